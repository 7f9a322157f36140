// The filter: which methods the whole page shows, in the order of their rank, and the colour of each.

const TOP = 3;

// By default the first three and the reference; all if there are only four.
function defaultShown(data) {
  const few = data.groups.length <= TOP + 1;
  return new Set(data.groups.filter((_, i) => few || i < TOP || i === data.reference).map((group) => group.label));
}

const REFERENCE_SLOT = 6; // grey

// Keep the selection if it was the user's, and give each shown method the first free colour, which it keeps. The
// reference is grey, unless it is alone.
function updateShown(data, state) {
  const labels = data.groups.map((group) => group.label);
  const kept = state.chosen ? labels.filter((label) => state.shown.has(label)) : [];
  state.shown = kept.length ? new Set(kept) : defaultShown(data);
  for (const label of state.slots.keys()) if (!state.shown.has(label)) state.slots.delete(label);
  for (const label of labels) {
    if (!state.shown.has(label) || state.slots.has(label)) continue;
    const taken = new Set(state.slots.values());
    const isReference = labels.length > 1 && label === labels[data.reference];
    let slot = isReference ? REFERENCE_SLOT : 0;
    while (taken.has(slot) || (slot === REFERENCE_SLOT && !isReference)) slot += 1;
    state.slots.set(label, slot);
  }
}

const shownEntries = (data, state) =>
  data.groups.filter((group) => state.shown.has(group.label)).map((group) => ({ group, slot: state.slots.get(group.label) }));

// A sentence on what is hidden, for the sections that list methods.
function hiddenNote(data, state) {
  const hidden = data.groups.filter((group) => !state.shown.has(group.label)).map((group) => group.title);
  if (!hidden.length) return [];
  return [el("p", { class: "note hidden-note" }, `Not shown: ${hidden.join(", ")}. `, el("button", { type: "button", onclick: showAll }, "Show all"))];
}

const showAll = () => setShown(data.groups.map((group) => group.label), true);

function setShown(labels, chosen) {
  if (!labels.length) return; // the last one stays
  Object.assign(state, { shown: new Set(labels), chosen });
  drawPage();
}

function drawFilter(data, state) {
  const bar = $("#filter");
  bar.hidden = data.groups.length < 2;
  if (bar.hidden) return;
  const focused = document.activeElement && bar.contains(document.activeElement) ? document.activeElement.dataset.label : null;
  const chip = (group) => {
    const shown = state.shown.has(group.label);
    const toggle = () => {
      const next = data.groups.map((g) => g.label).filter((label) => state.shown.has(label) !== (label === group.label));
      setShown(next, true);
    };
    const pressed = { type: "button", class: "chip", "aria-pressed": String(shown), "data-label": group.label, title: group.title };
    const highlight = { onpointerenter: () => shown && bringOut(group), onpointerleave: () => bringOut(null) };
    return el("button", { ...pressed, onclick: toggle, ...highlight }, shown ? swatch(state.slots.get(group.label)) : null, el("span", {}, group.title));
  };
  const all = state.shown.size === data.groups.length;
  const few = [...defaultShown(data)];
  const buttons = [];
  if (!all) buttons.push(el("button", { type: "button", class: "plain", "data-label": "*all", onclick: showAll }, `Show all ${data.groups.length}`));
  if (few.length < data.groups.length && (all || state.chosen)) {
    const reset = () => setShown(few, false);
    const text = few.length > TOP ? `Top three and ${data.groups[data.reference].title}` : "Top three";
    buttons.push(el("button", { type: "button", class: "plain", "data-label": "*few", onclick: reset }, text));
  }
  const chips = (wanted) => data.groups.filter((group) => state.shown.has(group.label) === wanted).map(chip);
  bar.replaceChildren(el("div", { class: "chips" }, chips(true), chips(false)), el("div", { class: "choices" }, buttons));
  if (focused) ($(`[data-label="${CSS.escape(focused)}"]`, bar) || $("button", bar)).focus();
}

// Fade everything of other methods while the pointer is on one.
function bringOut(group) {
  const names = group ? [group.label, group.title] : null;
  for (const node of $$("main [data-method]")) node.classList.toggle("faded", Boolean(names) && !names.includes(node.dataset.method));
}

// The label counts of the clients, and the settings of the runs.

function splitSection(data, body, state) {
  const indices = data.groups.map((group) => runOf(group, state.seed)).map((run) => run && run.split).filter((index) => !isMissing(index));
  const splits = [...new Set(indices)].map((index) => data.splits[index]);
  showSection("split", data.splits.length > 0);
  for (const split of splits) {
    const plot = el("div", { class: "plot" });
    const some = split.ids.length < split.clients ? ` ${split.ids.length} of ${split.clients} clients are shown, evenly spaced.` : "";
    const notes = [el("figcaption", {}, `${split.summary}.${some}`), el("figcaption", {}, heterogeneityNote(split.heterogeneity))];
    body.append(el("figure", {}, el("h3", {}, split.title), plot, notes));
    drawSplit(plot, data, split);
  }
}

const heterogeneityNote = (h) =>
  `A client next to all clients, mean: Jensen-Shannon distance ${h.jensen_shannon.toFixed(2)}, Hellinger distance ` +
  `${h.hellinger.toFixed(2)}, earth mover's distance ${h.earth_movers.toFixed(2)}; ${h.effective_classes.toFixed(1)} effective ` +
  "classes per client.";

function drawSplit(plot, data, split) {
  const [card, ink] = [parseColour(themeColour("--card")), parseColour(themeColour("--c0"))];
  const most = Math.max(1, ...split.counts.flat());
  const classes = split.counts[0].length;
  drawMatrix(plot, {
    rows: classes,
    columns: split.ids.length,
    rowHeight: classes <= 20 ? 20 : Math.max(3, Math.floor(400 / classes)),
    maxCellWidth: split.names ? 90 : 46,
    gaps: [],
    rowLabels: split.counts[0].map((_, c) => className(data, c)),
    columnTitle: "client",
    columnNumbers: split.ids,
    columnNames: split.names,
    colour: (row, k) => (split.counts[k][row] ? mixColours(card, ink, 0.2 + 0.8 * Math.sqrt(split.counts[k][row] / most)) : null),
    text: (row, k) => `${split.counts[k][row]}`,
    describe: (row, k) =>
      `${split.names ? split.names[k] : `client ${split.ids[k]}`}, ${className(data, row)}: ${split.counts[k][row]} ` +
      `example${split.counts[k][row] === 1 ? "" : "s"}`,
    label: `Label counts: ${split.summary}`,
  });
}

const factsTable = (facts) =>
  el("table", { class: "facts-table" },
    el("tbody", {}, ...Object.entries(facts).map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, value)))),
  );

function aboutSection(data, body) {
  const open = new Set($$("details[open] > summary", body).map((summary) => summary.textContent));
  const fold = (name, ...content) => el("details", { open: open.has(name) }, el("summary", {}, name), ...content);
  const parts = data.groups.map((group) => {
    const own = Object.fromEntries(Object.entries(group.setting).filter(([key]) => !(key in data.shared)));
    const runs = group.runs.map((run) => {
      const versions = Object.entries(run.made_by).map(([key, value]) => `${key} ${value}`).join(", ");
      return el("p", { class: "note" }, `${run.folder || "run"}: seed ${run.seed}, ${run.reached} of ${run.planned} rounds; ${versions}`);
    });
    const seeds = group.runs.map((run) => run.seed).join(", ");
    const status = group.status === "finished" ? "" : `, ${group.status}`;
    return fold(`${group.title}: ${group.runs.length > 1 ? "seeds" : "seed"} ${seeds}${status}`, factsTable(own), ...runs);
  });
  const leftOut = page.left_out.map((entry) => el("p", { class: "note" }, `${entry.run}: ${entry.reason}`));
  const missing = leftOut.length ? [fold("Runs that were left out", ...leftOut)] : [];
  body.replaceChildren(fold("Settings shared by all runs", factsTable(data.shared)), ...parts, ...missing);
  const network = page.live ? "" : " This page is a single file and makes no network requests.";
  $("footer").textContent = `Made by ${page.made_by}.${network}`;
}

// What sections share, and those that compare all methods: bars, curves and distributions. Each is drawn from the data
// and the state (methods, seed, round).

const runOf = (group, seed) => group.runs.find((run) => run.seed === seed) || null;
const seedsOf = (data) => [...new Set(data.groups.flatMap((group) => group.runs.map((run) => run.seed)))].sort((a, b) => a - b);
const runsWithSeed = (data, state) => shownEntries(data, state).map((entry) => ({ ...entry, run: runOf(entry.group, state.seed) }));
const figureTitle = (group, slot, facts) =>
  el("h3", {}, swatch(slot), " ", group.title, facts ? el("span", { class: "facts" }, el("span", { class: "dot" }, " · "), facts) : null);

// Show or hide a section and its link.
function showSection(name, shown) {
  $(`#${name}`).hidden = $(`nav a[href="#${name}"]`).hidden = !shown;
}

// Append a figure for each entry, then draw them: a figure has its width only once all are in place.
function appendFigures(body, entries, drawFigure) {
  const pending = entries.map((entry) => {
    const plot = el("div", { class: "plot" });
    const note = el("figcaption");
    const title = figureTitle(entry.group, entry.slot, entry.facts);
    body.append(el("figure", { "data-method": entry.group.label }, title, plot, note));
    return () => drawFigure(entry, plot, note);
  });
  pending.forEach((draw) => draw());
}

function overviewSection(data, body, state) {
  const entries = shownEntries(data, state);
  const several = data.groups.some((group) => group.runs.length > 1);
  $(".over-seeds").textContent = several ? "; bars are means over seeds, thin lines one standard deviation" : "";
  const widest = Math.max(0.2, ...entries.map(({ group }) => (group.mean.forgetting || 0) + (group.spread.forgetting || 0)));
  const bar = (group, slot, key, whole, text) => {
    const [mean, deviation] = [group.mean[key], group.spread[key]];
    const share = (value) => `${(Math.min(Math.max(value / whole, 0), 1) * 100).toFixed(2)}%`;
    const whisker = isMissing(deviation) ? null : el("u", {
      style: { left: share(mean - deviation), width: share(Math.min(2 * deviation, whole - mean + deviation)) },
    });
    const filled = el("i", { style: { width: share(mean || 0), background: colourOf(slot) } });
    return el("div", { class: "measure", "data-method": group.label }, el("div", { class: "track" }, filled, whisker), el("span", {}, text));
  };
  const grid = el("div", { class: "bars" },
    el("span", { class: "head first" }),
    el("span", { class: "head" }, "forgetting in points (lower is better)"),
    el("span", { class: "head" }, "final accuracy"),
  );
  for (const { group, slot } of entries) {
    const deviation = (key) => (isMissing(group.spread[key]) ? null : group.spread[key] * 100);
    const lost = isMissing(group.mean.forgetting) ? null : group.mean.forgetting * 100;
    const name = el("span", { class: group.status === "finished" ? "name" : "name unfinished", title: group.title }, group.title);
    grid.append(
      name,
      bar(group, slot, "forgetting", widest, formatMean(lost, deviation("forgetting"), lost && Math.abs(lost) < 0.95 ? 1 : 0)),
      bar(group, slot, "final", 1, `${formatMean(group.mean.final * 100, deviation("final"), 1)}%`),
    );
  }
  body.append(grid, ...hiddenNote(data, state));
}

function curveSection(data, body, state) {
  const entries = shownEntries(data, state);
  const several = data.groups.some((group) => group.runs.length > 1);
  const bands = entries.length <= MAX_BANDS ? "; the band is ± one standard deviation" : "";
  $(".about-curves").textContent = several ? `Mean over seeds${bands}.` : "";
  const series = entries.map(({ group, slot }) => ({ label: group.title, slot, ...group.curve }));
  const plot = el("div", { class: "plot" });
  const last = (s) => formatPercent(s.mean.at(-1), 1);
  const ranked = [...series].sort((a, b) => b.mean.at(-1) - a.mean.at(-1)); // as the lines end
  const legend = el("figcaption", { class: "lines" },
    ranked.map((s) => el("span", { "data-method": s.label }, swatch(s.slot), ` ${s.label} ${last(s)}`)));
  body.append(el("figure", {}, legend, plot));
  drawCurves(plot, series);
}

function roundForgettingSection(data, body, state) {
  const rows = shownEntries(data, state).map(({ group, slot }) => ({ label: group.title, slot, ...group.drops }));
  const recorded = rows.some((row) => row.number);
  showSection("drops", recorded);
  if (!recorded) return;
  const plot = el("div", { class: "plot" });
  body.append(plot);
  drawDistributions(plot, data.drop_edges, rows);
}

// Heat maps of class accuracies over rounds: the best method and the reference on top of the page, and all that are shown.

const NARROW = 640; // pixels; below, the page has one column

// What the heat map of a group shows: the mean over its seeds, or the run with the selected seed.
function heatMapOf(group, state) {
  if (state.mean && group.mean_map) {
    const { forgetting, final } = group.mean;
    return { ...group.mean_map, below_best: group.class_forgetting, forgetting, final, of: `mean of ${group.runs.length} seeds` };
  }
  const run = runOf(group, state.seed) || group.runs[0];
  return { ...run, ...run.summary, of: `seed ${run.seed}` };
}

function heatFacts(group, map) {
  const final = formatPercent(map.final, 1);
  if (group.status !== "finished") return `${final} after round ${map.rounds.at(-1)}`;
  if (isMissing(map.forgetting)) return `ends at ${final}`;
  return `forgets ${map.forgetting > 0 ? inPoints(map.forgetting) : "nothing"}, ends at ${final}`;
}

function drawHeatMap(plot, data, group, map, worst, compact = false) {
  const values = unpack(map.class_accuracy);
  const value = (row, column) => values[column * group.classes + row];
  const names = map.below_best.map((_, c) => className(data, c));
  const numbers = compact && !data.class_names; // no space for the word "class"
  const tall = Math.max(3, Math.min(group.classes < 6 ? 26 : 17, Math.floor(400 / group.classes)));
  drawMatrix(plot, {
    rows: group.classes,
    columns: map.rounds.length,
    rowHeight: compact ? Math.max(3, Math.min(15, Math.floor(220 / group.classes))) : tall,
    gaps: [],
    rowLabels: numbers ? names.map((_, c) => `${c}`) : names,
    labelWidth: compact ? 44 : null,
    columnTitle: compact ? "" : "round",
    columnNumbers: map.rounds,
    rowBars: compact ? null : map.below_best.map((lost) => (lost || 0) / worst),
    colour: (row, column) => (Number.isNaN(value(row, column)) ? null : accuracyColour(value(row, column))),
    describe: (row, column) =>
      `round ${map.rounds[column]}, ${names[row]}: ${formatPercent(value(row, column))}\nends ${inPoints(map.below_best[row])} below its best`,
    label: `${group.title}: accuracy of each class over rounds, ${map.of}; ${heatFacts(group, map)}`,
  });
}

// The largest loss of a class, to which the bars are drawn.
const worstLoss = (maps) => Math.max(0.05, ...maps.flatMap((map) => map.below_best.map((v) => v || 0)));

// The best of the shown methods next to the reference, or to the last if the reference is hidden or is the best.
function heroEntries(data, state) {
  const entries = shownEntries(data, state);
  const best = entries[0];
  const reference = entries.find(({ group }) => group === data.groups[data.reference]);
  const other = reference && reference !== best ? reference : entries.at(-1);
  return other === best ? [best] : [best, other];
}

function heroSection(data, body, state) {
  const entries = heroEntries(data, state).map((entry) => ({ ...entry, map: heatMapOf(entry.group, state) }));
  const worst = worstLoss(entries.map(({ map }) => map));
  const compact = entries.length > 1 && innerWidth < NARROW && !document.body.classList.contains("printing");
  body.classList.toggle("single", entries.length === 1);
  const titled = entries.map((entry) => ({ ...entry, facts: heatFacts(entry.group, entry.map) }));
  appendFigures(body, titled, ({ group, map }, plot) => drawHeatMap(plot, data, group, map, worst, compact));
  $(".about-hero").textContent =
    "Accuracy of the global model on each class (rows) after each round (columns). A class that turns from bright to dark " +
    `has been forgotten.${seedNote(data, state)}`;
}

// Which seed heat maps show, if there are several: bars and the table are means over them.
function seedNote(data, state) {
  const seeds = seedsOf(data).length;
  if (seeds < 2) return "";
  if (state.mean) return ` Mean of ${seeds} seeds.`;
  return ` Seed ${state.seed} is shown${state.seed === data.seed ? `, the one nearest to the means over ${seeds} seeds` : ""}.`;
}

function heatMapSection(data, body, state) {
  showSection("heat", data.groups.length > 2 || innerWidth < NARROW); // otherwise it would repeat the two maps on top
  $(".which-seed").textContent = seedNote(data, state);
  if ($("#heat").hidden) return;
  const entries = shownEntries(data, state).map((entry) => ({ ...entry, map: heatMapOf(entry.group, state) }));
  const worst = worstLoss(entries.map(({ map }) => map));
  const titled = entries.map((entry) => ({ ...entry, facts: heatFacts(entry.group, entry.map) }));
  appendFigures(body, titled, ({ group, map }, plot) => drawHeatMap(plot, data, group, map, worst));
}

// The anatomy of one round: the global model before, the clients' models, the global model after.

function anatomyRounds(data, seed) {
  const rounds = data.groups.map((group) => runOf(group, seed)).flatMap((run) => (run && run.anatomy ? run.anatomy.rounds : []));
  return [...new Set(rounds)].sort((a, b) => a - b);
}

// The recorded round in which the reference lost most.
function worstRound(data, seed) {
  const runs = [data.groups[data.reference], ...data.groups].map((group) => runOf(group, seed));
  const run = runs.find((candidate) => candidate && candidate.anatomy);
  if (!run) return null;
  const losses = run.anatomy.rounds.map((_, i) => roundForgettingOf(run, i));
  return run.anatomy.rounds[losses.indexOf(Math.max(...losses))];
}

const meanOf = (values) => {
  const tested = [...values].filter((v) => !Number.isNaN(v));
  return tested.reduce((a, b) => a + b, 0) / Math.max(1, tested.length);
};
function roundForgettingOf(run, i) {
  const models = unpack(run.anatomy.models[i]);
  const classes = run.below_best.length;
  const after = models.slice(-classes);
  return meanOf(after.map((value, c) => Math.max(0, models[c] - value)));
}

// The name of a client, where the split of its run has one.
function clientName(data, run, id) {
  const split = isMissing(run.split) ? null : data.splits[run.split];
  const at = split && split.names ? split.ids.indexOf(id) : -1;
  return at < 0 ? `client ${id}` : split.names[at];
}

function anatomySection(data, body, state) {
  showSection("anatomy", data.groups.some((group) => group.runs.some((run) => run.anatomy)));
  const entries = runsWithSeed(data, state).filter(({ run }) => run && run.anatomy);
  if ($("#anatomy").hidden) return;
  const seeds = seedsOf(data).length > 1 ? `, seed ${state.seed}` : "";
  $(".which-round").textContent = state.round === null ? "" : `Round ${state.round}${seeds}.`;
  if (!entries.length) body.append(el("p", { class: "note" }, "Not recorded for these methods and this seed."));
  appendFigures(body, entries, ({ group, run }, plot, note) => {
    const i = run.anatomy.rounds.indexOf(state.round);
    if (i < 0) note.textContent = `Round ${state.round} was not recorded here.`;
    else drawAnatomy(plot, note, data, group, run, i);
  });
}

function drawAnatomy(plot, note, data, group, run, i) {
  const [loss, card] = [parseColour(themeColour("--loss")), parseColour(themeColour("--card"))];
  const [models, shares] = [unpack(run.anatomy.models[i]), unpack(run.anatomy.shares[i])];
  const lost = [unpack(run.anatomy.local[i]), unpack(run.anatomy.aggregation[i])];
  const [ids, round, classes] = [run.anatomy.ids[i], run.anatomy.rounds[i], group.classes];
  const last = ids.length + 1; // the row of the new global model
  const value = (row, c) => (row <= last ? models[row * classes + c] : lost[row - last - 1][c]);
  const clients = ids.map((id) => clientName(data, run, id));
  const labels = ["global before", ...clients, "global after", "lost locally", "lost in aggr."];
  const isClient = (row) => row > 0 && row < last;
  drawMatrix(plot, {
    rows: last + 3,
    columns: classes,
    rowHeight: last > 22 ? 12 : 22,
    gaps: [1, last, last + 1],
    rowLabels: labels,
    columnTitle: data.class_names ? "" : "class",
    columnNumbers: run.below_best.map((_, c) => c),
    columnNames: data.class_names,
    colour: (row, c) => {
      if (Number.isNaN(value(row, c))) return null;
      return row <= last ? accuracyColour(value(row, c)) : mixColours(card, loss, Math.min(1, value(row, c)));
    },
    text: (row, c) => (Number.isNaN(value(row, c)) ? "" : `${Math.round(value(row, c) * 100)}`),
    isMarked: (row, c) => isClient(row) && shares[(row - 1) * classes + c] > 0,
    describe: (row, c) => {
      const share = isClient(row) ? shares[(row - 1) * classes + c] : null;
      const held = share === null ? "" : share > 0 ? `\n${formatPercent(share)} of its examples` : "\nno examples of this class";
      const unit = row <= last ? formatPercent(value(row, c)) : `${inPoints(value(row, c))}, mean over clients`;
      return `${labels[row]}, ${className(data, c)}: ${unit}${held}`;
    },
    label:
      `${group.title}, round ${round}: class accuracies of the global model before, of ${ids.length} clients, and of ` +
      "the global model after",
  });
  const [training, aggregation] = lost.map(meanOf);
  const notShown = run.anatomy.clients[i] - ids.length;
  note.textContent =
    `Mean per class: ${inPoints(training)} lost in local training, ${formatPoints(aggregation)} in aggregation; ` +
    `the global model lost ${formatPoints(roundForgettingOf(run, i))}.` + (notShown > 0 ? ` ${notShown} more clients are not shown.` : "");
}

// The sections of the page, each drawn from the data and the state (seed, round, hidden methods).

const runOf = (group, seed) => group.runs.find((run) => run.seed === seed) || null;
const runsWithSeed = (data, seed) => data.groups.map((group, index) => ({ group, index, run: runOf(group, seed) }));
const figureTitle = (group, index, facts) =>
  el("h3", {}, swatch(index), " ", group.label, facts ? el("span", { class: "facts" }, ` · ${facts}`) : null);

// Append a figure for each entry, then draw them: a figure has its width only once all are in place.
function appendFigures(body, entries, drawFigure) {
  const pending = entries.map((entry) => {
    const plot = el("div", { class: "plot" });
    const note = el("figcaption");
    body.append(el("figure", {}, figureTitle(entry.group, entry.index, entry.facts), plot, note));
    return () => drawFigure(entry, plot, note);
  });
  pending.forEach((draw) => draw());
}

function overviewSection(data, body) {
  const order = data.groups.map((group, index) => ({ group, index }));
  const place = ({ group }) => (group.status === "finished" ? group.mean.forgetting ?? 1e6 : 1e9); // unfinished ones last
  order.sort((a, b) => place(a) - place(b));
  const widest = Math.max(0.2, ...order.map(({ group }) => (group.mean.forgetting || 0) + (group.spread.forgetting || 0)));
  const bar = (group, index, key, whole, text) => {
    const [mean, deviation] = [group.mean[key], group.spread[key]];
    const share = (value) => `${(Math.min(Math.max(value / whole, 0), 1) * 100).toFixed(2)}%`;
    const whisker = isMissing(deviation) ? null : el("u", {
      style: { left: share(mean - deviation), width: share(Math.min(2 * deviation, whole - mean + deviation)) },
    });
    const filled = el("i", { style: { width: share(mean || 0), background: colourOf(index) } });
    return el("div", { class: "measure" }, el("div", { class: "track" }, filled, whisker), el("span", {}, text));
  };
  const grid = el("div", { class: "bars" },
    el("span", { class: "head first" }),
    el("span", { class: "head" }, "forgetting in points (lower is better)"),
    el("span", { class: "head" }, "final accuracy"),
  );
  for (const { group, index } of order) {
    const deviation = (key) => (isMissing(group.spread[key]) ? null : group.spread[key] * 100);
    const lost = isMissing(group.mean.forgetting) ? null : group.mean.forgetting * 100;
    grid.append(
      el("span", { class: group.status === "finished" ? "name" : "name unfinished", title: group.label }, group.label),
      bar(group, index, "forgetting", widest, formatMean(lost, deviation("forgetting"), 0)),
      bar(group, index, "final", 1, `${formatMean(group.mean.final * 100, deviation("final"), 1)}%`),
    );
  }
  body.append(grid);
}

function heatMapSection(data, body, state) {
  const entries = runsWithSeed(data, state.seed).filter(({ run }) => run);
  const worst = Math.max(0.05, ...entries.flatMap(({ run }) => run.below_best.map((v) => v || 0)));
  const facts = ({ group, run }) => `${group.status === "finished" ? "ends" : "is"} at ${formatPercent(run.summary.final, 1)}, forgetting ${formatPoints(run.summary.forgetting)} points`;
  appendFigures(body, entries.map((entry) => ({ ...entry, facts: facts(entry) })), ({ group, run }, plot) => {
    const values = unpack(run.class_accuracy);
    const value = (row, column) => values[column * group.classes + row];
    drawMatrix(plot, {
      rows: group.classes,
      columns: run.rounds.length,
      rowHeight: group.classes <= 20 ? 17 : Math.max(3, Math.floor(400 / group.classes)),
      gaps: [],
      rowLabels: run.below_best.map((_, c) => `class ${c}`),
      columnTitle: "round",
      columnNumbers: run.rounds,
      rowBars: run.below_best.map((lost) => (lost || 0) / worst),
      colour: (row, column) => (Number.isNaN(value(row, column)) ? null : accuracyColour(value(row, column))),
      describe: (row, column) =>
        `round ${run.rounds[column]}, class ${row}: ${formatPercent(value(row, column))}\n` +
        `ends ${formatPoints(run.below_best[row])} points below its best`,
      label: `${group.label}: accuracy of each class over rounds; ${facts({ group, run })}`,
    });
  });
}

function curveSection(data, body, state) {
  const several = data.groups.some((group) => group.runs.length > 1);
  $(".about-curves").textContent = several
    ? "Mean over seeds; the band is ± one standard deviation."
    : "One run per method, so there is no spread.";
  const series = data.groups.map((group, index) => ({ label: group.label, index, ...group.curve }));
  const plot = el("div", { class: "plot" });
  body.append(plot);
  const shown = series.filter((s) => !state.hidden.has(s.label));
  if (shown.length) drawCurves(plot, shown);
  else plot.append(el("p", { class: "note" }, "All methods are hidden. Select one above."));
}

function anatomyRounds(data, seed) {
  const rounds = runsWithSeed(data, seed).flatMap(({ run }) => (run && run.anatomy ? run.anatomy.rounds : []));
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

function anatomySection(data, body, state) {
  const entries = runsWithSeed(data, state.seed).filter(({ run }) => run && run.anatomy);
  $("#anatomy .controls").hidden = !entries.length;
  $(".about-anatomy").hidden = !entries.length;
  if (!entries.length) {
    body.append(el("p", { class: "note" }, "Not recorded in these runs. Train with eval_local_every=1 to evaluate each " +
      "client's model in every round."));
    return;
  }
  const loss = parseColour(themeColour("--loss"));
  const card = parseColour(themeColour("--card"));
  appendFigures(body, entries, ({ group, run }, plot, note) => {
    const i = run.anatomy.rounds.indexOf(state.round);
    if (i < 0) {
      note.textContent = `Round ${state.round} was not recorded here.`;
      return;
    }
    const [models, shares] = [unpack(run.anatomy.models[i]), unpack(run.anatomy.shares[i])];
    const lost = [unpack(run.anatomy.local[i]), unpack(run.anatomy.aggregation[i])];
    const ids = run.anatomy.ids[i];
    const classes = group.classes;
    const last = ids.length + 1; // the row of the new global model
    const value = (row, c) => (row <= last ? models[row * classes + c] : lost[row - last - 1][c]);
    const clients = ids.map((id) => `client ${id}`);
    const labels = ["global before", ...clients, "global after", "lost in training", "lost in aggregation"];
    drawMatrix(plot, {
      rows: last + 3,
      columns: classes,
      rowHeight: last > 22 ? 12 : 22,
      gaps: [1, last, last + 1],
      rowLabels: labels,
      columnTitle: "class",
      columnNumbers: run.below_best.map((_, c) => c),
      colour: (row, c) => {
        if (Number.isNaN(value(row, c))) return null;
        return row <= last ? accuracyColour(value(row, c)) : mixColours(card, loss, Math.min(1, value(row, c)));
      },
      text: (row, c) => (Number.isNaN(value(row, c)) ? "" : `${Math.round(value(row, c) * 100)}`),
      hasDot: (row, c) => row > 0 && row < last && shares[(row - 1) * classes + c] > 0,
      describe: (row, c) => {
        const share = row > 0 && row < last ? shares[(row - 1) * classes + c] : null;
        const held = share === null ? "" : share > 0 ? `\n${formatPercent(share)} of its examples` : "\nno examples of this class";
        const unit = row <= last ? formatPercent(value(row, c)) : `${formatPoints(value(row, c))} points, mean over clients`;
        return `${labels[row]}, class ${c}: ${unit}${held}`;
      },
      label:
        `${group.label}, round ${state.round}: class accuracies of the global model before, of ${ids.length} clients, and of ` +
        "the global model after",
    });
    const [training, aggregation] = lost.map(meanOf);
    const notShown = run.anatomy.clients[i] - ids.length;
    note.textContent =
      `Mean per class: ${formatPoints(training)} points lost in local training, ${formatPoints(aggregation)} in aggregation; ` +
      `the global model lost ${formatPoints(roundForgettingOf(run, i))}.` + (notShown > 0 ? ` ${notShown} more clients are not shown.` : "");
  });
}

function roundForgettingSection(data, body) {
  const plot = el("div", { class: "plot" });
  body.append(plot);
  drawDistributions(plot, data.drop_edges, data.groups.map((group, index) => ({ label: group.label, index, ...group.drops })));
}

// Accuracy and forgetting before and after the best bias per class, and the biases; hidden if no run recorded them.
function recoverableSection(data, body, state) {
  const recorded = data.groups.some((group) => group.runs.some((run) => run.recoverable));
  $("#recoverable").hidden = $('nav a[href="#recoverable"]').hidden = !recorded;
  const entries = runsWithSeed(data, state.seed).filter(({ run }) => run && run.recoverable);
  const figures = entries.map(({ group, run }) => {
    const r = run.recoverable;
    const [curves, biases] = [el("div", { class: "plot" }), el("div", { class: "plot" })];
    const series = recoverableSeries(r);
    const legend = el("figcaption", { class: "lines" }, ...series.map((s) => el("span", {}, swatch(s.index), ` ${s.label}`)));
    const examples = r.fitted_on === "public set" ? `${r.n_fitted} public examples` : `half of the test set (${r.n_fitted} examples)`;
    const measured = r.fitted_on === "public set" ? "" : ` Everything here is measured on the other half (${r.n_measured} examples).`;
    const caption = el("figcaption", {}, `Bias fitted on ${examples}, at most ${r.largest.toFixed(2)} in size.${measured}`);
    const title = el("h3", {}, group.label, el("span", { class: "facts" }, ` · ${recoverableFacts(r)}`)); // colours are the lines'
    body.append(el("figure", {}, title, curves, legend, biases, caption));
    return () => {
      drawCurves(curves, series, `${group.label}: accuracy and forgetting over rounds, before and after the bias`);
      drawBiases(biases, group, r);
    };
  });
  figures.forEach((draw) => draw());
}

function recoverableSeries(r) {
  const line = (label, index, from, values) =>
    ({ label, index, rounds: r.rounds.slice(from), mean: values.slice(from), spread: values.slice(from).map(() => 0) });
  const accuracy = [line("accuracy", 0, 0, r.accuracy.before), line("accuracy with the bias", 7, 0, r.accuracy.after)];
  if (r.rounds.length < 2) return accuracy; // forgetting compares rounds
  return [...accuracy, line("forgetting so far", 1, 1, r.forgetting.before), line("forgetting with the bias", 8, 1, r.forgetting.after)];
}

function recoverableFacts(r) {
  const [before, after] = [r.forgetting.before.at(-1), r.forgetting.after.at(-1)];
  if (isMissing(before)) return "one analysed round";
  const share = isMissing(r.share) ? "nothing is forgotten" : `${formatPercent(Math.min(Math.max(r.share, 0), 1))} recoverable`;
  return `forgetting ${formatPoints(before)} points, ${formatPoints(after)} with the bias: ${share}`;
}

function drawBiases(plot, group, r) {
  const values = unpack(r.bias);
  const value = (row, column) => (values[column * group.classes + row] * 2 - 1) * r.largest;
  const [card, up, down] = ["--card", "--loss", "--c0"].map((name) => parseColour(themeColour(name)));
  const numbers = Array.from({ length: group.classes }, (_, c) => c);
  drawMatrix(plot, {
    rows: group.classes,
    columns: r.rounds.length,
    rowHeight: group.classes <= 20 ? 17 : Math.max(3, Math.floor(400 / group.classes)),
    gaps: [],
    rowLabels: numbers.map((c) => `class ${c}`),
    columnTitle: "round",
    columnNumbers: r.rounds,
    colour: (row, column) => mixColours(card, value(row, column) > 0 ? up : down, Math.min(1, Math.abs(value(row, column)) / r.largest)),
    describe: (row, column) => `round ${r.rounds[column]}, class ${row}: bias ${value(row, column).toFixed(2)}`,
    label: `${group.label}: the bias of each class over rounds, at most ${r.largest.toFixed(2)}`,
  });
}

function splitSection(data, body, state) {
  const intro = $(".about-split");
  const indices = runsWithSeed(data, state.seed).map(({ run }) => run && run.split).filter((index) => !isMissing(index));
  const splits = [...new Set(indices)].map((index) => data.splits[index]);
  intro.textContent = splits.length
    ? "Each column is a client, each row a class. A stronger colour means more examples. During local training, a client " +
      "tends to forget the classes it has no examples of."
    : "Not recorded in these runs.";
  const [card, ink] = [parseColour(themeColour("--card")), parseColour(themeColour("--c0"))];
  for (const split of splits) {
    const plot = el("div", { class: "plot" });
    const some = split.ids.length < split.clients ? ` ${split.ids.length} of ${split.clients} clients are shown, evenly spaced.` : "";
    body.append(el("figure", {}, el("h3", {}, split.title), plot, el("figcaption", {}, `${split.summary}.${some}`)));
    const most = Math.max(1, ...split.counts.flat());
    const classes = split.counts[0].length;
    drawMatrix(plot, {
      rows: classes,
      columns: split.ids.length,
      rowHeight: classes <= 20 ? 20 : Math.max(3, Math.floor(400 / classes)),
      maxCellWidth: 46,
      gaps: [],
      rowLabels: split.counts[0].map((_, c) => `class ${c}`),
      columnTitle: "client",
      columnNumbers: split.ids,
      colour: (row, k) => (split.counts[k][row] ? mixColours(card, ink, 0.2 + 0.8 * Math.sqrt(split.counts[k][row] / most)) : null),
      text: (row, k) => `${split.counts[k][row]}`,
      describe: (row, k) => `client ${split.ids[k]}, class ${row}: ${split.counts[k][row]} examples`,
      label: `Label counts: ${split.summary}`,
    });
  }
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
    return fold(`${group.label}: ${group.runs.length > 1 ? "seeds" : "seed"} ${seeds}${status}`, factsTable(own), ...runs);
  });
  const leftOut = page.left_out.map((entry) => el("p", { class: "note" }, `${entry.run}: ${entry.reason}`));
  const missing = leftOut.length ? [fold("Runs that were left out", ...leftOut)] : [];
  body.replaceChildren(fold("Settings shared by all runs", factsTable(data.shared)), ...parts, ...missing);
  const network = page.live ? "" : " This page is a single file and makes no network requests.";
  $("footer").textContent = `Made by ${page.made_by}.${network}`;
}

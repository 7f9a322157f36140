// Accuracy and forgetting before and after the best bias per class, and the biases; hidden if no run recorded them.
function recoverableSection(data, body, state) {
  showSection("recoverable", data.groups.some((group) => group.runs.some((run) => run.recoverable)));
  const entries = runsWithSeed(data, state).filter(({ run }) => run && run.recoverable);
  const figures = entries.map(({ group, run }) => {
    const r = run.recoverable;
    const [curves, biases] = [el("div", { class: "plot" }), el("div", { class: "plot" })];
    const series = recoverableSeries(r);
    const legend = el("figcaption", { class: "lines" }, ...series.map((s) => el("span", {}, swatch(s.slot), ` ${s.label}`)));
    const examples = r.fitted_on === "public set" ? `${r.n_fitted} public examples` : `half of the test set (${r.n_fitted} examples)`;
    const measured = r.fitted_on === "public set" ? "" : ` Everything here is measured on the other half (${r.n_measured} examples).`;
    const caption = el("figcaption", {}, `Bias fitted on ${examples}, at most ${r.largest.toFixed(2)} in size.${measured}`);
    const title = el("h3", {}, group.title, el("span", { class: "facts" }, ` · ${recoverableFacts(r)}`)); // colours are the lines'
    body.append(el("figure", {}, title, curves, legend, biases, caption));
    return () => {
      drawCurves(curves, series, `${group.title}: accuracy and forgetting over rounds, before and after the bias`);
      drawBiases(biases, data, group, r);
    };
  });
  figures.forEach((draw) => draw());
}

function recoverableSeries(r) {
  const line = (label, slot, from, values) =>
    ({ label, slot, rounds: r.rounds.slice(from), mean: values.slice(from), spread: values.slice(from).map(() => 0) });
  const accuracy = [line("accuracy", 0, 0, r.accuracy.before), line("accuracy with the bias", 7, 0, r.accuracy.after)];
  if (r.rounds.length < 2) return accuracy; // forgetting compares rounds
  return [...accuracy, line("forgetting so far", 1, 1, r.forgetting.before), line("forgetting with the bias", 8, 1, r.forgetting.after)];
}

function recoverableFacts(r) {
  const [before, after] = [r.forgetting.before.at(-1), r.forgetting.after.at(-1)];
  if (isMissing(before)) return "one analysed round";
  const share = isMissing(r.share) ? "nothing is forgotten" : `${formatPercent(Math.min(Math.max(r.share, 0), 1))} recoverable`;
  return `forgetting ${inPoints(before)}, ${formatPoints(after)} with the bias: ${share}`;
}

function drawBiases(plot, data, group, r) {
  const values = unpack(r.bias);
  const value = (row, column) => (values[column * group.classes + row] * 2 - 1) * r.largest;
  const [card, up, down] = ["--card", "--loss", "--c0"].map((name) => parseColour(themeColour(name)));
  const numbers = Array.from({ length: group.classes }, (_, c) => c);
  drawMatrix(plot, {
    rows: group.classes,
    columns: r.rounds.length,
    rowHeight: group.classes <= 20 ? 17 : Math.max(3, Math.floor(400 / group.classes)),
    gaps: [],
    rowLabels: numbers.map((c) => className(data, c)),
    columnTitle: "round",
    columnNumbers: r.rounds,
    colour: (row, column) => mixColours(card, value(row, column) > 0 ? up : down, Math.min(1, Math.abs(value(row, column)) / r.largest)),
    describe: (row, column) => `round ${r.rounds[column]}, ${className(data, row)}: bias ${value(row, column).toFixed(2)}`,
    label: `${group.title}: the bias of each class over rounds, at most ${r.largest.toFixed(2)}`,
  });
}

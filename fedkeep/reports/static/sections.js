// The sections of the page, each a function of the data and of what the reader has chosen.

const runOf = (group, seed) => group.runs.find((run) => run.seed === seed) || null;
const chosen = (data, seed) => data.groups.map((group, index) => ({ group, index, run: runOf(group, seed) }));
const title = (group, index, facts) =>
  el("h3", {}, swatch(index), " ", group.label, facts ? el("span", { class: "facts" }, ` · ${facts}`) : null);

// Put a figure for each entry into a body, and draw when all are in place, so that each knows its width.
function figures(body, entries, draw) {
  const drawn = entries.map((entry) => {
    const plot = el("div", { class: "plot" });
    const note = el("figcaption");
    body.append(el("figure", {}, title(entry.group, entry.index, entry.facts), plot, note));
    return () => draw(entry, plot, note);
  });
  drawn.forEach((finish) => finish());
}

function glance(data, body) {
  const order = data.groups.map((group, index) => ({ group, index }));
  order.sort((a, b) => (a.group.mean.forgetting ?? Infinity) - (b.group.mean.forgetting ?? Infinity));
  const widest = Math.max(0.2, ...order.map(({ group }) => (group.mean.forgetting || 0) + (group.spread.forgetting || 0)));
  const bar = (group, index, key, whole, words) => {
    const [mean, deviation] = [group.mean[key], group.spread[key]];
    const share = (value) => `${(Math.min(Math.max(value / whole, 0), 1) * 100).toFixed(2)}%`;
    const whisker = missing(deviation) ? null : el("u", {
      style: { left: share(mean - deviation), width: share(Math.min(2 * deviation, whole - mean + deviation)) },
    });
    const filled = el("i", { style: { width: share(mean || 0), background: colourOf(index) } });
    return el("div", { class: "measure" }, el("div", { class: "track" }, filled, whisker), el("span", {}, words));
  };
  const grid = el("div", { class: "bars" },
    el("span", { class: "head first" }),
    el("span", { class: "head" }, "forgetting, points (less is better)"),
    el("span", { class: "head" }, "final accuracy"),
  );
  for (const { group, index } of order) {
    const deviation = (key) => (missing(group.spread[key]) ? null : group.spread[key] * 100);
    const lost = missing(group.mean.forgetting) ? null : group.mean.forgetting * 100;
    grid.append(
      el("span", { class: "name" }, group.label),
      bar(group, index, "forgetting", widest, spread(lost, deviation("forgetting"), 0)),
      bar(group, index, "final", 1, `${spread(group.mean.final * 100, deviation("final"), 1)}%`),
    );
  }
  body.append(grid);
}

function heat(data, body, state) {
  const here = chosen(data, state.seed).filter(({ run }) => run);
  const worst = Math.max(0.05, ...here.flatMap(({ run }) => run.below_best.map((v) => v || 0)));
  const facts = (run) => `ends at ${percent(run.summary.final, 1)}, forgetting ${points(run.summary.forgetting)} points`;
  figures(body, here.map((entry) => ({ ...entry, facts: facts(entry.run) })), ({ group, run }, plot) => {
    const values = unpack(run.class_accuracy);
    const value = (row, column) => values[column * group.classes + row];
    matrix(plot, {
      rows: group.classes,
      columns: run.rounds.length,
      rowHeight: group.classes <= 20 ? 17 : Math.max(3, Math.floor(400 / group.classes)),
      gaps: [],
      rowLabels: run.below_best.map((_, c) => `class ${c}`),
      columnTitle: "round",
      columnNumbers: run.rounds,
      side: run.below_best.map((lost) => (lost || 0) / worst),
      colour: (row, column) => (Number.isNaN(value(row, column)) ? null : known(value(row, column))),
      tell: (row, column) =>
        `round ${run.rounds[column]}, class ${row}: ${percent(value(row, column))}\n` +
        `ends ${points(run.below_best[row])} points below its best`,
      label: `${group.label}: accuracy of each class over rounds; ${facts(run)}`,
    });
  });
}

function accuracy(data, body, state) {
  const several = data.groups.some((group) => group.runs.length > 1);
  $(".about-curves").textContent = several
    ? "Mean over seeds; the band is one standard deviation to either side."
    : "One run each: there is no spread to show.";
  const series = data.groups.map((group, index) => ({ label: group.label, index, ...group.curve }));
  const plot = el("div", { class: "plot" });
  body.append(plot);
  const shown = series.filter((s) => !state.hidden.has(s.label));
  if (shown.length) curves(plot, shown);
  else plot.append(el("p", { class: "note" }, "All methods are hidden: choose one above."));
}

function anatomyRounds(data, seed) {
  const rounds = chosen(data, seed).flatMap(({ run }) => (run && run.anatomy ? run.anatomy.rounds : []));
  return [...new Set(rounds)].sort((a, b) => a - b);
}

// The round in which the reference lost most, of those that can be taken apart.
function worstRound(data, seed) {
  const runs = [data.groups[data.reference], ...data.groups].map((group) => runOf(group, seed));
  const run = runs.find((found) => found && found.anatomy);
  if (!run) return null;
  const losses = run.anatomy.rounds.map((_, i) => dropOf(run, i));
  return run.anatomy.rounds[losses.indexOf(Math.max(...losses))];
}

const average = (values) => {
  const tested = [...values].filter((v) => !Number.isNaN(v));
  return tested.reduce((a, b) => a + b, 0) / Math.max(1, tested.length);
};
function dropOf(run, i) {
  const models = unpack(run.anatomy.models[i]);
  const classes = run.below_best.length;
  const after = models.slice(-classes);
  return average(after.map((value, c) => Math.max(0, models[c] - value)));
}

function anatomy(data, body, state) {
  const here = chosen(data, state.seed).filter(({ run }) => run && run.anatomy);
  $("#anatomy .controls").hidden = !here.length;
  $(".about-anatomy").hidden = !here.length;
  if (!here.length) {
    body.append(el("p", { class: "note" }, "Not recorded in these runs: train with eval_local_every=1 (or every n-th round) " +
      "to see what becomes of each client's model."));
    return;
  }
  const loss = parsed(theme("--loss"));
  const card = parsed(theme("--card"));
  figures(body, here, ({ group, run }, plot, note) => {
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
    const labels = ["global, before", ...ids.map((id) => `client ${id}`), "global, after", "lost in training", "lost in aggregation"];
    matrix(plot, {
      rows: last + 3,
      columns: classes,
      rowHeight: last > 22 ? 12 : 22,
      gaps: [1, last, last + 1],
      rowLabels: labels,
      columnTitle: "class",
      columnNumbers: run.below_best.map((_, c) => c),
      colour: (row, c) => {
        if (Number.isNaN(value(row, c))) return null;
        return row <= last ? known(value(row, c)) : mix(card, loss, Math.min(1, value(row, c)));
      },
      text: (row, c) => (Number.isNaN(value(row, c)) ? "" : `${Math.round(value(row, c) * 100)}`),
      dot: (row, c) => (row > 0 && row < last ? shares[(row - 1) * classes + c] : 0),
      tell: (row, c) => {
        const share = row > 0 && row < last ? shares[(row - 1) * classes + c] : null;
        const own = share === null ? "" : share > 0 ? `\n${percent(share)} of its examples` : "\nno examples of it";
        const unit = row <= last ? percent(value(row, c)) : `${points(value(row, c))} points, mean over clients`;
        return `${labels[row]}, class ${c}: ${unit}${own}`;
      },
      label:
        `${group.label}, round ${state.round}: class accuracies of the global model before, of ${ids.length} clients, and of ` +
        "the global model after",
    });
    const [training, aggregation] = lost.map(average);
    const left = run.anatomy.clients[i] - ids.length;
    note.textContent =
      `Per class, training lost ${points(training)} points of what was known, aggregation ${points(aggregation)} of what a ` +
      `client knew; in all the global model lost ${points(dropOf(run, i))}.` + (left > 0 ? ` ${left} more clients are not shown.` : "");
  });
}

function drops(data, body) {
  const plot = el("div", { class: "plot" });
  body.append(plot);
  ridges(plot, data.drop_edges, data.groups.map((group, index) => ({ label: group.label, index, ...group.drops })));
}

function split(data, body, state) {
  const about = $(".about-split");
  const places = chosen(data, state.seed).map(({ run }) => run && run.split).filter((place) => !missing(place));
  const found = [...new Set(places)].map((place) => data.splits[place]);
  about.textContent = found.length
    ? "Each column is a client, each row a class; the stronger the colour, the more examples. While it trains, a client tends " +
      "to forget the classes it has no examples of."
    : "Not recorded in these runs.";
  const [card, ink] = [parsed(theme("--card")), parsed(theme("--c0"))];
  for (const one of found) {
    const plot = el("div", { class: "plot" });
    const some = one.ids.length < one.clients ? ` Shown: ${one.ids.length} of ${one.clients} clients, evenly chosen.` : "";
    body.append(el("figure", {}, el("h3", {}, one.title), plot, el("figcaption", {}, `${one.words}.${some}`)));
    const most = Math.max(1, ...one.counts.flat());
    const classes = one.counts[0].length;
    matrix(plot, {
      rows: classes,
      columns: one.ids.length,
      rowHeight: classes <= 20 ? 20 : Math.max(3, Math.floor(400 / classes)),
      widest: 46,
      gaps: [],
      rowLabels: one.counts[0].map((_, c) => `class ${c}`),
      columnTitle: "client",
      columnNumbers: one.ids,
      colour: (row, k) => (one.counts[k][row] ? mix(card, ink, 0.2 + 0.8 * Math.sqrt(one.counts[k][row] / most)) : null),
      text: (row, k) => `${one.counts[k][row]}`,
      tell: (row, k) => `client ${one.ids[k]}, class ${row}: ${one.counts[k][row]} examples`,
      label: `Who holds which classes: ${one.words}`,
    });
  }
}

const factsTable = (facts) =>
  el("table", { class: "facts-table" },
    el("tbody", {}, ...Object.entries(facts).map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, value)))),
  );

function about(data, body) {
  const open = new Set($$("details[open] > summary", body).map((summary) => summary.textContent));
  const fold = (name, ...content) => el("details", { open: open.has(name) }, el("summary", {}, name), ...content);
  const parts = data.groups.map((group) => {
    const own = Object.fromEntries(Object.entries(group.setting).filter(([key]) => !(key in data.shared)));
    const runs = group.runs.map((run) => {
      const versions = Object.entries(run.made_by).map(([key, value]) => `${key} ${value}`).join(", ");
      return el("p", { class: "note" }, `${run.folder || "run"}: seed ${run.seed}, ${run.reached} of ${run.planned} rounds; ${versions}`);
    });
    const seeds = group.runs.map((run) => run.seed).join(", ");
    return fold(`${group.label}: ${group.runs.length > 1 ? "seeds" : "seed"} ${seeds}`, factsTable(own), ...runs);
  });
  body.replaceChildren(fold("Settings that all runs share", factsTable(data.shared)), ...parts);
  $("footer").textContent = `Made by ${data.made_by}. This page is one file and asks the network for nothing.`;
}

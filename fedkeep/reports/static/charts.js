// Axes, curves and distributions, in SVG. Each plot fills the element `plot`.

// The smallest of 1, 2, 5, 10, 20, ... that is at least `least`.
function niceStep(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((s) => s * size).find((s) => s >= least * 0.999);
}

// The positions of the tick marks of an axis, at most about `wanted`.
function ticks(low, high, wanted) {
  const step = niceStep((high - low) / Math.max(1, wanted) || 1);
  const marks = [];
  for (let mark = Math.ceil(low / step - 1e-9) * step; mark <= high + step / 1e6; mark += step) marks.push(+mark.toPrecision(12));
  return marks;
}

// A share as percent or points without rounding: a tick at 1.5 is not labelled 2.
const formatTick = (value) => `${+(value * 100).toFixed(4)}`;

// Which of the whole numbers get a label: the first, the last, and between them multiples of 1, 2, 5, 10, ... whose
// labels do not touch. `place(number)` returns the middle of a label in pixels.
function wholeTicks(numbers, place) {
  const [first, last] = [numbers[0], numbers.at(-1)];
  if (first === last) return [first];
  const room = textWidth(`${last}`) + 8;
  const pixels = Math.abs(place(last) - place(first));
  if (pixels < room) return [last];
  const isTight = (numbers.length - 1) * room > pixels; // not all fit: then few, which are easier to read
  const step = isTight || numbers.length > 25 ? Math.max(1, niceStep((last - first) / Math.min(10, pixels / (1.5 * room)))) : 1;
  const multiples = numbers.filter((number) => Number.isInteger(number / step));
  const spaced = multiples.length > 1 ? multiples : numbers.filter((_, i) => i % Math.ceil((numbers.length * room) / pixels) === 0);
  const free = (a, b) => Math.abs(place(a) - place(b)) >= room;
  return [first, ...spaced.filter((number) => number !== first && number !== last && free(number, first) && free(number, last)), last];
}

const MAX_BANDS = 8; // more hide each other and the lines

// Draw curves, each with a band of one standard deviation: series of { label, slot, rounds, mean, spread }.
function drawCurves(plot, series, title = "Accuracy over rounds") {
  const width = Math.max(plot.clientWidth, 160);
  const height = Math.max(240, Math.min(400, width * 0.42));
  const box = { left: 44, right: 14, top: 8, bottom: 34 };
  const rounds = [...new Set(series.flatMap((s) => s.rounds))].sort((a, b) => a - b);
  const [first, last] = [rounds[0], Math.max(rounds.at(-1), rounds[0] + 1)];
  const highest = Math.max(...series.flatMap((s) => s.mean.map((m, i) => m + s.spread[i])));
  const high = Math.min(1, Math.ceil(highest * 10 + 0.2) / 10);
  const low = Math.min(0, Math.floor(Math.min(...series.flatMap((s) => s.mean)) * 10) / 10); // forgetting may be negative
  const x = (round) => box.left + ((round - first) / (last - first)) * (width - box.left - box.right);
  const y = (value) => height - box.bottom - ((Math.min(Math.max(value, low), high) - low) / (high - low)) * (height - box.top - box.bottom);
  const label = `${title}: ${series.map((s) => `${s.label} ends at ${formatPercent(s.mean.at(-1), 1)}`).join(", ")}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img", "aria-label": label });
  for (const mark of ticks(low, high, 5)) {
    picture.append(
      svg("line", { class: "axis", x1: box.left, x2: width - box.right, y1: y(mark), y2: y(mark) }),
      svg("text", { x: box.left - 7, y: y(mark) + 4, "text-anchor": "end" }, `${formatTick(mark)}%`),
    );
  }
  const marks = wholeTicks(Array.from({ length: last - first + 1 }, (_, i) => first + i), x);
  for (const mark of marks) picture.append(svg("text", { x: x(mark), y: height - 17, "text-anchor": "middle" }, `${mark}`));
  picture.append(svg("text", { x: (box.left + width) / 2, y: height - 2, "text-anchor": "middle" }, "round"));
  const coordinates = (at, values) => at.map((round, i) => `${x(round).toFixed(1)},${y(values[i]).toFixed(1)}`);
  for (const s of series.filter((s) => series.length <= MAX_BANDS && s.spread.some((v) => v > 0))) {
    const upper = coordinates(s.rounds, s.mean.map((m, i) => m + s.spread[i]));
    const lower = coordinates(s.rounds, s.mean.map((m, i) => m - s.spread[i])).reverse();
    const band = { fill: colourOf(s.slot), opacity: 0.13, "data-method": s.label };
    picture.append(svg("path", { d: `M${[...upper, ...lower].join("L")}Z`, ...band }));
  }
  for (const s of series) {
    const line = { fill: "none", stroke: colourOf(s.slot), "stroke-width": 2.2, "stroke-linejoin": "round", "data-method": s.label };
    picture.append(svg("path", { d: `M${coordinates(s.rounds, s.mean).join("L")}`, ...line, "stroke-dasharray": dashOf(s.slot) }));
  }
  const crosshair = svg("line", { class: "crosshair", y1: box.top, y2: height - box.bottom, visibility: "hidden" });
  picture.append(crosshair);
  plot.replaceChildren(picture);
  addCellNavigation(plot, picture, {
    columns: rounds.length,
    rows: 1,
    outline: false,
    cellBox: (column) => ({ x: x(rounds[column]), y: box.top, w: 0, h: 40 }),
    cellAt(px) {
      let nearest = 0;
      rounds.forEach((round, i) => { if (Math.abs(x(round) - px) < Math.abs(x(rounds[nearest]) - px)) nearest = i; });
      return [nearest, 0];
    },
    describe(column) {
      crosshair.setAttribute("visibility", column === null ? "hidden" : "visible");
      if (column === null) return "";
      crosshair.setAttribute("x1", x(rounds[column]));
      crosshair.setAttribute("x2", x(rounds[column]));
      return describeRound(series, rounds[column]);
    },
  });
}

const MAX_LINES = 10; // of a tooltip
function describeRound(series, round) {
  const shown = series.map((s) => ({ s, i: s.rounds.indexOf(round) })).filter(({ i }) => i >= 0);
  shown.sort((a, b) => b.s.mean[b.i] - a.s.mean[a.i]);
  const lines = shown.map(({ s, i }) => `${s.label}: ${formatPercent(s.mean[i], 1)}${s.spread[i] ? ` ±${formatPoints(s.spread[i])}` : ""}`);
  const more = lines.length > MAX_LINES ? [`… and ${lines.length - MAX_LINES + 1} below`] : [];
  return [`round ${round}`, ...lines.slice(0, more.length ? MAX_LINES - 1 : MAX_LINES), ...more].join("\n");
}

// Draw one distribution per row on a common axis: rows of { label, slot, counts, quartiles, number }.
function drawDistributions(plot, edges, rows) {
  const [width, rowHeight, bottom] = [Math.max(plot.clientWidth, 160), 66, 36]; // the first 20 pixels of each row are its name
  const height = rows.length * rowHeight + bottom;
  const [left, right] = [8, 16];
  const x = (value) => left + (value / edges.at(-1)) * (width - left - right);
  const label = `Round forgetting: ${rows.map((r) => `${r.label}, median ${inPoints(r.quartiles[1])}`).join("; ")}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img", "aria-label": label });
  for (const mark of ticks(0, edges.at(-1), Math.min(12, width / 70))) {
    picture.append(
      svg("line", { class: "axis", x1: x(mark), x2: x(mark), y1: 0, y2: height - bottom }),
      svg("text", { x: x(mark), y: height - bottom + 15, "text-anchor": "middle" }, formatTick(mark)),
    );
  }
  const axisTitle = "points lost per class from one round to the next";
  picture.append(svg("text", { x: width / 2, y: height - 4, "text-anchor": "middle" }, axisTitle));
  rows.forEach((row, i) => {
    const floor = (i + 1) * rowHeight - 8;
    const tallest = Math.max(...row.counts, 1);
    const steps = row.counts.flatMap((count, b) => {
      const level = (floor - (count / tallest) * (rowHeight - 28)).toFixed(1);
      return [`${x(edges[b]).toFixed(1)},${level}`, `${x(edges[b + 1]).toFixed(1)},${level}`];
    });
    const area = `M${x(0)},${floor}L${steps.join("L")}L${x(edges.at(-1))},${floor}Z`;
    picture.append(svg("path", { d: area, fill: colourOf(row.slot), opacity: 0.45, "data-method": row.label }));
    const [low, middle, high] = row.quartiles;
    if (!isMissing(middle)) {
      const line = { stroke: colourOf(row.slot), "stroke-width": 3, "stroke-linecap": "round", "data-method": row.label };
      picture.append(
        svg("line", { x1: x(low), x2: x(high), y1: floor, y2: floor, ...line }),
        svg("circle", { cx: x(middle), cy: floor, r: 5, fill: colourOf(row.slot), "data-method": row.label }),
      );
    }
    const facts = ` · median ${formatPoints(middle)}, worst ${inPoints(row.largest)}`;
    const name = fitText(row.label, width - left - right - textWidth(facts) - 10, "600 12px system-ui, sans-serif");
    picture.append(svg("text", { class: "strong", x: left, y: floor - rowHeight + 22 }, name + facts));
  });
  plot.replaceChildren(picture);
  addCellNavigation(plot, picture, {
    columns: edges.length - 1,
    rows: rows.length,
    cellBox: (column, row) => ({ x: x(edges[column]), y: row * rowHeight + 19, w: x(edges[1]) - x(0), h: rowHeight - 27 }),
    cellAt: (px, py) => {
      const [column, row] = [Math.floor((px - left) / (x(edges[1]) - x(0))), Math.floor(py / rowHeight)];
      return column >= 0 && column < edges.length - 1 && row < rows.length ? [column, row] : null;
    },
    describe: (column, row) =>
      column === null
        ? ""
        : `${rows[row].label}\n${rows[row].counts[column]} of ${rows[row].number} rounds lost ` +
          `${(edges[column] * 100).toFixed(1)} ${column < edges.length - 2 ? `to ${(edges[column + 1] * 100).toFixed(1)} points` : "points or more"}`,
  });
}

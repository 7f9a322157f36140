// The plots: a matrix of cells on a canvas, curves and distributions in SVG. Each fills the element `plot`.

// Draw rows and columns of cells. `colour(row, column)` returns [r, g, b], or null for a cell without a value. `text` and
// `hasDot` are optional, `rowBars` draws a bar at the end of each row, `gaps` are rows with some space above them. If
// there is no space for all column numbers, only multiples of a step are written.
function drawMatrix(plot, options) {
  const width = Math.max(plot.clientWidth, 160);
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": options.label });
  const pen = canvas.getContext("2d");
  const font = "12px system-ui, sans-serif";
  pen.font = font;
  const labels = options.rowLabels;
  const left = Math.ceil(Math.max(...[...labels, options.columnTitle].map((label) => pen.measureText(label).width))) + 8;
  const right = options.rowBars ? 46 : 2;
  const bottom = 20;
  const gap = 8;
  const top = (row) => row * options.rowHeight + gap * options.gaps.filter((g) => g <= row).length;
  const height = top(options.rows - 1) + options.rowHeight + bottom;
  const cellWidth = Math.min((width - left - right) / options.columns, options.maxCellWidth || Infinity);
  const x = (column) => Math.round(left + column * cellWidth);
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  pen.scale(ratio, ratio);
  pen.font = font;
  pen.textBaseline = "middle";
  const soft = themeColour("--soft");
  const absent = themeColour("--absent");
  const everyRow = Math.ceil(14 / options.rowHeight);
  const gridLine = cellWidth >= 12 && options.rowHeight >= 12 ? 1 : 0;
  for (let row = 0; row < options.rows; row++) {
    pen.fillStyle = soft;
    pen.textAlign = "right";
    if (row % everyRow === 0) pen.fillText(labels[row], left - 6, Math.max(7, top(row) + options.rowHeight / 2));
    for (let column = 0; column < options.columns; column++) {
      const colour = options.colour(row, column);
      pen.fillStyle = colour ? rgb(colour) : absent;
      const [from, to] = [x(column), x(column + 1)];
      pen.fillRect(from, top(row), to - from - gridLine, options.rowHeight - gridLine);
      const text = options.text && cellWidth >= 17 && options.rowHeight >= 14 ? options.text(row, column) : "";
      if (colour && (text || (options.hasDot && options.hasDot(row, column)))) {
        pen.fillStyle = textColourOn(colour);
        pen.textAlign = "center";
        if (cellWidth < 26) pen.font = "10px system-ui, sans-serif";
        if (text) pen.fillText(text, (from + to - gridLine) / 2, top(row) + options.rowHeight / 2 + (cellWidth < 26 ? 2 : 0));
        pen.font = font;
        if (options.hasDot && options.hasDot(row, column)) {
          pen.beginPath();
          pen.arc(to - gridLine - 4, top(row) + 4, Math.min(2.4, cellWidth / 4), 0, 7);
          pen.fill();
        }
      }
    }
    if (options.rowBars) {
      const share = Math.max(0, options.rowBars[row] || 0);
      pen.fillStyle = themeColour("--loss");
      pen.fillRect(x(options.columns) + 4, top(row) + 1, share * 40, Math.max(1, options.rowHeight - 2 - gridLine));
    }
  }
  pen.fillStyle = soft;
  pen.textAlign = "right";
  pen.fillText(options.columnTitle, left - 6, height - bottom / 2 + 1);
  pen.textAlign = "center";
  const labelWidth = pen.measureText(`${options.columnNumbers.at(-1)}`).width + 8;
  const span = options.columnNumbers.at(-1) - options.columnNumbers[0];
  const step = labelWidth <= cellWidth ? 1 : niceStep((span * labelWidth) / (cellWidth * options.columns));
  let nextFree = -Infinity;
  options.columnNumbers.forEach((number, column) => {
    const middle = Math.min((x(column) + x(column + 1)) / 2, width - labelWidth / 2);
    if ((number % step && column) || middle - labelWidth / 2 < nextFree) return;
    nextFree = middle + labelWidth / 2;
    pen.fillText(`${number}`, middle, height - bottom / 2 + 1);
  });
  plot.replaceChildren(canvas);
  addCellNavigation(plot, canvas, {
    columns: options.columns,
    rows: options.rows,
    describe: (column, row) => (column === null ? "" : options.describe(row, column)),
    cellBox: (column, row) => ({ x: x(column), y: top(row), w: x(column + 1) - x(column) - gridLine, h: options.rowHeight - gridLine }),
    cellAt(px, py) {
      const column = Math.floor((px - left) / cellWidth);
      for (let row = 0; row < options.rows; row++) {
        if (py >= top(row) && py < top(row) + options.rowHeight && column >= 0 && column < options.columns) return [column, row];
      }
      return null;
    },
  });
}

// The smallest of 1, 2, 5, 10, 20, ... that is at least `least`.
function niceStep(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((s) => s * size).find((s) => s >= least * 0.999);
}

// The positions of the tick marks of an axis.
function ticks(low, high, wanted) {
  const step = niceStep((high - low) / Math.max(1, wanted) || 1);
  const marks = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high + step / 1e6; mark += step) marks.push(+mark.toPrecision(12));
  return marks;
}

// Draw curves, each with a band of one standard deviation: series of { label, index, rounds, mean, spread }.
function drawCurves(plot, series, title = "Accuracy over rounds") {
  const width = Math.max(plot.clientWidth, 160);
  const height = Math.max(260, Math.min(400, width * 0.42));
  const box = { left: 44, right: 12, top: 8, bottom: 34 };
  const first = Math.min(...series.map((s) => s.rounds[0]));
  const last = Math.max(...series.map((s) => s.rounds.at(-1)), first + 1);
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
      svg("text", { x: box.left - 7, y: y(mark) + 4, "text-anchor": "end" }, formatPercent(mark)),
    );
  }
  for (const mark of ticks(first, last, width / 110)) {
    if (Number.isInteger(mark)) picture.append(svg("text", { x: x(mark), y: height - 16, "text-anchor": "middle" }, `${mark}`));
  }
  picture.append(svg("text", { x: (box.left + width) / 2, y: height - 2, "text-anchor": "middle" }, "round"));
  const coordinates = (rounds, values) => rounds.map((round, i) => `${x(round).toFixed(1)},${y(values[i]).toFixed(1)}`);
  for (const s of series.filter((s) => s.spread.some((v) => v > 0))) {
    const upper = coordinates(s.rounds, s.mean.map((m, i) => m + s.spread[i]));
    const lower = coordinates(s.rounds, s.mean.map((m, i) => m - s.spread[i])).reverse();
    picture.append(svg("path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: colourOf(s.index), opacity: 0.14 }));
  }
  for (const s of series) {
    const line = { fill: "none", stroke: colourOf(s.index), "stroke-width": 2, "stroke-linejoin": "round" };
    picture.append(svg("path", { d: `M${coordinates(s.rounds, s.mean).join("L")}`, ...line, "stroke-dasharray": dashOf(s.index) }));
  }
  const crosshair = svg("line", { class: "crosshair", y1: box.top, y2: height - box.bottom, visibility: "hidden" });
  picture.append(crosshair);
  plot.replaceChildren(picture);
  const rounds = [...new Set(series.flatMap((s) => s.rounds))].sort((a, b) => a - b);
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
      const shown = series.map((s) => ({ s, i: s.rounds.indexOf(rounds[column]) })).filter(({ i }) => i >= 0);
      shown.sort((a, b) => b.s.mean[b.i] - a.s.mean[a.i]);
      const lines = shown.map(({ s, i }) => `${s.label}: ${formatPercent(s.mean[i], 1)}${s.spread[i] ? ` ±${formatPoints(s.spread[i])}` : ""}`);
      return [`round ${rounds[column]}`, ...lines].join("\n");
    },
  });
}

// Draw one distribution per row on a common axis: rows of { label, index, counts, quartiles, number }.
function drawDistributions(plot, edges, rows) {
  const [width, rowHeight, bottom] = [Math.max(plot.clientWidth, 160), 66, 36]; // the first 20 pixels of each row are its name
  const height = rows.length * rowHeight + bottom;
  const [left, right] = [8, 12];
  const x = (value) => left + (value / edges.at(-1)) * (width - left - right);
  const label = `Round forgetting: ${rows.map((r) => `${r.label}, median ${formatPoints(r.quartiles[1])} points`).join("; ")}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img", "aria-label": label });
  for (const mark of ticks(0, edges.at(-1), width / 90)) {
    picture.append(
      svg("line", { class: "axis", x1: x(mark), x2: x(mark), y1: 0, y2: height - bottom }),
      svg("text", { x: x(mark), y: height - bottom + 15, "text-anchor": "middle" }, formatPoints(mark)),
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
    picture.append(svg("path", { d: area, fill: colourOf(row.index), opacity: 0.45 }));
    const [low, middle, high] = row.quartiles;
    if (!isMissing(middle)) {
      const line = { stroke: colourOf(row.index), "stroke-width": 3, "stroke-linecap": "round" };
      picture.append(
        svg("line", { x1: x(low), x2: x(high), y1: floor, y2: floor, ...line }),
        svg("circle", { cx: x(middle), cy: floor, r: 5, fill: colourOf(row.index) }),
      );
    }
    const heading = `${row.label} · median ${formatPoints(middle)}, worst ${formatPoints(row.largest)}`;
    picture.append(svg("text", { class: "strong", x: left, y: floor - rowHeight + 22 }, heading));
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

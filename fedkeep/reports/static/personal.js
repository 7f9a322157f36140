// Personalised accuracy: a table that says which model, data, clients and round, and every client as a dot.

function personalSection(data, body, state) {
  showSection("personal", data.personal.length > 0);
  const shown = (row) => state.shown.has(row.label);
  const figures = data.personal.filter((table) => table.rows.some(shown)).map((table) => {
    const own = table.rows.filter(shown).map((row) => ({ ...row, slot: state.slots.get(row.label) }));
    const plot = el("div", { class: "plot" });
    const heads = ["method", "model", ...table.columns].map((head, i) =>
      el("th", { scope: "col", class: i === 1 ? "text" : null }, head));
    const rows = own.map((row) => el("tr", {},
      el("td", {}, swatch(row.slot), ` ${row.title}`), el("td", { class: "text" }, row.model),
      ...row.cells.map((cell) => el("td", {}, cell))));
    const numbers = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
    body.append(el("figure", {}, el("h3", {}, table.title), plot,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Personalised accuracy" }, numbers),
      el("figcaption", {}, `${table.caption}.`)));
    return () => drawClients(plot, own);
  });
  figures.forEach((draw) => draw());
}

// One row for each method and model, one dot for each client; dots of equal accuracy are stacked.
function drawClients(plot, rows) {
  const [width, rowHeight, bottom, left, right] = [Math.max(plot.clientWidth, 160), 58, 36, 12, 20];
  const height = rows.length * rowHeight + bottom;
  const x = (value) => left + value * (width - left - right);
  const facts = (row) => ` · mean ${formatPercent(row.mean, 1)}, worst tenth ${formatPercent(row.worst_tenth, 1)}`;
  const label = `Accuracy of every client: ${rows.map((row) => `${row.title}, ${row.model}${facts(row)}`).join("; ")}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img", "aria-label": label });
  for (const mark of ticks(0, 1, width / 90)) {
    picture.append(
      svg("line", { class: "axis", x1: x(mark), x2: x(mark), y1: 0, y2: height - bottom }),
      svg("text", { x: x(mark), y: height - bottom + 15, "text-anchor": "middle" }, `${formatTick(mark)}%`),
    );
  }
  picture.append(svg("text", { x: width / 2, y: height - 4, "text-anchor": "middle" }, "accuracy on data like the client's own"));
  const [bin, most] = [7 / (width - left - right), rowHeight - 32]; // a dot's width; the height of a stack
  const places = rows.map((row) => {
    const stacks = new Map();
    for (const value of row.clients) stacks.set(Math.round(value / bin), (stacks.get(Math.round(value / bin)) || 0) + 1);
    return { stacks, step: Math.min(6, most / Math.max(1, ...stacks.values())) };
  });
  rows.forEach((row, i) => {
    const floor = (i + 1) * rowHeight - 8;
    for (const [at, count] of places[i].stacks) {
      for (let k = 0; k < count; k += 1) {
        const dot = { cx: x(Math.min(1, at * bin)).toFixed(1), cy: (floor - 3 - k * places[i].step).toFixed(1), r: 3 };
        picture.append(svg("circle", { ...dot, fill: colourOf(row.slot), opacity: 0.6 }));
      }
    }
    const marker = { stroke: "var(--ink)", "stroke-width": 2.5, y1: floor - 14, y2: floor + 3 };
    picture.append(
      svg("line", { ...marker, x1: x(row.mean), x2: x(row.mean) }),
      svg("line", { ...marker, x1: x(row.worst_tenth), x2: x(row.worst_tenth), "stroke-dasharray": "3 2" }),
      svg("text", { class: "strong", x: left, y: floor - rowHeight + 24 },
        `${row.title}, ${row.model}${width < 600 ? "" : facts(row)}`),
    );
  });
  plot.replaceChildren(picture);
  const bins = 20;
  addCellNavigation(plot, picture, {
    columns: bins,
    rows: rows.length,
    cellBox: (column, row) => ({ x: x(column / bins), y: row * rowHeight + 19, w: x(1 / bins) - x(0), h: rowHeight - 24 }),
    cellAt: (px, py) => {
      const [column, row] = [Math.min(bins - 1, Math.floor((px - left) / (x(1 / bins) - x(0)))), Math.floor(py / rowHeight)];
      return column >= 0 && row >= 0 && row < rows.length ? [column, row] : null;
    },
    describe(column, row) {
      if (column === null) return "";
      const inside = rows[row].clients.filter((value) => Math.min(bins - 1, Math.floor(value * bins)) === column).length;
      const share = formatPercent(inside / Math.max(1, rows[row].clients.length));
      return `${rows[row].title}, ${rows[row].model}\n${share} of the clients have ${column * 5} to ${column * 5 + 5}%`;
    },
  });
}

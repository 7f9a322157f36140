// The table of summaries: sortable, and copied as it stands, in Markdown, CSV or LaTeX.

const COLUMNS = [
  { key: "label", head: "method" },
  { key: "final", head: "final %", scale: 100, digits: 1, best: Math.max },
  { key: "best", head: "best %", scale: 100, digits: 1, best: Math.max },
  { key: "smoothed", head: "smoothed %", scale: 100, digits: 1, best: Math.max },
  { key: "forgetting", head: "forgetting", scale: 1, digits: 3, best: Math.min },
  { key: "round_forgetting", head: "per round", scale: 1, digits: 3, best: Math.min },
  { key: "bytes", head: "MB", scale: 1e-6, digits: 1, plain: true },
  { key: "seconds", head: "seconds", scale: 1, digits: 1, plain: true },
  { key: "runs", head: "runs" },
];

function cellOf(group, column) {
  if (column.key === "label") return { text: group.label, value: group.label };
  if (column.key === "runs") return { text: `${group.runs.length}`, value: group.runs.length };
  const [mean, deviation] = [group.mean[column.key], column.plain ? null : group.spread[column.key]];
  const scaled = (value) => (missing(value) ? null : value * column.scale);
  return { text: spread(scaled(mean), scaled(deviation), column.digits), value: scaled(mean), deviation: scaled(deviation) };
}

function sorted(data, sort) {
  const column = COLUMNS.find((c) => c.key === sort.key);
  if (!column) return data.groups;
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  return [...data.groups].sort((one, other) => {
    const [a, b] = [cellOf(one, column).value, cellOf(other, column).value];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return sort.down ? order(b, a) : order(a, b);
  });
}

const bestOf = (data, column) => {
  const values = data.groups.map((group) => cellOf(group, column).value).filter((value) => !missing(value));
  return column.best && data.groups.length > 1 && values.length ? column.best(...values) : null;
};

function summary(data, state, change) {
  $(".about-summary").textContent =
    "Mean" + (data.groups.some((g) => g.runs.length > 1) ? "±standard deviation over seeds" : "") +
    ". Forgetting: best earlier minus final accuracy, mean over classes (FedNTD, eq. 5); per round: what is lost from one " +
    "round to the next, gains ignored (Flashback); smoothed: moving average; MB: moved in all. Choose a heading to sort.";
  const heads = COLUMNS.map((column) => {
    const here = state.sort.key === column.key;
    const sort = () => change({ sort: { key: column.key, down: here ? !state.sort.down : column.best === Math.max } });
    const button = el("button", { type: "button", onclick: sort, "data-key": column.key },
      column.head + (here ? (state.sort.down ? " ↓" : " ↑") : ""));
    return el("th", { scope: "col", "aria-sort": here ? (state.sort.down ? "descending" : "ascending") : null }, button);
  });
  const best = Object.fromEntries(COLUMNS.map((column) => [column.key, bestOf(data, column)]));
  const rows = sorted(data, state.sort).map((group) =>
    el("tr", {}, ...COLUMNS.map((column) => {
      const cell = cellOf(group, column);
      if (column.key === "label") return el("td", {}, swatch(data.groups.indexOf(group)), ` ${cell.text}`);
      return el("td", { class: !missing(cell.value) && cell.value === best[column.key] ? "best" : null }, cell.text);
    })),
  );
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  $("#summary table").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
  if (focused) $(`#summary [data-key="${focused}"]`)?.focus();
}

const FORMATS = {
  markdown(rows) {
    const clean = (text) => text.replaceAll("\\", "\\\\").replaceAll("|", "\\|").replaceAll("\n", " ");
    const line = (cells) => `| ${cells.join(" | ")} |`;
    const body = rows.map((row) => line(row.map((c) => (c.best ? `**${clean(c.text)}**` : clean(c.text)))));
    return [line(COLUMNS.map((c) => c.head)), line(COLUMNS.map((c, i) => (i ? "---:" : "---"))), ...body].join("\n") + "\n";
  },
  csv(rows) {
    // A cell that a spreadsheet would take for a formula is kept from being one.
    const quoted = (value) => `"${String(value).replace(/^([=+\-@\t\r])/, "'$1").replaceAll('"', '""')}"`;
    const named = COLUMNS.flatMap((c) => (c.best ? [c.key, `${c.key}_std`] : [c.key]));
    const body = rows.map((row) => row.flatMap((cell, i) => {
      if (COLUMNS[i].key === "label") return [quoted(cell.text)];
      const raw = (value) => (missing(value) ? "" : +(value / (COLUMNS[i].scale || 1)).toPrecision(8));
      return COLUMNS[i].best ? [raw(cell.value), raw(cell.deviation)] : [raw(cell.value)];
    }).join(","));
    return [named.join(","), ...body].join("\n") + "\n";
  },
  latex(rows) {
    const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\n": " " };
    const clean = (text) => text.replace(/[\\~^\n&%$#_{}]/g, (c) => special[c] || `\\${c}`);
    const number = (cell) => {
      const text = `$${cell.text.replace("±", " \\pm ").replace("–", "-")}$`;
      return cell.best ? `$\\mathbf{${text.slice(1, -1)}}$` : text;
    };
    const line = (cells) => `${cells.join(" & ")} \\\\`;
    const body = rows.map((row) => line(row.map((cell, i) => (i ? number(cell) : clean(cell.text)))));
    return [`\\begin{tabular}{l${"r".repeat(COLUMNS.length - 1)}}`, "\\hline", line(COLUMNS.map((c) => clean(c.head))),
      "\\hline", ...body, "\\hline", "\\end{tabular}"].join("\n") + "\n";
  },
};

function tableAs(format, data, state) {
  const rows = sorted(data, state.sort).map((group) => COLUMNS.map((column) => {
    const cell = cellOf(group, column);
    return { ...cell, best: column.best && !missing(cell.value) && cell.value === bestOf(data, column) };
  }));
  return FORMATS[format](rows);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("the browser does not let this page copy");
  }
}

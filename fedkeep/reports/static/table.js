// The summary table: sortable, and copied in the shown order as Markdown, CSV or LaTeX.

const COLUMNS = [
  { key: "label", head: "method" },
  { key: "final", head: "final %", scale: 100, digits: 1, best: Math.max },
  { key: "best", head: "best %", scale: 100, digits: 1, best: Math.max },
  { key: "smoothed", head: "smoothed %", scale: 100, digits: 1, best: Math.max },
  { key: "forgetting", head: "forgetting", scale: 1, digits: 3, best: Math.min },
  { key: "round_forgetting", head: "per round", scale: 1, digits: 3, best: Math.min },
  { key: "bytes", head: "MB", scale: 1e-6, digits: 1, noSpread: true },
  { key: "seconds", head: "seconds", scale: 1, digits: 1, noSpread: true },
  { key: "runs", head: "runs" },
];

function cellOf(group, column) {
  if (column.key === "label") return { text: group.label, value: group.label };
  if (column.key === "runs") return { text: `${group.runs.length}`, value: group.runs.length };
  const [mean, deviation] = [group.mean[column.key], column.noSpread ? null : group.spread[column.key]];
  const scaled = (value) => (isMissing(value) ? null : value * column.scale);
  return { text: formatMean(scaled(mean), scaled(deviation), column.digits), value: scaled(mean), deviation: scaled(deviation) };
}

function sortedGroups(data, sort) {
  const column = COLUMNS.find((c) => c.key === sort.key);
  if (!column) return data.groups;
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  return [...data.groups].sort((one, other) => {
    const [a, b] = [cellOf(one, column).value, cellOf(other, column).value];
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    return sort.down ? order(b, a) : order(a, b);
  });
}

// Whether the group is best in this column: the data says so, because unfinished groups and ties are not ranked.
const isBest = (data, group, column) => Boolean(column.best) && (data.ranks[column.key] || {})[group.label] === 1;

function drawTable(data, state, updateState) {
  $(".about-summary").textContent =
    "Mean" + (data.groups.some((g) => g.runs.length > 1) ? "±standard deviation over seeds" : "") +
    ". Forgetting: best earlier minus final accuracy, mean over classes (FedNTD, eq. 5). Per round: accuracy lost from one " +
    "round to the next, gains ignored (Flashback). Smoothed: moving average. MB: total communication. Click a heading to sort.";
  const heads = COLUMNS.map((column) => {
    const isSorted = state.sort.key === column.key;
    const sort = () => updateState({ sort: { key: column.key, down: isSorted ? !state.sort.down : column.best === Math.max } });
    const button = el("button", { type: "button", onclick: sort, "data-key": column.key },
      column.head + (isSorted ? (state.sort.down ? " ↓" : " ↑") : ""));
    return el("th", { scope: "col", "aria-sort": isSorted ? (state.sort.down ? "descending" : "ascending") : null }, button);
  });
  const rows = sortedGroups(data, state.sort).map((group) =>
    el("tr", {}, ...COLUMNS.map((column) => {
      const cell = cellOf(group, column);
      if (column.key === "label") return el("td", {}, swatch(data.groups.indexOf(group)), ` ${cell.text}`);
      return el("td", { class: isBest(data, group, column) ? "best" : null }, cell.text);
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
    // Quote a cell that a spreadsheet would read as a formula.
    const quoted = (value) => `"${String(value).replace(/^([=+\-@\t\r])/, "'$1").replaceAll('"', '""')}"`;
    const names = COLUMNS.flatMap((c) => (c.best ? [c.key, `${c.key}_std`] : [c.key]));
    const body = rows.map((row) => row.flatMap((cell, i) => {
      if (COLUMNS[i].key === "label") return [quoted(cell.text)];
      const raw = (value) => (isMissing(value) ? "" : +(value / (COLUMNS[i].scale || 1)).toPrecision(8));
      return COLUMNS[i].best ? [raw(cell.value), raw(cell.deviation)] : [raw(cell.value)];
    }).join(","));
    return [names.join(","), ...body].join("\n") + "\n";
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

function formatTable(format, data, state) {
  const rows = sortedGroups(data, state.sort).map((group) => COLUMNS.map((column) => {
    const cell = cellOf(group, column);
    return { ...cell, best: isBest(data, group, column) };
  }));
  return FORMATS[format](rows);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) throw new Error("the browser does not allow it");
  }
}

// The summary table: sortable, and copied in the shown order as Markdown, CSV or LaTeX. The data has the columns, each
// with a cell { text, value, spread, best } for every group.

const METHOD = { key: "label", head: "method", down: false };
const tableColumns = (data) => [{ ...METHOD, cells: data.groups.map((group) => ({ text: group.title, value: group.title })) }, ...data.columns];

// The shown groups as rows of cells, sorted by a column.
function tableRows(data, state) {
  const columns = tableColumns(data);
  const sorted = columns.find((column) => column.key === state.sort.key) || columns[0];
  const rows = shownEntries(data, state).map(({ group, slot }) => {
    const index = data.groups.indexOf(group);
    return { slot, cells: columns.map((column) => column.cells[index]), by: sorted.cells[index].value };
  });
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  return rows.sort((one, other) => {
    if (isMissing(one.by) || isMissing(other.by)) return isMissing(one.by) - isMissing(other.by);
    return state.sort.down ? order(other.by, one.by) : order(one.by, other.by);
  });
}

function tableNote(data) {
  const several = data.groups.some((group) => group.runs.length > 1);
  const notes = data.columns.filter((column) => column.note).map((column) => `${column.head}: ${column.note}`);
  const tests = data.columns.some((column) => column.head === "p")
    ? ` p: paired t-test against ${data.tests.against} over common seeds` +
      `${data.tests.number > 1 ? `, corrected for ${data.tests.number} comparisons (Holm)` : ""}.`
    : "";
  return `${several ? "Mean±standard deviation over seeds. " : ""}${notes.join("; ")}.${tests}`;
}

function drawTable(data, state, updateState) {
  $(".about-summary").textContent = tableNote(data);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  fillTable($("#summary .summary"), data, state, updateState, (column) => !column.part);
  for (const part of ["metrics", "sites"]) {
    const isPart = (column) => column.part === part;
    $$(`#summary .of-${part}`).forEach((node) => { node.hidden = !data.columns.some(isPart); });
    fillTable($(`#summary .${part}`), data, state, updateState, (column) => isPart(column) || column.key === METHOD.key);
  }
  $$("#summary .hidden-note").forEach((note) => note.remove());
  $$("#summary .scroll").at(-1).after(...hiddenNote(data, state));
  if (focused) $(`#summary [data-key="${focused}"]`)?.focus();
}

// Fill a table with the columns for which `isShown` is true; all tables have the same order of rows.
function fillTable(table, data, state, updateState, isShown) {
  const columns = tableColumns(data);
  const heads = columns.filter(isShown).map((column) => {
    const isSorted = state.sort.key === column.key;
    const sort = () => updateState({ sort: { key: column.key, down: isSorted ? !state.sort.down : column.down } });
    const button = el("button", { type: "button", onclick: sort, "data-key": column.key, title: "Sort" },
      column.head + (isSorted ? (state.sort.down ? " ↓" : " ↑") : ""));
    return el("th", { scope: "col", "aria-sort": isSorted ? (state.sort.down ? "descending" : "ascending") : null }, button);
  });
  const rows = tableRows(data, state).map(({ slot, cells }) => el("tr", { "data-method": cells[0].text },
    cells.flatMap((cell, i) => {
      if (!isShown(columns[i])) return [];
      return [i ? el("td", { class: cell.best ? "best" : null }, cell.text) : el("td", {}, swatch(slot), `\u00a0${cell.text}`)];
    })));
  table.replaceChildren(el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

const FORMATS = {
  markdown(columns, rows) {
    const clean = (text) => text.replaceAll("\\", "\\\\").replaceAll("|", "\\|").replaceAll("\n", " ");
    const line = (cells) => `| ${cells.join(" | ")} |`;
    const body = rows.map((row) => line(row.map((c) => (c.best ? `**${clean(c.text)}**` : clean(c.text)))));
    return [line(columns.map((c) => clean(c.head))), line(columns.map((c, i) => (i ? "---:" : "---"))), ...body].join("\n") + "\n";
  },
  csv(columns, rows) {
    // Quote a cell that a spreadsheet would read as a formula.
    const quoted = (value) => `"${String(value).replace(/^([=+\-@\t\r])/, "'$1").replaceAll('"', '""')}"`;
    const name = (key) => (/^\w+$/.test(key) ? key : quoted(key));
    const names = columns.flatMap((c) => (c.spread ? [name(c.key), name(`${c.key}_std`)] : [name(c.key)]));
    const raw = (value) => (isMissing(value) ? "" : +value.toPrecision(8));
    const body = rows.map((row) => row.flatMap((cell, i) => {
      if (!i) return [quoted(cell.text)];
      return columns[i].spread ? [raw(cell.value), raw(cell.spread)] : [raw(cell.value)];
    }).join(","));
    return [names.join(","), ...body].join("\n") + "\n";
  },
  latex(columns, rows) {
    const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\n": " " };
    const clean = (text) => text.replace(/[\\~^\n&%$#_{}]/g, (c) => special[c] || `\\${c}`);
    const number = (cell) => {
      const text = cell.text.replace("±", " \\pm ").replace("–", "-").replace(/\(.*\)/, (some) => `\\text{${some}}`);
      return cell.best ? `$\\mathbf{${text}}$` : text && `$${text}$`;
    };
    const line = (cells) => `${cells.join(" & ")} \\\\`;
    const body = rows.map((row) => line(row.map((cell, i) => (i ? number(cell) : clean(cell.text)))));
    return [`\\begin{tabular}{l${"r".repeat(columns.length - 1)}}`, "\\hline", line(columns.map((c) => clean(c.head))),
      "\\hline", ...body, "\\hline", "\\end{tabular}"].join("\n") + "\n";
  },
};

const formatTable = (format, data, state) => FORMATS[format](tableColumns(data), tableRows(data, state).map((row) => row.cells));

// Matrices of cells: on a canvas, or as SVG when a section is saved. A painter uses a pen, which both have.

const FONT = "12px system-ui, sans-serif";
const SMALL_FONT = "10px system-ui, sans-serif";
const ruler = document.createElement("canvas").getContext("2d");
function textWidth(text, font = FONT) {
  ruler.font = font;
  return ruler.measureText(text).width;
}

// The text, or its beginning with an ellipsis if it is wider than `most` pixels.
function fitText(text, most, font = FONT) {
  if (textWidth(text, font) <= most) return text;
  let length = text.length - 1;
  while (length > 1 && textWidth(`${text.slice(0, length)}…`, font) > most) length -= 1;
  return `${text.slice(0, length)}…`;
}

// A pen with the methods of a canvas that painters use, which collects SVG elements.
class SvgPen {
  constructor() {
    this.parts = [];
    this.last = null;
  }
  fillRect(x, y, width, height) {
    const last = this.last; // neighbours of one colour become one rectangle
    if (last && last.fill === this.fillStyle && last.y === y && last.height === height && last.x + last.width === x) {
      last.width += width;
      last.node.setAttribute("width", last.width);
      return;
    }
    const node = svg("rect", { x, y, width, height, fill: this.fillStyle });
    this.last = { x, y, width, height, fill: this.fillStyle, node };
    this.parts.push(node);
  }
  fillText(text, x, y) {
    const anchor = { right: "end", center: "middle" }[this.textAlign] || "start";
    const [size, ...family] = this.font.split(" ");
    const font = { "font-size": size, "font-family": family.join(" "), fill: this.fillStyle, "text-anchor": anchor };
    this.parts.push(svg("text", { x, y: y + parseFloat(size) * 0.35, ...font }, text)); // y is the middle
  }
}

// Draw rows and columns of cells into the element `plot`. `colour(row, column)` returns [r, g, b], or null for a cell
// without a value. `text` and `isMarked` are optional, `rowBars` draws a bar at the end of each row, `gaps` are rows with
// some space above them. Columns have numbers, of which those are written that have space, or names if all have some.
function drawMatrix(plot, options) {
  const width = Math.max(plot.clientWidth, 120);
  const most = options.labelWidth || Math.max(60, Math.min(170, width * 0.3));
  const labels = options.rowLabels.map((label) => fitText(label, most));
  const left = Math.ceil(Math.max(...[...labels, options.columnTitle].map((label) => textWidth(label)))) + 8;
  const right = options.rowBars ? 46 : 2;
  const bottom = 20;
  const top = (row) => row * options.rowHeight + 8 * options.gaps.filter((g) => g <= row).length;
  const height = top(options.rows - 1) + options.rowHeight + bottom;
  const cellWidth = Math.min((width - left - right) / options.columns, options.maxCellWidth || Infinity);
  const x = (column) => Math.round(left + column * cellWidth);
  const gridLine = options.text && cellWidth >= 12 && options.rowHeight >= 12 ? 1 : 0; // between cells with numbers
  const layout = { labels, left, top, x, height, cellWidth, gridLine, width, bottom };
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": options.label });
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  canvas.paint = painter(options, layout);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.textBaseline = "middle";
  canvas.paint(pen);
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

// A function that paints a matrix with a pen. Colours are those of the theme now.
function painter(options, layout) {
  const { labels, left, top, x, height, gridLine, bottom } = layout;
  const [soft, absent, loss] = ["--soft", "--absent", "--loss"].map(themeColour);
  const everyRow = niceStep(options.rowHeight >= 14 ? 1 : 19 / options.rowHeight);
  const numbers = columnLabels(options, layout);
  return (pen) => {
    pen.font = FONT;
    for (let row = 0; row < options.rows; row++) {
      pen.fillStyle = soft;
      pen.textAlign = "right";
      if (row % everyRow === 0) pen.fillText(labels[row], left - 6, Math.max(7, top(row) + options.rowHeight / 2));
      for (let column = 0; column < options.columns; column++) paintCell(pen, options, layout, absent, row, column);
      if (options.rowBars) {
        const share = Math.max(0, options.rowBars[row] || 0);
        pen.fillStyle = loss;
        pen.fillRect(x(options.columns) + 4, top(row) + 1, share * 40, Math.max(1, options.rowHeight - 2 - gridLine));
      }
    }
    pen.fillStyle = soft;
    pen.textAlign = "right";
    pen.fillText(options.columnTitle, left - 6, height - bottom / 2 + 1);
    pen.textAlign = "center";
    for (const { text, middle } of numbers) pen.fillText(text, middle, height - bottom / 2 + 1);
  };
}

function paintCell(pen, options, { x, top, cellWidth, gridLine }, absent, row, column) {
  const colour = options.colour(row, column);
  const [from, to, height] = [x(column), x(column + 1), options.rowHeight];
  pen.fillStyle = colour ? rgb(colour) : absent;
  pen.fillRect(from, top(row), to - from - gridLine, height - gridLine);
  if (!colour) return;
  const middle = (from + to - gridLine) / 2;
  pen.fillStyle = textColourOn(colour);
  const text = options.text && cellWidth >= 17 && height >= 14 ? options.text(row, column) : "";
  if (text) {
    const font = cellWidth < 26 ? SMALL_FONT : FONT;
    if (textWidth(text, font) <= cellWidth) {
      pen.font = font;
      pen.textAlign = "center";
      pen.fillText(text, middle, top(row) + height / 2 - (options.isMarked ? 1 : 0));
      pen.font = FONT;
    }
  }
  if (options.isMarked && options.isMarked(row, column)) {
    const length = Math.max(2, Math.min(16, to - from - gridLine - 4)); // below the number, so that none is hidden
    pen.fillRect(middle - length / 2, top(row) + height - gridLine - (height >= 14 ? 4 : 2), length, height >= 14 ? 2 : 1);
  }
}

// What is written below the columns, and where: names that fit, otherwise numbers that do not touch.
function columnLabels(options, { x, cellWidth, width }) {
  const columns = options.columnNumbers.map((number, column) => ({ number, middle: (x(column) + x(column + 1)) / 2 }));
  if (options.columnNames && (cellWidth >= 44 || options.columnNames.every((name) => textWidth(name) <= cellWidth - 4))) {
    return columns.map(({ middle }, i) => ({ middle, text: fitText(options.columnNames[i], cellWidth - 4) }));
  }
  const widest = textWidth(`${columns.at(-1).number}`);
  for (const column of columns) column.middle = Math.min(column.middle, width - widest / 2);
  const at = new Map(columns.map(({ number, middle }) => [number, middle]));
  const chosen = wholeTicks(columns.map((c) => c.number), (number) => at.get(number));
  return chosen.map((number) => ({ text: `${number}`, middle: at.get(number) }));
}

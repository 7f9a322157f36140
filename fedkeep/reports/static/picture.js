// Pictures of parts of the page: an element becomes an SVG document, text by text and box by box, and that a PNG. Nothing
// leaves the page, and an SVG needs neither the page nor its fonts.

const SKIPPED = ".controls > :not(.scale), .save, .cursor, .hidden-note button, script, select";
const PADDING = 24;
const FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

// An element as an SVG document, as large as what is drawn of it. The parts of `footer` are written below.
function toSvg(element, footer = []) {
  const drawing = { parts: [], left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity };
  for (const child of element.childNodes) drawNode(drawing, child);
  const inner = drawing.right - drawing.left;
  const whole = footer.join(" · ");
  const lines = !footer.length || textWidth(whole) <= inner ? footer.slice(0, 1).map(() => whole) : footer.map((line) => fitText(line, inner));
  const [width, drawn] = [Math.ceil(inner + 2 * PADDING), drawing.bottom - drawing.top + PADDING];
  const height = Math.ceil(drawn + PADDING + (lines.length ? 8 + lines.length * 16 : 0));
  return svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FAMILY },
    svg("rect", { width, height, fill: themeColour("--card") }),
    svg("g", { transform: `translate(${PADDING - drawing.left} ${PADDING - drawing.top})` }, drawing.parts),
    lines.map((line, i) => svg("text", { x: PADDING, y: drawn + 24 + i * 16, "font-size": 12, fill: themeColour("--soft") }, line)));
}

// Add a part that covers a box.
function addPart(drawing, part, box) {
  drawing.parts.push(part);
  drawing.left = Math.min(drawing.left, box.left);
  drawing.top = Math.min(drawing.top, box.top);
  drawing.right = Math.max(drawing.right, box.right);
  drawing.bottom = Math.max(drawing.bottom, box.bottom);
}

function drawNode(drawing, node) {
  if (node.nodeType === Node.TEXT_NODE) return drawText(drawing, node);
  if (node.nodeType !== Node.ELEMENT_NODE || node.matches(SKIPPED)) return;
  const style = getComputedStyle(node);
  if (style.display === "none" || style.visibility === "hidden") return;
  const box = node.getBoundingClientRect();
  if (node.tagName === "svg") return addPart(drawing, copySvg(node, box), box);
  if (node.tagName === "CANVAS") return addPart(drawing, copyCanvas(node, box), box);
  drawBox(drawing, style, box);
  if (node.matches(".scale i")) addPart(drawing, scaleBar(box), box);
  for (const child of node.childNodes) drawNode(drawing, child);
}

const isVisible = (colour) => colour !== "transparent" && !/^rgba\(.*, 0\)$/.test(colour);

function drawBox(drawing, style, box) {
  const { left: x, top: y, width, height } = box;
  if (isVisible(style.backgroundColor)) {
    const look = { fill: style.backgroundColor, opacity: style.opacity, rx: parseFloat(style.borderTopLeftRadius) || 0 };
    addPart(drawing, svg("rect", { x, y, width, height, ...look }), box);
  }
  const line = parseFloat(style.borderBottomWidth);
  if (line && style.borderBottomStyle !== "none") {
    const at = y + height - line / 2;
    addPart(drawing, svg("line", { x1: x, x2: x + width, y1: at, y2: at, stroke: style.borderBottomColor, "stroke-width": line }), box);
  }
}

const scaleBar = ({ left, top, width, height }) =>
  svg("g", {}, Array.from({ length: 32 }, (_, i) =>
    svg("rect", { x: left + (i * width) / 32, y: top, width: width / 32 + 0.5, height, fill: rgb(accuracyColour(i / 31)) })));

// The lines of a text, each where the browser has put it.
function drawText(drawing, node) {
  if (!node.textContent.trim()) return;
  const style = getComputedStyle(node.parentElement);
  const font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  ruler.font = font;
  const { fontBoundingBoxAscent: ascent, fontBoundingBoxDescent: descent } = ruler.measureText("x");
  for (const { text, box } of textLines(node)) {
    const right = style.textAlign === "right" || style.textAlign === "end";
    const look = { "font-size": style.fontSize, "font-weight": style.fontWeight, fill: style.color, "text-anchor": right ? "end" : "start" };
    const y = box.top + (box.height - ascent - descent) / 2 + ascent;
    addPart(drawing, svg("text", { x: right ? box.right : box.left, y, ...look }, text), box);
  }
}

function textLines(node) {
  const range = document.createRange();
  const lines = [];
  for (const match of node.textContent.matchAll(/\s*\S+/g)) {
    const start = match.index + match[0].search(/\S/);
    range.setStart(node, start);
    range.setEnd(node, match.index + match[0].length);
    for (const box of range.getClientRects()) { // a long word may have several lines; its text is on the first
      const last = lines.at(-1);
      if (last && Math.abs(last.box.top - box.top) < 2) {
        last.text += match[0].replace(/\s+/g, " ");
        last.box = new DOMRect(last.box.left, last.box.top, box.right - last.box.left, last.box.height);
      } else lines.push({ text: match[0].trim(), box });
      break;
    }
  }
  return lines;
}

const STYLES = ["fill", "stroke", "font-size", "font-weight", "opacity", "stroke-dasharray", "visibility"];
function copySvg(node, { left: x, top: y, width, height }) {
  const copy = node.cloneNode(true);
  const originals = $$("*", node);
  $$("*", copy).forEach((part, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of STYLES) part.setAttribute(name, style.getPropertyValue(name));
    part.removeAttribute("class");
  });
  for (const name of ["class", "tabindex", "role"]) copy.removeAttribute(name);
  for (const [name, value] of Object.entries({ x, y, width, height })) copy.setAttribute(name, value);
  return copy;
}

function copyCanvas(node, { left, top }) {
  const pen = new SvgPen();
  node.paint(pen);
  return svg("g", { transform: `translate(${left} ${top})` }, pen.parts);
}

const svgText = (root) => new XMLSerializer().serializeToString(root);

async function toPng(root, scale = 2) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(root))}`;
  await image.decode();
  const canvas = el("canvas", { width: root.getAttribute("width") * scale, height: root.getAttribute("height") * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, fail) => canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error("the picture is too large"))), "image/png"));
}

function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function savePicture(root, name, format) {
  const blob = format === "svg" ? new Blob([svgText(root)], { type: "image/svg+xml" }) : await toPng(root);
  download(blob, `${name}.${format}`);
}

// Buttons that save a section as a picture.
function addSaveButtons() {
  for (const section of $$("main > section")) {
    const title = $("h2", section) ? $("h2", section).textContent : "the heat maps";
    const button = (format) => {
      const save = () => savePicture(toSvg(section, footerText()), `fedkeep-${section.id}`, format);
      return el("button", { type: "button", class: "plain", "data-save": format, "aria-label": `Save ${title} as ${format.toUpperCase()}`, onclick: save }, format.toUpperCase());
    };
    section.prepend(el("div", { class: "save" }, el("span", { "aria-hidden": "true" }, "↓"), button("png"), button("svg")));
  }
}

const footerText = () => [data.verdict.headline, data.facts.join(" · "), page.made_by];

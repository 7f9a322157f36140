"use strict";
// Shared helpers: elements (text is never parsed as markup), colours, number formats, the tooltip, and navigation over
// the cells of a plot with the pointer and the arrow keys.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

function createNode(namespace, tag, attributes, children) {
  const node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}
const el = (tag, attributes = {}, ...children) => createNode(null, tag, attributes, children);
const svg = (tag, attributes = {}, ...children) => createNode("http://www.w3.org/2000/svg", tag, attributes, children);

// The data stores accuracies as bytes, in steps of half a percent; 255 is a class that was not tested.
const STEPS = 200;
function unpack(text) {
  return Float32Array.from(atob(text), (character) => {
    const byte = character.charCodeAt(0);
    return byte === 255 ? NaN : byte / STEPS;
  });
}

// Dark to light in steps of equal contrast, readable for the colour-blind (after viridis).
const SCALE = ["440154", "472c7a", "3b518b", "2c718e", "21908d", "27ad81", "5cc863", "aadc32", "fde725"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)),
);
function mixColours(a, b, share) {
  return a.map((value, i) => Math.round(value + (b[i] - value) * share));
}
function accuracyColour(value) {
  const position = Math.min(Math.max(value, 0), 1) * (SCALE.length - 1);
  const low = Math.min(Math.floor(position), SCALE.length - 2);
  return mixColours(SCALE[low], SCALE[low + 1], position - low);
}
const rgb = (colour) => `rgb(${colour.join(",")})`;
const textColourOn = ([r, g, b]) => (r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#111" : "#fff");
const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function parseColour(hex) {
  const full = hex.length === 4 ? [...hex.slice(1)].map((c) => c + c).join("") : hex.slice(1);
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16));
}

// Colours of methods: twenty that differ, the first seven also for the colour-blind (after Okabe and Ito), then ones
// around the colour circle. A method has a colour of its own while it is shown; lines also differ in their dashes.
const COLOURS = 20;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const colourOf = (slot) => (slot < COLOURS ? `var(--c${slot})` : `hsl(${((slot * 137.5) % 360).toFixed(1)} 60% 50%)`);
const dashOf = (slot) => DASHES[Math.floor(slot / 7) % DASHES.length];
const swatch = (slot) =>
  svg("svg", { class: "swatch", width: 22, height: 10, viewBox: "0 0 22 10", "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, stroke: colourOf(slot), "stroke-width": 4, "stroke-dasharray": dashOf(slot) }));

const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);

// A number with some decimals, rounded as Python does (half to even), so that the same number reads the same everywhere.
function toFixed(value, digits) {
  const [whole, fraction] = value.toFixed(digits + 40 > 100 ? 100 : digits + 40).split(".");
  const isTie = /^50*$/.test(fraction.slice(digits));
  const last = (whole + fraction.slice(0, digits)).at(-1);
  if (!isTie || last % 2) return value.toFixed(digits);
  return digits ? `${whole}.${fraction.slice(0, digits)}` : whole;
}
const formatPercent = (value, digits = 0) => (isMissing(value) ? "–" : `${toFixed(value * 100, digits)}%`);
const formatPoints = (value) => {
  if (isMissing(value)) return "–";
  const small = Math.abs(value) >= 0.0005 && Math.abs(value) < 0.0095;
  return toFixed(value * 100, small ? 1 : 0);
};
const inPoints = (value) => `${formatPoints(value)} ${formatPoints(value) === "1" ? "point" : "points"}`;
const formatMean = (mean, deviation, digits) =>
  isMissing(mean) ? "–" : toFixed(mean, digits) + (isMissing(deviation) ? "" : `±${toFixed(deviation, digits)}`);
const className = (data, c) => (data.class_names ? data.class_names[c] : `class ${c}`);

const tooltip = {
  show(x, y, text) {
    const node = $("#tooltip");
    node.hidden = false;
    node.textContent = text;
    const box = node.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
    const top = y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14;
    node.style.left = `${Math.max(4, left)}px`;
    node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    $("#tooltip").hidden = true;
  },
};

// Show a tooltip for the cell under the pointer, and move from cell to cell with the arrow keys. `cellBox(column, row)`
// returns the position in pixels, `cellAt(x, y)` the column and row at a position or null, `describe(column, row)` the
// text of the tooltip; `describe(null)` is called when the pointer leaves. `outline` draws a frame around the cell.
function addCellNavigation(plot, node, { columns, rows, cellBox, cellAt, describe, outline = true }) {
  const cursor = el("div", { class: "cursor", hidden: true });
  plot.append(cursor);
  let current = [0, 0];
  function show(column, row, x, y) {
    current = [column, row];
    const box = cellBox(column, row);
    if (outline) Object.assign(cursor.style, { left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px`, height: `${box.h}px` });
    cursor.hidden = !outline;
    const origin = node.getBoundingClientRect();
    tooltip.show(x ?? origin.left + box.x + box.w, y ?? origin.top + box.y + box.h, describe(column, row));
  }
  function leave() {
    cursor.hidden = true;
    tooltip.hide();
    describe(null);
  }
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  node.addEventListener("pointermove", (event) => {
    const origin = node.getBoundingClientRect();
    const cell = cellAt(event.clientX - origin.left, event.clientY - origin.top);
    if (cell) show(...cell, event.clientX, event.clientY);
    else leave();
  });
  node.addEventListener("pointerleave", leave);
  node.addEventListener("blur", leave);
  node.addEventListener("focus", () => node.matches(":focus-visible") && show(...current));
  node.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
    show(clamp(current[0] + step[0], columns), clamp(current[1] + step[1], rows));
  });
}

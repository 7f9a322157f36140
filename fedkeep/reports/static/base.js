"use strict";
// What everything else is built of: elements (text is always text, never markup), colours, the tip, and the probe that
// lets pointer and arrow keys walk over a picture.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

function make(namespace, tag, attributes, children) {
  const node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const el = (tag, attributes = {}, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);

// Bytes of the page's data: accuracies in steps of half a percent; 255 stands for a class that was not tested.
const STEPS = 200;
function unpack(text) {
  return Float32Array.from(atob(text), (letter) => {
    const byte = letter.charCodeAt(0);
    return byte === 255 ? NaN : byte / STEPS;
  });
}

// Dark to light in steps of equal contrast, told apart by the colour-blind too (after viridis).
const SCALE = ["440154", "472c7a", "3b518b", "2c718e", "21908d", "27ad81", "5cc863", "aadc32", "fde725"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)),
);
function mix(a, b, share) {
  return a.map((value, i) => Math.round(value + (b[i] - value) * share));
}
function known(value) {
  const place = Math.min(Math.max(value, 0), 1) * (SCALE.length - 1);
  const low = Math.min(Math.floor(place), SCALE.length - 2);
  return mix(SCALE[low], SCALE[low + 1], place - low);
}
const rgb = (colour) => `rgb(${colour.join(",")})`;
const inkOn = ([r, g, b]) => (r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#111" : "#fff");
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function parsed(hex) {
  const full = hex.length === 4 ? [...hex.slice(1)].map((c) => c + c).join("") : hex.slice(1);
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16));
}

// Methods: seven colours that the colour-blind can tell apart (after Okabe and Ito), then the same again, dashed.
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const colourOf = (index) => `var(--c${index % 7})`;
const dashOf = (index) => DASHES[Math.floor(index / 7) % DASHES.length];
const BORDERS = ["solid", "dashed", "dotted", "double"];
const swatch = (index) =>
  el("span", {
    class: "swatch",
    "aria-hidden": "true",
    style: { borderTopColor: colourOf(index), borderTopStyle: BORDERS[Math.floor(index / 7) % BORDERS.length] },
  });

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const percent = (value, digits = 0) => (missing(value) ? "–" : `${(value * 100).toFixed(digits)}%`);
const points = (value) => (missing(value) ? "–" : (value * 100).toFixed(Math.abs(value) >= 0.0005 && Math.abs(value) < 0.0095 ? 1 : 0));
const spread = (mean, deviation, digits) =>
  missing(mean) ? "–" : mean.toFixed(digits) + (missing(deviation) ? "" : `±${deviation.toFixed(digits)}`);

const tip = {
  show(x, y, text) {
    const node = $("#tip");
    node.hidden = false;
    node.textContent = text;
    const box = node.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
    const top = y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14;
    node.style.left = `${Math.max(4, left)}px`;
    node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    $("#tip").hidden = true;
  },
};

// Let the pointer and the arrow keys walk over a picture of columns and rows. `cell(column, row)` gives the place in
// pixels, `at(x, y)` the column and row under the pointer or null, `tell(column, row)` the words.
function probe(plot, node, { columns, rows, cell, at, tell, mark = true }) {
  const cursor = el("div", { class: "cursor", hidden: true });
  plot.append(cursor);
  let here = [0, 0];
  function show(column, row, x, y) {
    here = [column, row];
    const box = cell(column, row);
    if (mark) Object.assign(cursor.style, { left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px`, height: `${box.h}px` });
    cursor.hidden = !mark;
    const origin = node.getBoundingClientRect();
    tip.show(x ?? origin.left + box.x + box.w, y ?? origin.top + box.y + box.h, tell(column, row, box));
  }
  function leave() {
    cursor.hidden = true;
    tip.hide();
    tell(null);
  }
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  node.addEventListener("pointermove", (event) => {
    const origin = node.getBoundingClientRect();
    const found = at(event.clientX - origin.left, event.clientY - origin.top);
    if (found) show(...found, event.clientX, event.clientY);
    else leave();
  });
  node.addEventListener("pointerleave", leave);
  node.addEventListener("blur", leave);
  node.addEventListener("focus", () => node.matches(":focus-visible") && show(...here));
  node.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
    show(clamp(here[0] + step[0], columns), clamp(here[1] + step[1], rows));
  });
}

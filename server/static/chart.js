/** Charts over time: stacked areas, lines above them, marks. They draw what they are given, on a canvas. */

import { size } from "./format.js";

const TOP = 8;
const BOTTOM = 16;
const LEFT = 58;
const FONT = '10.5px -apple-system, "Segoe UI", "Noto Sans", "Helvetica Neue", Arial, sans-serif';

/**
 * @typedef {{values: Float64Array, colour: string, alpha?: number}} Layer an area on top of those before it
 * @typedef {{values: Float64Array, colour: string, dash?: number[], width?: number, bound?: string}} Line NaN leaves a gap; a `bound`
 *   with this name does not stretch the scale: one that is above it is an arrow with its number
 *
 * @param {HTMLCanvasElement} canvas
 * @param {{layers: Layer[], lines: Line[], marks: number[], seconds: number, theme: Object, least?: number}} chart
 *   marks are shares of the time shown, 0 .. 1
 * @returns {{top: number, above: string[]}|undefined} the value at the top, and the bounds above it
 */
export function drawChart(canvas, { layers, lines, marks, seconds, theme, least = 1 }) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const [width, height] = sizeOnPage(canvas);
  if (width < 20) return;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const top = niceTop(Math.max(least, highest(layers, lines)));
  const x = (share) => LEFT + share * (width - LEFT - 2);
  const y = (value) => height - BOTTOM - (value / top) * (height - TOP - BOTTOM);
  drawGrid(context, { top, y, width, height, seconds, theme });
  drawLayers(context, layers, x, y);
  const isAbove = ({ bound, values }) => bound && values[values.length - 1] > top;
  for (const line of lines) if (!isAbove(line)) drawLine(context, line, x, y);
  const above = lines.filter(isAbove).map(({ bound, values }) => `${bound} ${size(values[values.length - 1])}`);
  drawAbove(context, above, width, theme);
  context.fillStyle = theme.alarm;
  for (const share of marks) {
    const at = x(share);
    context.globalAlpha = 0.25;
    context.fillRect(at - 0.5, TOP, 1, height - TOP - BOTTOM);
    context.globalAlpha = 1;
    context.beginPath();
    context.moveTo(at - 4, TOP - 7);
    context.lineTo(at + 4, TOP - 7);
    context.lineTo(at, TOP);
    context.fill();
  }
  return { top, above };
}

/** Names and numbers of bounds above the top, each with an arrow. */
function drawAbove(context, above, width, theme) {
  if (!above.length) return;
  context.font = FONT;
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(above.map((text) => `↑ ${text}`).join("   "), width - 6, TOP + 3);
}

const sizes = new WeakMap(); // of canvases, as their observer told: asking each time would lay the page out
const observer = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) sizes.set(target, [Math.round(contentRect.width), Math.round(contentRect.height)]);
});

function sizeOnPage(canvas) {
  if (!sizes.has(canvas)) {
    sizes.set(canvas, [canvas.clientWidth, canvas.clientHeight]);
    observer.observe(canvas);
  }
  return sizes.get(canvas);
}

function highest(layers, lines) {
  let most = 0;
  const length = layers[0]?.values.length ?? 0;
  for (let at = 0; at < length; at += 1) {
    let sum = 0;
    for (const { values } of layers) sum += values[at] || 0;
    if (sum > most) most = sum;
  }
  for (const { values, bound } of lines) if (!bound) for (const value of values) if (value > most) most = value;
  return most;
}

/** The next of 1, 1.5, 2, 3, 4, 6, 8 times a power of 2^10 with some air above. */
function niceTop(value) {
  let unit = 1;
  while (value / unit >= 1024) unit *= 1024;
  for (let decade = 1; decade <= 1000; decade *= 10) {
    for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8]) if (value * 1.04 <= step * decade * unit) return step * decade * unit;
  }
  return 1024 * unit;
}

function drawGrid(context, { top, y, width, height, seconds, theme }) {
  context.font = FONT;
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const at = Math.round(y(top * share)) + 0.5;
    context.strokeStyle = theme.line;
    context.beginPath();
    context.moveTo(LEFT, at);
    context.lineTo(width - 2, at);
    context.stroke();
    context.fillStyle = theme.muted;
    context.textAlign = "right";
    context.fillText(share ? size(top * share) : "0", LEFT - 8, at);
  }
  context.textBaseline = "alphabetic";
  context.fillText("now", width - 2, height - 3);
  context.textAlign = "left";
  context.fillText(seconds >= 120 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds)} s ago`, LEFT, height - 3);
}

function drawLayers(context, layers, x, y) {
  const length = layers[0]?.values.length ?? 0;
  let below = new Float64Array(length);
  for (const { values, colour, alpha = 1 } of layers) {
    const above = below.map((value, at) => value + (Number.isNaN(values[at]) ? 0 : values[at]));
    const first = values.findIndex((value) => !Number.isNaN(value));
    if (first >= 0) {
      context.fillStyle = colour;
      context.globalAlpha = alpha;
      context.beginPath();
      for (let at = first; at < length; at += 1) context.lineTo(x(at / (length - 1)), y(above[at]));
      for (let at = length - 1; at >= first; at -= 1) context.lineTo(x(at / (length - 1)), y(below[at]));
      context.fill();
      context.globalAlpha = 1;
    }
    below = above;
  }
}

function drawLine(context, { values, colour, dash = [], width = 1.5 }, x, y) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  let open = false;
  values.forEach((value, at) => {
    if (Number.isNaN(value)) open = false;
    else {
      const place = [x(at / (values.length - 1)), y(value)];
      if (open) context.lineTo(...place);
      else context.moveTo(...place);
      open = true;
    }
  });
  context.stroke();
  context.setLineDash([]);
}

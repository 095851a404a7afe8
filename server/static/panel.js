/** The panel of one model: its state, the blocks by state (the legend), the map, and its memory over time. */

import { BlockMap } from "./blocks.js";
import { announce, element, setText } from "./dom.js";
import { clock, count, percent, several, short, size } from "./format.js";
import { isShared, kindOf, rowOf } from "./frames.js";
import { LeaseChart } from "./memory.js";

/** The states in the order of the legend: kind, name, what it means. */
export const STATES = [
  ["live", "live", "held by running requests; the colour is the request"],
  ["shared", "shared", "held by several requests at once: a prefix computed once"],
  ["cached", "cached", "held by no request, kept because a prompt may begin the same way"],
  ["inflight", "in flight", "a copy reads or writes it"],
  ["free", "free", "has memory, holds nothing"],
  ["draining", "draining", "about to be given back to the device"],
  ["unmapped", "unmapped", "an address without memory"],
];
const STATE_NAMES = Object.fromEntries([...STATES.map(([kind, name]) => [kind, name]), ["null", "the null block"]]);
const EMPTY = {
  loading: "The model is loading: its blocks appear when it is ready.",
  unloaded: "The model is not loaded: its next request loads it.",
  asleep: "The model sleeps: it holds no memory.",
  waking: "The model wakes up: its blocks appear when it is ready.",
  failed: "The model could not be loaded: the server's log has the reason.",
};
const ACTIONS = [ // of an admin key: the name of the button, and the states in which it is there
  ["load", "Load", ["unloaded", "failed"]],
  ["wake", "Wake", ["asleep"]],
  ["sleep", "Sleep", ["ready"]],
  ["stop", "Stop", ["ready", "asleep", "loading", "waking"]],
];
let numPanels = 0; // for the ids of elements: names of models may have any characters
const LARGE_POOL_CELL = 6; // CSS pixels: below, the wheel zooms

export class ModelPanel {
  /**
   * @param {import("./frames.js").Model} model
   * @param {Object} app what all views share: see main.js
   */
  constructor(model, app) {
    this.model = model;
    this.app = app;
    this.chips = new Map();
    this.kind = null;
    this.number = numPanels++;
    this.canvas = element("canvas", {
      class: "map", tabindex: "0", role: "application", "aria-roledescription": "map of blocks",
      "aria-describedby": `summary-${this.number}`, "aria-label": `Blocks of ${model.name}`,
    });
    this.summary = element("p", { class: "summary", id: `summary-${this.number}` });
    this.statePill = element("span", { class: "pill" });
    this.actions = element("div", { class: "actions", role: "group", "aria-label": `What to do with ${model.name}`, hidden: true });
    this.buttons = ACTIONS.map(([action, name]) => element("button", { type: "button", class: "quiet", text: name, on: { click: () => this.#act(action) } }));
    this.actions.append(...this.buttons);
    this.said = element("p", { class: "summary", role: "alert", hidden: true });
    this.chart = new LeaseChart(app.theme);
    this.reset = element("button", { type: "button", class: "quiet", text: "Fit", on: { click: () => this.map.reset() } });
    this.node = this.#build();
    this.map = new BlockMap(this.canvas, model, {
      hueOf: (row) => this.app.hueOf(model, row), theme: app.theme, viewChanged: () => this.#viewChanged(),
    });
    this.#listen();
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  #build() {
    const zoom = (text, label, act) => element("button", { type: "button", class: "quiet icon", "aria-label": label, text, on: { click: act } });
    this.tools = element("div", { class: "tools", role: "group", "aria-label": "Zoom of the map" },
      zoom("−", "Zoom out", () => this.map.zoomOut()), zoom("+", "Zoom in", () => this.map.zoomIn()), this.reset);
    const title = element("h2", { text: this.model.name, id: `title-${this.number}` });
    const legend = element("div", { class: "states", role: "group", "aria-label": "Blocks by state; press one to see them alone" });
    for (const [kind, name, meaning] of STATES) legend.append(this.#chip(kind, name, meaning));
    this.age = element("p", { class: "age", role: "status", hidden: true });
    this.place = element("div", { class: "map-place" }, this.canvas, this.age);
    return element("section", { class: "card panel", "aria-labelledby": `title-${this.number}` },
      element("div", { class: "card-head" }, title, this.statePill, this.actions, legend, this.tools),
      this.place, this.said, this.summary, this.chart.node);
  }

  async #act(action) {
    this.#say("");
    this.#say(await this.app.change(this.model, action));
  }

  #say(text) {
    setText(this.said, text);
    this.said.hidden = !text;
  }

  #chip(kind, name, meaning) {
    const number = element("b", { text: "0" });
    const chip = element("button", { type: "button", class: "chip", "aria-pressed": "false", title: `${name}: ${meaning}` },
      element("i", { class: `cell ${kind}`, "aria-hidden": "true" }), element("span", { text: name }), number);
    chip.addEventListener("click", () => this.#choose(kind));
    this.chips.set(kind, { chip, number });
    return chip;
  }

  #choose(kind) {
    this.kind = this.kind === kind ? null : kind;
    for (const [other, { chip }] of this.chips) chip.setAttribute("aria-pressed", String(other === this.kind));
    this.showSpotlight();
  }

  /** Dims what the pointer or a chosen state leaves out. */
  showSpotlight() {
    const rows = this.app.spotlightRows(this.model);
    if (rows) this.map.highlight({ rows });
    else if (this.kind) this.map.highlight(this.kind === "shared" ? { shared: true } : { kind: this.kind });
    else this.map.highlight(null);
  }

  /** Takes the width of its place and a share of the window's height. */
  resize() {
    const alone = this.app.numModels() === 1;
    const most = Math.max(220, Math.min(window.innerHeight * (alone ? 0.56 : 0.42), 720));
    this.map.resize(this.place.clientWidth, most);
  }

  /** A frame was applied. @param {import("./frames.js").Change} change */
  changed(change) {
    const { pool } = this.model;
    if (!this.map.layout || this.map.layout.numBlocks !== pool.num_blocks || this.map.layout.perExtent !== pool.blocks_per_extent) this.resize();
    this.map.changed(change);
  }

  /** What need not follow every frame: numbers, sentences, the chart. */
  update() {
    const { model } = this;
    setText(this.statePill, model.state);
    this.statePill.dataset.state = model.state;
    this.actions.hidden = !this.app.isAdmin() || this.app.isReplay();
    ACTIONS.forEach(([, , states], at) => (this.buttons[at].hidden = !states.includes(model.state)));
    this.node.classList.toggle("empty", !model.pool);
    const why = model.why ? ` It was put to sleep ${model.why}.` : "";
    if (!model.pool) return setText(this.summary, (EMPTY[model.state] ?? "The first frame has not come yet.") + why);
    const isOld = model.state in EMPTY;
    this.node.classList.toggle("old", isOld);
    this.age.hidden = !isOld;
    if (isOld) setText(this.age, `${model.state}: the picture is of ${clock(model.time)}${why && `.${why}`}`);
    const { counts, pool } = model;
    const shown = { ...counts, unmapped: pool.num_blocks - 1 - counts.mapped, shared: countShared(model.cells) };
    for (const [kind, { number }] of this.chips) setText(number, count(shown[kind]));
    setText(this.summary, this.#inWords(shown));
    this.chart.draw(model);
  }

  #inWords(shown) {
    const { model } = this;
    const { pool, counts, host } = model;
    const extents = Math.round((counts.mapped + 1) / pool.blocks_per_extent);
    const parts = [
      `${several(pool.num_blocks, "block")} of ${several(pool.block_size, "token")}, ${size(pool.block_bytes)} each`,
      `${count(extents)} of ${several(model.numExtents, "extent")} of ${pool.blocks_per_extent} have memory`,
    ];
    if (counts.mapped) parts.push(`${percent(shown.live / counts.mapped)} of it in use`);
    if (host) parts.push(`host tier ${count(host[0])} of ${several(host[1], "block")}`);
    return `${parts.join(" · ")}.`;
  }

  /** What a block is, in a few words. @param {number} block */
  describe(block) {
    const cell = this.model.cells[block];
    const row = rowOf(cell);
    const holder = row >= 0 ? this.model.rows.get(row) : null;
    const words = [`block ${count(block)}`, STATE_NAMES[kindOf(cell)] ?? "unknown"];
    if (holder) words.push(short(holder.label || holder.id, 40));
    if (isShared(cell)) words.push("and others");
    return words.join(" · ");
  }

  #viewChanged() {
    const { map } = this;
    if (!map) return;
    const large = map.fitted.scale < LARGE_POOL_CELL * map.ratio;
    this.canvas.classList.toggle("zoomed", map.isZoomed);
    this.tools.hidden = !large && !map.isZoomed;
    this.reset.disabled = !map.isZoomed;
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => {
      this.app.hideTooltip();
      this.map.whole = true;
      this.map.invalidate();
    });
    canvas.addEventListener("pointerleave", () => this.app.hideTooltip());
    new Gestures(canvas, {
      hover: (event) => this.#hover(event), click: (event) => this.#click(event),
      drag: (right, down) => this.map.pan(right, down), pinch: (factor, x, y) => this.map.zoom(factor, x, y),
    });
  }

  #wheel(event) {
    const large = this.map.fitted.scale < LARGE_POOL_CELL * this.map.ratio;
    if (!event.ctrlKey && !event.metaKey && !large && !this.map.isZoomed) return;
    event.preventDefault();
    this.map.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), event.offsetX, event.offsetY);
  }

  #hover(event) {
    const block = this.map.blockAt(event.offsetX, event.offsetY);
    if (block < 0) return this.app.hideTooltip();
    this.app.showTooltip(this, block, event.clientX, event.clientY);
  }

  #click(event) {
    const block = this.map.blockAt(event.offsetX, event.offsetY);
    if (block >= 0) this.app.openBlock(this.model, block, this.canvas);
  }

  #key(event) {
    const { map } = this;
    if (!map.layout || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns, perExtent, across, rows } = map.layout;
    const at = Math.max(0, map.cursor);
    const within = at % perExtent;
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, Home: -at, End: map.layout.numBlocks - 1 - at,
      ArrowUp: within >= columns ? -columns : -(perExtent * across) + (rows - 1) * columns,
      ArrowDown: within + columns < perExtent ? columns : perExtent * across - (rows - 1) * columns,
      PageUp: -perExtent, PageDown: perExtent,
    };
    const acts = {
      "+": () => map.zoomIn(), "=": () => map.zoomIn(), "-": () => map.zoomOut(), 0: () => map.reset(),
      Enter: () => this.app.openBlock(this.model, at, this.canvas), " ": () => this.app.openBlock(this.model, at, this.canvas),
    };
    if (event.key in steps) this.#step(at + (map.cursor < 0 ? 0 : steps[event.key]));
    else if (event.key in acts) acts[event.key]();
    else return;
    event.preventDefault();
  }

  #step(block) {
    this.map.moveCursor(block);
    const [left, top, edge] = this.map.cellRect(this.map.cursor);
    const box = this.canvas.getBoundingClientRect();
    this.app.showTooltip(this, this.map.cursor, box.left + left + edge / 2, box.top + top + edge / 2);
    announce(this.describe(this.map.cursor));
  }
}

function countShared(cells) {
  let found = 0;
  for (let at = 0; at < cells.length; at += 1) if (cells[at] & 0x8000) found += 1;
  return found;
}

/** Pointers on an element: hovering, clicks, drags, pinches. */
class Gestures {
  constructor(node, acts) {
    Object.assign(this, { node, acts, pointers: new Map(), moved: 0, distance: 0 });
    node.addEventListener("pointerdown", (event) => this.#down(event));
    node.addEventListener("pointermove", (event) => this.#move(event));
    for (const type of ["pointerup", "pointercancel"]) node.addEventListener(type, (event) => this.#up(event, type));
  }

  #down(event) {
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.moved = this.pointers.size > 1 ? Infinity : 0;
    this.distance = 0;
    if (this.node.classList.contains("zoomed")) this.node.setPointerCapture(event.pointerId);
  }

  #move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return void (event.pointerType === "mouse" && this.acts.hover(event));
    const now = [event.offsetX, event.offsetY];
    this.pointers.set(event.pointerId, now);
    if (this.pointers.size === 2) return this.#pinch();
    const [right, down] = [now[0] - before[0], now[1] - before[1]];
    this.moved += Math.hypot(right, down);
    if (this.moved > 4) this.acts.drag(right, down);
  }

  #pinch() {
    const [a, b] = [...this.pointers.values()];
    const distance = Math.hypot(a[0] - b[0], a[1] - b[1]);
    if (this.distance) this.acts.pinch(distance / this.distance, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
    this.distance = distance;
  }

  #up(event, type) {
    const known = this.pointers.delete(event.pointerId);
    this.distance = 0;
    if (known && type === "pointerup" && this.moved <= 4) this.acts.click(event);
  }
}

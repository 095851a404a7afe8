/**
 * The map of a pool: every block a cell, on a canvas.
 *
 * Cells of at least DETAIL device pixels are drawn one by one, and later only those that changed. Smaller ones are pixels of a
 * picture with one pixel for each cell, which is drawn scaled: a million blocks are a few milliseconds.
 */

import { CACHED, DRAINING, FIRST_ROW, FREE, IN_FLIGHT, NULL_BLOCK, SHARED, UNMAPPED, isShared, kindOf, rowOf } from "./frames.js";
import { fit } from "./layout.js";
import { channels, css, mix } from "./palette.js";

const DETAIL = 4; // device pixels
const LARGEST_CELL = 22; // CSS pixels, not zoomed
const WIDEST_GAP = 9; // between extents, CSS pixels
const LARGEST_ZOOM = 40; // CSS pixels
const FLASH_MS = 520;
const PULSE_MS = 1100;
const ANIMATION_MS = 110; // between pictures of flashes and pulses where no frame comes: a picture costs the browser far more than its cells
const MOST_FLASHES = 6000;
const DIM = 0.8;
const ZOOM_STEP = 1.5;

export class BlockMap {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {import("./frames.js").Model} model
   * @param {{hueOf: (row: number) => number, theme: () => Object, hover: (block: number, x: number, y: number) => void,
   *   pick: (block: number) => void, viewChanged: () => void}} host
   */
  constructor(canvas, model, host) {
    Object.assign(this, { canvas, model, host });
    this.context = canvas.getContext("2d");
    this.picture = document.createElement("canvas");
    this.layout = null;
    this.fittedTo = ""; // the size and the layout, as text
    this.view = { scale: 1, x: 0, y: 0 }; // device pixels a cell, and the place of the map's corner
    this.fitted = { ...this.view };
    this.sprites = new Map(); // by look
    this.spriteOf = new Map(); // the same by cell, while no row changes its request
    this.lookup = new Uint32Array(0x10000);
    this.flashes = new Map(); // block -> when it changed
    this.pulsing = new Set();
    this.extents = new Uint8Array(0); // 0 unmapped, 1 mapped, 2 draining
    /** @type {{rows?: Set<number>, kind?: string, shared?: boolean}|null} what is shown while all else is dimmed */
    this.spotlight = null;
    /** @type {Set<number>} rows whose cells are ringed */
    this.followed = new Set();
    this.cursor = -1;
    this.whole = true; // draw everything
    this.recolour = true; // the picture is out of date
    this.pending = this.timer = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  get isDetailed() {
    return this.view.scale >= DETAIL;
  }

  get isZoomed() {
    return this.view.scale > this.fitted.scale * 1.001;
  }

  /** Takes the size of its place: `width` and at most `height` CSS pixels. The part that was zoomed into stays in view. */
  resize(width, height) {
    const { pool } = this.model;
    if (!pool || width < 20) return;
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    const [wide, high] = [Math.floor(width * ratio), Math.floor(height * ratio)];
    const { layout, scale } = fit(pool.num_blocks, pool.blocks_per_extent, wide, high, LARGEST_CELL * ratio, WIDEST_GAP * ratio);
    const margin = Math.floor(Math.max(0, layout.gap * scale - 5 * ratio)); // frames begin where the text above does
    const used = Math.max(Math.ceil(layout.height * scale) - 2 * margin, Math.round(40 * ratio));
    const fitted = { scale, x: -margin, y: -margin };
    const key = JSON.stringify([wide, used, ratio, fitted, layout]);
    if (key === this.fittedTo) return; // what is drawn, and where the viewer looks, stays
    const kept = this.isZoomed && this.layout?.numBlocks === layout.numBlocks ? this.#middle() : null;
    Object.assign(this, { fittedTo: key, ratio, layout, fitted, view: { ...fitted } });
    if (this.canvas.width !== wide || this.canvas.height !== used) {
      this.canvas.width = wide;
      this.canvas.height = used;
    }
    this.canvas.style.setProperty("height", `${used / ratio}px`);
    if (kept) this.#lookAt(kept);
    this.extents = new Uint8Array(this.model.numExtents);
    this.#restart();
    this.host.viewChanged();
  }

  /** The block nearest to the middle of the picture, and the size of a cell in CSS pixels. */
  #middle() {
    const { layout, view, canvas } = this;
    const across = (canvas.width / 2 - view.x) / view.scale - layout.gap;
    const down = (canvas.height / 2 - view.y) / view.scale - layout.gap;
    const within = (value, last) => Math.max(0, Math.min(last, Math.floor(value)));
    const column = within(across / (layout.columns + layout.gap), layout.across - 1);
    const line = within(down / (layout.rows + layout.gap), layout.numExtents - 1);
    const inX = within(across - column * (layout.columns + layout.gap), layout.columns - 1);
    const inY = within(down - line * (layout.rows + layout.gap), layout.rows - 1);
    const block = (line * layout.across + column) * layout.perExtent + inY * layout.columns + inX;
    return { block: Math.min(block, layout.numBlocks - 1), size: view.scale / this.ratio };
  }

  /** Puts a block in the middle, as far as the map reaches. */
  #lookAt({ block, size }) {
    const wanted = Math.min(LARGEST_ZOOM, size) * this.ratio;
    const scale = Math.max(this.fitted.scale, wanted > 2 ? Math.round(wanted) : wanted);
    const { canvas, layout } = this;
    this.#look(scale, canvas.width / 2 - (layout.x(block) + 0.5) * scale, canvas.height / 2 - (layout.y(block) + 0.5) * scale);
  }

  /** The theme changed, or the hue of a row. */
  repaint() {
    this.#restart();
  }

  /** What is shown while all else is dimmed; null shows all. */
  highlight(spotlight) {
    const key = (one) => (one ? JSON.stringify([...(one.rows ?? []), one.kind ?? "", one.shared ?? ""]) : "");
    if (key(spotlight) === key(this.spotlight)) return;
    this.spotlight = spotlight;
    this.#restart();
  }

  /** Rings the cells of these rows. @param {Set<number>} rows */
  follow(rows) {
    if (rows.size === this.followed.size && [...rows].every((row) => this.followed.has(row))) return;
    this.followed = rows;
    this.#restart();
  }

  /** A frame came. @param {import("./frames.js").Change} change */
  changed(change) {
    if (!this.layout || this.layout.numBlocks !== this.model.pool.num_blocks) return;
    const total = change.runs.reduce((sum, value, at) => sum + (at % 2 ? value : 0), 0);
    if (change.full || total > MOST_FLASHES) this.whole = this.recolour = true;
    if (change.admitted.length) this.#assigned(change.admitted);
    if (change.full) this.flashes.clear();
    else if (total <= MOST_FLASHES) this.#flash(change.runs, this.still.matches ? -Infinity : performance.now());
    this.invalidate();
  }

  /** These rows have other requests now: their cells may stay as they are, and change their hue. */
  #assigned(admitted) {
    this.recolour = true;
    this.spriteOf.clear();
    const values = new Set(admitted.flatMap(({ row }) => [FIRST_ROW + row, (FIRST_ROW + row) | SHARED]));
    if (!this.isDetailed || this.whole) return;
    this.model.cells.forEach((cell, block) => {
      if (cell >= FIRST_ROW && values.has(cell)) this.flashes.set(block, -Infinity);
    });
  }

  #flash(runs, now) {
    for (let at = 0; at < runs.length; at += 2) {
      for (let block = runs[at]; block < runs[at] + runs[at + 1]; block += 1) this.flashes.set(block, now);
    }
    if (this.flashes.size <= MOST_FLASHES) return;
    this.flashes.clear();
    this.whole = this.recolour = true;
  }

  /** Draws again in a while, unless something else does before. */
  #animate() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      this.invalidate();
    }, ANIMATION_MS);
  }

  /** Draws at the next frame of the screen. */
  invalidate() {
    if (!this.pending) this.pending = requestAnimationFrame((now) => this.#draw(now));
  }

  /** The rectangle of a block's cell in CSS pixels of the canvas. */
  cellRect(block) {
    const { scale, x, y } = this.view;
    const place = [Math.round(x + this.layout.x(block) * scale), Math.round(y + this.layout.y(block) * scale), scale, scale];
    return place.map((value) => value / this.ratio);
  }

  /** The block at a place of the canvas in CSS pixels, or -1. */
  blockAt(left, top) {
    if (!this.layout) return -1;
    const { scale, x, y } = this.view;
    return this.layout.blockAt((left * this.ratio - x) / scale, (top * this.ratio - y) / scale);
  }

  /** Zooms by a factor around a place in CSS pixels, the middle by default. */
  zoom(factor, left = this.canvas.clientWidth / 2, top = this.canvas.clientHeight / 2) {
    const { scale, x, y } = this.view;
    let next = Math.min(LARGEST_ZOOM * this.ratio, Math.max(this.fitted.scale, scale * factor));
    if (next > 2) next = factor > 1 ? Math.ceil(next) : Math.floor(next);
    next = Math.max(next, this.fitted.scale);
    const [atX, atY] = [left * this.ratio, top * this.ratio];
    this.#look(next, atX - ((atX - x) * next) / scale, atY - ((atY - y) * next) / scale);
  }

  /** Moves by CSS pixels. */
  pan(right, down) {
    this.#look(this.view.scale, this.view.x + right * this.ratio, this.view.y + down * this.ratio);
  }

  reset() {
    this.#look(this.fitted.scale, this.fitted.x, this.fitted.y);
  }

  /** Puts the cursor of the keyboard on a block, and into view. */
  moveCursor(block) {
    this.cursor = Math.max(0, Math.min(this.layout.numBlocks - 1, block));
    const [left, top, size] = this.cellRect(this.cursor);
    const [wide, high] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (left < 0 || top < 0 || left + size > wide || top + size > high) this.pan(wide / 2 - left, high / 2 - top);
    this.whole = true;
    this.invalidate();
  }

  zoomIn() {
    this.zoom(ZOOM_STEP);
  }

  zoomOut() {
    this.zoom(1 / ZOOM_STEP);
  }

  #look(scale, x, y) {
    const { canvas, layout, fitted } = this;
    const clamp = (value, size, place) => (size <= place ? fitted.x : Math.min(0, Math.max(place - size, value)));
    const next = {
      scale,
      x: Math.round(clamp(x, layout.width * scale, canvas.width)),
      y: Math.round(clamp(y, layout.height * scale, canvas.height)),
    };
    if (scale !== this.view.scale) this.#forgetSprites();
    this.view = next;
    this.whole = this.recolour = true;
    this.host.viewChanged();
    this.invalidate();
  }

  #forgetSprites() {
    this.sprites.clear();
    this.spriteOf.clear();
  }

  #restart() {
    this.#forgetSprites();
    this.flashes.clear();
    this.whole = this.recolour = true;
    this.invalidate();
  }

  #draw(now) {
    this.pending = 0;
    clearTimeout(this.timer);
    this.timer = 0;
    if (!this.layout || !this.canvas.width) return;
    if (this.isDetailed) this.#drawCells(now);
    else this.#drawPicture(now);
    this.whole = false;
    if (this.flashes.size || (this.isDetailed && this.pulsing.size && !this.still.matches)) this.#animate();
  }

  // ---- cell by cell

  #drawCells(now) {
    const { context, model } = this;
    if (this.whole || this.isZoomed) {
      this.pulsing.clear();
      this.whole = this.recolour = true;
      context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      for (const extent of this.#visibleExtents()) this.#drawExtent(extent);
      this.whole = false; // from here on a cell is drawn over what is there
    } else {
      const touched = new Set();
      for (const block of this.flashes.keys()) touched.add(Math.floor(block / model.pool.blocks_per_extent));
      for (const extent of touched) if (this.#stateOf(extent) !== this.extents[extent]) this.#drawExtent(extent);
    }
    for (const block of this.pulsing) if (!this.flashes.has(block)) this.#drawCell(block, 0, now);
    for (const [block, since] of this.flashes) {
      const age = (now - since) / FLASH_MS;
      this.#drawCell(block, age < 1 ? 1 - Math.max(0, age) : 0, now);
      if (age >= 1) this.flashes.delete(block);
    }
    if (this.cursor >= 0 && document.activeElement === this.canvas) this.#drawCursor();
  }

  *#visibleExtents() {
    const { layout, canvas, view } = this;
    const tall = (layout.rows + layout.gap) * view.scale;
    const wide = (layout.columns + layout.gap) * view.scale;
    const lines = [Math.max(0, Math.floor(-view.y / tall)), Math.ceil((canvas.height - view.y) / tall)];
    const columns = [Math.max(0, Math.floor(-view.x / wide)), Math.min(layout.across, Math.ceil((canvas.width - view.x) / wide))];
    for (let line = lines[0]; line <= lines[1]; line += 1) {
      for (let column = columns[0]; column < columns[1]; column += 1) {
        const extent = line * layout.across + column;
        if (extent < layout.numExtents) yield extent;
      }
    }
  }

  #stateOf(extent) {
    const per = this.model.pool.blocks_per_extent;
    const cells = this.model.cells.subarray(extent * per, (extent + 1) * per);
    return cells.includes(DRAINING) ? 2 : cells.some((cell) => cell !== UNMAPPED) ? 1 : 0;
  }

  #drawExtent(extent) {
    const { context, layout, view } = this;
    const theme = this.host.theme();
    const state = (this.extents[extent] = this.#stateOf(extent));
    const [x, y, wide, high] = layout.extent(extent).map((value, at) => Math.round(value * view.scale + [view.x, view.y, 0, 0][at]));
    const reach = Math.max(1.5, Math.min(layout.gap * view.scale * 0.3, 3 * this.ratio));
    const outer = Math.floor((layout.gap * view.scale) / 2);
    if (!this.whole) context.clearRect(x - outer, y - outer, wide + 2 * outer, high + 2 * outer);
    context.lineWidth = Math.max(1, Math.round(this.ratio * (state === 2 ? 1.5 : 1)));
    context.strokeStyle = state === 2 ? theme.alarm : state === 1 ? theme.frame : theme.unmapped;
    context.setLineDash(state === 0 ? [2 * this.ratio, 2 * this.ratio] : []);
    context.beginPath();
    context.roundRect(x - reach, y - reach, wide + 2 * reach, high + 2 * reach, Math.min(5 * this.ratio, view.scale * 0.6));
    context.stroke();
    context.setLineDash([]);
    const per = layout.perExtent;
    const last = Math.min((extent + 1) * per, layout.numBlocks);
    const cells = this.model.cells.subarray(extent * per, last);
    if (cells[0] !== IN_FLIGHT && cells.length === per && cells.every((cell) => cell === cells[0])) {
      context.drawImage(this.#spriteOfExtent(cells[0]), x, y);
      for (let block = extent * per; block < last; block += 1) this.pulsing.delete(block);
    } else for (let block = extent * per; block < last; block += 1) this.#drawCell(block, 0, 0);
  }

  /** An extent whose cells are all alike, as one picture: most are, in a large pool. */
  #spriteOfExtent(cell) {
    const sprite = this.#sprite(cell);
    const key = `extent ${this.view.scale}`;
    if (!sprite[key]) {
      const { layout, view } = this;
      const whole = document.createElement("canvas");
      Object.assign(whole, { width: Math.ceil(layout.columns * view.scale), height: Math.ceil(layout.rows * view.scale) });
      const context = whole.getContext("2d");
      for (let at = 0; at < layout.perExtent; at += 1) {
        context.drawImage(sprite, (at % layout.columns) * view.scale, Math.floor(at / layout.columns) * view.scale);
      }
      sprite[key] = whole;
    }
    return sprite[key];
  }

  #drawCell(block, flash, now) {
    const { context, layout, view } = this;
    const x = Math.round(view.x + layout.x(block) * view.scale);
    const y = Math.round(view.y + layout.y(block) * view.scale);
    if (x + view.scale < 0 || y + view.scale < 0 || x > this.canvas.width || y > this.canvas.height) return;
    const cell = this.model.cells[block];
    if (!this.whole) context.clearRect(x, y, view.scale, view.scale);
    if (cell === IN_FLIGHT) this.pulsing.add(block);
    else this.pulsing.delete(block);
    if (cell === IN_FLIGHT && now && !this.still.matches) {
      context.globalAlpha = 0.6 + 0.4 * Math.cos((now / PULSE_MS) * 2 * Math.PI);
    }
    context.drawImage(this.#sprite(cell), x, y);
    context.globalAlpha = 1;
    if (flash > 0 && !this.#isDimmed(cell)) {
      const inner = this.#inset();
      context.globalAlpha = flash * 0.75;
      context.fillStyle = this.host.theme().flash;
      context.beginPath();
      context.roundRect(x + inner, y + inner, view.scale - 2 * inner, view.scale - 2 * inner, this.#radius());
      context.fill();
      context.globalAlpha = 1;
    }
  }

  #drawCursor() {
    const { context, view } = this;
    const [x, y] = [view.x + this.layout.x(this.cursor) * view.scale, view.y + this.layout.y(this.cursor) * view.scale];
    context.lineWidth = 2 * this.ratio;
    context.strokeStyle = this.host.theme().accent;
    context.strokeRect(x - this.ratio, y - this.ratio, view.scale + 2 * this.ratio, view.scale + 2 * this.ratio);
  }

  #inset() {
    return this.view.scale >= 14 * this.ratio ? this.ratio : Math.max(0.5, this.ratio / 2);
  }

  #radius() {
    return this.view.scale < 7 ? 0 : Math.min(3 * this.ratio, this.view.scale * 0.2);
  }

  #isDimmed(cell) {
    const { spotlight } = this;
    if (!spotlight) return false;
    if (spotlight.rows) return !spotlight.rows.has(rowOf(cell));
    if (spotlight.shared) return !isShared(cell);
    return kindOf(cell) !== spotlight.kind;
  }

  /** The picture of one cell, made once for each look. */
  #sprite(cell) {
    let sprite = this.spriteOf.get(cell);
    if (!sprite) this.spriteOf.set(cell, (sprite = this.#spriteOfLook(cell)));
    return sprite;
  }

  #spriteOfLook(cell) {
    const row = rowOf(cell);
    const ring = row >= 0 && this.followed.has(row);
    const look = row >= 0 ? `hue ${this.host.hueOf(row)}` : kindOf(cell);
    const dimmed = this.#isDimmed(cell);
    const key = `${look} ${isShared(cell)} ${dimmed} ${ring}`;
    let sprite = this.sprites.get(key);
    if (!sprite) this.sprites.set(key, (sprite = this.#paint(look, isShared(cell), dimmed, ring)));
    return sprite;
  }

  #paint(look, shared, dimmed, ring) {
    const theme = this.host.theme();
    const size = Math.max(1, Math.round(this.view.scale));
    const sprite = Object.assign(document.createElement("canvas"), { width: size, height: size });
    const context = sprite.getContext("2d");
    const inset = this.#inset();
    const box = [inset, inset, size - 2 * inset, size - 2 * inset, this.#radius()];
    context.globalAlpha = dimmed ? 1 - DIM : 1;
    context.beginPath();
    context.roundRect(...box);
    if (look === "unmapped") {
      if (size >= 9 * this.ratio) {
        context.strokeStyle = theme.unmapped;
        context.lineWidth = this.ratio;
        context.globalAlpha *= 0.45;
        context.beginPath();
        context.roundRect(inset + this.ratio / 2, inset + this.ratio / 2, box[2] - this.ratio, box[3] - this.ratio, this.#radius());
        context.stroke();
        return sprite;
      }
      const reach = Math.max(1, Math.round(size * 0.18));
      context.fillStyle = theme.unmapped;
      context.fillRect(Math.floor((size - reach) / 2), Math.floor((size - reach) / 2), reach, reach);
      return sprite;
    }
    context.fillStyle = look.startsWith("hue") ? theme.hues[Number(look.slice(4))] : theme[look];
    context.fill();
    context.clip();
    if (look === "inflight" || look === "draining") hatch(context, size, this.ratio, look === "inflight" ? theme.inflightInk : theme.alarm);
    if (look === "null") dot(context, size, theme.surface);
    if (shared) notch(context, size, theme.surface);
    if (ring) {
      context.strokeStyle = theme.ink;
      context.lineWidth = Math.max(2, Math.round(size * 0.22));
      context.beginPath();
      context.roundRect(...box);
      context.stroke();
    }
    return sprite;
  }

  // ---- as a picture with one pixel a cell

  #drawPicture(now) {
    const { context, layout, view, picture } = this;
    if (picture.width !== layout.width || picture.height !== layout.height) {
      picture.width = layout.width;
      picture.height = layout.height;
      this.image = null;
      this.recolour = true;
    }
    if (!this.image) {
      this.image = new ImageData(layout.width, layout.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    if (this.recolour) this.#paintAll();
    let changed = this.recolour;
    for (const [block, since] of this.flashes) {
      const over = now - since >= FLASH_MS;
      this.#paintPixel(block, over ? 0 : 0.6);
      if (over) this.flashes.delete(block);
      changed = true;
    }
    this.recolour = false;
    if (changed) picture.getContext("2d").putImageData(this.image, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = view.scale < 1;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, view.x, view.y, layout.width * view.scale, layout.height * view.scale);
    if (this.cursor >= 0 && document.activeElement === this.canvas) this.#drawCursor();
  }

  #paintAll() {
    this.#fillLookup();
    const { layout, pixels, lookup } = this;
    const { cells } = this.model;
    pixels.fill(0);
    const { columns, perExtent, width } = layout;
    for (let extent = 0; extent < layout.numExtents; extent += 1) {
      const [left, top] = layout.extent(extent);
      const last = Math.min((extent + 1) * perExtent, cells.length);
      let block = extent * perExtent;
      for (let at = top * width + left; block < last; at += width) {
        const end = Math.min(block + columns, last);
        for (let to = at; block < end; to += 1, block += 1) pixels[to] = lookup[cells[block]];
      }
    }
  }

  #paintPixel(block, flash) {
    const { layout, pixels } = this;
    let colour = this.lookup[this.model.cells[block]];
    if (flash) {
      const [r, g, b] = channels(this.host.theme().flash);
      const blend = (from, to) => Math.round(from + (to - from) * flash);
      colour = packed([blend(colour & 255, r), blend((colour >> 8) & 255, g), blend((colour >> 16) & 255, b)]);
    }
    pixels[layout.y(block) * layout.width + layout.x(block)] = colour;
  }

  #fillLookup() {
    const theme = this.host.theme();
    const set = (cell, colour) => {
      this.lookup[cell] = packed(this.#isDimmed(cell) ? mix(colour, theme.surface, DIM) : channels(colour));
    };
    const flat = (colour, over, share) => `#${mix(colour, over, share).map((part) => part.toString(16).padStart(2, "0")).join("")}`;
    set(UNMAPPED, flat(theme.surface, theme.unmapped, 0.1));
    set(FREE, theme.free);
    set(DRAINING, flat(theme.draining, theme.alarm, 0.45));
    set(CACHED, theme.cached);
    set(IN_FLIGHT, flat(theme.inflight, theme.inflightInk, 0.4));
    set(NULL_BLOCK, theme.null);
    for (const row of this.model.rows.keys()) {
      const hue = theme.hues[this.host.hueOf(row)];
      const colour = this.followed.has(row) ? flat(hue, theme.ink, 0.45) : hue;
      set(FIRST_ROW + row, colour);
      set((FIRST_ROW + row) | SHARED, flat(colour, theme.surface, 0.3));
    }
  }
}

function packed([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}

function hatch(context, size, ratio, colour) {
  context.strokeStyle = colour;
  context.lineWidth = Math.max(1, size * 0.13);
  const step = Math.max(3 * Math.min(ratio, 1.5), size * 0.36);
  context.beginPath();
  for (let at = -size; at < size * 2; at += step) {
    context.moveTo(at, size + 1);
    context.lineTo(at + size + 2, -1);
  }
  context.stroke();
}

function dot(context, size, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(size / 2, size / 2, Math.max(1, size * 0.16), 0, 2 * Math.PI);
  context.fill();
}

/** The mark of a shared block: a corner cut off. */
function notch(context, size, colour) {
  const reach = Math.max(2, size * 0.46);
  context.fillStyle = css(channels(colour), 0.92);
  context.beginPath();
  context.moveTo(size, size);
  context.lineTo(size - reach, size);
  context.lineTo(size, size - reach);
  context.fill();
}

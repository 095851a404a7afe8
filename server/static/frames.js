/**
 * Frames of an engine, and the state that they add up to. Pure: no drawing, no network.
 *
 * A frame is what changed in one model since the frame before; a full frame says everything. docs/page.md has the format.
 */

export const UNMAPPED = 0;
export const FREE = 1;
export const DRAINING = 2;
export const CACHED = 3;
export const IN_FLIGHT = 4;
export const NULL_BLOCK = 5;
export const FIRST_ROW = 16; // a live block is FIRST_ROW + the row that holds it
export const SHARED = 0x8000; // ... and several rows hold it

export const FORMAT_VERSION = 1;
const RUN_BYTES = 8;
const MOST_ENDED = 256;
const MOST_DECISIONS = 256;
const MOST_SAMPLES = 1200;
const RATE_S = 2; // the time over which tokens per second are averaged

/** The kind of a cell: one of the names below, whatever its row. @param {number} cell */
export function kindOf(cell) {
  if (cell >= FIRST_ROW) return "live";
  return ["unmapped", "free", "draining", "cached", "inflight", "null"][cell] ?? "unknown";
}

/** The row of a live cell, and -1 of all others. @param {number} cell */
export function rowOf(cell) {
  return cell >= FIRST_ROW ? (cell & ~SHARED) - FIRST_ROW : -1;
}

/** @param {number} cell */
export function isShared(cell) {
  return cell >= FIRST_ROW && (cell & SHARED) !== 0;
}

/**
 * Writes the runs of a frame into `cells`.
 * @param {string} base64 records of 8 bytes, little endian: uint32 first block, uint16 length - 1, uint16 value
 * @param {Uint16Array} cells
 * @param {number[]} [changed] gets the first block and the length of each run
 * @returns {number} the number of cells that were written
 */
export function applyRuns(base64, cells, changed) {
  const text = atob(base64);
  if (text.length % RUN_BYTES) throw new Error(`cells have ${text.length} bytes, which are no whole runs`);
  const view = new DataView(new ArrayBuffer(text.length));
  for (let at = 0; at < text.length; at += 1) view.setUint8(at, text.charCodeAt(at));
  let written = 0;
  for (let at = 0; at < text.length; at += RUN_BYTES) {
    const first = view.getUint32(at, true);
    const length = view.getUint16(at + 4, true) + 1;
    if (first + length > cells.length) throw new Error(`a run ends at block ${first + length} of ${cells.length}`);
    cells.fill(view.getUint16(at + 6, true), first, first + length);
    changed?.push(first, length);
    written += length;
  }
  return written;
}

/**
 * A request that holds a row.
 * @typedef {{row: number, id: string, label: string, prompt: number, limit: number, priority: number, arrival: number,
 *   cached: number, status: number, known: number, computed: number, blocks: number, preemptions: number, perSecond: number}} Running
 *
 * A request that waits.
 * @typedef {{id: string, label: string, known: number, needed: number, priority: number, waited: number,
 *   preemptions: number, status: string}} Waiting
 *
 * What one frame changed.
 * @typedef {{full: boolean, runs: number[], admitted: Running[], ended: Array, decisions: Object[], before: Object|null}} Change
 */

/** What is known of one model: the sum of its frames. */
export class Model {
  /** @param {string} name */
  constructor(name) {
    this.name = name;
    this.state = "ready";
    this.forget();
  }

  /** Back to before the first frame. */
  forget() {
    /** @type {Object|null} */ this.pool = null;
    this.cells = new Uint16Array(0);
    this.counts = { free: 0, draining: 0, live: 0, cached: 0, inflight: 0, mapped: 0, limit: 0 };
    /** @type {Map<number, Running>} */ this.rows = new Map();
    /** @type {Waiting[]} */ this.waiting = [];
    this.numWaiting = 0;
    this.ended = [];
    this.decisions = new Map();
    this.stats = null;
    this.host = null;
    this.memory = null;
    this.time = 0;
    this.step = 0;
    this.seq = -1;
    this.tokensPerSecond = 0;
    this.samples = [];
    this.measuredAt = 0;
  }

  /** Extents of the pool. */
  get numExtents() {
    return this.pool ? Math.ceil(this.pool.num_blocks / this.pool.blocks_per_extent) : 0;
  }

  get numRunning() {
    return this.rows.size;
  }

  /** Rows that run, those that are served first first. @returns {Running[]} */
  get running() {
    return [...this.rows.values()].sort((a, b) => a.priority - b.priority || a.arrival - b.arrival || a.row - b.row);
  }

  /**
   * Takes a frame in.
   * @param {Object} frame
   * @returns {Change|null} null if it cannot follow what is here: a full frame has to come first
   */
  apply(frame) {
    if (frame.v !== FORMAT_VERSION) throw new Error(`frames have version ${frame.v}; this page reads ${FORMAT_VERSION}`);
    if (!frame.full && !this.pool) return null;
    const before = this.stats && { stats: this.stats, counts: this.counts, memory: this.memory, time: this.time };
    const known = frame.full && frame.step >= this.step ? this.decisions : new Map(); // a full frame has old decisions again
    if (frame.full) this.#begin(frame);
    const runs = [];
    if (frame.cells) applyRuns(frame.cells, this.cells, runs);
    const admitted = this.#applyRows(frame);
    this.#applyRunning(frame);
    this.#applyWaiting(frame.waiting);
    const [free, draining, live, cached, inflight, mapped, limit] = frame.blocks;
    this.counts = { free, draining, live, cached, inflight, mapped, limit };
    const ended = (frame.ended ?? []).map(([id, label, reason, tokens, error]) => ({ id, label, reason, tokens, error }));
    this.ended.push(...ended.map((one) => ({ ...one, time: frame.time })));
    this.ended.splice(0, this.ended.length - MOST_ENDED);
    for (const decision of frame.decisions ?? []) this.decisions.set(decision.n, { ...decision, time: frame.time });
    for (const n of this.decisions.keys()) {
      if (this.decisions.size <= MOST_DECISIONS) break;
      this.decisions.delete(n);
    }
    Object.assign(this, { stats: frame.stats, host: frame.host, memory: frame.memory ?? this.memory });
    Object.assign(this, { time: frame.time, step: frame.step, seq: frame.seq });
    this.#sample();
    const decisions = (frame.decisions ?? []).filter(({ n }) => !known.has(n));
    return { full: frame.full, runs, admitted, ended, decisions, before };
  }

  /** It holds no memory from then on. @param {number} time */
  leave(time) {
    const last = this.samples[this.samples.length - 1];
    if (!last) return;
    const nothing = { kv: 0, weights: 0, base: 0, prepared: 0, lease: null };
    this.samples.push({ ...last, ...nothing, time: Math.max(last.time, time) });
  }

  /** The newest decision about a request, by its id or label. @param {string} id */
  decisionAbout(id) {
    let newest = null;
    for (const decision of this.decisions.values()) {
      if (decision.request_id === id || (decision.label && decision.label === id)) newest = decision;
    }
    return newest;
  }

  #begin(frame) {
    const sameSize = this.pool && this.pool.num_blocks === frame.pool.num_blocks;
    this.pool = frame.pool;
    if (sameSize) this.cells.fill(UNMAPPED);
    else this.cells = new Uint16Array(frame.pool.num_blocks);
    this.decisions = new Map();
  }

  #applyRows(frame) {
    const before = this.rows;
    if (frame.full) this.rows = new Map();
    for (const row of frame.left ?? []) this.rows.delete(row);
    const admitted = [];
    for (const [row, id, label, prompt, limit, priority, arrival, cached] of frame.rows ?? []) {
      const old = before.get(row);
      const same = old && old.id === id;
      const entry = same ? old : { status: 0, known: 0, computed: 0, blocks: 0, preemptions: 0, perSecond: 0 };
      this.rows.set(row, Object.assign(entry, { row, id, label, prompt, limit, priority, arrival, cached }));
      if (!same) admitted.push(entry);
    }
    return admitted;
  }

  #applyRunning(frame) {
    const passed = frame.time - this.time;
    for (const [row, status, known, computed, blocks, preemptions] of frame.running ?? []) {
      const entry = this.rows.get(row);
      if (!entry) continue;
      if (passed > 0 && passed < 10 && entry.computed) {
        const share = Math.min(1, passed / RATE_S);
        const now = Math.max(0, computed - entry.computed) / passed;
        entry.perSecond = entry.perSecond ? entry.perSecond + share * (now - entry.perSecond) : now;
      }
      Object.assign(entry, { status, known, computed, blocks, preemptions });
    }
  }

  #applyWaiting([total, listed]) {
    this.numWaiting = total;
    this.waiting = listed.map(([id, label, known, needed, priority, waited, preemptions, status]) => ({
      id, label, known, needed, priority, waited, preemptions, status,
    }));
  }

  #sample() {
    const last = this.samples[this.samples.length - 1];
    if (last && this.time < last.time) this.samples = this.samples.filter((sample) => sample.time < this.time);
    const base = this.samples.findLast((sample) => this.time - sample.time >= RATE_S) ?? this.samples[0];
    if (base && this.time > base.time) {
      const made = this.stats.computed_tokens - base.computed;
      this.tokensPerSecond = Math.max(0, made) / (this.time - base.time);
    }
    if (last && this.time - last.time < 0.09) return;
    const memory = this.memory ?? {};
    this.samples.push({
      time: this.time, computed: this.stats.computed_tokens, kv: memory.kv ?? 0, weights: memory.weights ?? 0,
      base: memory.base ?? 0, prepared: memory.prepared ?? 0, lease: memory.lease ?? null, device: memory.device ?? null,
      counts: this.counts, blockBytes: this.pool.block_bytes, recalls: this.stats.recalls ?? 0,
    });
    if (this.samples.length > MOST_SAMPLES) this.samples.splice(0, this.samples.length - MOST_SAMPLES);
  }
}

/** Memory over time: that of one model's pool and lease, and that of the device with all models on it. */

import { drawChart } from "./chart.js";
import { element, setText } from "./dom.js";
import { size } from "./format.js";

const LONGEST_S = 120;
const SHORTEST_S = 15;
const BINS = 240;

/** The seconds to show: as many as are known. */
function secondsOf(samples, until) {
  return Math.min(LONGEST_S, Math.max(SHORTEST_S, until - samples[0].time));
}

/** The values of samples at evenly spaced times up to `until`; NaN before the first. */
function binned(samples, until, seconds, value) {
  const values = new Float64Array(BINS).fill(NaN);
  let next = 0;
  for (let bin = 0; bin < BINS; bin += 1) {
    const time = until - seconds * (1 - bin / (BINS - 1));
    while (next < samples.length && samples[next].time <= time + 1e-6) next += 1;
    if (next) values[bin] = value(samples[next - 1]) ?? NaN;
  }
  return values;
}

/** What is left for the cache of bytes of a lease, which pays for the weights and the process too. */
function forCache({ weights, base, prepared }, bytes) {
  return bytes === null || bytes === undefined ? undefined : Math.max(0, bytes - besideCache({ weights, base, prepared }));
}

/** The pool can hold no more than all its blocks, whatever the lease has for the process. */
function capped(bytes, most) {
  return bytes === undefined ? undefined : Math.min(bytes, most);
}

/** The bytes of all blocks of a pool. */
function sizeOf({ num_blocks: blocks, block_bytes: bytes }) {
  return blocks * bytes;
}

/** A legend of names with values, as a description list beside a chart. */
class Legend {
  constructor() {
    this.node = element("dl", { class: "chart-legend" });
    this.values = new Map();
  }

  /** Hides all entries. */
  clear() {
    for (const { box } of this.values.values()) box.hidden = true;
  }

  /** @param {string} name @param {string} mark a class for the mark @param {string|null} value null hides the entry */
  show(name, mark, value) {
    let entry = this.values.get(name);
    if (!entry) {
      const shown = element("dd");
      const term = element("dt", {}, element("i", { class: `mark ${mark}`, "aria-hidden": "true" }), name);
      entry = { shown, box: element("div", {}, term, shown) };
      this.values.set(name, entry);
      this.node.append(entry.box);
    }
    entry.box.hidden = value === null;
    if (value !== null) setText(entry.shown, value);
  }
}

/** One model's pool and lease. */
export class LeaseChart {
  /** @param {() => Object} theme */
  constructor(theme) {
    this.theme = theme;
    this.canvas = element("canvas", { class: "chart", role: "img", "aria-label": "Memory of this model's cache over time" });
    this.legend = new Legend();
    this.node = element("div", { class: "chart-box" }, this.canvas, this.legend.node);
  }

  /** @param {import("./frames.js").Model} model */
  draw(model) {
    const { samples, memory } = model;
    if (!samples.length || !memory) return;
    const theme = this.theme();
    const bytes = (states) => (sample) => states.reduce((sum, state) => sum + sample.counts[state], 0) * sample.blockBytes;
    const seconds = secondsOf(samples, model.time);
    const of = (value) => binned(samples, model.time, seconds, value);
    const whole = sizeOf(model.pool);
    const lease = (name) => of((sample) => capped(forCache(sample, sample.lease?.[name]), whole));
    this.drawn = drawChart(this.canvas, {
      theme, seconds, least: 1024,
      layers: [
        { values: of(bytes(["live"])), colour: theme.accent, alpha: 0.85 },
        { values: of(bytes(["cached", "inflight"])), colour: theme.cached },
        { values: of(bytes(["free", "draining"])), colour: theme.free },
      ],
      lines: [
        { values: lease("max"), colour: theme.muted, dash: [2, 3], width: 1, bound: "at most" },
        { values: lease("min"), colour: theme.muted, dash: [2, 3], width: 1, bound: "at least" },
        { values: lease("granted"), colour: theme.ink, width: 1.25 },
        { values: lease("recall_target"), colour: theme.alarm, width: 2 },
      ],
      marks: recalls(samples, model.time, seconds),
    });
    this.#describe(model);
  }

  #describe({ counts, memory, pool }) {
    const lease = Object.fromEntries(Object.entries(memory.lease ?? {}).map(([name, bytes]) => [name, capped(forCache(memory, bytes), sizeOf(pool))]));
    const show = (name, mark, bytes) => this.legend.show(name, mark, bytes === null || bytes === undefined ? null : size(bytes));
    show("live", "live", counts.live * pool.block_bytes);
    show("cached", "cached", (counts.cached + counts.inflight) * pool.block_bytes);
    show("free", "free", (counts.free + counts.draining) * pool.block_bytes);
    show("granted", "granted", lease.granted);
    show("held", "held", lease.held !== lease.granted ? lease.held : null);
    show("at least", "bound", lease.min);
    show("at most", "bound", lease.max);
    show("recall to", "recall", lease.recall_target);
    show("on disk", "disk", memory.disk?.bytes);
    show("written to disk today", "disk", memory.disk?.written_today);
  }
}

/** The times of recalls, as shares of the time shown. */
function recalls(samples, until, seconds) {
  const found = [];
  for (let at = 1; at < samples.length; at += 1) {
    const share = 1 - (until - samples[at].time) / seconds;
    if (samples[at].recalls > samples[at - 1].recalls && share >= 0) found.push(share);
  }
  return found;
}

const VIEWS = { cache: "KV caches", engines: "Engines", device: "Whole device" };

/** The device: the memory of all models on it, and that of other processes. */
export class DeviceChart {
  /** @param {HTMLElement} place @param {() => Object} theme */
  constructor(place, theme) {
    Object.assign(this, { place, theme });
    this.chosen = null; // a key of VIEWS; null: by the number of models
    this.name = element("span", { class: "pill" });
    this.switch = element("fieldset", { class: "switch" }, element("legend", { class: "unseen", text: "What the chart shows" }));
    for (const [view, name] of Object.entries(VIEWS)) this.#addView(view, name);
    this.canvas = element("canvas", { class: "chart", role: "img", "aria-label": "Memory of the device over time" });
    this.legend = new Legend();
    place.append(
      element("div", { class: "card-head" }, element("h2", { text: "Device memory", id: "device-title" }), this.name, this.switch),
      element("div", { class: "chart-box" }, this.canvas, this.legend.node),
    );
  }

  #addView(view, name) {
    const input = element("input", { type: "radio", name: "device-view", value: view });
    input.addEventListener("change", () => {
      this.chosen = view;
      this.draw(this.models ?? []);
    });
    this.switch.append(element("label", {}, input, element("span", { text: name })));
  }

  /** @param {import("./frames.js").Model[]} models */
  draw(models) {
    this.models = models;
    const shown = models.filter((model) => model.samples.length && model.memory);
    this.place.classList.toggle("empty", !shown.length);
    if (!shown.length) return;
    const known = shown.find((model) => model.memory.device) ?? shown[0];
    const view = this.chosen ?? (shown.length > 1 ? "cache" : "engines");
    this.switch.querySelector(`[value=${view}]`).checked = true;
    this.#drawView(view, shown, known);
    this.#describe(view, shown, known.memory.device);
  }

  #drawView(view, models, known) {
    const theme = this.theme();
    const until = Math.max(...models.map((model) => model.time));
    const seconds = Math.max(...models.map((model) => secondsOf(model.samples, until)));
    const colour = (at) => theme.models[at % theme.models.length];
    const layer = (model, value, look) => ({ values: binned(model.samples, until, seconds, value), ...look });
    const layers = models.map((model, at) => layer(model, (sample) => sample.kv, { colour: colour(at) }));
    if (view !== "cache") {
      models.forEach((model, at) => {
        layers.push(layer(model, (sample) => sample.weights, { colour: colour(at), alpha: 0.55 }));
        layers.push(layer(model, besideWeights, { colour: colour(at), alpha: 0.25 }));
      });
    }
    const { device } = known.memory;
    const lines = [];
    if (view === "device" && device) {
      layers.push(layer(known, (sample) => sample.device?.others, { colour: theme.others }));
      lines.push({ values: new Float64Array(BINS).fill(device.total), colour: theme.muted, dash: [2, 3], width: 1 });
    }
    drawChart(this.canvas, { theme, seconds, least: 1024, layers, lines, marks: recalls(known.samples, until, seconds) });
  }

  #describe(view, models, device) {
    this.legend.clear(); // the names depend on the number of models
    setText(this.name, device?.name ?? "");
    this.name.hidden = !device?.name;
    models.forEach((model, at) => {
      const name = models.length > 1 ? model.name : null;
      const now = model.samples[model.samples.length - 1];
      const beside = (bytes) => (view === "cache" ? null : size(bytes));
      this.legend.show(name ? `${name}, KV` : "KV cache", `model-${at % 4}`, size(now.kv));
      this.legend.show(name ? `${name}, weights` : "weights", `model-${at % 4} pale`, beside(now.weights));
      this.legend.show(name ? `${name}, rest` : "process", `model-${at % 4} faint`, beside(besideWeights(now)));
    });
    const whole = view === "device" && device;
    this.legend.show("other processes", "others", whole ? size(device.others ?? 0) : null);
    this.legend.show("whole device", "bound", whole ? size(device.total) : null);
  }
}

/** An engine's memory beside its KV cache. */
function besideCache({ weights = 0, ...process }) {
  return weights + besideWeights(process);
}

/** An engine's memory beside its KV cache and its weights. */
function besideWeights({ base = 0, prepared = 0 }) {
  return base + prepared;
}

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

/** A legend of names with values, as a description list beside a chart. */
class Legend {
  constructor() {
    this.node = element("dl", { class: "chart-legend" });
    this.values = new Map();
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
    const lease = (name) => of((sample) => sample.lease?.[name]);
    drawChart(this.canvas, {
      theme, seconds, least: 1024,
      layers: [
        { values: of(bytes(["live"])), colour: theme.accent, alpha: 0.85 },
        { values: of(bytes(["cached", "inflight"])), colour: theme.cached },
        { values: of(bytes(["free", "draining"])), colour: theme.free },
      ],
      lines: [
        { values: lease("max"), colour: theme.muted, dash: [2, 3], width: 1 },
        { values: lease("min"), colour: theme.muted, dash: [2, 3], width: 1 },
        { values: lease("granted"), colour: theme.ink, width: 1.25 },
        { values: lease("recall_target"), colour: theme.alarm, width: 2 },
      ],
      marks: recalls(samples, model.time, seconds),
    });
    this.#describe(model);
  }

  #describe({ counts, memory, pool }) {
    const { lease } = memory;
    const show = (name, mark, bytes) => this.legend.show(name, mark, bytes === null || bytes === undefined ? null : size(bytes));
    show("live", "live", counts.live * pool.block_bytes);
    show("cached", "cached", (counts.cached + counts.inflight) * pool.block_bytes);
    show("free", "free", (counts.free + counts.draining) * pool.block_bytes);
    show("granted", "granted", lease?.granted);
    show("held", "held", lease && lease.held !== lease.granted ? lease.held : null);
    show("at least", "bound", lease?.min);
    show("at most", "bound", lease?.max);
    show("recall to", "recall", lease?.recall_target ?? null);
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

/** The device: the memory of all models on it, and that of other processes. */
export class DeviceChart {
  /** @param {HTMLElement} place @param {() => Object} theme */
  constructor(place, theme) {
    Object.assign(this, { place, theme });
    this.whole = false;
    this.title = element("h2", { text: "Device memory", id: "device-title" });
    this.button = element("button", { type: "button", class: "quiet", "aria-pressed": "false", text: "Whole device" });
    this.button.addEventListener("click", () => {
      this.whole = !this.whole;
      this.button.setAttribute("aria-pressed", String(this.whole));
      this.draw(this.models ?? []);
    });
    this.canvas = element("canvas", { class: "chart", role: "img", "aria-label": "Memory of the device over time" });
    this.legend = new Legend();
    place.append(
      element("div", { class: "card-head" }, this.title, this.button),
      element("div", { class: "chart-box" }, this.canvas, this.legend.node),
    );
  }

  /** @param {import("./frames.js").Model[]} models */
  draw(models) {
    this.models = models;
    const shown = models.filter((model) => model.samples.length && model.memory);
    this.place.classList.toggle("empty", !shown.length);
    if (!shown.length) return;
    const theme = this.theme();
    const until = Math.max(...shown.map((model) => model.time));
    const device = shown.map((model) => model.memory.device).find(Boolean) ?? null;
    const seconds = Math.max(...shown.map((model) => secondsOf(model.samples, until)));
    setText(this.title, device?.name ? `Memory of ${device.name}` : "Memory of the engines");
    this.button.hidden = !device;
    const layers = shown.map((model, at) => ({
      values: binned(model.samples, until, seconds, (sample) => sample.kv), colour: theme.models[at % theme.models.length],
    }));
    shown.forEach((model, at) => {
      const values = binned(model.samples, until, seconds, (sample) => sample.weights + sample.base + sample.prepared);
      layers.push({ values, colour: theme.models[at % theme.models.length], alpha: 0.35 });
    });
    const whole = this.whole && device;
    const first = shown.find((model) => model.memory.device) ?? shown[0];
    if (whole) layers.push({ values: binned(first.samples, until, seconds, (sample) => sample.device?.others), colour: theme.others });
    const total = whole ? [{ values: new Float64Array(BINS).fill(device.total), colour: theme.muted, dash: [2, 3] }] : [];
    drawChart(this.canvas, { theme, seconds, least: 1024, layers, lines: total, marks: [] });
    this.#describe(shown, device);
  }

  #describe(models, device) {
    models.forEach((model, at) => {
      const { kv, weights, base, prepared } = model.memory;
      const named = models.length > 1 ? `${model.name}: ` : "";
      this.legend.show(`${named}KV`, `model-${at % 4}`, size(kv));
      this.legend.show(`${named}weights`, `model-${at % 4} pale`, size(weights + base + (prepared ?? 0)));
    });
    this.legend.show("other processes", "others", device ? size(device.others ?? 0) : null);
    this.legend.show("whole device", "bound", device ? size(device.total) : null);
  }
}

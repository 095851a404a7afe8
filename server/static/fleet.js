/** A fleet: its front ends, the queue and the workers, as its newest snapshot says. `fleetEvents` is pure. */

import { KeyedList, element, setAttribute, setText, setVariable } from "./dom.js";
import { clock, count, percent, several, short } from "./format.js";
import { Model } from "./frames.js";

const SILENT_S = 2; // a worker that said nothing for so long is said to be silent
const MOST_ROWS = 300;
const RATE_S = 3; // the time over which tokens per second are averaged
const PARTS = [["used", "in use"], ["cached", "cached"], ["free", "free"], ["more", "the lease can still grow"]];
const inOrder = new Intl.Collator("en", { numeric: true }).compare; // worker-2 before worker-10

let numPanels = 0; // for the ids of elements

/** A model that is served by a fleet: of a snapshot to the next one it has no frames, but counters. */
export class Fleet extends Model {
  /** @param {string} name */
  constructor(name) {
    super(name);
    this.now = null; // the newest snapshot: see docs/page.md
    this.isAway = false;
    this.recorded = []; // [time, tokens]
  }

  get numRunning() {
    return this.now?.queue.running ?? 0;
  }

  /** Takes a snapshot in, null if the queue does not answer. @returns {Event[]} what happened since the one before */
  take(snapshot) {
    snapshot?.workers.sort((a, b) => inOrder(a.name, b.name));
    const events = fleetEvents(this.now, this.isAway, snapshot);
    this.isAway = snapshot === null;
    if (this.isAway) return events;
    const { queue, workers, time } = snapshot;
    Object.assign(this, { now: snapshot, time, numWaiting: queue.waiting });
    this.stats = {
      prompt_tokens: queue.prompt_blocks, cached_prompt_tokens: queue.hit_blocks, // in blocks: only their ratio is shown
      preemptions: workers.reduce((sum, worker) => sum + (worker.preemptions ?? 0), 0),
    };
    this.recorded = this.recorded.filter(([at, tokens]) => time - at <= RATE_S && at < time && tokens <= queue.recorded_tokens);
    const [at, tokens] = this.recorded[0] ?? [time, queue.recorded_tokens];
    this.tokensPerSecond = time > at ? (queue.recorded_tokens - tokens) / (time - at) : 0;
    this.recorded.push([time, queue.recorded_tokens]);
    return events;
  }
}

/** What is shown as the state of a worker. */
export function stateOf({ state, silent_s: silent = 0 }) {
  return state !== "starting" && silent >= SILENT_S ? "silent" : state;
}

/**
 * What happened between two snapshots of a fleet. Pure.
 * @param {Object|null} before @param {boolean} wasAway @param {Object|null} now null: the queue does not answer
 * @returns {import("./events.js").Event[]}
 */
export function fleetEvents(before, wasAway, now) {
  if (!now) return wasAway || !before ? [] : [{ kind: "lost", text: "the queue does not answer", loud: true }];
  if (!before) return now.workers.map(earlyEvent);
  const events = wasAway ? [{ kind: "return", text: "the queue answers again", loud: true }] : [];
  const known = new Map(before.workers.map((worker) => [worker.name, worker]));
  for (const worker of now.workers) {
    const event = workerEvent(known.get(worker.name), worker);
    if (event) events.push({ loud: true, ...event, text: `${worker.name} ${event.text}` });
    known.delete(worker.name);
  }
  for (const name of known.keys()) events.push({ kind: "leave", text: `${name} has ended`, loud: true });
  const moved = now.queue.requeued - before.queue.requeued;
  if (moved > 0) events.push({ kind: "moved", text: `${several(moved, "request")} of lost workers ${moved === 1 ? "goes" : "go"} on elsewhere` });
  const { fault } = now.journal;
  if (fault && fault !== before.journal.fault) events.push({ kind: "fault", text: fault, loud: true });
  if (!fault && before.journal.fault) events.push({ kind: "return", text: "the journal can be written again", loud: true });
  const [fronts, earlier] = [now, before].map((one) => one.front_ends.map(([name]) => name));
  for (const name of fronts.filter((one) => !earlier.includes(one))) events.push({ kind: "start", text: `the front end ${name} is here` });
  for (const name of earlier.filter((one) => !fronts.includes(one))) events.push({ kind: "leave", text: `the front end ${name} has gone` });
  return events;
}

/** A worker that was there when the page was opened. */
function earlyEvent(worker) {
  const state = stateOf(worker);
  const here = { silent: { kind: "lost", text: "is silent" }, draining: { kind: "leave", text: "hands its requests over" } };
  const { kind, text } = here[state] ?? workerEvent(undefined, worker);
  return { kind, text: `${worker.name} ${text}`, early: "" };
}

function workerEvent(before, now) {
  if (now.state === "starting") {
    if (!before) return { kind: "start", text: "is starting" };
    if (before.state === "starting") return now.error !== before.error && now.error ? { kind: "lost", text: now.error } : null;
    return { kind: "lost", text: `${now.error || "has ended"}; it is started again` };
  }
  if (!before || before.state === "starting") return { kind: "join", text: `is ready, with the epoch ${count(now.epoch)}` };
  if (before.epoch !== now.epoch) return { kind: "join", text: `is here again, with the epoch ${count(now.epoch)}` };
  const [state, last] = [stateOf(now), stateOf(before)];
  if (state === last) return null;
  if (state === "silent") return { kind: "lost", text: "is silent" };
  if (last === "silent") return { kind: "return", text: "speaks again" };
  return { kind: "leave", text: state === "draining" ? "hands its requests over, and then ends" : `is ${state}` };
}

/** The panel of a fleet: a row for each worker, and the queue between them and the front ends. */
export class FleetPanel {
  /** @param {Fleet} fleet */
  constructor(fleet) {
    this.fleet = fleet;
    this.number = numPanels++;
    this.facts = new Map();
    this.statePill = element("span", { class: "pill" });
    this.age = element("p", { class: "age", role: "status", hidden: true });
    this.fault = element("p", { class: "failed", role: "status", hidden: true });
    this.summary = element("p", { class: "summary" });
    this.fronts = element("ul", { class: "fronts" });
    this.workers = element("ul", { class: "workers" });
    this.more = element("p", { class: "note", hidden: true });
    this.node = this.#build();
    this.frontList = new KeyedList(this.fronts, (key) => frontItem(key));
    this.workerList = new KeyedList(this.workers, (key) => workerItem(key));
  }

  #build() {
    const id = `fleet-${this.number}`;
    const part = (name, title, beside, ...children) => element("section", { class: name, "aria-labelledby": `${id}-${name}` },
      element("div", { class: "card-head" }, element("h3", { id: `${id}-${name}`, text: title }), beside), ...children);
    this.numFronts = element("span", { class: "pill" });
    this.numReady = element("span", { class: "pill" });
    const legend = element("div", { class: "blocks-legend", "aria-hidden": "true" });
    for (const [kind, name] of PARTS) legend.append(element("span", {}, element("i", { class: `cell ${kind}` }), name));
    this.parts = element("div", { class: "fleet-parts" },
      part("front-ends", "Front ends", this.numFronts, this.fronts),
      part("queue", "Queue", null, this.#queue(), this.fault),
      part("worker-rows", "Workers", this.numReady, legend, this.workers, this.more));
    return element("section", { class: "card panel fleet", "aria-labelledby": `${id}-title` },
      element("div", { class: "card-head" }, element("h2", { text: this.fleet.name, id: `${id}-title` }), this.statePill),
      element("div", { class: "map-place" }, this.parts, this.age), this.summary);
  }

  #queue() {
    const list = element("dl", { class: "queue-facts" });
    for (const name of ["waiting", "running", "ended", "failed", "cancelled", "refused", "requeued", "journal"]) {
      const value = element("dd");
      list.append(element("div", { "data-fact": name }, element("dt", { text: name }), value));
      this.facts.set(name, value);
    }
    return list;
  }

  update() {
    const { fleet } = this;
    const { now, isAway } = fleet;
    const isOld = isAway || fleet.state !== "ready";
    setText(this.statePill, isAway ? "queue away" : fleet.state);
    this.statePill.dataset.state = isAway ? "away" : fleet.state;
    this.node.classList.toggle("old", isOld);
    this.age.hidden = !isOld;
    const why = isAway ? "the queue does not answer" : fleet.state;
    if (isOld) setText(this.age, now ? `${why}: the picture is of ${clock(now.time)}` : why);
    if (!now) return;
    this.frontList.show(now.front_ends.slice(0, MOST_ROWS), ([name]) => name);
    const hasNodes = new Set(now.workers.map((worker) => worker.node).filter(Boolean)).size > 1;
    this.workerList.show(now.workers.slice(0, MOST_ROWS).map((worker) => ({ ...worker, hasNodes })), ({ name }) => name);
    this.more.hidden = now.workers.length <= MOST_ROWS;
    setText(this.more, `and ${count(now.workers.length - MOST_ROWS)} more`);
    this.#showQueue(now);
    this.#summarize(now);
  }

  #showQueue({ queue, journal, front_ends: fronts, workers }) {
    for (const [name, value] of this.facts) if (name in queue) setText(value, count(queue[name]));
    const isFaulty = journal.fault !== null;
    setText(this.facts.get("journal"), isFaulty ? "fault" : journal.unwritten ? `${count(journal.unwritten)} unwritten` : "written");
    this.facts.get("journal").classList.toggle("failed", isFaulty);
    this.fault.hidden = !isFaulty;
    setText(this.fault, journal.fault ?? "");
    setText(this.numFronts, count(fronts.length));
    const ready = workers.filter((worker) => stateOf(worker) === "ready").length;
    setText(this.numReady, `${count(ready)} of ${count(workers.length)} ready`);
  }

  #summarize({ queue, workers, restarts }) {
    const sum = (value) => workers.reduce((total, worker) => total + (value(worker) ?? 0), 0);
    const blocks = sum(({ blocks: one }) => one && one.used + one.cached + one.free);
    const parts = [`${count(sum((one) => one.sequences))} of ${several(sum((one) => one.max_seqs), "sequence")} run`];
    if (blocks) parts.push(`${percent(sum(({ blocks: one }) => one?.used) / blocks)} of ${several(blocks, "block")} in use`);
    if (queue.prompt_blocks) parts.push(`${percent(queue.hit_blocks / queue.prompt_blocks)} of the prompts' blocks were cached where they went`);
    if (queue.workers_lost) parts.push(`${several(queue.workers_lost, "worker")} lost, ${several(restarts, "restart")}`);
    setText(this.summary, `${parts.join(" · ")}.`);
  }

  // ---- what a panel of blocks does beside: there are no blocks

  resize() {}

  showSpotlight() {}
}

function frontItem(name) {
  const label = element("span", { class: "name", text: short(name, 24), title: name });
  const number = element("b");
  const node = element("li", {}, label, number);
  return { node, update: ([, requests]) => setText(number, several(requests, "request")) };
}

function workerItem(name) {
  const state = element("span", { class: "pill" });
  const facts = element("span", { class: "facts" });
  const bar = element("span", { class: "blocks-bar", role: "img" }, ...PARTS.map(([kind]) => element("i", { class: kind })));
  const numbers = element("span", { class: "numbers" });
  const why = element("span", { class: "why" });
  const node = element("li", { class: "worker" },
    element("span", { class: "line" }, element("b", { class: "name", text: name, title: name }), state, facts), bar, numbers, why);
  const update = (worker) => {
    const shown = stateOf(worker);
    if (node.dataset.state !== shown) node.dataset.state = state.dataset.state = shown;
    setText(state, shown === "silent" ? `silent for ${Math.floor(worker.silent_s)} s` : shown);
    setText(facts, factsOf(worker));
    showBlocks(bar, numbers, worker);
    setText(why, whyOf(worker, shown));
    why.hidden = !why.textContent;
    why.classList.toggle("failed", shown === "silent" || (shown === "starting" && Boolean(worker.error)));
  };
  return { node, update };
}

function factsOf({ state, sequences, max_seqs: most, requests, epoch, device, node, hasNodes }) {
  if (state === "starting") return "";
  const facts = [`${count(sequences)} of ${several(most, "sequence")}`, several(requests, "request"), `epoch ${count(epoch)}`];
  return [...facts, device, hasNodes ? node : ""].filter(Boolean).join(" · ");
}

function whyOf({ error, state }, shown) {
  if (state === "starting") return error ? `${error}; it is started again` : "loads the model";
  if (shown === "silent") return "its requests go to others if it stays silent";
  if (state === "draining") return "hands its requests over, and then ends";
  return error ? `started again; the process before ${error}` : "";
}

function showBlocks(bar, numbers, { blocks = { used: 0, cached: 0, free: 0, more: 0 } }) {
  const all = PARTS.reduce((sum, [kind]) => sum + blocks[kind], 0);
  for (const [kind] of PARTS) setVariable(bar, `--${kind}`, `${((100 * blocks[kind]) / (all || 1)).toFixed(2)}%`);
  if (!all) setVariable(bar, "--more", "100%");
  bar.classList.toggle("none", !all);
  const { used, cached, free, more } = blocks;
  const toCome = more ? ` · ${count(more)} to come` : "";
  const text = all ? `${several(used, "block")} in use · ${count(cached)} cached · ${count(free)} free${toCome}` : "no blocks";
  setText(numbers, all ? text : "");
  numbers.hidden = !all;
  setAttribute(bar, "aria-label", text);
}

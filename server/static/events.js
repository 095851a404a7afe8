/** What happens: admissions, prefix hits, preemptions, swaps, recalls, ends, as a list of sentences. */

import { inWords, nameIn, nameOf } from "./decisions.js";
import { announce, byId, element } from "./dom.js";
import { clock, count, several, short, size } from "./format.js";

const MOST_EVENTS = 150;
const MOST_OF_FRAME = 4; // admissions and ends that are told one by one
const MOST_EARLY = 50; // of those before the first frame

/**
 * @typedef {{kind: string, id?: string, text: string, loud?: boolean, early?: string}} Event `id`: the request; `loud`: said to
 *   screen readers; `early`: when, of one that was before the first frame
 *
 * The events of one frame, oldest first. The first frame has those of the requests that run, and the decisions that are kept. Pure.
 * @param {import("./frames.js").Model} model after the frame
 * @param {import("./frames.js").Change} change
 * @returns {Event[]}
 */
export function eventsOfChange(model, change) {
  const events = [];
  const isFirst = change.full && !change.before;
  if (isFirst) events.push(...earlyAdmissions(change.admitted));
  for (const decision of change.decisions.filter(({ what }) => what !== "wait")) {
    const kind = decision.what === "give up" ? "evict" : decision.what;
    const early = isFirst ? `step ${count(decision.step)}` : undefined;
    events.push({ kind, id: decision.request_id, n: decision.n, text: inWords(decision), name: nameIn(decision), early });
  }
  if (isFirst) return events;
  const { admitted: rows, ended: ends } = change;
  const hits = rows.filter(({ cached, preemptions }) => cached && !preemptions);
  events.push(...counted(model, change, hits));
  for (const row of rows.slice(0, MOST_OF_FRAME)) events.push(admitted(row));
  if (rows.length > MOST_OF_FRAME) events.push({ kind: "admit", text: `${several(rows.length - MOST_OF_FRAME, "more request")} admitted` });
  for (const row of hits.slice(0, MOST_OF_FRAME)) events.push(hit(row));
  if (hits.length > MOST_OF_FRAME) events.push({ kind: "hit", text: `${several(hits.length - MOST_OF_FRAME, "more request")} found prompt tokens in the cache` });
  if (ends.length > MOST_OF_FRAME) events.push({ kind: "end", text: `${several(ends.length - MOST_OF_FRAME, "more request")} ended` });
  for (const one of ends.slice(-MOST_OF_FRAME)) events.push(ended(one));
  return events;
}

/** The admissions of the requests that ran when the page was opened. */
function earlyAdmissions(running) {
  const rows = [...running].sort((one, other) => one.arrival - other.arrival);
  const left = rows.length - MOST_EARLY;
  const events = left > 0 ? [{ kind: "admit", text: `${several(left, "more request")} admitted`, early: "" }] : [];
  for (const row of rows.slice(-MOST_EARLY)) {
    const early = `came at ${clock(row.arrival)}`;
    events.push({ ...admitted(row), early });
    if (row.cached && !row.preemptions) events.push({ ...hit(row), early });
  }
  return events;
}

function admitted({ id, label, prompt, limit, preemptions }) {
  const again = preemptions ? " again" : "";
  return { kind: "admit", id, name: nameOf(id, label), text: `is admitted${again}: ${several(prompt, "prompt token")}, at most ${count(limit)} in all` };
}

function hit({ id, label, cached }) {
  return { kind: "hit", id, name: nameOf(id, label), text: `found ${several(cached, "prompt token")} in the cache, not computed again` };
}

function ended({ id, label, reason, tokens, error }) {
  const why = { stop: "reached its end", length: "reached its length", aborted: "was aborted", error: `failed: ${error}` }[reason] ?? reason;
  return { kind: reason === "error" ? "error" : "end", id, name: nameOf(id, label), text: `${why} after ${several(tokens, "token")}` };
}

/** Events that only counters tell; of the hits those of requests that were not seen with a row. */
function counted(model, { before }, seen) {
  if (!before) return [];
  const events = [];
  const grown = (name) => Math.max(0, (model.stats[name] ?? 0) - (before.stats[name] ?? 0));
  const hits = grown("cached_prompt_tokens") - seen.reduce((sum, { cached }) => sum + cached, 0);
  if (hits > 0) events.push({ kind: "hit", text: `${several(hits, "prompt token")} of other requests found in the cache, not computed again` });
  if (grown("promoted_blocks")) events.push({ kind: "swap", text: `${several(grown("promoted_blocks"), "block")} copied back from the host` });
  const bytes = grown("recalled_bytes");
  const target = model.memory?.lease?.recall_target;
  if (target && target !== before.memory?.lease?.recall_target) {
    events.push({ kind: "recall", loud: true, text: `the lease is recalled: the cache shrinks to ${size(target)} at most` });
  }
  if (grown("recalls")) events.push({ kind: "recall", loud: true, text: `recall done: ${size(bytes)} given back` });
  const blocks = model.counts.mapped - before.counts.mapped;
  if (blocks > 0) events.push({ kind: "grow", text: `the pool grew by ${several(blocks, "block")} to ${count(model.counts.mapped)}` });
  if (blocks < 0) events.push({ kind: "shrink", text: `the pool shrank by ${several(-blocks, "block")} to ${count(model.counts.mapped)}` });
  return events;
}

const BADGES = {
  admit: "admitted", end: "done", hit: "hit", preempt: "preempted", return: "returned", pass: "passed", cut: "cut", evict: "evicted",
  swap: "swap", recall: "recall", grow: "grew", shrink: "shrank", error: "error",
  start: "starts", join: "ready", leave: "leaves", lost: "lost", moved: "moved", fault: "journal", // of a fleet
};

/** The list of events on the page. */
export class EventList {
  /** @param {Object} app see main.js */
  constructor(app) {
    this.app = app;
    this.list = byId("events");
    this.merged = new Map(); // by model and number of a decision
  }

  /** @param {import("./frames.js").Model} model @param {import("./frames.js").Change} change */
  add(model, change) {
    this.tell(model, eventsOfChange(model, change));
  }

  /** @param {import("./frames.js").Model} model @param {Event[]} events oldest first */
  tell(model, events) {
    for (const event of events) this.#show(model, event);
    while (this.list.children.length > MOST_EVENTS) this.list.lastChild.remove();
    byId("no-events").hidden = this.list.children.length > 0;
  }

  clear() {
    this.list.replaceChildren();
    this.merged.clear();
    byId("no-events").hidden = false;
  }

  #show(model, event) {
    const key = event.n === undefined ? null : `${model.name} ${event.n}`;
    const text = element("span", { class: "what", text: event.text });
    const known = key && this.merged.get(key);
    if (known?.isConnected) return void known.querySelector(".what").replaceWith(text);
    const time = element("time", event.early === undefined ? { text: clock(model.time) } : { text: "before", title: event.early });
    const node = element("li", { class: `event ${event.kind}` },
      time, element("span", { class: "badge", text: BADGES[event.kind] ?? event.kind }),
      element("span", { class: "words" }, this.#name(model, event), text));
    if (this.app.numModels() > 1) node.querySelector(".words").prepend(element("span", { class: "tag", text: model.name }), " ");
    this.list.prepend(node);
    if (key) this.merged.set(key, node);
    if (this.merged.size > 2 * MOST_EVENTS) this.merged.delete(this.merged.keys().next().value);
    if (event.loud) announce(`${model.name}: ${event.text}`);
  }

  #name(model, { id, name }) {
    if (!id) return "";
    const button = element("button", { type: "button", class: "link", text: short(name || id, 30), title: name || id });
    button.addEventListener("click", () => this.app.openRequest(model, id, button));
    const holder = element("span", {}, button, " ");
    return holder;
  }
}

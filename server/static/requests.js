/** The lists of requests: those that run, with their progress, and those that wait, with the reason. */

import { inWords, inWordsNow, kindInWords } from "./decisions.js";
import { KeyedList, byId, element, setAttribute, setText, setVariable } from "./dom.js";
import { count, duration, several, short } from "./format.js";

const MOST_SHOWN = 60;
const STATUS = ["prefilling", "decoding", "paused", "finishing"];

export class RequestLists {
  /** @param {Object} app see main.js */
  constructor(app) {
    this.app = app;
    this.running = new KeyedList(byId("running"), (key) => this.#runningItem(key));
    this.waiting = new KeyedList(byId("waiting"), (key) => this.#waitingItem(key));
  }

  /** @param {import("./frames.js").Model[]} models */
  show(models) {
    const named = models.length > 1;
    const running = models.flatMap((model) => {
      const rows = model.running;
      const labels = rows.map((one) => one.label);
      return rows.map((one) => ({ ...one, model, named, twin: one.label !== "" && labels.filter((label) => label === one.label).length > 1 }));
    });
    const waiting = models.flatMap((model) => model.waiting.map((one, at) => ({ entry: one, ...one, model, named, at })));
    const numWaiting = models.reduce((sum, model) => sum + model.numWaiting, 0);
    this.running.show(running.slice(0, MOST_SHOWN), (one) => `${one.model.name} ${one.row} ${one.id}`);
    this.waiting.show(waiting.slice(0, MOST_SHOWN), (one) => `${one.model.name} ${one.id}`);
    setText(byId("num-running"), count(running.length));
    setText(byId("num-waiting"), count(numWaiting));
    this.#more("more-running", running.length - MOST_SHOWN);
    this.#more("more-waiting", numWaiting - Math.min(waiting.length, MOST_SHOWN));
    byId("no-running").hidden = running.length > 0;
    byId("no-waiting").hidden = numWaiting > 0;
  }

  #more(id, left) {
    byId(id).hidden = left <= 0;
    if (left > 0) setText(byId(id), `and ${count(left)} more`);
  }

  /** The parts that both lists share: a button that opens the request, and lights its blocks up. */
  #item(marks, below) {
    const name = element("span", { class: "name" });
    const tag = element("span", { class: "tag" });
    const facts = element("span", { class: "facts" });
    const button = element("button", { type: "button", class: "request" },
      element("span", { class: "line" }, marks, name, tag, facts), below);
    const node = element("li", {}, button);
    let current = null;
    const light = (on) => current && this.app.spotlight(on ? current.id : null);
    button.addEventListener("pointerenter", () => light(true));
    button.addEventListener("pointerleave", () => light(false));
    button.addEventListener("focus", () => light(true));
    button.addEventListener("blur", () => light(false));
    button.addEventListener("click", () => this.app.openRequest(current.model, current.id, button));
    const update = (one) => {
      current = one;
      setText(name, short(one.label || one.id, 18));
      setAttribute(button, "title", one.label ? `${one.label} (${one.id})` : one.id);
      setText(tag, [one.named ? one.model.name : "", one.twin ? one.id : ""].filter(Boolean).join(" · ")); // twins: continuations of a prompt
      tag.hidden = !one.named && !one.twin;
      button.classList.toggle("found", this.app.isSought(one));
    };
    return { node, facts, update };
  }

  #runningItem() {
    const swatch = element("i", { class: "swatch", "aria-hidden": "true" });
    const bar = element("span", { class: "bar", role: "progressbar", "aria-valuemin": "0", "aria-label": "computed tokens" },
      element("i", { class: "prompt" }), element("i", { class: "known" }), element("i", { class: "computed" }));
    const item = this.#item(swatch, bar);
    const update = (one) => {
      item.update(one);
      const hue = this.app.hueOf(one.model, one.row);
      if (item.node.dataset.hue !== String(hue)) item.node.dataset.hue = String(hue);
      const share = (tokens) => `${Math.min(100, (100 * tokens) / Math.max(1, one.limit)).toFixed(1)}%`;
      setVariable(bar, "--prompt", share(one.prompt));
      setVariable(bar, "--known", share(one.known));
      setVariable(bar, "--computed", share(one.computed));
      setAttribute(bar, "aria-valuemax", String(one.limit));
      setAttribute(bar, "aria-valuenow", String(one.computed));
      setAttribute(bar, "title", `${count(one.computed)} tokens computed, ${count(one.known)} known (${count(one.prompt)} prompt), at most ${count(one.limit)}`);
      const facts = [STATUS[one.status] ?? "", several(one.blocks, "block")];
      if (one.perSecond >= 0.5) facts.push(`${count(one.perSecond)} tok/s`);
      if (one.preemptions) facts.push(`preempted ${one.preemptions}×`);
      setText(item.facts, facts.join(" · "));
    };
    return { node: item.node, update };
  }

  #waitingItem() {
    const place = element("span", { class: "place" });
    const why = element("span", { class: "why" });
    const item = this.#item(place, why);
    const update = (one) => {
      item.update(one);
      setText(place, `${one.at + 1}`);
      const facts = [several(one.needed, "block"), `waits ${duration(one.waited)}`];
      if (one.preemptions) facts.push(`preempted ${one.preemptions}×`);
      setText(item.facts, facts.join(" · "));
      setText(why, whyWaits(one.model, one.entry));
    };
    return { node: item.node, update };
  }
}

/** Why a request waits. @param {import("./frames.js").Model} model @param {import("./frames.js").Waiting} one */
export function whyWaits(model, one) {
  const decision = model.decisionAbout(one.id);
  if (decision) return decision.what === "wait" ? inWordsNow(decision, model.step) : `${kindInWords(decision)}: ${inWords(decision)}`;
  if (one.status && one.status !== "waiting") return one.status;
  const at = model.waiting.indexOf(one);
  if (at > 0) return `behind ${several(at, "request")} that came first`;
  const { free, cached } = model.counts;
  return one.needed <= free + cached ? `its blocks are there; it waits for one of the ${model.rows.size} that run to end` : "is next";
}

/** The panel of details: of one block, or of one request with the decisions about it. */

import { inWords, kindInWords } from "./decisions.js";
import { byId, element, setText } from "./dom.js";
import { clock, count, several } from "./format.js";
import { isShared, kindOf, rowOf } from "./frames.js";
import { STATES } from "./panel.js";

const MEANINGS = Object.fromEntries([
  ...STATES.map(([kind, name, meaning]) => [kind, `${name}: ${meaning}`]),
  ["null", "the null block: never allocated, padding points to it"],
]);

export class Details {
  /** @param {Object} app see main.js */
  constructor(app) {
    this.app = app;
    this.panel = byId("details");
    this.opener = null;
    this.asked = 0;
    byId("details-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.panel.hidden) this.close();
    });
  }

  close() {
    if (this.panel.hidden) return;
    this.panel.hidden = true;
    this.asked += 1;
    this.app.pin(null);
    this.opener?.isConnected && this.opener.focus();
  }

  #open(title, opener) {
    setText(byId("details-title"), title);
    byId("details-body").replaceChildren();
    if (this.panel.hidden) this.opener = opener;
    this.panel.hidden = false;
    byId("details-title").focus();
    return (this.asked += 1);
  }

  /** @param {import("./frames.js").Model} model @param {number} block */
  async block(model, block, opener) {
    const asked = this.#open(`Block ${count(block)}`, opener);
    const cell = model.cells[block];
    const body = byId("details-body");
    const holder = model.rows.get(rowOf(cell));
    this.app.pin(holder ? holder.id : null);
    body.append(element("p", { class: "lead" }, element("i", { class: `cell ${kindOf(cell)}`, "aria-hidden": "true" }),
      ` ${MEANINGS[kindOf(cell)] ?? "unknown"}${isShared(cell) ? " (shared)" : ""}`));
    const place = { model: model.name, extent: `${count(Math.floor(block / model.pool.blocks_per_extent))} of ${count(model.numExtents)}` };
    const facts = element("dl", { class: "facts-list" });
    body.append(facts);
    addFacts(facts, place);
    if (this.app.isReplay()) {
      if (holder) this.#holders(body, model, [{ ...holder, position: null }]);
      return;
    }
    const found = await this.app.ask(`block?model=${encodeURIComponent(model.name)}&block=${block}`);
    if (asked !== this.asked) return;
    if (!found) return void body.append(element("p", { class: "note", text: "The server did not answer." }));
    this.#blockFacts(body, facts, model, found);
  }

  #blockFacts(body, facts, model, { state, rows = [], hits, tokens, text }) {
    addFacts(facts, {
      "state now": state,
      "tokens of the prompt or output": tokens ? `${count(tokens[0])} to ${count(tokens[1] - 1)}` : null,
      "found again": hits === null || hits === undefined ? null : `${several(hits, "time")}`,
    });
    if (rows.length) this.#holders(body, model, rows);
    if (text !== null && text !== undefined) {
      body.append(element("h3", { text: "Text" }), element("pre", { class: "block-text", text, tabindex: "0" }));
    } else if (tokens) {
      const why = this.app.isAdmin() ? "No text is known for this block." : "Its text is shown to holders of an admin key.";
      body.append(element("p", { class: "note", text: why }));
    }
  }

  #holders(body, model, rows) {
    const list = element("ul", { class: "holders" });
    for (const { row, id, label, position } of rows) {
      const button = element("button", { type: "button", class: "link", text: label || id });
      button.addEventListener("click", () => this.request(model, id, this.opener));
      const swatch = element("i", { class: "swatch", "aria-hidden": "true" });
      const item = element("li", {}, swatch, button);
      if (position !== null && position !== undefined) item.append(` its block ${count(position)}`);
      item.dataset.hue = String(this.app.hueOf(model, row));
      list.append(item);
    }
    body.append(element("h3", { text: rows.length > 1 ? "Requests that share it" : "Request" }), list);
  }

  /** @param {import("./frames.js").Model} model @param {string} id or label */
  async request(model, id, opener) {
    const running = model.running.find((one) => one.id === id || one.label === id);
    const waiting = model.waiting.find((one) => one.id === id || one.label === id);
    const ended = model.ended.findLast((one) => one.id === id || one.label === id);
    const known = running ?? waiting ?? ended;
    const asked = this.#open(known?.label || known?.id || id, opener);
    this.app.pin(running?.id ?? null);
    const body = byId("details-body");
    const facts = element("dl", { class: "facts-list" });
    body.append(facts);
    addFacts(facts, this.#requestFacts(model, { running, waiting, ended }));
    if (known?.label) addFacts(facts, { id: known.id });
    body.append(element("h3", { text: "Decisions about it" }));
    const list = element("ol", { class: "history" });
    body.append(list);
    const here = [...model.decisions.values()].filter((one) => [one.request_id, one.label].includes(id) || one.request_id === known?.id);
    showDecisions(list, here);
    if (this.app.isReplay()) return;
    const decisions = await this.app.explain(model, known?.id ?? id);
    if (asked !== this.asked || !decisions) return;
    const times = new Map(here.map((one) => [one.n, one.time]));
    if (decisions.length) showDecisions(list, decisions.map((one) => ({ ...one, time: times.get(one.n) })));
  }

  #requestFacts(model, { running, waiting, ended }) {
    if (running) {
      return {
        model: model.name, state: "running", prompt: several(running.prompt, "token"),
        computed: `${count(running.computed)} of at most ${several(running.limit, "token")}`, blocks: count(running.blocks),
        priority: String(running.priority), preemptions: String(running.preemptions), arrived: clock(running.arrival),
      };
    }
    if (waiting) {
      return {
        model: model.name, state: waiting.status || "waiting", tokens: count(waiting.known), needs: several(waiting.needed, "block"),
        priority: String(waiting.priority), preemptions: String(waiting.preemptions),
      };
    }
    if (ended) return { model: model.name, state: `ended: ${ended.error ?? ended.reason}`, output: several(ended.tokens, "token"), at: clock(ended.time) };
    return { model: model.name, state: "no longer here" };
  }
}

function addFacts(list, facts) {
  for (const [name, value] of Object.entries(facts)) {
    if (value !== null) list.append(element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  }
}

function showDecisions(list, decisions) {
  list.replaceChildren();
  if (!decisions.length) list.append(element("li", { class: "note", text: "None: it got its blocks at once, or too long ago." }));
  for (const decision of decisions) {
    const when = decision.time ? clock(decision.time) : `step ${count(decision.step)}`;
    list.append(element("li", {}, element("time", { text: when }), element("b", { text: ` ${kindInWords(decision)} ` }), inWords(decision)));
  }
}

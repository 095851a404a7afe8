/** The page: makes the views, feeds them with frames, live or out of a recording, and knows what is selected. */

import { Details } from "./details.js";
import { byId, element, setText } from "./dom.js";
import { EventList } from "./events.js";
import { Feed } from "./feed.js";
import { Fleet, FleetPanel } from "./fleet.js";
import { clock, count, percent } from "./format.js";
import { Model } from "./frames.js";
import { DeviceChart } from "./memory.js";
import { Hues, readTheme } from "./palette.js";
import { ModelPanel } from "./panel.js";
import { PromptBox } from "./prompt.js";
import { Replay } from "./replay.js";
import { RequestLists } from "./requests.js";
import { Session } from "./session.js";
import { messageOf } from "./sse.js";

const UPDATE_MS = 250; // lists and charts; the maps follow every frame
const THEME_KEY = "pagetide theme";
const HOLDS_NOTHING = new Set(["asleep", "unloaded", "failed"]);

/** What all views share. */
class App {
  constructor() {
    /** @type {Map<string, {model: Model, panel: ModelPanel|FleetPanel}>} */
    this.shown = new Map();
    this.hues = new Hues();
    this.colours = readTheme();
    this.theme = () => this.colours;
    this.lit = null; // the request under the pointer
    this.pinned = null; // the request of the open details
    this.followedId = null; // the label of the prompt box's request
    this.sought = "";
    this.mode = "live";
    this.details = new Details(this);
    this.lists = new RequestLists(this);
    this.events = new EventList(this);
    this.prompt = new PromptBox(this);
    this.device = new DeviceChart(byId("device"), this.theme);
    this.session = new Session(() => this.#signedIn());
    this.feed = new Feed({
      models: (list) => this.#showModels(list), frame: (name, frame) => this.#takeFrame(name, frame),
      fleet: (name, snapshot) => this.#takeFleet(name, snapshot),
      state: (state, pause, said) => this.#showState(state, pause, said), key: () => this.#signedOut(),
    });
    this.tooltip = byId("tooltip");
    this.dirty = true;
    this.#listen();
  }

  async start() {
    try {
      const info = await this.session.info();
      this.mode = info.mode;
      setText(byId("version"), info.version ? `pagetide ${info.version}` : "");
      document.body.dataset.mode = info.mode;
      if (info.mode === "replay") return this.#startReplay(info);
      if (info.needs_key && !info.signed_in) return this.#signedOut();
    } catch {
      // the feed says that the server is away, and comes back
    }
    this.feed.start();
  }

  #signedIn() {
    delete document.body.dataset.session;
    byId("content").focus();
    this.feed.start();
  }

  #signedOut() {
    document.body.dataset.session = "out";
    this.details.close();
    this.hideTooltip();
    this.#showState("out");
    this.session.ask();
  }

  // ---- what views ask

  isReplay() {
    return this.mode === "replay";
  }

  isAdmin() {
    return this.session.isAdmin;
  }

  numModels() {
    return this.shown.size;
  }

  get models() {
    return [...this.shown.values()].map(({ model }) => model);
  }

  /** The hue of the request in a row. */
  hueOf(model, row) {
    const holder = model.rows.get(row);
    return holder ? this.hues.of(`${model.name} ${holder.id}`, this.#holders()) : 0;
  }

  *#holders() {
    for (const { model } of this.shown.values()) for (const one of model.rows.values()) yield { id: `${model.name} ${one.id}` };
  }

  /** Whether a search is on that finds this request. */
  isSought({ id, label }) {
    const sought = this.sought.toLowerCase();
    return sought !== "" && (id.toLowerCase().includes(sought) || label.toLowerCase().includes(sought));
  }

  /** The rows to show alone, or null for all. @param {Model} model */
  spotlightRows(model) {
    const id = this.lit ?? this.pinned;
    if (!id && !this.sought) return null;
    const rows = [...model.rows.values()].filter((one) => (id ? one.id === id : this.isSought(one)));
    if (!rows.length && !this.models.some((other) => [...other.rows.values()].some((one) => (id ? one.id === id : this.isSought(one))))) {
      return null;
    }
    return new Set(rows.map((one) => one.row));
  }

  /** JSON of the server, null if there is none. */
  async ask(path) {
    try {
      const response = await fetch(path, { cache: "no-store" });
      return response.ok ? await response.json() : null;
    } catch {
      return null;
    }
  }

  /** The decisions about a request that a model's engine keeps, null if it does not answer. @returns {Promise<Object[]|null>} */
  async explain(model, id) {
    return this.ask(`explain?model=${encodeURIComponent(model.name)}&request=${encodeURIComponent(id)}`);
  }

  /** Loads a model, lets it sleep, wakes it up or stops it. @returns {Promise<string>} why the server refuses, or "" */
  async change(model, action) {
    try {
      const response = await fetch(`model?model=${encodeURIComponent(model.name)}&action=${action}`, { method: "POST" });
      return response.ok ? "" : messageOf(response);
    } catch {
      return "the server does not answer";
    }
  }

  // ---- what views tell

  /** Dims all but a request's blocks. @param {string|null} id */
  spotlight(id) {
    this.lit = id;
    this.#relight();
  }

  /** As `spotlight`, until it is taken back. */
  pin(id) {
    this.pinned = id;
    this.#relight();
  }

  /** Rings the blocks of a request from now on. @param {string|null} label */
  follow(label) {
    this.followedId = label;
    this.#follow();
  }

  openBlock(model, block, opener) {
    this.hideTooltip();
    this.details.block(model, block, opener);
  }

  openRequest(model, id, opener) {
    this.details.request(model, id, opener);
  }

  showTooltip(panel, block, x, y) {
    this.hovered = { panel, block };
    this.#place(element("p", { text: panel.describe(block) }), x + 14, y + 14);
  }

  showNote(node, x, y) {
    this.#place(node, x, y + 6);
  }

  hideTooltip() {
    this.tooltip.hidden = true;
    this.hovered = null;
  }

  #place(node, x, y) {
    this.tooltip.replaceChildren(node);
    this.tooltip.hidden = false;
    const box = this.tooltip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x, window.innerWidth - box.width - 8));
    const top = y + box.height > window.innerHeight - 8 ? Math.max(8, y - box.height - 32) : y;
    this.tooltip.style.setProperty("transform", `translate(${Math.round(left)}px, ${Math.round(top)}px)`);
  }

  #relight() {
    for (const { panel } of this.shown.values()) panel.showSpotlight();
  }

  #follow() {
    for (const { model, panel } of this.shown.values()) {
      const rows = [...model.rows.values()].filter((one) => this.followedId && one.label === this.followedId);
      panel.map?.follow(new Set(rows.map((one) => one.row)));
    }
  }

  // ---- what the server sends

  #showModels(list) {
    const before = [...this.shown.keys()].join("\n");
    const newest = Math.max(0, ...this.models.map((model) => model.time));
    for (const { name, state, unloaded_for: why } of list) {
      if (!this.shown.has(name)) this.#add(name);
      const { model } = this.shown.get(name);
      if (HOLDS_NOTHING.has(state) && model.state !== state) model.leave?.(newest);
      Object.assign(model, { state, why: why ?? "" });
    }
    for (const [name, { panel }] of this.shown) {
      if (list.some((one) => one.name === name)) continue;
      panel.node.remove();
      this.shown.delete(name);
    }
    byId("no-models").hidden = list.length > 0;
    byId("panels").dataset.count = String(Math.min(3, this.shown.size));
    this.prompt.offer(list);
    if ([...this.shown.keys()].join("\n") !== before) for (const { panel } of this.shown.values()) panel.resize();
    this.dirty = true;
  }

  #add(name) {
    const model = new Model(name);
    const panel = new ModelPanel(model, this);
    this.shown.set(name, { model, panel });
    byId("panels").append(panel.node);
    this.#showKind();
  }

  #takeFrame(name, frame) {
    if (!this.shown.has(name)) this.#add(name);
    if (this.shown.get(name).model instanceof Fleet) this.#replace(name, new Model(name));
    const { model, panel } = this.shown.get(name);
    const change = model.apply(frame);
    if (!change) return;
    panel.changed(change);
    this.events.add(model, change);
    if (change.admitted.length || change.full) {
      this.#follow();
      if (this.lit || this.pinned || this.sought) panel.showSpotlight();
    }
    if (this.hovered?.panel === panel && !this.tooltip.hidden) {
      const words = this.tooltip.querySelector("p");
      if (words) setText(words, panel.describe(this.hovered.block));
    }
    this.dirty = true;
  }

  /** A snapshot of a fleet, or null of one that does not answer. */
  #takeFleet(name, snapshot) {
    if (!this.shown.has(name)) this.#add(name);
    if (!(this.shown.get(name).model instanceof Fleet)) this.#replace(name, new Fleet(name));
    const { model } = this.shown.get(name);
    this.events.tell(model, model.take(snapshot));
    this.dirty = true;
  }

  /** Shows a model anew, whose engine became a fleet or the other way. */
  #replace(name, model) {
    const { model: before, panel: old } = this.shown.get(name);
    model.state = before.state;
    const panel = model instanceof Fleet ? new FleetPanel(model) : new ModelPanel(model, this);
    this.shown.set(name, { model, panel });
    old.node.replaceWith(panel.node);
    this.#showKind();
  }

  /** Leaves out what a fleet's front end does not know: blocks and requests. */
  #showKind() {
    const isFleet = this.shown.size > 0 && this.models.every((one) => one instanceof Fleet);
    document.body.dataset.kind = isFleet ? "fleet" : "engine";
  }

  #showState(state, pause, said) {
    const words = { connecting: "connecting", live: "live", lost: said ? "refused" : "connection lost", paused: "paused", out: "signed out" };
    const status = byId("status");
    if (status.dataset.state === state && state === "live") return;
    if (state === "connecting" && status.dataset.state === "lost") return;
    status.dataset.state = state;
    setText(byId("status-text"), words[state]);
    const banner = byId("banner");
    banner.hidden = state !== "lost";
    if (state !== "lost") return;
    const newest = Math.max(0, ...this.models.map((model) => model.time));
    const asOf = newest ? ` The picture is as of ${clock(newest)}.` : "";
    setText(byId("banner-text"), `${said ? `The server refuses: ${said}.` : "The server does not answer."}${asOf} Trying again in ${Math.max(1, Math.round(pause))} s.`);
  }

  #startReplay(info) {
    byId("prompt-card").hidden = true;
    byId("status").dataset.state = "replay";
    setText(byId("status-text"), `recording of ${new Date(info.began * 1000).toLocaleString()}`);
    this.#showModels([{ name: info.model, state: "replay" }]);
    this.replay = new Replay(info, {
      reset: () => {
        for (const { model } of this.shown.values()) model.forget();
        this.events.clear();
      },
      frame: (frame) => this.#takeFrame(info.model, frame),
    });
  }

  // ---- the page itself

  #listen() {
    byId("retry").addEventListener("click", () => this.feed.start());
    byId("theme").addEventListener("click", () => this.#switchTheme());
    byId("search").addEventListener("input", (event) => this.#search(event.target.value.trim()));
    byId("search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#openFound();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    window.addEventListener("resize", () => {
      for (const { panel } of this.shown.values()) panel.resize();
      this.dirty = true;
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.closest("input, textarea, select")) return;
      event.preventDefault();
      byId("search").focus();
    });
    setInterval(() => this.#update(), UPDATE_MS);
  }

  #switchTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try {
      localStorage.setItem(THEME_KEY, root.dataset.theme);
    } catch {
      // private windows may refuse
    }
    this.#recolour();
  }

  #recolour() {
    this.colours = readTheme();
    for (const { panel } of this.shown.values()) panel.map?.repaint();
    this.dirty = true;
  }

  #search(text) {
    this.sought = text;
    this.#relight();
    this.dirty = true;
    const found = this.models.flatMap((model) => [...model.rows.values(), ...model.waiting]).filter((one) => this.isSought(one));
    this.#sayFound(text ? (found.length ? `${count(found.length)} found` : "none here: Enter asks the server") : "");
  }

  async #openFound() {
    const { sought, models } = this;
    if (!sought || !models.length) return;
    for (const model of models) {
      const found = [...model.rows.values(), ...model.waiting, ...model.ended].find((one) => this.isSought(one));
      if (found) return this.openRequest(model, found.id, byId("search"));
    }
    const known = models.find((model) => model.decisionAbout(sought));
    if (known) return this.openRequest(known, sought, byId("search"));
    const answers = this.isReplay() ? [[]] : await Promise.all(models.map((model) => this.explain(model, sought)));
    if (sought !== this.sought) return;
    const at = answers.findIndex((decisions) => decisions?.length);
    if (at >= 0) return this.openRequest(models[at], sought, byId("search"));
    const isAway = answers.every((decisions) => decisions === null);
    this.#sayFound(isAway ? "the server does not answer" : "no request of that name is known");
  }

  #sayFound(text) {
    const said = byId("search-result");
    setText(said, text);
    said.classList.toggle("long", text.length > 12);
  }

  #update() {
    if (!this.dirty) return;
    this.dirty = false;
    const models = this.models;
    for (const { panel } of this.shown.values()) panel.update();
    this.lists.show(models);
    this.prompt.update(models);
    this.device.draw(models);
    this.#totals(models.filter((model) => model.stats));
  }

  #totals(models) {
    const sum = (value) => models.reduce((total, model) => total + value(model), 0);
    const prompt = sum((model) => model.stats.prompt_tokens ?? 0);
    setText(byId("total-speed"), count(sum((model) => model.tokensPerSecond)));
    setText(byId("total-running"), count(sum((model) => model.numRunning)));
    setText(byId("total-waiting"), count(sum((model) => model.numWaiting)));
    setText(byId("total-hits"), prompt ? percent(sum((model) => model.stats.cached_prompt_tokens ?? 0) / prompt) : "–");
    setText(byId("total-preemptions"), count(sum((model) => model.stats.preemptions ?? 0)));
    setText(byId("total-recalls"), count(sum((model) => model.stats.recalls ?? 0)));
  }
}

try {
  const theme = localStorage.getItem(THEME_KEY);
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // private windows may refuse
}
const app = new App();
globalThis.pagetide = app; // for the console, and for tests
app.start();

/** The prompt box: sends a request, shows its text token by token, and follows its blocks. */

import { announce, byId, element, setText } from "./dom.js";
import { count, duration, percent, several } from "./format.js";
import { whyWaits } from "./requests.js";
import { eventsOf, messageOf } from "./sse.js";

const NUM_ALTERNATIVES = 4;
// Fields of the form by their names in the API, and how their text becomes a value.
const NUMBERS = { temperature: Number, top_p: Number, top_k: Number, min_p: Number, seed: seedOf, min_tokens: Number, max_tokens: Number, n: Number };
const SAMPLING_ONLY = ["temperature", "top_p", "top_k", "min_p", "seed"];
const NUM_BEAMS = 4; // unless it is chosen
const SEEDS = [-(2n ** 63n), 2n ** 64n - 1n];

/**
 * The body of a request. Pure.
 * @param {Object<string, string>} fields as the form has them
 * @returns {{path: string, body: string}} the body as JSON
 * @throws {Error} if a field is wrong
 */
export function requestOf(fields) {
  const body = { model: fields.model, stream: true, stream_options: { include_usage: true } };
  const isChat = fields.kind === "chat";
  if (isChat) Object.assign(body, { messages: [{ role: "user", content: fields.prompt }], logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  else Object.assign(body, { prompt: fields.prompt, logprobs: NUM_ALTERNATIVES });
  for (const [name, parse] of Object.entries(NUMBERS)) {
    const text = (fields[name] ?? "").trim();
    if (text === "" || (fields.mode !== "sampling" && SAMPLING_ONLY.includes(name))) continue;
    body[name] = parse(text);
  }
  const stop = (fields.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (fields.mode === "greedy") body.temperature = 0;
  if (fields.mode === "beams") {
    body.use_beam_search = true; // as wide as n
    body.n ??= NUM_BEAMS;
    for (const name of ["logprobs", "top_logprobs"]) delete body[name];
  }
  const { seed, ...others } = body;
  const text = JSON.stringify(others);
  const whole = seed === undefined ? text : `${text.slice(0, -1)},"seed":${seed}}`; // JSON.stringify takes no BigInt
  return { path: isChat ? "/v1/chat/completions" : "/v1/completions", body: whole };
}

/** A seed with all its digits: a Number would round those beyond 2^53. @param {string} text */
function seedOf(text) {
  const seed = /^[+-]?\d{1,20}$/.test(text) ? BigInt(text.replace("+", "")) : null;
  if (seed === null || seed < SEEDS[0] || seed > SEEDS[1]) {
    throw new Error(`the seed is ${text.slice(0, 40)}; it has to be a whole number from −2^63 to 2^64 − 1, or empty`);
  }
  return seed;
}

/**
 * The tokens of one piece of a choice, in either API's form: [{token, logprob, top: [[text, logprob], ...]}, ...]. Pure.
 * @param {Object} choice
 */
export function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: (top ?? []).map((one) => [one.token, one.logprob]) }));
  }
  return found.tokens.map((token, at) => {
    const top = Object.entries(found.top_logprobs?.[at] ?? {}).sort((a, b) => b[1] - a[1]);
    return { token, logprob: found.token_logprobs[at], top };
  });
}

/**
 * Divides new text among its tokens: [[text, tokens], ...]. A piece whose tokens are not the text's parts (half characters,
 * text held back for a stop string) stays whole, with all its tokens. Pure.
 */
export function divided(text, tokens) {
  const parts = [];
  let rest = text;
  for (let at = 0; at < tokens.length; at += 1) {
    const { token } = tokens[at];
    if (!rest.startsWith(token) || token === "") return rest ? [...parts, [rest, tokens.slice(at)]] : parts;
    parts.push([token, [tokens[at]]]);
    rest = rest.slice(token.length);
  }
  return rest ? [...parts, [rest, []]] : parts;
}

export class PromptBox {
  /** @param {Object} app see main.js */
  constructor(app) {
    this.app = app;
    this.form = byId("prompt-form");
    this.output = byId("output");
    this.abort = null;
    this.choices = new Map();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    byId("abort").addEventListener("click", () => this.abort?.abort());
    this.form.addEventListener("change", () => this.#showMode());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.#listenToTokens();
    this.#showMode();
  }

  /** The models to choose from. @param {{name: string, state: string}[]} models */
  offer(models) {
    const select = byId("prompt-model");
    const names = models.map((model) => model.name);
    if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => element("option", { value: name, text: name })));
    if (names.includes(chosen)) select.value = chosen;
    byId("prompt-model-field").hidden = names.length < 2;
  }

  #fields() {
    return Object.fromEntries(new FormData(this.form).entries());
  }

  #showMode() {
    const { mode } = this.#fields();
    for (const node of this.form.querySelectorAll("[data-modes]")) node.hidden = !node.dataset.modes.split(" ").includes(mode);
    this.form.elements.n.placeholder = mode === "beams" ? NUM_BEAMS : 1;
  }

  /** What the form asks for, null with an error beside it. */
  #request() {
    try {
      return requestOf(this.#fields());
    } catch (error) {
      this.form.querySelector(".parameters").open = true;
      this.#say(`Failed: ${error.message}.`);
      return null;
    }
  }

  #say(text) {
    const said = byId("prompt-status");
    setText(said, text);
    said.classList.toggle("failed", text.startsWith("Failed"));
  }

  /** Says how far the request is while it has no text. @param {import("./frames.js").Model[]} models */
  update(models) {
    if (!this.abort || this.hasText) return;
    for (const model of models) {
      const rows = model.running.filter((one) => one.label === this.id);
      const waiting = model.waiting.find((one) => one.label === this.id);
      if (rows.length) this.#say(this.#progress(rows));
      else if (waiting) this.#say(`Waits: ${whyWaits(model, waiting)} …`);
    }
  }

  #progress(rows) {
    const status = Math.max(...rows.map((one) => one.status));
    const { computed, prompt, known } = rows[0];
    if (status === 0) return `Computing the prompt: ${count(Math.min(computed, prompt))} of ${several(prompt, "token")} …`;
    if (status === 2) return "Paused …";
    return `${this.isSearch ? "Searching" : "Computing"}: ${several(Math.max(0, known - prompt), "token")} …`;
  }

  async #run() {
    if (this.abort) return;
    const request = this.#request();
    if (!request) return;
    const { path, body } = request;
    const id = `page-${crypto.getRandomValues(new Uint32Array(2)).reduce((text, part) => text + part.toString(36), "")}`;
    const abort = (this.abort = new AbortController());
    this.isSearch = this.#fields().mode === "beams";
    this.#begin(id);
    const began = performance.now();
    let end = "";
    try {
      const headers = { "content-type": "application/json", "x-request-id": id };
      const response = await fetch(path, { method: "POST", headers, body, signal: abort.signal });
      if (!response.ok) throw new Error(await messageOf(response));
      end = await this.#read(response, began);
    } catch (error) {
      end = error.name === "AbortError" ? "Aborted." : `Failed: ${error.message}`;
    }
    this.abort = null;
    this.#end(end);
  }

  async #read(response, began) {
    let first = 0;
    let usage = null;
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices ?? []) this.#append(choice);
      if (!first && event.choices?.some((choice) => choice.text || choice.delta?.content)) first = performance.now() - began;
    }
    const seconds = (performance.now() - began) / 1000;
    if (!usage) return `Done in ${duration(seconds)}.`;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const found = cached ? `, ${count(cached)} of them found in the cache` : "";
    return `${count(usage.completion_tokens)} tokens in ${duration(seconds)}, the first after ${duration(first / 1000)}; `
      + `prompt of ${count(usage.prompt_tokens)} tokens${found}.`;
  }

  #begin(id) {
    this.id = id;
    this.hasText = false;
    this.choices.clear();
    this.output.replaceChildren();
    this.output.hidden = false;
    byId("likely-legend").hidden = this.isSearch;
    byId("abort").hidden = false;
    byId("run").disabled = true;
    this.#say("Sent …");
    this.app.follow(id);
  }

  #end(text) {
    byId("abort").hidden = true;
    byId("run").disabled = false;
    this.#say(text);
    this.output.classList.remove("streaming");
    announce(text);
    this.app.follow(null);
  }

  #append(choice) {
    let place = this.choices.get(choice.index);
    if (!place) {
      place = element("p", { class: "choice" });
      this.choices.set(choice.index, place);
      const after = [...this.choices.keys()].filter((index) => index < choice.index).length;
      this.output.insertBefore(place, this.output.children[after] ?? null);
    }
    const text = choice.text ?? choice.delta?.content ?? "";
    if (!text) return;
    this.hasText = true;
    this.output.classList.add("streaming");
    setText(byId("prompt-status"), "");
    const atEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 30;
    for (const [part, tokens] of divided(text, tokensOf(choice))) place.append(token(part, tokens));
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  // ---- log-probabilities, by the pointer and by the keyboard

  #listenToTokens() {
    const show = (node) => {
      const at = node?.closest?.(".token");
      if (!at?.scores?.length) return this.app.hideTooltip();
      const box = at.getBoundingClientRect();
      this.app.showNote(scoresTable(at.scores), box.left, box.bottom);
    };
    this.output.addEventListener("pointerover", (event) => show(event.target));
    this.output.addEventListener("pointerleave", () => this.app.hideTooltip());
    this.output.addEventListener("focusin", (event) => show(event.target));
    this.output.addEventListener("focusout", () => this.app.hideTooltip());
    this.output.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const tokens = [...this.output.querySelectorAll(".token")];
      const next = tokens[tokens.indexOf(document.activeElement) + step] ?? tokens[step > 0 ? 0 : tokens.length - 1];
      if (!next) return;
      next.focus();
      announce(next.scores.map((one) => `${one.token}: ${percent(Math.exp(one.logprob))}`).join(", "));
    });
  }
}

/** A token's span: the less likely it was, the stronger its tint. */
function token(text, scores) {
  const span = element("span", { class: "token", tabindex: "-1", text });
  span.scores = scores.filter((one) => one.logprob !== null);
  const least = Math.min(0, ...span.scores.map((one) => one.logprob));
  const share = Math.exp(least);
  if (span.scores.length) span.dataset.likely = share > 0.25 ? "3" : share > 0.05 ? "2" : share > 0.01 ? "1" : "0";
  return span;
}

function scoresTable(scores) {
  const table = element("table", { class: "scores" });
  for (const { token: chosen, logprob, top } of scores.slice(0, 4)) {
    const rows = top.some(([text]) => text === chosen) ? top : [[chosen, logprob], ...top];
    for (const [text, value] of rows) {
      const bar = element("i", { class: "probability", vars: { "--share": String(Math.exp(value)) } });
      table.append(element("tr", { class: text === chosen ? "chosen" : "" },
        element("td", {}, element("code", { text: visible(text) })), element("td", { text: value.toFixed(2) }),
        element("td", { text: percent(Math.exp(value)) }), element("td", {}, bar)));
    }
  }
  return table;
}

/** Spaces and line ends that can be seen. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

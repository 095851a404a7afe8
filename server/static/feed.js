/** The live feed: connects, hands events on, and comes back after a loss with growing pauses. */

import { eventsOf, messageOf } from "./sse.js";

const FIRST_PAUSE_S = 0.5;
const LONGEST_PAUSE_S = 10;
const HIDDEN_S = 20; // a page that nobody sees leaves the feed after this time
const SILENCE_S = 15; // frames come at least once a second

export class Feed {
  /**
   * @param {{models: (list: Object[]) => void, frame: (model: string, frame: Object) => void, fleet: (model: string,
   *   snapshot: Object|null) => void, state: (state: string, pause?: number, said?: string) => void, key: () => void}} listener states: "connecting", "live", "lost", "paused"; `said`:
   *   what the server said when it refused
   * @param {number} [rate] frames a second at most
   */
  constructor(listener, rate = 10) {
    this.listener = listener;
    this.rate = rate;
    this.pause = FIRST_PAUSE_S;
    this.running = false;
    this.abort = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.#visibility());
  }

  /** Connects now; again if it is connected. */
  start() {
    this.stop();
    this.running = true;
    this.#connect();
  }

  stop() {
    this.running = false;
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async #connect() {
    const abort = (this.abort = new AbortController());
    this.listener.state("connecting");
    let watchdog = 0;
    let said = "";
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_S * 1000);
    };
    try {
      alive();
      const response = await fetch(`events?rate=${this.rate}`, { signal: abort.signal, cache: "no-store" });
      if (response.status === 401) return void this.#refused(abort);
      if (!response.ok) {
        said = await messageOf(response);
        throw new TypeError(said); // shown on the page
      }
      for await (const { event, data } of eventsOf(response)) {
        if (abort !== this.abort) return;
        alive();
        this.pause = FIRST_PAUSE_S;
        this.#take(event, data);
      }
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof TypeError)) console.warn(`the feed ended: ${error.message}`);
    } finally {
      clearTimeout(watchdog);
    }
    if (this.running && abort === this.abort) this.#again(said);
  }

  #take(event, data) {
    this.listener.state("live");
    if (event === "models") this.listener.models(JSON.parse(data));
    else if (event === "frame") {
      const { model, frame } = JSON.parse(data);
      this.listener.frame(model, frame);
    } else if (event === "fleet") {
      const { model, fleet } = JSON.parse(data);
      this.listener.fleet(model, fleet);
    }
  }

  #refused(abort) {
    if (abort !== this.abort) return;
    this.stop();
    this.listener.key();
  }

  #again(said) {
    const pause = this.pause * (0.8 + 0.4 * Math.random());
    this.pause = Math.min(LONGEST_PAUSE_S, this.pause * 1.7);
    this.listener.state("lost", pause, said);
    this.timer = setTimeout(() => this.#connect(), pause * 1000);
  }

  #visibility() {
    if (!document.hidden) {
      clearTimeout(this.hiding);
      if (this.away) this.start();
      this.away = false;
    } else if (this.running) {
      this.hiding = setTimeout(() => {
        this.away = true;
        this.stop();
        this.listener.state("paused");
      }, HIDDEN_S * 1000);
    }
  }
}

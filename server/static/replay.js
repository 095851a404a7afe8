/** Replay: the frames of a recording, played with a slider. */

import { byId, element, setText } from "./dom.js";
import { position } from "./format.js";
import { messageOf } from "./sse.js";

const AHEAD_S = 10; // fetched at once, and before the time shown reaches the end of what is here
const STEP_S = 1;
const LEAP_S = 10;
const FIRST_PAUSE_S = 2; // after frames did not come, doubled each time
const LONGEST_PAUSE_S = 30;

export class Replay {
  /**
   * @param {{began: number, ended: number}} info
   * @param {{reset: () => void, frame: (frame: Object) => void}} listener `reset`: the next frame is full
   */
  constructor(info, listener) {
    const { began, ended } = info;
    Object.assign(this, { began, ended, listener });
    this.time = began;
    this.speed = 1;
    this.playing = false;
    this.queue = []; // frames to come
    this.until = began; // frames are here up to this time
    this.fetching = false;
    this.pause = FIRST_PAUSE_S;
    this.retryAt = 0; // of performance.now()
    this.isLost = false; // what was sought last did not come
    this.turn = 0; // seeks so far: answers to earlier ones are thrown away
    this.slider = byId("replay-slider");
    this.slider.max = String(Math.max(0.1, ended - began));
    this.#listen();
    byId("replay").hidden = false;
    this.seek(began);
  }

  #listen() {
    this.slider.addEventListener("input", () => this.seek(this.began + Number(this.slider.value)));
    byId("replay-play").addEventListener("click", () => this.toggle());
    const speeds = byId("replay-speed");
    for (const speed of [0.25, 0.5, 1, 2, 5, 10, 30]) {
      speeds.append(element("option", { value: speed, text: `${speed}×`, selected: speed === 1 }));
    }
    speeds.addEventListener("change", () => (this.speed = Number(speeds.value)));
    document.addEventListener("keydown", (event) => this.#key(event));
    let last = performance.now();
    const tick = (now) => {
      const passed = Math.min(0.5, (now - last) / 1000);
      last = now;
      requestAnimationFrame(tick);
      if (this.playing) this.#advance(passed * this.speed, now);
    };
    requestAnimationFrame(tick);
  }

  #key(event) {
    if (event.target.closest("input:not([type=range]), textarea, select, button, canvas") || event.altKey || event.ctrlKey) return;
    const to = {
      ArrowLeft: this.time - (event.shiftKey ? LEAP_S : STEP_S), ArrowRight: this.time + (event.shiftKey ? LEAP_S : STEP_S),
      Home: this.began, End: this.ended,
    }[event.key];
    if (event.key === " ") this.toggle();
    else if (to !== undefined) this.seek(to);
    else return;
    event.preventDefault();
  }

  toggle() {
    if (!this.playing && this.time >= this.ended) this.seek(this.began);
    else if (!this.playing && this.isLost) this.seek(this.time);
    this.retryAt = 0;
    this.pause = FIRST_PAUSE_S;
    this.#play(!this.playing);
  }

  #play(playing) {
    this.playing = playing;
    const button = byId("replay-play");
    setText(button, this.playing ? "Pause" : "Play");
    button.classList.toggle("playing", this.playing);
  }

  /** Shows a time, in seconds since 1970. */
  async seek(time) {
    this.time = Math.max(this.began, Math.min(this.ended, time));
    this.#showTime();
    const turn = (this.turn += 1);
    const wanted = this.time;
    const found = await this.#fetch(wanted, Math.min(this.ended, wanted + AHEAD_S));
    if (turn !== this.turn) return;
    this.isLost = !found;
    if (!found) return this.#play(false);
    this.listener.reset();
    this.queue = found.frames;
    this.until = found.until;
    this.#show();
  }

  #advance(seconds, now) {
    if (this.isLost) return; // it is sought again
    if (this.time + seconds > this.until && this.until < this.ended) seconds = Math.max(0, this.until - this.time); // wait for more
    this.time = Math.min(this.ended, this.time + seconds);
    this.#showTime();
    this.#show();
    if (this.time >= this.ended) return this.#play(false);
    if (this.until >= this.ended) return;
    if (this.retryAt && this.time >= this.until) return this.#play(false); // all that came is shown
    if (now >= this.retryAt && this.until - this.time < AHEAD_S / 2 + this.speed) this.#more();
  }

  /** Hands on the frames up to the time shown. */
  #show() {
    const { queue } = this;
    let next = 0;
    const isDue = (frame) => frame.time <= this.time || (next === 0 && frame.full && frame.time - this.time < 1);
    while (next < queue.length && isDue(queue[next])) next += 1;
    for (const frame of queue.splice(0, next)) this.listener.frame(frame);
  }

  async #more() {
    if (this.fetching) return;
    this.fetching = true;
    const turn = this.turn;
    const from = this.until;
    const found = await this.#fetch(from, Math.min(this.ended, from + AHEAD_S * Math.max(1, this.speed)));
    this.fetching = false;
    if (turn !== this.turn) return;
    if (!found) {
      this.retryAt = performance.now() + this.pause * 1000;
      this.pause = Math.min(LONGEST_PAUSE_S, 2 * this.pause);
      return;
    }
    this.retryAt = 0;
    this.pause = FIRST_PAUSE_S;
    this.until = found.until;
    // the answer begins with a full frame before `from`: what was shown already is left out
    this.queue.push(...found.frames.filter((frame) => frame.time > from));
  }

  /** The frames between two times, null with a message if they do not come. */
  async #fetch(from, until) {
    try {
      const response = await fetch(`frames?from=${from}&until=${until}`);
      if (!response.ok) throw new Error(await messageOf(response));
      const lines = (await response.text()).split("\n").map(parsed).filter((line) => line !== null);
      const frames = lines.filter((line) => line.cells !== undefined);
      const end = lines.find((line) => line.cells === undefined); // the last line: up to when all frames are here
      setText(byId("replay-status"), "");
      return { frames, until: Math.min(until, end?.until ?? until) };
    } catch (error) {
      setText(byId("replay-status"), `The frames did not come: ${error.message}`);
      return null;
    }
  }

  #showTime() {
    this.slider.value = String(this.time - this.began);
    const text = `${position(this.time - this.began)} of ${position(this.ended - this.began)}`;
    this.slider.setAttribute("aria-valuetext", text);
    setText(byId("replay-time"), text);
  }
}

/** A line of JSON, null if it is none: a recording may be damaged. */
function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    return null;
  }
}

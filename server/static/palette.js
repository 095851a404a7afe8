/** Colours: those of the theme as style.css has them, and the hue of each request. */

export const NUM_HUES = 12;
const MOST_KNOWN = 4000;

/** Gives each request a hue that it keeps, the least used one among those that run. */
export class Hues {
  constructor() {
    this.known = new Map();
  }

  /** @param {string} id @param {Iterable<{id: string}>} running */
  of(id, running = []) {
    let hue = this.known.get(id);
    if (hue === undefined) {
      const used = new Array(NUM_HUES).fill(0);
      for (const other of running) {
        const taken = other.id === id ? undefined : this.known.get(other.id);
        if (taken !== undefined) used[taken] += 1;
      }
      hue = used.indexOf(Math.min(...used));
      this.known.set(id, hue);
      if (this.known.size > MOST_KNOWN) this.known.delete(this.known.keys().next().value);
    }
    return hue;
  }
}

/** The colours of the theme that is shown, as style.css defines them. */
export function readTheme() {
  const probe = document.createElement("i");
  document.body.append(probe);
  const colour = (name) => {
    probe.style.setProperty("color", `var(${name})`);
    return hex(getComputedStyle(probe).color);
  };
  const theme = {
    surface: colour("--surface"), ink: colour("--ink"), muted: colour("--muted"), line: colour("--line"),
    accent: colour("--accent"), alarm: colour("--alarm"), unmapped: colour("--cell-unmapped"),
    free: colour("--cell-free"), cached: colour("--cell-cached"), draining: colour("--cell-draining"),
    inflight: colour("--cell-inflight"), inflightInk: colour("--cell-inflight-ink"), null: colour("--cell-null"),
    frame: colour("--frame"), flash: colour("--flash"), others: colour("--others"), weights: colour("--weights"),
    models: [0, 1, 2, 3].map((at) => colour(`--model-${at}`)),
    hues: Array.from({ length: NUM_HUES }, (_, hue) => colour(`--hue-${hue}`)),
  };
  probe.remove();
  return theme;
}

/** "rgb(r, g, b)" as "#rrggbb". @param {string} colour */
function hex(colour) {
  return `#${colour.match(/[\d.]+/g).slice(0, 3).map((part) => Math.round(Number(part)).toString(16).padStart(2, "0")).join("")}`;
}

/** "#rrggbb" as [red, green, blue]. @param {string} colour */
export function channels(colour) {
  const number = parseInt(colour.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

/** A colour between two, `share` of the second. @returns {[number, number, number]} */
export function mix(first, second, share) {
  const [a, b] = [channels(first), channels(second)];
  return a.map((value, at) => Math.round(value + (b[at] - value) * share));
}

/** @param {number[]} rgb */
export function css([red, green, blue], alpha = 1) {
  return alpha === 1 ? `rgb(${red} ${green} ${blue})` : `rgb(${red} ${green} ${blue} / ${alpha})`;
}

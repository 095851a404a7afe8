/** Numbers, sizes and times as people read them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

const NUMBERS = new Intl.NumberFormat("en-US");

/** @param {number} value */
export function count(value) {
  return NUMBERS.format(Math.round(value));
}

/** `1,536` bytes are "1.5 KiB". @param {number} bytes */
export function size(bytes) {
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = value >= 100 || unit === 0 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${bytes < 0 ? "−" : ""}${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** A duration: "12 ms", "3.4 s", "2:05 min". @param {number} seconds */
export function duration(seconds) {
  if (seconds < 0.001) return `${Math.max(0, seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
  return `${Math.floor(whole / 3600)}:${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} h`;
}

/** The time of day, of seconds since 1970. @param {number} time */
export function clock(time) {
  const date = new Date(time * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** A position in a recording: "1:07". @param {number} seconds */
export function position(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const minutes = Math.floor(whole / 60) % 60;
  const hours = Math.floor(whole / 3600);
  const tail = `${hours ? String(minutes).padStart(2, "0") : minutes}:${String(whole % 60).padStart(2, "0")}`;
  return hours ? `${hours}:${tail}` : tail;
}

/** "1 block", "2 blocks". @param {number} value @param {string} noun */
export function several(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** @param {number} share 0 .. 1 */
export function percent(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** A long id, shortened in the middle. @param {string} id */
export function short(id, most = 22) {
  return id.length <= most ? id : `${id.slice(0, most - 7)}…${id.slice(-6)}`;
}

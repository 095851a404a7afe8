/** The scheduler's decisions in plain words. Pure. */

import { count, duration, several, short } from "./format.js";

const WORDS = {
  wait: "waits", pass: "passes", preempt: "preempted", return: "returns", cut: "cut short", read: "from disk", "give up": "cache shrinks",
};

const OLD_STEPS = 50;

/** A word or two for the kind of a decision. @param {Object} decision */
export function kindInWords(decision) {
  return WORDS[decision.what] ?? decision.what;
}

/** The request of a decision as people know it. @param {Object} decision */
export function nameIn(decision) {
  return nameOf(decision.request_id ?? "", decision.label);
}

/** A request's name: its label, and of a further continuation of a prompt its id too. @param {string} id @param {string} label */
export function nameOf(id, label) {
  return label && /\.\d+$/.test(id) ? `${label} · ${id}` : label || id;
}

/**
 * Why a request waits, was preempted, and so on: a sentence that follows its name.
 * @param {Object} decision as of explain()
 * @returns {string}
 */
export function inWords(decision) {
  switch (decision.what) {
    case "wait":
      return waits(decision);
    case "pass":
      return `needs only ${several(decision.needed, "block")}, so it was admitted before ${others(decision.passed)}`;
    case "preempt":
      return preempted(decision);
    case "return":
      return `is admitted again: ${count(decision.found)} of its ${several(decision.had, "token")} were still cached`;
    case "cut":
      return `ended: it needs ${several(decision.needed, "block")}, and the pool may have ${count(decision.limit)}`;
    case "read":
      return `found ${several(decision.found, "token")} in memory and read ${count(decision.read)} from disk${decision.why && `: ${decision.why}`}`;
    case "give up":
      return gaveUp(decision);
    default:
      return decision.what;
  }
}

/**
 * As `inWords`, of a request that waits: its decision was made when it was first refused, and may be of long ago.
 * @param {Object} decision @param {number} step the newest one
 */
export function inWordsNow(decision, step) {
  return step - decision.step > OLD_STEPS ? `when it came: ${inWords(decision)}` : inWords(decision);
}

function waits({ needed, room, expected, usable, in_steps: inSteps }) {
  const needs = `needs ${several(needed, "block")}; ${count(room)} ${room === 1 ? "is" : "are"} free`;
  if (room < needed || expected === null || expected === undefined) return needs;
  return `${needs}, but with it the running requests are expected to need ${count(Math.round(expected))} of ${several(usable, "block")} `
    + `in about ${several(inSteps, "step")}: it waits so that none has to give up its blocks`;
}

function preempted({ blocks_won: won, tokens, chosen, swap_s: swap, compute_s: compute }) {
  const gave = `gave up its row and ${several(won, "block")} (${several(tokens, "token")})`;
  if (chosen === "swap") return `${gave}; swapped to the host in ${duration(swap)}, computing again takes ${duration(compute)}`;
  const instead = swap === null || swap === undefined ? "" : `, swapping ${duration(swap)}`;
  return `${gave}; computing them again takes ${duration(compute)}${instead}`;
}

function gaveUp({ demoted, evicted, swap_s: swap, compute_s: compute }) {
  const parts = [];
  if (evicted) parts.push(`${several(evicted, "cached block")} evicted`);
  if (demoted) parts.push(`${several(demoted, "cached block")} copied to the host`);
  const costs = [];
  if (swap) costs.push(`swap ${duration(swap)}`);
  if (compute) costs.push(`compute ${duration(compute)}`);
  return `${parts.join(", ") || "no blocks"}${costs.length ? `; a block costs: ${costs.join(", ")}` : ""}`;
}

function others(ids) {
  const shown = ids.slice(0, 2).map((id) => short(id, 16)).join(" and ");
  return ids.length > 2 ? `${shown} and ${ids.length - 2} more` : shown;
}

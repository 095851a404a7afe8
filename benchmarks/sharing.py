"""Goodput of several engines that share one device, simulated with the real policies: see shared_device.py.

    python -m benchmarks.sharing [--json FILE] [--data DIR] [--mixes 4x8b,...] [--only static,leases,...]
                                 [--slices 5] [--tuning] [--seed 0]

Goodput is the share of requests within the SLO: the first token at most FIRST_S (2 s for agents) and three times the unloaded
prefill after the request came, and BETWEEN_S a token on average. The arrangements serve the same requests:

    static   each engine has an equal part of the KV memory
    best     of the splits in tenths (of the first kind of engine to the second), the one with the most requests in time
    first    one pool, first come first served: admission by fit alone, what no request uses goes back at once, 16,000 cached
             tokens an engine (the default of kvcached), no recalls
    pool     one pool without a broker: any idle block, cached or not, goes to the engine that needs it, without delay
    whole    each engine has all of the KV memory: no arrangement of one device reaches it when bursts coincide
    leases   pagetide: the real broker, with its headroom and band

KV memory is what weights, 0.5 GB of workspace for each engine, headroom and band leave of the card, the same in all
arrangements; each lease's minimum is a LEAST_PART of it. Prompts are cut to three quarters of an equal part, so that static
engines can serve them. Loads are those of public traces: Azure's chats and code (4x8b, 8x4b, 2x14b), Mooncake's conversations
(long), sessions of coding agents at their own pace (agents), and chats of many turns with lengths of Azure's (chats); with
`--data none` all of them are synthetic.

Slices that policies are tuned on (`--tuning`) and those that are reported are disjoint: of the Azure and Mooncake traces the
first and the other two thirds, of the sessions of agents the first 10 and the other 20.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.arguments import add_data, names_of, parser_of, whole
from benchmarks.figures import Figure, percentile, report
from benchmarks.load import BadTrace, Turn, agentic, azure, mooncake
from benchmarks.modelled_clock import H100, LLAMA_1B, LLAMA_8B, QWEN3_4B, QWEN3_14B, RTX_4090, Gpu, Model, Roofline
from benchmarks.shared_device import (
    BLOCK_SIZE,
    Clock,
    ModelledBroker,
    ModelledDevice,
    ModelledEngine,
    PooledMemory,
    Served,
    Shape,
    SharedPool,
    lease_memory,
)
from pagetide.allocator.lease_policy import Rules

REACHED = 0.6  # of the card's peaks
WORKSPACE_BYTES = 500_000_000  # of each engine
FIRST_S, BETWEEN_S = 1.0, 0.1
MOST_OUTPUT = 1_000
TRACE_S = 1_200.0
TUNING_S = 400.0  # of the Azure and Mooncake traces
TUNING_SESSIONS = 10  # of the agents' 30
LEAST_PART = 64  # each lease's minimum of KV is this part of all
FIRST_CACHED_TOKENS = 16_000
CHAT_TURNS, PAUSE_S = 8, 25.0
GOALS = {  # of the leases' goodput against another arrangement's
    **{(mix, "static"): 1.35 for mix in ("4x8b", "8x4b", "2x14b")},
    **{(mix, other): 0.97 for mix in ("4x8b", "8x4b", "2x14b") for other in ("first", "pool")},
    **{(mix, "first"): 0.96 for mix in ("4x8b-over", "8x4b-over")},
    ("agents", "static"): 1.0, ("chats", "static"): 1.0, ("long", "static"): 0.97,
}  # fmt: skip
ARRANGEMENTS = ("static", "best", "first", "pool", "whole", "leases")


@dataclass(frozen=True, slots=True)
class Mix:
    """Engines on one card, and their load."""

    gpu: Gpu
    capacity_bytes: int
    model: Model
    kinds: tuple[str, ...]  # of each engine's requests: chat, code, sessions, agents
    rate: float  # requests a second, of all engines together
    seconds: float
    first_s: float = FIRST_S

    @property
    def base_bytes(self) -> int:
        """Bytes of an engine besides KV."""
        return self.model.weights_bytes + WORKSPACE_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV, of all engines together."""
        rules = Rules.of(self.capacity_bytes)
        return self.capacity_bytes - rules.headroom_bytes - rules.band_bytes - len(self.kinds) * self.base_bytes

    @property
    def share_tokens(self) -> int:
        """Tokens of an equal part of the KV memory."""
        return self.kv_bytes // len(self.kinds) // self.model.kv_bytes


H100_BYTES, RTX_4090_BYTES = 80_000_000_000, 24_000_000_000
_FOUR, _EIGHT = ("chat", "code") * 2, ("chat", "code") * 4
MIXES = {
    "4x8b": Mix(H100, H100_BYTES, LLAMA_8B, _FOUR, 4.6, 100),
    "4x8b-over": Mix(H100, H100_BYTES, LLAMA_8B, _FOUR, 5.4, 100),
    "8x4b": Mix(H100, H100_BYTES, QWEN3_4B, _EIGHT, 3.6, 100),
    "8x4b-over": Mix(H100, H100_BYTES, QWEN3_4B, _EIGHT, 4.5, 100),
    "2x14b": Mix(H100, H100_BYTES, QWEN3_14B, ("chat", "code"), 4.6, 100),
    "agents": Mix(RTX_4090, RTX_4090_BYTES, LLAMA_1B, ("agents", "agents"), 0.32, 1_600, first_s=2.0),
    "chats": Mix(H100, H100_BYTES, LLAMA_8B, ("turns", "turns"), 2.4, 200),
    "long": Mix(H100, H100_BYTES, LLAMA_8B, ("sessions", "sessions"), 0.8, 390),
}


# ---- load ---------------------------------------------------------------------------------------


def load_of(mix: Mix, folder: Path | None, number: int, tuning: bool) -> list[Served]:
    """The requests of slice `number`, in order of time."""
    if mix.kinds[0] == "agents":
        served = _sessions(mix, folder, number, tuning)
    elif mix.kinds[0] == "turns":
        served = _chats(mix, _trace(folder, "chat"), number, tuning)
    else:
        served = []
        for engine, kind in enumerate(mix.kinds):
            served += _window(mix, _trace(folder, kind), engine, number, tuning)
    return sorted(served, key=lambda one: one.due)


def _trace(folder: Path | None, kind: str) -> list[Turn]:
    if folder is None:
        return _synthetic(kind)
    return mooncake(folder).turns if kind == "sessions" else azure(folder, {"chat": "conv"}.get(kind, "code")).turns


def _synthetic(kind: str) -> list[Turn]:
    """Turns in TRACE_S: Poisson, log-normal lengths (sigma 0.8). Chats 5 a second, prompts around 800 tokens and outputs around
    150; code 3 a second, 1,600 and 15; sessions 3 a second, 8,000 and 300, in 1,200 conversations of prompts that begin alike.
    """
    per_second, prompt, output = {"chat": (5, 800, 150), "code": (3, 1_600, 15), "sessions": (3, 8_000, 300)}[kind]
    rng, at, turns = random.Random(kind), 0.0, []
    while (at := at + rng.expovariate(per_second)) < TRACE_S:
        tokens, more = int(rng.lognormvariate(math.log(prompt), 0.8)) + 1, int(rng.lognormvariate(math.log(output), 0.8)) + 1
        head = (1 + rng.randrange(1_200)) << 20 if kind == "sessions" else 0
        ids = head + np.arange(tokens // 512) if kind == "sessions" else np.empty(0, np.int64)
        turns.append(Turn(at, tokens, more, ids))
    return turns


def _window(mix: Mix, turns: list[Turn], engine: int, number: int, tuning: bool) -> list[Served]:
    """Of a window of the trace as many requests, evenly thinned, as the rate asks for. Engines of a kind have other windows."""
    start, length = (0.0, TUNING_S) if tuning else (TUNING_S, TRACE_S - TUNING_S)
    peers = [i for i, kind in enumerate(mix.kinds) if kind == mix.kinds[engine]]
    place = peers.index(engine)
    count, longest = round(mix.rate * mix.seconds / len(mix.kinds)), mix.share_tokens * 3 // 4
    if mix.kinds[engine] == "sessions":
        at = start + number * 0.381966 % 1.0 * (length - mix.seconds)
        window = [turn for turn in turns if at <= turn.at_s < at + mix.seconds]
        heads = [int(turn.ids[min(1, len(turn.ids) - 1)]) * 40503 % 65536 / 65536 for turn in window]
        most = min(1.0, count * len(peers) / len(window))
        window = [turn for turn, head in zip(window, heads, strict=True) if place <= head / most * len(peers) < place + 1]
        count = len(window)
    else:
        at = start + (number * 0.381966 + place * 0.618034) % 1.0 * (length - mix.seconds)
        window = [turn for turn in turns if at <= turn.at_s < at + mix.seconds]
        count = min(len(window), count)
    return [
        Served(
            engine, turn.at_s - at, max(1, min(turn.prompt_tokens, longest)), min(turn.output_tokens, MOST_OUTPUT),
            _blocks(turn.ids, 512),
        )
        for turn in (window[int(i * len(window) / count)] for i in range(count))
    ]  # fmt: skip


def _sessions(mix: Mix, folder: Path | None, number: int, tuning: bool) -> list[Served]:
    """Sessions of agents, drawn with replacement, that start at random times; what of them falls into the slice.

    Each copy of a session has ids of its own. The rate is that of the sessions drawn, on average.
    """
    by_session: dict[int, list[Turn]] = {}
    for turn, session in agents(folder):
        by_session.setdefault(session, []).append(turn)
    names = sorted(by_session)
    names = names[:TUNING_SESSIONS] if tuning else names[TUNING_SESSIONS:]
    longest_s = max(by_session[name][-1].at_s - by_session[name][0].at_s for name in names)
    starts = mix.rate / len(mix.kinds) / (sum(len(by_session[name]) for name in names) / len(names))  # a second and engine
    rng = random.Random(1_000 * tuning + number)
    served: list[Served] = []
    longest = mix.share_tokens * 3 // 4
    copies = itertools.count(1)
    for engine in range(len(mix.kinds)):
        at = -longest_s
        while (at := at + rng.expovariate(starts)) < mix.seconds:
            turns, copy = by_session[rng.choice(names)], next(copies)
            for turn in turns:
                if 0 <= (due := at + turn.at_s - turns[0].at_s) < mix.seconds:
                    tokens, output = min(turn.prompt_tokens, longest), min(turn.output_tokens, MOST_OUTPUT)
                    served.append(Served(engine, due, tokens, output, _blocks(turn.ids, 64) + (copy << 32)))
    return served


def _chats(mix: Mix, turns: list[Turn], number: int, tuning: bool) -> list[Served]:
    """Chats that start at random times: CHAT_TURNS turns on average (geometric), pauses around PAUSE_S (log-normal), each
    prompt the chat so far. Lengths of questions and answers are those of random turns of the trace.
    """
    rng = random.Random(2_000 + 1_000 * tuning + number)
    turns = [turn for turn in turns if (turn.at_s < TUNING_S) == tuning]
    served: list[Served] = []
    ids = itertools.count(0, 1 << 20)
    for engine in range(len(mix.kinds)):
        at = -20 * PAUSE_S
        while (at := at + rng.expovariate(mix.rate / len(mix.kinds) / CHAT_TURNS)) < mix.seconds:
            first, due, tokens = next(ids), at, 0
            while due < mix.seconds:
                turn = rng.choice(turns)
                output = min(turn.output_tokens, MOST_OUTPUT)
                if (tokens := tokens + turn.prompt_tokens) > mix.share_tokens * 3 // 4:
                    break
                if due >= 0:
                    served.append(Served(engine, due, tokens, output, first + np.arange(tokens // BLOCK_SIZE)))
                tokens += output
                due += rng.lognormvariate(math.log(PAUSE_S), 0.8)
                if rng.random() < 1 / CHAT_TURNS:
                    break
    return served


def agents(folder: Path | None) -> list[tuple[Turn, int]]:
    """The turns of the agents, each with its session; without a folder 30 synthetic sessions of 40 turns: prompts from 15,000
    tokens on that grow by 2,000 (exponential), outputs of 300 (log-normal), pauses of 30 s (exponential).
    """
    if folder is not None:
        lines = (folder / "agentic_sessions.jsonl").read_text("utf-8").splitlines()
        sessions = sorted((row["timestamp"] / 1e3, row["session"]) for row in map(json.loads, lines))
        return [(turn, session) for turn, (_, session) in zip(agentic(folder).turns, sessions, strict=True)]
    rng, turns = random.Random("agents"), []
    for session in range(30):
        at, tokens = 0.0, 15_000
        for _ in range(40):
            ids = (session << 20) + np.arange(tokens // BLOCK_SIZE)
            turns.append((Turn(at, tokens, 1 + int(rng.lognormvariate(math.log(300), 0.7)), ids), session))
            at, tokens = at + rng.expovariate(1 / 30), tokens + 1 + int(rng.expovariate(1 / 2_000))
    return turns


def _blocks(ids: np.ndarray, tokens: int) -> np.ndarray:
    """Ids of blocks of BLOCK_SIZE tokens, of ids that stand for `tokens` each."""
    per = tokens // BLOCK_SIZE
    return (ids[:, None] * per + np.arange(per)).ravel() if per > 1 else ids


# ---- arrangements -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceOutcome:
    """What an arrangement gave for one slice."""

    in_time: float  # share of the requests
    first_s: float  # p95; infinite if requests have not ended
    hits: float  # share of the prompt tokens that were found
    hits_each: tuple[float, ...]
    preemptions: int
    recalls: int
    cpu_s: float


def run(mix: Mix, load: Sequence[Served], arrangement: str, split: float | None = None) -> SliceOutcome:
    """Serve a copy of `load` in one arrangement. `split`: the first kind's share under static."""
    began = time.process_time()
    load = [replace(one) for one in load]
    clock, roofline = Clock(), Roofline(mix.gpu, mix.model, REACHED)
    shape = Shape.of(roofline)
    longest = max(one.prompt_tokens + one.output_tokens for one in load)
    total = mix.kv_bytes // shape.extent_bytes
    equal = total // len(mix.kinds)
    pooled = arrangement in ("first", "pool", "leases")
    cached = FIRST_CACHED_TOKENS if any(len(one.ids) for one in load) else 0
    engines = []
    for number, kind in enumerate(mix.kinds):
        share = equal
        if split is not None:
            one = kind == mix.kinds[0] if len(set(mix.kinds)) > 1 else number == 0
            share = int(total * (split if one else 1 - split) / max(1, len(mix.kinds) // 2))
        size = total if pooled or arrangement == "whole" else share
        least = max(1, total // LEAST_PART)
        mapped = least if arrangement == "leases" else 1 if pooled else size
        engines.append(
            ModelledEngine(
                number,
                shape,
                size,
                mapped,
                longest + 64,
                forecast=arrangement not in ("first", "pool"),
                max_cached_tokens=cached if arrangement == "first" else None,
            )
        )
    device, broker = ModelledDevice(clock, engines), None
    if arrangement == "leases":
        broker = ModelledBroker(clock, mix.capacity_bytes, Rules.of(mix.capacity_bytes))
        broker.device = device
        for engine in engines:
            engine.memory = lease_memory(engine, broker, base_bytes=mix.base_bytes, min_extents=least)
    elif pooled:
        shared = SharedPool(mix.kv_bytes, evicts_others=arrangement == "pool")
        for engine in engines:
            engine.memory = PooledMemory(engine, shared, gives_back=arrangement == "first")
    device.serve(load)
    good = [_in_time(mix, roofline, one) for one in load]
    stats = [engine.scheduler.stats for engine in engines]
    waits = [one.first - one.due if one.first is not None else float("inf") for one in load]
    return SliceOutcome(
        sum(good) / len(good), percentile(waits, 0.95),
        sum(s.cached_prompt_tokens for s in stats) / max(1, sum(s.prompt_tokens for s in stats)),
        tuple(s.cached_prompt_tokens / max(1, s.prompt_tokens) for s in stats),
        sum(s.preemptions for s in stats), broker.recalls if broker else 0, time.process_time() - began,
    )  # fmt: skip


def best_split(mix: Mix, load: Sequence[Served]) -> SliceOutcome:
    """The best of the splits in tenths, in hindsight."""
    return max((run(mix, load, "static", tenths / 10) for tenths in range(3, 8)), key=lambda outcome: outcome.in_time)


def _in_time(mix: Mix, roofline: Roofline, one: Served) -> bool:
    if one.first is None or one.last is None:
        return False
    tokens = one.prompt_tokens
    unloaded_s = roofline.step_s(tokens, 1, tokens * tokens // 2, 0)
    between = (one.last - one.first) / max(1, one.output_tokens - 1)
    return one.first - one.due <= mix.first_s + 3 * unloaded_s and between <= BETWEEN_S


# ---- figures ------------------------------------------------------------------------------------


def figures(outcomes: dict[str, dict[str, list[SliceOutcome]]]) -> list[Figure]:
    """Of each mix and arrangement the mean share in time; and the leases' against the others', paired by slice."""
    table: list[Figure] = []
    for name, arrangements in outcomes.items():
        for arrangement, some in arrangements.items():
            in_time = [one.in_time for one in some]
            table.append(Figure(f"{name} {arrangement}: in time", statistics.mean(in_time), "", samples=in_time))
            table.append(Figure(f"{name} {arrangement}: first token, p95", statistics.median(one.first_s for one in some), "s"))
            table.append(Figure(f"{name} {arrangement}: prompt tokens found", 100 * statistics.mean(o.hits for o in some), "%"))
        for other in arrangements.keys() - {"leases"} if "leases" in arrangements else ():
            ratios = [
                mine.in_time / max(theirs.in_time, 1e-9)
                for mine, theirs in zip(arrangements["leases"], arrangements[other], strict=True)
            ]
            goal = GOALS.get((name, other))
            table.append(Figure(f"{name} leases / {other}: mean", statistics.mean(ratios), "x", goal, "higher", samples=ratios))
            table.append(Figure(f"{name} leases / {other}: 95 % interval, +-", _interval(ratios), "x"))
            table.append(Figure(f"{name} leases / {other}: worst slice", min(ratios), "x"))
    return table


def _interval(samples: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t; infinite for one sample."""
    if len(samples) < 2:
        return math.inf
    t = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}.get(len(samples) - 1, 2.0)
    return t * statistics.stdev(samples) / math.sqrt(len(samples))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_data(parser, "the traces", "synthetic lengths and sessions")
    parser.add_argument("--mixes", type=names_of(list(MIXES), "mix"), default=list(MIXES), metavar="NAMES")
    parser.add_argument("--only", type=names_of(ARRANGEMENTS, "arrangement"), default=list(ARRANGEMENTS), metavar="NAMES")
    parser.add_argument("--slices", type=whole, default=5, help="of the traces, at different offsets (%(default)s)")
    parser.add_argument("--tuning", action="store_true", help="the slices that policies are tuned on, not those for reports")
    args = parser.parse_args(argv)
    logging.getLogger("pagetide").setLevel(logging.ERROR)  # overloads leave recalls overdue
    outcomes: dict[str, dict[str, list[SliceOutcome]]] = {}
    for name in args.mixes:
        mix = MIXES[name]
        outcomes[name] = {arrangement: [] for arrangement in args.only}
        for number in range(args.slices):
            try:
                load = load_of(mix, args.data, args.seed + number, args.tuning)
            except BadTrace as error:
                parser.error(str(error))
            for arrangement, some in outcomes[name].items():
                some.append(best_split(mix, load) if arrangement == "best" else run(mix, load, arrangement))
                print(f"  {name} slice {number}, {len(load)} requests, {arrangement}: {some[-1]}", flush=True)
    report("sharing: engines on one device, simulated", figures(outcomes), args.seed, args.json)


if __name__ == "__main__":
    main()

"""Memory, goodput and prefix hits of a model with sliding windows: groups of layers share one pool of equal pages.

python -m benchmarks.windows [--data DIR] [--only memory,mooncake,azure,turns] [--requests N] [--json FILE] [--seed 0]

The model has the shape of Gemma 3 4B: 34 layers, 29 of which read the last 1,024 tokens only; 4 KV heads of 256 in bfloat16,
blocks of 16 tokens. A page holds 5 layers: a sequence has 1 table of full layers and 6 tables of windows.

memory   one sequence of 32,768 tokens in the cache manager, its prompt computed in chunks, against the layer-tokens that it
         needs; and how many of them a pool holds, against one group (all layers keep all tokens)
traces   in the modelled clock of benchmarks.replay, with a pool so small that requests wait:
         "mooncake" and "azure" are conversations; "turns" alternates between stretches of both

What is compared with the shared pool, in the same bytes:

    one group    all layers keep all tokens, in blocks of 34 layers
    static split a share r of the pages is for full layers, the rest for windows. No second manager computes it, it is bounded
                 from above: at r, its goodput is at most the lower of two replays, one in which only full layers take pages
                 and one in which only windows do. The bound is that of the best r, chosen with hindsight for each load,
                 and, over all loads, that of the best r for all of them

Goodput is the share of requests with a first token and tokens in time. "In time" is 5 times what 90 % of the requests take at
a twentieth of the load. The speeds of the loads are such that the shared pool serves about 90 % in time. The clock counts
attention of all layers over all tokens, whatever the arrangement: the model's windows would make all replays faster.

The Mooncake trace names prefixes in units of 512 tokens and cannot say that a turn goes on behind the last, partial unit of
the turn before it. "Whole ids" are its prompts without that unit, so that turns do go on where a prompt ends.

Without DIR the traces are synthetic: sessions of many turns, and short prompts without a common prefix.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import Gemma3TextConfig

from benchmarks.arguments import add_data, whole
from benchmarks.figures import Figure, report
from benchmarks.replay_clock import GPUS, MODELS, Roofline
from benchmarks.replay_run import PoolSample, ReplayOutcome, ReplaySettings, replay, settings_for
from benchmarks.replay_traces import FILES, BadTrace, Trace, Turn, synthetic
from pagetide.cache.geometry import Geometry
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_index import NO_HIT

MODEL = MODELS["gemma-3-4b"]
BLOCK_SIZE, WINDOW = 16, 1_024
CONTEXT, DECODED, CHUNK = 32_768, 256, 8_192  # tokens
MEMORY_POOL_BYTES = 16e9
RATIOS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.8)  # of the pages, for full layers
UNLOADED = 20  # times as slow
UNLOADED_REQUESTS = 200
SLACK = 5.0
STRETCH_S = 20.0  # of one trace, when both take turns
PARTS = ("memory", "mooncake", "azure", "turns")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Groups of layers, and the bytes of a block."""

    groups: tuple[LayerGroup, ...]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """A trace, and the device that is too small for it."""

    trace: Trace
    speed: float  # of arrivals, against the source
    pool_bytes: float
    gpus: int  # as one
    cut: Trace | None = None  # the same, with prompts of whole ids


def geometry(windows: bool) -> Geometry:
    """Of the model, with its windows or as if all layers read all tokens."""
    config = Gemma3TextConfig(
        num_hidden_layers=MODEL.layers, hidden_size=MODEL.hidden, intermediate_size=MODEL.ffn, head_dim=MODEL.head_dim,
        num_attention_heads=MODEL.heads, num_key_value_heads=MODEL.kv_heads, vocab_size=MODEL.vocab, sliding_window=WINDOW,
        layer_types=None if windows else ["full_attention"] * MODEL.layers,
    )  # fmt: skip
    return Geometry.from_config(config, block_size=BLOCK_SIZE, dtype="bfloat16")


def arrangement(windows: bool) -> Arrangement:
    """The groups of the model, with its windows or without."""
    shape = geometry(windows)
    return Arrangement(shape.groups, shape.block_stride)


# -- memory ----------------------------------------------------------------------------------------------------------


def memory(context: int, pool_bytes: float) -> list[Figure]:
    """What sequences of `context` tokens hold in a pool of `pool_bytes`."""
    of_layers = [WINDOW if layer.window else context for layer in geometry(True).layers]
    needed = sum(min(context, tokens) for tokens in of_layers) * MODEL.kv_bytes // MODEL.layers
    (held, count), (held_by_all, count_by_all) = (
        filled(arrangement(windows), context, pool_bytes) for windows in (True, False)
    )
    at = f"at {context:,} tokens"
    return [
        Figure(f"KV bytes of a sequence {at}, of those needed", held / needed, "x", 1.05),
        Figure(f"KV bytes of a sequence {at}, one group / windows", held_by_all / held, "x"),
        Figure(f"sequences {at} in {pool_bytes / 1e9:g} GB, windows", count, "sequences"),
        Figure(f"sequences {at} in {pool_bytes / 1e9:g} GB, one group", count_by_all, "sequences"),
        Figure(f"sequences {at}, windows / one group", count / max(1, count_by_all), "x", 4.0, "higher"),
    ]


def filled(by: Arrangement, context: int, pool_bytes: float) -> tuple[int, int]:
    """(bytes that the first sequence holds, sequences that the pool holds)."""
    num_blocks = int(pool_bytes // by.block_bytes)
    most = num_blocks * BLOCK_SIZE // min(context, WINDOW) + 1
    cache = CacheManager(num_blocks, BLOCK_SIZE, most, context + 1, groups=by.groups)
    held, row = 0, 0
    while computed(cache, row, context):
        held = held or int(cache.row_tables.held_blocks(np.array([row]))[0])
        row += 1
    cache.check_invariants()
    return held * by.block_bytes, row


def computed(cache: CacheManager, row: int, context: int) -> bool:
    """Compute a sequence of `context` tokens in `row`: a prompt in chunks, then decodes. False if blocks are short."""
    rows, prompt = np.array([row]), context - min(DECODED, context // 2)
    if cache.admit(row, prompt, NO_HIT) is None:
        return False
    done = 0
    while done < prompt:
        cache.release_passed(rows, np.array([done]))
        reached, _ = cache.reach(row, min(done + CHUNK, prompt), cache.pool.available)
        if reached == done:
            return False
        done = reached
    for known in range(prompt + 1, context + 1):
        if len(cache.row_tables.short(rows, np.array([known]))):
            more = (
                cache.advance(rows, np.array([known - 1]))
                if cache.row_tables.has_windows
                else cache.extend(rows, np.array([known]))
            )
            if more is None:
                return False
    return True


# -- traces ----------------------------------------------------------------------------------------------------------


def settings(trace: Trace, load: TraceLoad, by: Arrangement, share: float = 1.0) -> ReplaySettings:
    """`share` of the load's pool, arranged so."""
    blocks = max(2, int(load.pool_bytes * share // by.block_bytes))
    plain = settings_for(trace, Roofline(GPUS["h200"], MODEL, load.gpus), BLOCK_SIZE)
    return replace(plain, num_blocks=blocks, groups=by.groups, page_bytes=by.block_bytes)


def bounds_of(load: TraceLoad) -> tuple[float, float]:
    """Seconds until the first token and between tokens that are in time."""
    trace = load.trace.taken(UNLOADED_REQUESTS, load.speed / UNLOADED)
    unloaded = replay(trace, settings(trace, load, arrangement(True)))
    ttft_s, tpot_s = (float(np.nanpercentile(of, 90)) for of in (unloaded.ttft_s, unloaded.tpot_s))
    return SLACK * ttft_s, SLACK * tpot_s


@dataclass(frozen=True, slots=True)
class Goodputs:
    """Of one load: of the shared pool, and at most of a static split at each of RATIOS."""

    shared: float
    split: tuple[float, ...]


def figures_of(name: str, load: TraceLoad) -> tuple[list[Figure], Goodputs]:
    """Figures of one load."""
    ttft_s, tpot_s = bounds_of(load)
    trace = load.trace.taken(None, load.speed)
    shared, by_all = (replay(trace, settings(trace, load, arrangement(windows))) for windows in (True, False))
    print(
        f"\n{name}: {len(trace.turns):,} requests in {trace.turns[-1].at_s:,.0f} s, a pool of {load.pool_bytes / 1e9:g} GB, "
        f"{load.gpus} x {GPUS['h200'].name}; in time: first token in {ttft_s:.2f} s, others every {1e3 * tpot_s:.1f} ms"
    )
    splits = []
    for ratio in RATIOS:
        full, windows = split_at(trace, load, ratio)
        good = [outcome.goodput(ttft_s, tpot_s) for outcome in (full, windows)]
        splits.append(min(good))
        print(
            f"  {ratio:.0%} for full layers: at most {good[0]:.3f} by these, {good[1]:.3f} by the windows", flush=True
        )
    goodputs = Goodputs(shared.goodput(ttft_s, tpot_s), tuple(splits))
    figures = [
        *of_memory(name, shared.samples),
        Figure(f"{name}: goodput, shared pool", goodputs.shared, "share"),
        Figure(f"{name}: goodput, bound of a static split", max(splits), "share"),
        Figure(f"{name}: goodput, one group", by_all.goodput(ttft_s, tpot_s), "share"),
        Figure(f"{name}: requests refused, one group", by_all.refused, "requests"),
        Figure(
            f"{name}: goodput, shared / bound of a static split",
            over(goodputs.shared, max(splits)),
            "x",
            1.15,
            "higher",
        ),
        *of_hits(name, load, shared, by_all),
    ]
    return figures, goodputs


def of_all_loads(goodputs: Sequence[Goodputs]) -> list[Figure]:
    """Against a static split that has one ratio for all loads: the best one for the mean of their goodput."""
    shared = float(np.mean([of.shared for of in goodputs]))
    split = float(np.max(np.mean([of.split for of in goodputs], axis=0)))
    label = "all loads: mean goodput"
    return [
        Figure(f"{label}, shared pool", shared, "share"),
        Figure(f"{label}, bound of a static split with one ratio for all", split, "share"),
        Figure(f"{label}, shared / bound of a static split with one ratio for all", over(shared, split), "x"),
    ]


def over(one: float, other: float) -> float:
    """One goodput in terms of another, which may be 0."""
    return one / max(other, 1e-9)


def split_at(trace: Trace, load: TraceLoad, ratio: float) -> tuple[ReplayOutcome, ReplayOutcome]:
    """Two replays: only full layers take pages, in `ratio` of them; only windows do, in the rest."""
    by = arrangement(True)
    full = Arrangement(tuple(group for group in by.groups if group.window is None), by.block_bytes)
    windows = Arrangement(tuple(group for group in by.groups if group.window is not None), by.block_bytes)
    return replay(trace, settings(trace, load, full, ratio)), replay(trace, settings(trace, load, windows, 1 - ratio))


def of_memory(name: str, samples: Sequence[PoolSample]) -> list[Figure]:
    """What the pool is used for while requests wait."""
    waiting = [sample for sample in samples if sample.waiting]
    figures = [Figure(f"{name}: samples in which requests wait", 100 * len(waiting) / max(1, len(samples)), "%")]
    if waiting:
        live, used = (
            np.array(of)
            for of in zip(*((s.live / s.usable, (s.live + s.cached) / s.usable) for s in waiting), strict=True)
        )
        label = f"{name}: of the blocks, while requests wait"
        figures += [
            Figure(f"{label}, needed or findable, median", float(np.median(used)), "share", 0.95, "higher"),
            Figure(f"{label}, needed or findable, 5th percentile", float(np.percentile(used, 5)), "share"),
            Figure(f"{label}, needed, median", float(np.median(live)), "share"),
        ]
    return figures


def of_hits(name: str, load: TraceLoad, shared: ReplayOutcome, by_all: ReplayOutcome) -> list[Figure]:
    """Prefix hits, where the load has some."""
    pairs = {"prefix hit tokens": (shared, by_all)}
    if load.cut is not None:
        trace = load.cut.taken(None, load.speed)
        cut = [replay(trace, settings(trace, load, arrangement(windows))) for windows in (True, False)]
        pairs["prefix hit tokens, whole ids"] = (cut[0], cut[1])
    figures = []
    for label, pair in pairs.items():
        hits = [outcome.counters.hit_tokens for outcome in pair]
        if hits[1]:
            figures.append(Figure(f"{name}: {label}, shared pool / one group", hits[0] / hits[1], "x", 1.0, "higher"))
            figures.append(Figure(f"{name}: {label}, shared pool", hits[0], "tokens"))
    return figures


def loads(data: Path | None, num_requests: int | None, seed: int) -> dict[str, Callable[[], TraceLoad]]:
    """By name, what makes each load. Sizes and speeds are those of the module's docstring."""

    def mooncake() -> Trace:
        return FILES["mooncake"](data) if data else synthetic(rate=3.0, seed=seed)

    def azure() -> Trace:
        return FILES["azure-conv"](data) if data else short(seed)

    def first(trace: Trace, num: int) -> Trace:
        return trace.taken(num_requests or num, 1.0)

    def with_prefixes() -> TraceLoad:
        trace = first(mooncake(), 600)
        return TraceLoad(trace, 1.75, 8e9, 4, whole_ids(trace))

    return {
        "mooncake": with_prefixes,
        "azure": lambda: TraceLoad(first(azure(), 1_000), 2.2, 2e9, 1),
        "turns": lambda: TraceLoad(first(in_turns(mooncake(), azure(), 4.0), 1_200), 1.8, 4e9, 4),
    }


def whole_ids(trace: Trace) -> Trace:
    """`trace` without the last, partial id of prompts."""
    unit = trace.id_tokens
    turns = [replace(turn, prompt_tokens=max(unit, turn.prompt_tokens // unit * unit)) for turn in trace.turns]
    return Trace(f"{trace.source}, prompts of whole ids", unit, turns)


def in_turns(first: Trace, second: Trace, speed: float) -> Trace:
    """Stretches of both, in turns; the second one is `speed` times as fast."""
    turns: list[Turn] = []
    for number, trace in enumerate((first, second.taken(None, speed))):
        for turn in trace.turns:
            stretch, into_s = divmod(turn.at_s, STRETCH_S)
            at_s = (2 * stretch + number) * STRETCH_S + into_s
            turns.append(replace(turn, at_s=at_s, own_id=2 * turn.own_id + number))
    return Trace(
        f"{first.source} and {second.source} in turns", first.id_tokens, sorted(turns, key=lambda turn: turn.at_s)
    )


def short(seed: int, num_requests: int = 6_000, rate: float = 5.0) -> Trace:
    """A Poisson process of log-normal prompts (median 1,000 tokens, sigma 0.8) and outputs (median 200, sigma 0.7)."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    prompts = 1 + np.minimum(rng.lognormal(np.log(1_000), 0.8, num_requests), 16_000).astype(int)
    outputs = 2 + np.minimum(rng.lognormal(np.log(200), 0.7, num_requests), 2_000).astype(int)
    none = np.empty(0, np.int64)
    turns = [
        Turn(float(at), int(prompt), int(output), none, (1 << 29) + number)
        for number, (at, prompt, output) in enumerate(zip(at_s, prompts, outputs, strict=True))
    ]
    return Trace(f"synthetic: {short.__doc__}", 512, turns)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data(parser, "the traces", "synthetic ones")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--requests", type=whole, metavar="N", help="the first N of each trace only")
    parser.add_argument("--context", type=whole, default=CONTEXT, metavar="TOKENS", help="of a sequence in `memory`")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic traces")
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    figures = memory(args.context, MEMORY_POOL_BYTES) if "memory" in parts else []
    goodputs = []
    try:
        for name, make in loads(args.data, args.requests, args.seed).items():
            if name in parts:
                of_load, of_goodput = figures_of(name, make())
                figures += of_load
                goodputs.append(of_goodput)
    except BadTrace as error:
        raise SystemExit(f"windows: {error}") from None
    if len(goodputs) > 1:
        figures += of_all_loads(goodputs)
    report("Windows: groups of layers in one pool", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

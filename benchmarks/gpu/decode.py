"""The engine's decode steps: their time, compared with the bound by memory bandwidth, and the effect of each optimization.

Steps are timed from the return of one to the return of the next, while all rows decode. The bounded figures come first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.figures import Figure
from pagetide import LLM, SamplingParams
from pagetide.engine.execution.runner import ModelRunner

from .bandwidth import MEMORY
from .bench import Bench
from .profile import profiled
from .report import Item, Note, Unmeasured, bounded, unmeasured
from .steps import HOST, Step, watched

MANY, ONE, FIRST = "decode, many sequences: pagetide", "decode, one sequence: pagetide", "time to first token: pagetide"
CAPTURED = "CUDA graphs of decode steps"
LEAST_S = 8.0  # of the time box, for a measurement that no bound needs


@contextmanager
def engine(bench: Bench, **options: Any) -> Iterator[LLM]:
    """An LLM over the run's model, with the attention and the ways of stepping asked for."""
    device = str(bench.clock.device)
    asked = {"overlap": bench.overlap, "cuda_graphs": bench.cuda_graphs}
    options = {"kv_memory": bench.scale.kv_bytes, "max_step_tokens": 8192, "share": False, **asked, **options}
    if bench.attention is not None:
        options["attention"] = bench.attention
    with LLM(bench.model, device="cuda:0" if bench.clock.cuda else device, **options) as llm:
        yield llm
    bench.clean()


def greedy(new_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)


def measure(bench: Bench) -> Iterator[Item]:
    """Tokens a second of many sequences and of one, and the time to a first token; then what overlap and graphs are worth, what
    host and device do in a step, and a profile.
    """
    rows = bench.scale.rows
    with capturing(bench) as captured, engine(bench, prefix_caching=False) as llm:
        yield Note("the engine", _about(llm))
        seen: dict[int, list[Step]] = {}
        for num, name, key in [(rows, MANY, "rows_share"), (1, ONE, "one_share")]:
            yield from _rate(bench, llm, num, name, key, seen)
        yield from _first_token(bench, llm)
        yield from captured or [Unmeasured(CAPTURED, "none: they are off, or the engine's log says why")]
        yield Figure("... of them in use after these steps", len(llm.stats()["cuda_graphs"]), "count", better="higher")
        for num, steps in seen.items():
            yield from _ways(bench, llm, num, steps)
            yield from _host_and_device(num, steps)
        for num in (rows, 1):
            if bench.left_s < LEAST_S:
                yield Unmeasured(f"a decode step of {num} under the profiler", "no time left")
                continue
            few = bench.scale.few_tokens
            yield from profiled(bench, llm, num, few, partial(_generate, bench, llm, num, 3, few))


@contextmanager
def capturing(bench: Bench) -> Iterator[list[Item]]:
    """What it takes an engine that is built meanwhile to capture its decode steps."""
    items: list[Item] = []
    kind: Any = ModelRunner
    record = kind.record

    def noted(runner: ModelRunner, sizes: Any, how: Any) -> None:
        bench.clean()
        free, began = bench.clock.free_bytes(), time.perf_counter()
        try:
            record(runner, sizes, how)
        except Exception as error:
            items.append(Unmeasured(CAPTURED, f"{type(error).__name__}: {error}"))
            raise
        bench.clock.synchronize()
        took_s = time.perf_counter() - began
        bench.clean()
        items.append(Figure(CAPTURED, len(sizes), "count", better="higher"))
        items.append(Figure("... time to capture them, kernels compiled meanwhile", took_s, "s"))
        items.append(Figure("... memory that they took", (free - bench.clock.free_bytes()) / 1e6, "MB"))

    kind.record = noted
    try:
        yield items
    finally:
        kind.record = record


def _about(llm: LLM) -> tuple[str, ...]:
    stats = llm.stats()
    return (
        f"attention by {stats['attention']}, block size {stats['block_size']}",
        f"steps are {'' if stats['overlap'] else 'not '}begun ahead",
        f"CUDA graphs of {', '.join(map(str, stats['cuda_graphs'])) or 'no'} rows",
    )


def _generate(bench: Bench, llm: LLM, rows: int, seed: int, new_tokens: int | None = None) -> None:
    """Decode so many tokens of each row, halfway of which the rows are `context` long."""
    scale = bench.scale
    new_tokens = new_tokens or scale.new_tokens
    prompts = bench.prompts(rows, scale.context - new_tokens // 2, seed)
    llm.generate(prompts, greedy(new_tokens), progress=False)


def _rate(bench: Bench, llm: LLM, rows: int, name: str, key: str, seen: dict[int, list[Step]]) -> Iterator[Item]:
    scale = bench.scale
    _generate(bench, llm, rows, seed=1)  # compiles, tries the graphs, fills caches
    with watched(llm) as steps:
        _generate(bench, llm, rows, seed=2)
    full = steps.full(rows)
    if not full:
        yield unmeasured(key, "no two steps in a row decoded all sequences")
        return
    seen[rows] = full
    seconds = [step.took_s for step in full]
    mean = statistics.fmean(seconds)
    yield Figure(name, rows / mean, "tokens/s", better="higher", samples=[rows / s for s in seconds])
    yield Figure(f"... step, {rows} x {scale.context:,}", 1e3 * mean, "ms", samples=[1e3 * s for s in seconds])
    bandwidth = bench.known.get(MEMORY)
    if bandwidth is None:
        yield unmeasured(key, "the memory bandwidth is not known")
        return
    num_bytes = scale.weight_bytes_per_step + rows * scale.context * scale.kv_bytes_per_token
    least = num_bytes / (bandwidth * 1e9)
    yield Figure(f"... {num_bytes / 1e9:.1f} GB at the memory bandwidth", 1e3 * least, "ms")
    yield bounded(key, least / mean, [least / s for s in seconds])


def _first_token(bench: Bench, llm: LLM) -> Iterator[Item]:
    """From the call to the first token, of prompts that have nothing in common."""
    samples = []
    for seed in range(5):
        prompts = bench.prompts(1, bench.scale.prompt, 10 + seed)
        began = time.perf_counter()
        llm.generate(prompts, greedy(1), progress=False)
        samples.append(time.perf_counter() - began)
    samples = samples[1:]
    yield Figure(FIRST, 1e3 * statistics.median(samples), "ms", samples=[1e3 * s for s in samples])


def _host_and_device(rows: int, steps: list[Step]) -> Iterator[Item]:
    """What either does in a step, which takes as long as the slower one where steps are begun ahead."""
    device = [1e3 * step.device_s for step in steps]
    yield Figure(f"... {rows}: the device's time", statistics.median(device), "ms", samples=device)
    host = [1e3 * sum(step.host_s) for step in steps]
    yield Figure(f"... {rows}: the host's time", statistics.median(host), "ms", samples=host)
    for number, part in enumerate(HOST):
        each = [1e3 * step.host_s[number] for step in steps]
        yield Figure(f"... {rows}: of it to {part}", statistics.median(each), "ms")
    ahead = statistics.fmean(step.ahead for step in steps)
    yield Figure(f"... {rows}: share of steps that were begun ahead", ahead, "x", better="higher")


def _ways(bench: Bench, llm: LLM, rows: int, steps: list[Step]) -> Iterator[Item]:
    """Steps as they were, and without what the engine has; these of fewer tokens."""
    with llm.locked_engine() as parts:
        runner = parts.core.runner
    graphs, overlaps = runner.graphs is not None and bool(runner.graphs.sizes), runner.overlaps
    yield Figure(f"decode step of {rows}", 1e3 * statistics.fmean(step.took_s for step in steps), "ms")
    ways = [("without CUDA graphs", overlaps)] * graphs + [("without CUDA graphs and overlap", False)] * overlaps
    for way, overlap in ways:
        name = f"... {rows}: {way}"
        if bench.left_s < LEAST_S:
            yield Unmeasured(name, "no time left")
            continue
        with stripped(llm, overlap), watched(llm) as seen:
            _generate(bench, llm, rows, 4, bench.scale.few_tokens)
        samples = [1e3 * step.took_s for step in seen.full(rows)]
        if samples:
            yield Figure(name, statistics.fmean(samples), "ms", samples=samples)
        else:
            yield Unmeasured(name, "no two steps in a row decoded all sequences")


@contextmanager
def stripped(llm: LLM, overlap: bool) -> Iterator[None]:
    """Run an LLM without CUDA graphs, and with or without `overlap`, as if its engine had been built so.

    Only the caller uses the LLM meanwhile.
    """
    with llm.locked_engine() as parts:
        runner = parts.core.runner
    before = runner.graphs, runner.overlaps
    runner.graphs, runner.overlaps = None, overlap
    try:
        yield
    finally:
        runner.graphs, runner.overlaps = before

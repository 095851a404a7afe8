"""The engine's decode steps: their time, compared with the bound by memory bandwidth, and what host and device do in it.

Steps are timed from the return of one to the return of the next, while all rows decode. The bounded figures come first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.figures import Figure
from pagetide import LLM, SamplingParams

from .bandwidth import MEMORY
from .bench import Bench
from .parts import Item, Note, bounded, unmeasured
from .steps import HOST, Step, watched

MANY, ONE, FIRST = "decode, many sequences: pagetide", "decode, one sequence: pagetide", "time to first token: pagetide"


@contextmanager
def engine(bench: Bench, **options: Any) -> Iterator[LLM]:
    """An LLM over the run's model, with the attention and the ways of stepping asked for."""
    device = str(bench.clock.device)
    asked = {"overlap": bench.overlap, "cuda_graphs": bench.cuda_graphs}
    options = {"kv_memory": bench.scale.kv_bytes, "max_step_tokens": 8192, "share": False, **asked, **options}
    if bench.attention is not None:
        options["attention"] = bench.attention
    with LLM(bench.saved_model, device="cuda:0" if bench.clock.cuda else device, **options) as llm:
        yield llm
    bench.clean()


def greedy(new_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)


def measure(bench: Bench) -> Iterator[Item]:
    """Tokens a second of many sequences and of one, and the time to a first token; then what host and device do in a step."""
    rows = bench.scale.rows
    with engine(bench, prefix_caching=False) as llm:
        yield Note("the engine", _about(llm))
        seen: dict[int, list[Step]] = {}
        for num, name, key in [(rows, MANY, "rows_share"), (1, ONE, "one_share")]:
            yield from _rate(bench, llm, num, name, key, seen)
        yield from _first_token(bench, llm)
        yield Figure("CUDA graphs in use after these steps", len(llm.stats()["cuda_graphs"]), "count", better="higher")
        for num, steps in seen.items():
            yield from _host_and_device(num, steps)


def _about(llm: LLM) -> tuple[str, ...]:
    stats = llm.stats()
    return (
        f"attention by {stats['attention']}, block size {stats['block_size']}",
        f"steps are {'' if stats['overlap'] else 'not '}begun ahead",
        f"CUDA graphs of {', '.join(map(str, stats['cuda_graphs'])) or 'no'} rows",
    )


def _generate(bench: Bench, llm: LLM, rows: int, seed: int) -> None:
    """Decode `new_tokens` of each row, halfway of which the rows are `context` long."""
    scale = bench.scale
    prompts = bench.prompts(rows, scale.context - scale.new_tokens // 2, seed)
    llm.generate(prompts, greedy(scale.new_tokens), progress=False)


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

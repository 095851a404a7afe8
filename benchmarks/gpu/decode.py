"""The engine's decode steps: how long they take, against what the memory bandwidth allows, and where their time goes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.figures import Figure
from pagetide import LLM, SamplingParams

from .bandwidth import MEMORY
from .bench import Bench
from .report import Item, Note, bounded, unmeasured

MANY, ONE, FIRST = "decode, many sequences: pagetide", "decode, one sequence: pagetide", "time to first token: pagetide"
PROFILED_STEPS = 8
PARTS = {  # a kernel is of the first part that has a piece of its name
    "attention": ("_decode", "_merge", "_prefill", "_write", "flash", "fmha", "attention", "paged", "sdpa"),
    "linears": (
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "cublas",
        "splitk",
        "matmul",
        "aten::mm",
        "aten::addmm",
        "mkl",
        "linear",
    ),
    "copies": ("memcpy", "memset", "copy"),
}


@dataclass
class Steps:
    """The steps of an engine while it is watched: when each ended (time.perf_counter), and the tokens that it gave."""

    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    before: Callable[[int], None] | None = None  # told the number of steps in which all rows decoded so far

    def full(self, rows: int) -> list[float]:
        """Seconds of the steps that gave `rows` tokens each, and followed one that did."""
        pairs = zip(range(len(self.ended)), range(1, len(self.ended)), strict=False)
        return [self.ended[b] - self.ended[a] for a, b in pairs if self.tokens[a] == self.tokens[b] == rows]


@contextmanager
def watched(llm: LLM, rows: int = 0) -> Iterator[Steps]:
    """Note every step of the engine."""
    core: Any = llm._desk.engine.core  # type: ignore[union-attr]
    step, steps = core.step, Steps()

    def noted() -> Any:
        if steps.before is not None:
            steps.before(sum(count == rows for count in steps.tokens))
        steps.began.append(time.perf_counter())
        emissions = step()
        steps.ended.append(time.perf_counter())
        steps.tokens.append(len(emissions.tokens))
        return emissions

    core.step = noted
    try:
        yield steps
    finally:
        del core.step


@contextmanager
def engine(bench: Bench, **options: Any) -> Iterator[LLM]:
    """An LLM over the run's model, with the attention asked for."""
    device = str(bench.clock.device)
    options = {"kv_memory": bench.scale.kv_bytes, "max_step_tokens": 8192, "share": False, **options}
    if bench.attention is not None:
        options["attention"] = bench.attention
    with LLM(bench.model, device="cuda:0" if bench.clock.cuda else device, **options) as llm:
        yield llm
    bench.clean()


def greedy(new_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)


def measure(bench: Bench) -> Iterator[Item]:
    """Tokens a second of many sequences and of one, the time to a first token, and a profile of each."""
    scale = bench.scale
    with engine(bench, prefix_caching=False) as llm:
        yield Note("the engine", (f"attention by {llm.stats()['attention']}, block size {llm.stats()['block_size']}",))
        for rows, name, key in [(scale.rows, MANY, "rows_share"), (1, ONE, "one_share")]:
            yield from _rate(bench, llm, rows, name, key)
        yield from _first_token(bench, llm)
        for rows in (scale.rows, 1):
            yield from _profile(bench, llm, rows)


def _generate(bench: Bench, llm: LLM, rows: int, seed: int) -> None:
    scale = bench.scale
    prompts = bench.prompts(rows, scale.context - scale.new_tokens // 2, seed)
    llm.generate(prompts, greedy(scale.new_tokens), progress=False)


def _rate(bench: Bench, llm: LLM, rows: int, name: str, key: str) -> Iterator[Item]:
    scale = bench.scale
    _generate(bench, llm, rows, seed=1)  # compiles, captures, fills caches
    with watched(llm) as steps:
        _generate(bench, llm, rows, seed=2)
    seconds = steps.full(rows)
    if not seconds:
        yield unmeasured(key, "no two steps in a row decoded all sequences")
        return
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


def _profile(bench: Bench, llm: LLM, rows: int) -> Iterator[Item]:
    """Where the time of some decode steps goes, kernel by kernel; what is left of the steps is the host's."""
    cuda = bench.clock.cuda
    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])
    marks: list[float] = []
    most = min(PROFILED_STEPS, max(1, bench.scale.new_tokens // 3))

    def before(num_full: int) -> None:
        if num_full == 2 and not marks:
            bench.clock.synchronize()
            profiler.start()
            marks.append(time.perf_counter())
        elif num_full == 2 + most and len(marks) == 1:
            bench.clock.synchronize()
            marks.append(time.perf_counter())
            profiler.stop()

    with watched(llm, rows) as steps:
        steps.before = before
        _generate(bench, llm, rows, seed=3)
    if len(marks) != 2:
        if marks:
            profiler.stop()
        yield Note(f"a decode step of {rows}", ("no profile: too few steps decoded all sequences",))
        return
    spent: dict[str, float] = defaultdict(float)  # ms a step
    kernels = []
    for event in profiler.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        if micros <= 0:
            continue
        part = next(
            (part for part, pieces in PARTS.items() if any(p in event.key.lower() for p in pieces)),
            "rest of the device",
        )
        spent[part] += micros / 1e3 / most
        kernels.append((micros / 1e3 / most, event.count / most, part, event.key))
    whole = 1e3 * (marks[1] - marks[0]) / most
    spent["device idle" if cuda else "outside of operators"] = whole - sum(spent.values())
    title = f"a decode step of {rows} under the profiler"
    yield Figure(title, whole, "ms")
    for part, ms in sorted(spent.items(), key=lambda item: -item[1]):
        yield Figure(f"... {rows}: {part}", ms, "ms")
    yield Figure(f"... {rows}: kernels launched", sum(count for _, count, _, _ in kernels), "count")
    top = sorted(kernels, reverse=True)[:24]
    yield Note(
        title, tuple(f"{ms:8.3f} ms  {count:6.1f} x  {part:12.12s}  {name[:90]}" for ms, count, part, name in top)
    )

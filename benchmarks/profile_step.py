"""A profile of a step: linears, attention, the rest of the model, packing, sampling, bookkeeping, the loop."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure
from pagetide import LLM, SamplingParams

PRODUCTS = ("pagetide::linear", "mkldnn::_linear_pointwise", "aten::linear")  # operators


@contextmanager
def clocked(owner: Any, name: str, spent: dict[str, float]) -> Iterator[None]:
    """Add the time inside the method `owner.name` to `spent[name]`."""
    inner: Callable[..., Any] = getattr(owner, name)

    def clocked(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start

    setattr(owner, name, clocked)
    try:
        yield
    finally:
        delattr(owner, name)  # of the instance: the method of its class is there again


@contextmanager
def _hooked(model: torch.nn.Module, spent: dict[str, float]) -> Iterator[None]:
    """Add the time inside the model to `spent`, and that of its products with weights, whichever module asks for them."""
    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def after(*_: Any) -> None:
        spent["model"] += time.perf_counter() - began

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    spent["linears"] = sum(one.cpu_time_total for one in operators.key_averages() if one.key in PRODUCTS) / 1e6


def profile(folder: Path, dtype: str, inputs: list[list[int]], new_tokens: int) -> list[Figure]:
    """Share of the time of a whole `generate` by part. The clocks themselves cost a few percent."""
    spent: dict[str, float] = defaultdict(float)
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    with LLM(folder, device="cpu", dtype=dtype, kv_memory="256MiB", prefix_caching=False) as llm, ExitStack() as clocks:
        llm.generate(inputs[:2], sampling)
        with llm.locked_engine() as engine:
            runner, scheduler = engine.core.runner, engine.core.scheduler
            clocks.enter_context(_hooked(runner.model, spent))
            for owner, name in (
                (runner.kernel, "attend"), (runner.sampler, "sample"), (runner, "begin"),
                (scheduler, "schedule"), (scheduler, "apply"),
            ):  # fmt: skip
                clocks.enter_context(clocked(owner, name, spent))
        start = time.perf_counter()
        llm.generate(inputs, sampling)
        total = time.perf_counter() - start
    parts = {
        "linears": spent["linears"],
        "attention": spent["attend"],
        "the rest of the model": spent["model"] - spent["linears"] - spent["attend"],
        "sampling": spent["sample"],
        "packing": spent["begin"] - spent["model"] - spent["sample"],
        "scheduling": spent["schedule"] + spent["apply"],
    }
    parts["the loop"] = total - sum(parts.values())
    return [Figure(f"{dtype} time in {part}", 100 * seconds / total, "%") for part, seconds in parts.items()]

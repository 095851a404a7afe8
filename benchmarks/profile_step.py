"""Where the time of a step goes: linears, attention, sampling, bookkeeping, the rest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure
from pagetide import LLM, SamplingParams


@contextmanager
def _clocked(owner: Any, name: str, spent: dict[str, float], part: str) -> Iterator[None]:
    """Add the time inside `owner.name` to `spent[part]`."""
    inner: Callable[..., Any] = getattr(owner, name)

    def clocked(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    setattr(owner, name, clocked)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def profile(folder: Path, dtype: str, inputs: list[list[int]], new_tokens: int) -> list[Figure]:
    """Share of the time of a whole `generate` by part. The clocks themselves cost a few percent."""
    spent: dict[str, float] = defaultdict(float)
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    with LLM(folder, device="cpu", dtype=dtype, kv_memory="256MiB") as llm:
        llm.generate(inputs[:2], sampling)
        core = llm._desk.engine.core
        started: dict[Any, float] = {}

        def before(module: torch.nn.Module, _: Any) -> None:
            started[module] = time.perf_counter()

        def after(module: torch.nn.Module, *_: Any) -> None:
            spent["linears"] += time.perf_counter() - started[module]

        hooks = []
        for module in core.runner.model.modules():
            if "Linear" in type(module).__name__:
                hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        with (
            _clocked(core.runner.kernel, "attend", spent, "attention"),
            _clocked(core.runner.sampler, "sample", spent, "sampling"),
            _clocked(core.runner, "_pack", spent, "packing"),
            _clocked(core.scheduler, "schedule", spent, "scheduling"),
            _clocked(core.scheduler, "apply", spent, "scheduling"),
        ):
            start = time.perf_counter()
            llm.generate(inputs, sampling)
            total = time.perf_counter() - start
        for hook in hooks:
            hook.remove()
    spent["rest of the model and the loop"] = total - sum(spent.values())
    return [Figure(f"{dtype} time in {part}", 100 * seconds / total, "%") for part, seconds in spent.items()]

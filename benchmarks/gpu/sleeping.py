"""The engine asleep: how long a sleep and waking take, what they give back, and the first token right after waking.

The weights alone are mapped and copied in an engine's model between two sleeps; their rate is compared with one large pinned
copy. On a CPU they are mapped from a file instead.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Figure
from pagetide import AsyncLLM

from .bandwidth import FROM_HOST
from .bench import GIB, Bench, timed
from .decode import greedy
from .parts import Item, Unmeasured, bounded, unmeasured

ROUNDS = 5


def measure(bench: Bench) -> Iterator[Item]:
    """Times of sleeps of level 1, the memory that is free then, and the first token after waking against one awake."""
    samples: dict[str, list[float]] = {name: [] for name in ("sleep", "wake", "first", "warm", "free", "fill")}
    size = asyncio.run(_rounds(bench, samples))
    bench.clean()
    if size is None:
        yield unmeasured("wake_first", "the weights cannot sleep here: the log says why")
        return
    ratios = [first / statistics.median(samples["warm"]) for first in samples["first"]]
    yield bounded("wake_first", statistics.median(ratios), ratios)
    for name, what in (("sleep", "a sleep"), ("wake", "waking"), ("fill", "weights wake up alone")):
        yield Figure(f"sleeping: {what}", statistics.median(samples[name]), "s", samples=samples[name])
    free = [given / size for given in samples["free"]]
    yield Figure("sleeping: memory given back / weights", statistics.median(free), "x", better="higher", samples=free)
    if FROM_HOST in bench.known:
        shares = [size / s / 1e9 / bench.known[FROM_HOST] for s in samples["fill"]]
        name = "sleeping: weights wake up, share of one large pinned copy"
        yield Figure(name, statistics.median(shares), "x", better="higher", samples=shares)
    else:
        yield Unmeasured("sleeping: share of one large pinned copy", "that was not measured")


async def _rounds(bench: Bench, samples: dict[str, list[float]]) -> int | None:
    """The bytes that sleep; None if the model would be loaded again."""
    options: dict[str, Any] = {"kv_memory": min(GIB, bench.scale.kv_bytes), "share": False, "prefix_caching": False}
    device = "cuda:0" if bench.clock.cuda else "cpu"
    prompts = bench.prompts(ROUNDS + 2, bench.scale.prompt, seed=3)
    async with AsyncLLM(bench.saved_model, device=device, max_step_tokens=8192, **options) as llm:

        async def first_s(number: int) -> float:
            began = time.perf_counter()
            await llm.generate([prompts[number]], greedy(1))
            return time.perf_counter() - began

        await first_s(0)
        kept = llm._engine_thread.open().kept
        for number in range(ROUNDS):
            samples["warm"].append(await first_s(number + 1))
            before, began = bench.clock.free_bytes(), time.perf_counter()
            await llm.sleep(1)
            samples["sleep"].append(time.perf_counter() - began)
            samples["free"].append(bench.clock.free_bytes() - before)
            if kept is None or kept.weights is None:
                return None
            samples["fill"].append(timed(lambda: _fill(kept.weights)))
            kept.weights.drop(1)
            began = time.perf_counter()
            await llm.wake_up()
            samples["wake"].append(time.perf_counter() - began)
            samples["first"].append(await first_s(number + 1))
        return kept.asleep_bytes if kept is not None else None


def _fill(weights: Any) -> None:
    weights.fill()
    weights.wait()

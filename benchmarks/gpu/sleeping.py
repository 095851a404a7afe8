"""The engine asleep: how long a sleep and waking take, what they give back, and the first token right after waking.

The weights alone, of an engine that has ended, are mapped and copied; their rate is compared with one large pinned copy. On a
CPU they are mapped from a file instead.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.figures import Figure
from pagetide import AsyncLLM
from pagetide.engine.build import build
from pagetide.engine.config import EngineArguments, EngineConfig
from pagetide.engine.loading.arena_weights import ArenaWeights
from pagetide.engine.loading.mapped_weights import MappedWeights

from .bandwidth import FROM_HOST
from .bench import GIB, Bench, timed
from .decode import greedy
from .parts import Item, Unmeasured, bounded, unmeasured

ROUNDS = 5


def measure(bench: Bench) -> Iterator[Item]:
    """Times of sleeps of level 1, the memory that is free then, and the first token after waking against one awake."""
    samples: dict[str, list[float]] = {name: [] for name in ("sleep", "wake", "first", "warm", "free", "fill")}
    options: dict[str, Any] = {
        "device": "cuda:0" if bench.clock.cuda else "cpu", "kv_memory": min(GIB, bench.scale.kv_bytes), "share": False,
        "prefix_caching": False, "max_step_tokens": 8192,
    }  # fmt: skip
    size = _weights_alone(bench, options, samples["fill"])
    if size is None:
        yield unmeasured("wake_first", "the weights cannot sleep here: the log says why")
        return
    yield Figure("sleeping: weights wake up alone", statistics.median(samples["fill"]), "s", samples=samples["fill"])
    if FROM_HOST in bench.known:
        shares = [size / s / 1e9 / bench.known[FROM_HOST] for s in samples["fill"]]
        name = "sleeping: weights wake up, share of one large pinned copy"
        yield Figure(name, statistics.median(shares), "x", better="higher", samples=shares)
    else:
        yield Unmeasured("sleeping: share of one large pinned copy", "that was not measured")
    asyncio.run(_rounds(bench, options, samples))
    bench.clean()
    ratios = [first / statistics.median(samples["warm"]) for first in samples["first"]]
    yield bounded("wake_first", statistics.median(ratios), ratios)
    for name, what in (("sleep", "a sleep"), ("wake", "waking")):
        yield Figure(f"sleeping: {what}", statistics.median(samples[name]), "s", samples=samples[name])
    free = [given / size for given in samples["free"]]
    yield Figure("sleeping: memory given back / weights", statistics.median(free), "x", better="higher", samples=free)


async def _rounds(bench: Bench, options: dict[str, Any], samples: dict[str, list[float]]) -> None:
    prompts = bench.prompts(ROUNDS + 2, bench.scale.prompt, seed=3)
    async with AsyncLLM(bench.saved_model, **options) as llm:

        async def first_s(number: int) -> float:
            began = time.perf_counter()
            await llm.generate([prompts[number]], greedy(1))
            return time.perf_counter() - began

        await first_s(0)
        for number in range(ROUNDS):
            samples["warm"].append(await first_s(number + 1))
            before, began = bench.clock.free_bytes(), time.perf_counter()
            await llm.sleep(1)
            samples["sleep"].append(time.perf_counter() - began)
            samples["free"].append(bench.clock.free_bytes() - before)
            began = time.perf_counter()
            await llm.wake_up()
            samples["wake"].append(time.perf_counter() - began)
            samples["first"].append(await first_s(number + 1))


def _weights_alone(bench: Bench, options: dict[str, Any], samples: list[float]) -> int | None:
    """Time the waking of weights without an engine. The bytes that sleep; None if the model would be loaded again."""
    engine = build(replace(EngineConfig.of(EngineArguments(model=bench.saved_model, **options)), sleeps=True))
    kept = engine.kept
    if kept is not None:
        kept.stays = True
    engine.close()
    if kept is None or not kept.sleep(1) or kept.weights is None:
        return None
    for _ in range(ROUNDS):
        samples.append(timed(partial(_fill, kept.weights)))
        kept.weights.drop(1)
    size = kept.asleep_bytes
    kept.stays = False
    kept.release()
    del kept, engine
    bench.clean()
    return size


def _fill(weights: MappedWeights | ArenaWeights) -> None:
    weights.fill()
    weights.wait()

"""An engine on the CPU that sleeps and wakes up: its times against reading the same bytes, and what it gives back.

    python -m benchmarks.waking [--json FILE] [--rounds 9] [--hidden 1024] [--layers 8] [--dtype float32] [--cycles 100]
                               [--seed 0]
    python -m benchmarks.waking --peers DIR [--json FILE] [--rounds 9] [--seed 0]

A random Qwen2-like model, in a process of its own. Level 1 leaves the weights to the page cache; level 2 gives them back.
"Waking" of weights is mapping all of them (`MappedWeights.fill`), against `read` of the same bytes of the same file into
memory that is there already; after level 2 both read from the disk. Waking of the engine is `AsyncLLM.wake_up`, and the
first token that of a prompt of 64 tokens right after it. Growth is that of the resident set over 100 sleeps with a token
between them, behind a tenth as many more and those that were timed.

With `--peers`, the folder of `benchmarks.peers.make`: three models of 0.39 B parameters in bfloat16 in turn, by a server of
pagetide with memory for one, and by llama-cpp-python's server behind a proxy that ends one process and starts the next, as
llama-swap does (`benchmarks.peers.swapping`). Each request asks for one token behind 64; after a switch, and once more
without one. The times of a switch are compared within a round; both have their files in the page cache.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import save_qwen2
from benchmarks.loading import cached_bytes, memory_bytes
from benchmarks.peers import swapping
from benchmarks.processes import Worker
from pagetide import AsyncLLM, SamplingParams
from pagetide.common.units import MIB
from pagetide.engine.build import build
from pagetide.engine.config import EngineArguments, EngineConfig
from pagetide.engine.loading.mapped_weights import Level, MappedWeights
from pagetide.engine.process.memory_usage import trim

HIDDEN, LAYERS = 1024, 8
PROMPT_TOKENS = 64
CYCLES = 100
LEVELS: tuple[Level, ...] = (1, 2)
ONE = SamplingParams(max_new_tokens=1, temperature=0)

Samples = dict[str, list[float]]


def measure_here(pipe: Connection, folder: str, dtype: str, rounds: int, cycles: int) -> None:
    """The process: one engine."""
    samples: Samples = defaultdict(list)
    engine = build(EngineConfig.of(EngineArguments(model=folder, **_options(dtype))))
    kept = engine.kept
    assert kept is not None
    kept.stays = True
    engine.close()
    assert kept.sleep(1) and kept.weights is not None
    room = bytearray(kept.weights.num_bytes)
    for _, level in itertools.product(range(rounds), LEVELS):
        _measure_weights(kept.weights, level, room, samples)
    del engine, kept, room
    asyncio.run(_measure_engine(folder, dtype, rounds, cycles, samples))
    pipe.send(dict(samples))


def _options(dtype: str) -> dict[str, Any]:
    return {"device": "cpu", "dtype": dtype, "kv_memory": "16MiB", "max_seqs": 4, "share": False}


async def _measure_engine(folder: str, dtype: str, rounds: int, cycles: int, samples: Samples) -> None:
    ids = itertools.count()

    async def first_s() -> float:
        """Seconds to the first token of a prompt that no other begins like."""
        began, base = time.perf_counter(), next(ids)
        await llm.generate([{"prompt_token_ids": [base % 500, *range(500, 499 + PROMPT_TOKENS)]}], ONE)
        return time.perf_counter() - began

    began = time.perf_counter()
    llm = AsyncLLM(folder, **_options(dtype))
    samples["load_s"].append(time.perf_counter() - began)
    async with llm:
        for _ in range(3):
            await first_s()
        began = time.perf_counter()
        await llm.sleep(1)
        samples["first_sleep_s"].append(time.perf_counter() - began)
        await llm.wake_up()
        for _, level in itertools.product(range(rounds), LEVELS):
            samples["warm_s"].append(await first_s())
            began = time.perf_counter()
            await llm.sleep(level)
            slept = time.perf_counter()
            await llm.wake_up()
            woken = time.perf_counter()
            samples[f"sleep_{level}_s"].append(slept - began)
            samples[f"wake_{level}_s"].append(woken - slept)
            samples[f"first_{level}_s"].append(await first_s())
        before = await _cycles(llm, first_s, cycles // 10)
        samples["growth"].append(await _cycles(llm, first_s, cycles) - before)


def _measure_weights(weights: MappedWeights, level: Level, room: bytearray, samples: Samples) -> None:
    """One sleep and waking of the weights, and one reading of them."""
    began = time.perf_counter()
    weights.drop(level)
    samples[f"drop_{level}_s"].append(time.perf_counter() - began)
    samples[f"cached_{level}"].append(cached_bytes(weights) / weights.num_bytes)
    began = time.perf_counter()
    weights.fill()
    weights.wait()
    samples[f"fill_{level}_s"].append(time.perf_counter() - began)
    weights.drop(level)
    view, at = memoryview(room), 0
    began = time.perf_counter()
    for one in weights.extents:
        os.preadv(one.file.fileno(), [view[at : at + one.num_bytes]], one.offset)
        at += one.num_bytes
    samples[f"read_{level}_s"].append(time.perf_counter() - began)
    samples["weights"] = [weights.num_bytes]


async def _cycles(llm: AsyncLLM, generate: Callable[[], Awaitable[object]], count: int) -> int:
    """The resident set after so many sleeps, of both levels in turn, with a token between them; asleep."""
    for _, level in zip(range(count), itertools.cycle(LEVELS), strict=False):
        await llm.sleep(level)
        await llm.wake_up()
        await generate()
    await llm.sleep(1)
    gc.collect()
    trim(torch.device("cpu"))
    held = memory_bytes("VmRSS")
    await llm.wake_up()
    return held


def figures_of(samples: Samples, cycles: int) -> list[Figure]:
    """The figures, ratios of each round."""

    def ratio(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(samples[one], samples[other], strict=True)]

    warm = sorted(samples["warm_s"])[len(samples["warm_s"]) // 2]
    return [
        median("weights", [size / MIB for size in samples["weights"]], "MiB"),
        median("loading", samples["load_s"], "s"),
        median("the first sleep, which writes the file", samples["first_sleep_s"], "s"),
        median("level 1: weights wake up / read from the page cache", ratio("fill_1_s", "read_1_s"), "x", 0.4),
        median("level 1: weights wake up", samples["fill_1_s"], "s"),
        median("level 2: weights wake up / read from the disk", ratio("fill_2_s", "read_2_s"), "x", 1.2),
        median("level 2: weights wake up", samples["fill_2_s"], "s"),
        median("level 2: weights are given back after", samples["drop_2_s"], "s", 1.0),
        median("level 2: weights that stay in memory", samples["cached_2"], "", 0.05),
        median("level 1: the engine sleeps", samples["sleep_1_s"], "s"),
        median("level 2: the engine sleeps", samples["sleep_2_s"], "s"),
        median("level 1: the engine wakes up", samples["wake_1_s"], "s"),
        median("level 2: the engine wakes up", samples["wake_2_s"], "s"),
        median("first token, awake", samples["warm_s"], "s"),
        median("level 1: first token after waking / awake", [one / warm for one in samples["first_1_s"]], "x", 1.3),
        median("level 2: first token after waking / awake", [one / warm for one in samples["first_2_s"]], "x"),
        median(f"growth over {cycles} sleeps", [size / MIB for size in samples["growth"]], "MiB", 4.0),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--hidden", type=whole, default=HIDDEN, help="of the model, a multiple of 64 (%(default)s)")
    parser.add_argument("--layers", type=whole, default=LAYERS, help="of the model (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--cycles", type=whole, default=CYCLES, help="sleeps over which memory may grow (%(default)s)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="models in turn beside llama.cpp: of peers.make")
    args = parser.parse_args(argv)
    if args.peers is not None:
        found = swapping.compare(args.peers.absolute(), args.rounds, args.seed)
        report("models in turn", found, args.seed, args.json)
        return
    if args.hidden % 64:
        parser.error(f"16 heads of an even size need a hidden size that is a multiple of 64, got {args.hidden}")
    with tempfile.TemporaryDirectory() as scratch:
        save_qwen2(Path(scratch), args.hidden, args.layers, args.seed)
        with Worker(measure_here, scratch, args.dtype, args.rounds, args.cycles) as worker:
            samples: Samples = worker.receive()
    report("sleeping and waking on the CPU", figures_of(samples, args.cycles), args.seed, args.json)


if __name__ == "__main__":
    main()

"""A model divided over processes of the CPU, against one process: tokens per second, where the time goes, and memory.

    python -m benchmarks.shards [--json FILE] [--rounds 5] [--hidden 1024] [--layers 24]
                                [--dtypes bfloat16 float32] [--prompts 16] [--new-tokens 64] [--seed 0]

A random Qwen2-like model of 0.4 billion parameters, ragged prompts of 64 to 256 tokens, greedy. The undivided engine uses all
cores; each shard has its share of them: on two cores and with two shards, two threads against one thread a shard. The
engines take turns; a figure is the median over the rounds of the ratio within a round. Agreement is the share of tokens
before the first that differs.

The time of a step is that of the driver: sending the plan, then the first shard's computing, of which collectives are
measured, with the wait for the other shard; the rest is the way of the result and the scheduler. "On NVLink" is on paper:
10 us a collective and 450 GB/s in each direction, of an H100.

Memory is what a shard's process holds besides K and V, above that of a shard of the bundled model, against the same
difference of the weights, divided and replicated.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import agreement, prompts, save_qwen2
from pagetide import LLM, SamplingParams

HIDDEN, LAYERS, PROMPTS, NEW_TOKENS = 1024, 24, 16, 64
SHARDS = 2
LEAST_RATIO, MOST_MEMORY = 0.7, 1.1
NVLINK_BYTES_S, NVLINK_CALL_S = 450e9, 10e-6
BEAT_S = 0.6  # after which a shard has written what it has done


def generate(llm: LLM, inputs: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """The tokens, and the seconds they took."""
    began = time.perf_counter()
    outputs = llm.generate(inputs, SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True), progress=False)
    return [list(one.completions[0].token_ids) for one in outputs], time.perf_counter() - began


def work_of(llm: LLM) -> dict[str, float]:
    """What the shards have done so far: steps, seconds and collectives of the first one."""
    time.sleep(BEAT_S)
    shards = llm.stats()["shards"]
    first = shards["each"][0]["collectives"].values()
    return {
        "steps": shards["steps"], "sending": shards["sending_s"], "computing": shards["computing_s"],
        "waiting": shards["waiting_s"], "calls": sum(kind["calls"] for kind in first),
        "bytes": sum(kind["bytes"] for kind in first), "collectives": sum(kind["seconds"] for kind in first),
    }  # fmt: skip


def held(llm: LLM) -> tuple[int, int]:
    """What the largest shard holds besides K and V, and the bytes of its weights."""
    time.sleep(BEAT_S)
    stats = llm.stats()
    return max(shard["base_bytes"] for shard in stats["shards"]["each"]), stats["weights_bytes"]


def measure(args: argparse.Namespace, folder: Path, dtype: str) -> list[Figure]:
    """The figures of one dtype."""
    inputs = prompts(args.prompts, args.seed)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "kv_memory": "256MiB", "prefix_caching": False, "share": False}
    with LLM("demo", tensor_parallel_size=SHARDS, **options) as small:
        small_held, small_weights = held(small)
    with LLM(folder, **options) as one, LLM(folder, tensor_parallel_size=SHARDS, **options) as divided:
        figures, ratios = [], []
        for llm in (one, divided):
            generate(llm, inputs, 4)
        before = work_of(divided)
        for _ in range(args.rounds):
            right, one_s = generate(one, inputs, args.new_tokens)
            found, divided_s = generate(divided, inputs, args.new_tokens)
            ratios.append(one_s / divided_s)
        work = {name: value - before[name] for name, value in work_of(divided).items()}
        large_held, large_weights = held(divided)
    steps = max(1.0, work["steps"])
    target = LEAST_RATIO if dtype == args.dtypes[0] else None
    figures.append(median(f"{dtype}: tokens/s, divided / one process", ratios, "x", target, "higher"))
    figures.append(Figure(f"{dtype}: tokens that agree", agreement(found, right), "share", None, "higher"))
    for name, seconds in (
        ("sending the plan", work["sending"]),
        ("collectives", work["collectives"]),
        ("computing besides", work["computing"] - work["collectives"]),
        ("the result's way", work["waiting"] - work["computing"]),
    ):
        figures.append(Figure(f"{dtype}: a step: {name}", 1e3 * seconds / steps, "ms"))
    figures.append(Figure(f"{dtype}: a step: collectives", work["calls"] / steps, "calls"))
    figures.append(Figure(f"{dtype}: a step: bytes in collectives", work["bytes"] / steps / 1e6, "MB"))
    paper = work["calls"] * NVLINK_CALL_S + work["bytes"] * 2 * (SHARDS - 1) / SHARDS / NVLINK_BYTES_S
    figures.append(Figure(f"{dtype}: a step: collectives on NVLink, on paper", 1e3 * paper / steps, "ms"))
    memory = (large_held - small_held) / max(1, large_weights - small_weights)
    figures.append(Figure(f"{dtype}: memory of a shard / its weights", memory, "x", MOST_MEMORY))
    figures.append(Figure(f"{dtype}: memory of a shard without weights", (small_held - small_weights) / 2**20, "MiB"))
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--hidden", type=whole, default=HIDDEN)
    parser.add_argument("--layers", type=whole, default=LAYERS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=whole, default=PROMPTS)
    parser.add_argument("--new-tokens", type=whole, default=NEW_TOKENS)
    args = parser.parse_args(argv)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        save_qwen2(Path(folder), args.hidden, args.layers, args.seed)
        for dtype in args.dtypes:
            figures += measure(args, Path(folder), dtype)
    report(f"one model over {SHARDS} shards on the CPU", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

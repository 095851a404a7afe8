"""The disk tier on the CPU: the first token after a restart, and what writing costs where nothing is ever found.

    python -m benchmarks.kept_prefixes [--json FILE] [--hidden 1024] [--layers 16] [--kv-heads 8] [--vocab 8192]
                                       [--tokens 8000] [--rounds 3] [--seed 0] [--keep DIR] [--no-restart] [--no-unused]
    python -m benchmarks.kept_prefixes --traces [--data DIR] [--requests N] [--json FILE] [--plot FILE]

A random Qwen2-like model in bfloat16 is saved, and an engine with a disk tier computes a prompt of so many tokens and ends.
With `--keep` an interrupted run goes on where it was. The next engines get the prompt with 64 other tokens behind it. Beside
that: a cold read of the same files, 64 tokens computed behind a prefix in memory, and all computed. Then prompts that none has
seen, in engines with the tier and without, by turns.

With `--traces`, without a model: hits against writes of the public traces, one request at a time, by the real cache manager for
what is in memory and the real index of the tier below it. Sizes of the tier are shares of all blocks of a trace.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import add_data, parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import random_qwen2
from benchmarks.prefix_hits import TRACES, OneAtATime, Prompt, load
from pagetide import LLM, SamplingParams
from pagetide.cache.disk_index import DiskIndex
from pagetide.cache.reuse_density import ReuseDensity

TAIL = 64
PIECE = 2000  # tokens
MOST_RESTART = 1.5  # times a cold read and computing the tail
LEAST_UNUSED = 0.98  # of the tokens/s without a tier


def first_token_s(llm: LLM, prompt: list[int], max_new_tokens: int = 1) -> float:
    """Seconds of a request for so many tokens."""
    began = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_new_tokens=max_new_tokens, temperature=0, ignore_eos=True))
    return time.perf_counter() - began


def cold_read_s(folder: Path) -> float:
    """Seconds to read all files of blocks, none of which is in memory."""
    files = [os.open(path, os.O_RDONLY) for path in sorted(folder.glob("*/*.kv"))]
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer, began = bytearray(4 << 20), time.perf_counter()
    for file in files:
        while os.readv(file, [buffer]):
            pass
        os.close(file)
    return time.perf_counter() - began


def fill(saved: Path, prompt: list[int], kept: dict[str, Any]) -> list[Figure]:
    """Compute `prompt` in pieces, each of which stays on disk if the next is interrupted. The time, unless some was there."""
    seconds = 0.0
    with LLM(str(saved), **kept) as llm:
        first_token_s(llm, prompt[::-1][:100])  # a warm-up
        for upto in (*range(PIECE, len(prompt), PIECE), len(prompt)):
            seconds += first_token_s(llm, prompt[:upto])
        found = llm.stats()["disk_tier"]["hit_tokens"]
    return [] if found else [Figure("all computed", seconds, "s")]


def restarts(saved: Path, prompt: list[int], tails: list[list[int]], kept: dict[str, Any]) -> list[Figure]:
    """Of `prompt`, which is computed first, with each two of `tails` behind it."""
    of_all = fill(saved, prompt, kept)
    found: dict[str, list[float]] = {"restart": [], "read": [], "tail": []}
    for fresh, other in zip(tails[::2], tails[1::2], strict=True):
        with LLM(str(saved), **kept) as llm:
            first_token_s(llm, fresh[::-1])  # a warm-up that is not on disk
            found["restart"].append(first_token_s(llm, prompt + fresh))
            assert llm.stats()["disk_tier"]["hit_tokens"] > len(prompt) - 32, llm.explain()
            found["tail"].append(first_token_s(llm, prompt + other))
        found["read"].append(cold_read_s(Path(kept["disk_kv_path"])))
    ratios = [a / (b + c) for a, b, c in zip(found["restart"], found["read"], found["tail"], strict=True)]
    return [
        median("first token after a restart", found["restart"], "s"),
        median("cold read of the files", found["read"], "s"),
        median("the tail, with the prefix in memory", found["tail"], "s"),
        *of_all,
        median("restart / (read + tail)", ratios, "x", MOST_RESTART),
    ]


def unused(saved: Path, args: Any, engine: dict[str, Any]) -> list[Figure]:
    """Tokens/s with a tier that nothing is found in over those without, and the same of tokens per second of processor time."""
    draw, ratios = np.random.default_rng(args.seed + 1), []
    with tempfile.TemporaryDirectory(dir=saved.parent) as path:
        kept = {**engine, "disk_kv_memory": "8GiB", "disk_kv_path": path}
        with LLM(str(saved), **kept) as with_tier, LLM(str(saved), **engine) as without:
            for turn in range(2 * args.rounds + 1):
                taken = []
                for llm in (with_tier, without) if turn % 2 else (without, with_tier):
                    prompts = draw.integers(1, args.vocab, (4, args.tokens // 8)).tolist()
                    began = np.array([time.perf_counter(), time.process_time()])
                    llm.generate(prompts, SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True))
                    time.sleep(1)  # the last blocks are written meanwhile
                    taken.append(np.array([time.perf_counter() - 1, time.process_time()]) - began)
                ratios.append(taken[1] / taken[0] if turn % 2 else taken[0] / taken[1])
    return [
        median("tokens/s with an unused tier / without", [float(one[0]) for one in ratios[1:]], "x", LEAST_UNUSED, "higher"),
        median("the same by processor time", [float(one[1]) for one in ratios[1:]], "x", LEAST_UNUSED, "higher"),
    ]


def endless_hits(prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Blocks that a pool without an end finds, and all blocks that differ."""
    seen: set[int] = set()
    num_hits = 0
    for prompt in prompts:
        known = [int(block) in seen for block in prompt.blocks]
        num_hits += known.index(False) if False in known else len(known)
        seen.update(prompt.blocks.tolist())
    return num_hits, len(seen)


def tiers(prompts: Sequence[Prompt], num_blocks: int, num_places: int) -> tuple[int, int, int]:
    """Blocks that `prompts` find in memory for `num_blocks` and on disk in `num_places`, those of disk, and those written."""
    memory = OneAtATime(ReuseDensity, num_blocks, max(len(prompt.blocks) for prompt in prompts)) if num_blocks else None
    disk = DiskIndex(1, num_places, bytes(32))
    num_hits = num_read = num_written = 0
    for prompt in prompts:
        num, chain = len(prompt.blocks), disk.chain(prompt.blocks.astype(np.int32), None)
        in_memory = 0 if memory is None else memory.serve(prompt.blocks, tail=True)
        on_disk = len(disk.find(chain, num))
        if on_disk > in_memory:
            disk.used(chain, on_disk)
        new = disk.take(chain, num)
        disk.written(new)
        num_hits += max(in_memory, on_disk)
        num_read += max(0, on_disk - in_memory)
        num_written += len(new)
    return num_hits, num_read, num_written


def frontier(name: str, prompts: Sequence[Prompt], memories: Sequence[int], shares: Sequence[float]) -> list[Figure]:
    """Hits and writes of each memory and each size of the tier."""
    endless, num_all = endless_hits(prompts)
    figures = [Figure(f"{name}: all blocks", num_all, "blocks"), Figure(f"{name}: hits of an endless pool", endless, "blocks")]
    for num_blocks in memories:
        for share in shares:
            label = f"{name}, {num_blocks} in memory, {share:g} on disk"
            hits, read, written = tiers(prompts, num_blocks, max(1, int(share * num_all)))
            figures += [
                Figure(f"{label}: hits of the endless", hits / endless, "x", 0.95 if share >= 0.5 else None, "higher"),
                Figure(f"{label}: written of what is read", written / max(1, read), "x"),
                Figure(f"{label}: times each block is written", written / num_all, "x"),
            ]
    return figures


def plot(figures: Sequence[Figure], path: Path) -> None:
    """Draw hits over writes of the `figures` of traces, for each trace, and each memory above the tier."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "kept prefixes",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "svg.fonttype": "none",
    }
    import matplotlib.pyplot as plt

    points: dict[str, dict[str, list[tuple[str, float, float]]]] = {}
    value_of = {figure.name: figure.value for figure in figures}
    for name in value_of:
        label, _, what = name.rpartition(": ")
        if what.startswith("hits of the endless"):
            trace, memory, share = label.split(", ")
            one = share.removesuffix(" on disk"), value_of[f"{label}: times each block is written"], value_of[name]
            points.setdefault(trace, {}).setdefault(memory, []).append(one)
    figure, axes = plt.subplots(1, len(points), figsize=(3.6 * len(points), 3), squeeze=False, layout="constrained")
    for axis, (trace, lines) in zip(axes[0], points.items(), strict=True):
        for (memory, found), marker in zip(lines.items(), "os", strict=False):
            axis.plot([one[1] for one in found], [one[2] for one in found], marker=marker, markersize=4, label=memory)
        for share, written, hits in next(iter(lines.values())):
            axis.annotate(share, (written, hits), textcoords="offset points", xytext=(5, -10))
        axis.axhline(0.95, color="grey", linewidth=0.7, linestyle=":")
        axis.set(title=trace, xlabel="times that each block is written", ylabel="hits, of an endless pool's", ylim=(0.4, 1.03))
    axes[0, 0].legend(loc="lower left", title="numbers: share of blocks on disk")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    add_data(parser, "the public traces", "no traces")
    parser.add_argument("--traces", action="store_true", help="hits against writes on the traces, and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw that, with matplotlib of the extra `examples`")
    parser.add_argument("--requests", type=whole, metavar="N", help="of the traces, the first N of each only")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the model and the files here; use those that are here")
    parser.add_argument("--no-restart", action="store_true", help="leave out the restarts")
    parser.add_argument("--no-unused", action="store_true", help="leave out the loads that never hit")
    parser.add_argument("--hidden", type=whole, default=1024, help="of the random model (%(default)s)")
    parser.add_argument("--layers", type=whole, default=16, help="of the random model (%(default)s)")
    parser.add_argument("--kv-heads", type=whole, help="of the random model (default: half as many as heads)")
    parser.add_argument("--vocab", type=whole, default=8192, help="of the random model (%(default)s)")
    parser.add_argument("--tokens", type=whole, default=8000, help="of the prompt (%(default)s)")
    args = parser.parse_args(argv)
    if args.traces:
        if args.data is None:
            parser.error("--traces needs --data DIR with the public traces")
        read = {name: load(make(args.data), size)[: args.requests] for name, (make, size) in TRACES.items()}
        figures = [one for name, prompts in read.items() for one in frontier(name, prompts, (0, 5_000), (0.1, 0.25, 0.5, 1.0))]
        report("Kept prefixes on traces", figures, args.seed, args.json)
        if args.plot is not None:
            plot(figures, args.plot)
        return
    heads = max(2, args.hidden // 64)
    engine = {"device": "cpu", "dtype": "bfloat16", "share": False, "kv_memory": "1GiB", "max_seqs": 8}
    with ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        saved = folder / "model"
        if not saved.exists():
            random_qwen2(
                args.hidden, args.layers, args.seed, intermediate_size=11 * args.hidden // 4, num_attention_heads=heads,
                num_key_value_heads=args.kv_heads or heads // 2, head_dim=64, vocab_size=args.vocab,
                max_position_embeddings=args.tokens + 200, tie_word_embeddings=False,
            ).save_pretrained(saved)  # fmt: skip
        draw = np.random.default_rng(args.seed)
        prompt = draw.integers(1, args.vocab, args.tokens).tolist()
        figures = []
        if not args.no_restart:
            kept = {**engine, "disk_kv_memory": "8GiB", "disk_kv_path": str(folder / "kv")}
            # other ones in each run: those of an earlier one are on disk
            tails = np.random.default_rng().integers(1, args.vocab, (2 * args.rounds, TAIL)).tolist()
            figures += restarts(saved, prompt, tails, kept)
        if not args.no_unused:
            figures += unused(saved, args, engine)
    report("Kept prefixes", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

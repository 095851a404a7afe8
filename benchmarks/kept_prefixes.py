"""The disk tier on the CPU: the first token after a restart, and what writing costs where nothing is ever found.

    python -m benchmarks.kept_prefixes [--json FILE] [--hidden 1024] [--layers 16] [--vocab 8192] [--tokens 8000]
                                       [--rounds 3] [--seed 0]

A random Qwen2-like model in bfloat16 is saved, and an engine with a disk tier computes a prompt of so many tokens and ends.
The next engine gets the prompt with 64 other tokens behind it. Beside that: a cold read of the same files, 64 tokens computed
behind a prefix in memory, and all computed. Then prompts that none has seen, in engines with the tier and without, by turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import random_qwen2
from pagetide import LLM, SamplingParams

TAIL = 64
MOST_RESTART = 1.5  # times a cold read and computing the tail
LEAST_UNUSED = 0.98  # of the tokens/s without a tier
FIRST = SamplingParams(max_new_tokens=1, temperature=0)


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


def restarts(saved: Path, prompt: list[int], engine: dict[str, Any], rounds: int) -> list[Figure]:
    """Of `prompt`, the last TAIL tokens of which no engine has computed before."""
    found: dict[str, list[float]] = {"restart": [], "read": [], "tail": [], "all": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=saved.parent) as path:
            kept = {**engine, "disk_kv_memory": "8GiB", "disk_kv_path": path}
            with LLM(str(saved), **kept) as llm:
                first_token_s(llm, prompt[:100])  # a warm-up
                found["all"].append(first_token_s(llm, prompt[:-TAIL]))
                found["tail"].append(first_token_s(llm, prompt))
            with LLM(str(saved), **kept) as llm:
                first_token_s(llm, prompt[::-1][:100])
                found["restart"].append(first_token_s(llm, prompt[:-TAIL] + prompt[:TAIL]))
                assert llm.stats()["disk_tier"]["hit_tokens"] > len(prompt) - TAIL - 32, llm.explain()
            found["read"].append(cold_read_s(Path(path)))
    ratios = [a / (b + c) for a, b, c in zip(found["restart"], found["read"], found["tail"], strict=True)]
    return [
        median("first token after a restart", found["restart"], "s"),
        median("cold read of the files", found["read"], "s"),
        median("the tail, with the prefix in memory", found["tail"], "s"),
        median("all computed", found["all"], "s"),
        median("restart / (read + tail)", ratios, "x", MOST_RESTART),
    ]


def unused(saved: Path, args: Any, engine: dict[str, Any]) -> Figure:
    """Tokens/s with a tier that nothing is found in, over those without."""
    draw, ratios = np.random.default_rng(args.seed + 1), []
    with tempfile.TemporaryDirectory(dir=saved.parent) as path:
        kept = {**engine, "disk_kv_memory": "8GiB", "disk_kv_path": path}
        with LLM(str(saved), **kept) as with_tier, LLM(str(saved), **engine) as without:
            for turn in range(2 * args.rounds + 1):
                taken = []
                for llm in (with_tier, without) if turn % 2 else (without, with_tier):
                    prompts = draw.integers(1, args.vocab, (4, args.tokens // 8)).tolist()
                    began = time.perf_counter()
                    llm.generate(prompts, SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True))
                    taken.append(time.perf_counter() - began)
                ratios.append(taken[1] / taken[0] if turn % 2 else taken[0] / taken[1])
    return median("tokens/s with an unused tier / without", ratios[1:], "x", LEAST_UNUSED, "higher")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--hidden", type=whole, default=1024, help="of the random model (%(default)s)")
    parser.add_argument("--layers", type=whole, default=16, help="of the random model (%(default)s)")
    parser.add_argument("--vocab", type=whole, default=8192, help="of the random model (%(default)s)")
    parser.add_argument("--tokens", type=whole, default=8000, help="of the prompt (%(default)s)")
    args = parser.parse_args(argv)
    heads = max(2, args.hidden // 64)
    engine = {"device": "cpu", "dtype": "bfloat16", "share": False, "kv_memory": "1GiB", "max_seqs": 8}
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        random_qwen2(
            args.hidden, args.layers, args.seed, intermediate_size=11 * args.hidden // 4, num_attention_heads=heads,
            num_key_value_heads=heads // 2, head_dim=64, vocab_size=args.vocab, max_position_embeddings=args.tokens + 200,
            tie_word_embeddings=False,
        ).save_pretrained(saved)  # fmt: skip
        prompt = np.random.default_rng(args.seed).integers(1, args.vocab, args.tokens + TAIL).tolist()
        figures = [*restarts(saved, prompt, engine, args.rounds), unused(saved, args, engine)]
    report("Kept prefixes", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

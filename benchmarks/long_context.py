"""The time of a decode step over long contexts on the CPU, compared with transformers' `generate`.

    python -m benchmarks.long_context [--json FILE] [--rounds 3] [--hidden 512] [--layers 8] [--cases 16x1000 1x8000]
                                      [--steps 64] [--seed 0]

A random Llama (hidden 512, 8 layers, 8 heads over 4 KV heads) in float32, greedy. A case is a number of sequences and the
tokens of each prompt. The time of a step is that of `--steps` and one more tokens, less that of one token, over the steps.
Both engines take turns; a ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.arguments import whole
from benchmarks.cpu_workload import VOCABULARY, save_model
from benchmarks.figures import Figure, report
from pagetide import LLM, SamplingParams

TARGETS = {"16x1000": 0.5, "1x8000": 0.4}
KV_MEMORY = 2**30


def case(text: str) -> tuple[int, int]:
    """16 sequences of 1,000 tokens: "16x1000"."""
    count, tokens = text.split("x")
    return whole(count), whole(tokens)


def step_s(run: Callable[[int], Any], steps: int) -> float:
    """Seconds of a decode step of `run`, which makes as many tokens as it is asked for."""

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        run(tokens)
        return time.perf_counter() - began

    first = seconds(1)
    return (seconds(1 + steps) - first) / steps


def compare(folder: Path, name: str, steps: int, rounds: int, seed: int) -> list[Figure]:
    """Figures of one case."""
    count, tokens = case(name)
    prompts = np.random.default_rng(seed).integers(1, VOCABULARY, (count, tokens))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompts)

    def theirs(new_tokens: int) -> None:
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip

    found: dict[str, list[float]] = {"pagetide": [], "generate": []}
    with LLM(
        str(folder), device="cpu", dtype="float32", kv_memory=KV_MEMORY, share=False, max_seqs=count,
        max_model_len=tokens + steps + 1, prefix_caching=False,
    ) as llm:  # fmt: skip

        def ours(new_tokens: int) -> None:
            params = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
            llm.generate(prompts.tolist(), params, progress=False)

        for _ in range(rounds):
            found["pagetide"].append(1e3 * step_s(ours, steps))
            found["generate"].append(1e3 * step_s(theirs, steps))
    ratios = [a / b for a, b in zip(found["pagetide"], found["generate"], strict=True)]
    times = [Figure(f"{name} {engine}", statistics.median(of), "ms", samples=of) for engine, of in found.items()]
    label = f"{name} decode step, pagetide / generate"
    return [*times, Figure(label, statistics.median(ratios), "x", TARGETS.get(name), "lower", ratios)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--hidden", type=whole, default=512)
    parser.add_argument("--layers", type=whole, default=8)
    parser.add_argument("--cases", nargs="+", default=list(TARGETS), metavar="COUNTxTOKENS")
    parser.add_argument("--steps", type=whole, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        longest = max(case(name)[1] for name in args.cases) + args.steps + 1
        save_model(Path(folder), args.hidden, args.layers, args.seed, longest)
        for name in args.cases:
            found += compare(Path(folder), name, args.steps, args.rounds, args.seed)
    report("decode steps over long contexts on the CPU", found, args.seed, args.json)


if __name__ == "__main__":
    main()

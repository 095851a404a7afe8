"""Quantized K and V on the CPU: perplexity and likeliest tokens of the demo model, sequences that fit, time of a decode step.

    python -m benchmarks.kv_cache_dtype [--json FILE] [--passages N] [--hidden 512] [--layers 8] [--vocab 8192]
                                        [--cases 16x500 1x8000] [--new-tokens 32] [--rounds 5] [--seed 0]

Perplexity is that of the demo model's held-out text, `heldout.txt`, in float32; with it comes the share of places where the
likeliest token is that of full precision. Steps are those of a random Qwen2-like model in bfloat16 with heads of 64. A case is
a number of sequences and the tokens of each prompt; prompts are cached, so that only steps that decode are timed. Engines take
turns; a ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import random_qwen2
from benchmarks.quantization import FOLDER, decode_seconds, passages, perplexity
from pagetide import LLM
from pagetide.engine.build import plan_only
from pagetide.engine.config import EngineConfig

FORMS = ("int8", "fp8")
MOST_LOSS = {"int8": 0.3}  # percent of perplexity
LEAST_SEQUENCES = 1.9  # times those of bfloat16
HEAD_DIMS = (64, 128)
MOST_STEP = {"16x500": 1.1, "1x8000": 1.0}  # times bfloat16's
ENGINE: dict[str, Any] = {"device": "cpu", "share": False}


def case(text: str) -> tuple[int, int]:
    """16 sequences of 1,000 tokens: "16x1000"."""
    count, tokens = text.split("x")
    return whole(count), whole(tokens)


def losses(texts: list[list[int]]) -> list[Figure]:
    """The demo model's perplexity, how much each form raises it, and the share of the same likeliest tokens."""
    plain, right = perplexity(FOLDER, texts)
    figures = [Figure("perplexity, float32", plain, "")]
    for form in FORMS:
        found, likeliest = perplexity(FOLDER, texts, kv_cache_dtype=form)
        same = sum(a == b for a, b in zip(likeliest, right, strict=True)) / len(right)
        figures.append(Figure(f"perplexity, {form}: loss", 100 * (found / plain - 1), "%", MOST_LOSS.get(form)))
        figures.append(Figure(f"same likeliest token, {form}", 100 * same, "%", better="higher"))
    return figures


def random_model(hidden: int, head_dim: int, layers: int, vocab: int, seed: int, longest: int = 1024) -> Any:
    """A random model with two query heads per KV head."""
    heads = max(2, hidden // head_dim)
    return random_qwen2(
        hidden, layers, seed, intermediate_size=11 * hidden // 4, num_attention_heads=heads, num_key_value_heads=heads // 2,
        head_dim=head_dim, vocab_size=vocab, max_position_embeddings=longest, tie_word_embeddings=False,
    )  # fmt: skip


def sequences(seed: int) -> list[Figure]:
    """Sequences of 1,000 tokens that the plan of a given pool has room for, over those of bfloat16."""
    figures = []
    for head_dim in HEAD_DIMS:
        model = random_model(64, head_dim, 2, 64, seed)
        fit = {
            form: plan_only(
                EngineConfig.resolve(model, device="cpu", kv_memory="256MiB", kv_cache_dtype=form), context=1000
            ).sequences_that_fit
            for form in ("auto", *FORMS)
        }
        for form in FORMS:
            name = f"sequences that fit, heads of {head_dim}, {form} / bfloat16"
            figures.append(Figure(name, fit[form] / fit["auto"], "x", LEAST_SEQUENCES, "higher"))
    return figures


def steps(name: str, args: argparse.Namespace) -> list[Figure]:
    """The time of a decode step of one case over K and V in bfloat16 and in int8."""
    count, tokens = case(name)
    longest = tokens + args.new_tokens + 1
    model = random_model(args.hidden, 64, args.layers, args.vocab, args.seed, longest)
    prompts = np.random.default_rng(args.seed).integers(1, args.vocab, (count, tokens)).tolist()
    found: dict[str, list[float]] = {"auto": [], "int8": []}
    with ExitStack() as stack:
        engines = {
            form: stack.enter_context(LLM(model, kv_cache_dtype=form, kv_memory="512MiB", max_seqs=count, **ENGINE))
            for form in found
        }
        for llm in engines.values():
            decode_seconds(llm, prompts, 1)  # a warm-up, after which the prompts are cached
        for _ in range(args.rounds):
            for form, llm in engines.items():
                found[form].append(1e3 * decode_seconds(llm, prompts, args.new_tokens) / args.new_tokens)
    ratios = [a / b for a, b in zip(found["int8"], found["auto"], strict=True)]
    return [
        median(f"{name} decode step, bfloat16", found["auto"], "ms"),
        median(f"{name} decode step, int8", found["int8"], "ms"),
        median(f"{name} decode step, int8 / bfloat16", ratios, "x", MOST_STEP.get(name)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--passages", type=whole, help="of the held-out text (all)")
    parser.add_argument("--hidden", type=whole, default=512, help="of the random model (%(default)s)")
    parser.add_argument("--layers", type=whole, default=8, help="of the random model (%(default)s)")
    parser.add_argument("--vocab", type=whole, default=8192, help="of the random model (%(default)s)")
    parser.add_argument("--cases", nargs="+", default=list(MOST_STEP), metavar="COUNTxTOKENS")
    parser.add_argument("--new-tokens", type=whole, default=32, help="of each sequence (%(default)s)")
    args = parser.parse_args(argv)
    figures = [*losses(passages()[: args.passages]), *sequences(args.seed)]
    for name in args.cases:
        figures += steps(name, args)
    report("Quantized K and V", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

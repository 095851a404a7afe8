"""Quantized weights on the CPU: perplexity of the demo model, with and without outlier channels, and the speed of decoding.

    python -m benchmarks.quantization [--json FILE] [--passages N] [--hidden 1024] [--layers 24] [--vocab 32768]
                                      [--sequences 16] [--new-tokens 32] [--rounds 5] [--seed 0]

Perplexity is that of the demo model's held-out text, `heldout.txt`. The second demo model computes the same function with
outlier channels: four gains of each norm are 64 times as large, and the columns of the linear layers that follow 64 times as
small. Speed is that of decoding with a random Qwen2-like model (0.39 B parameters as given) in bfloat16, all forms
alternating.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import random_qwen2
from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model

FOLDER = Path(str(demo_model.__file__)).parent
FORMS = ("int8", "int4")
MOST_LOSS = {"int8": 0.2, "int4": 1.5}  # percent of perplexity
MOST_LOSS_WITH_OUTLIERS = {"int8": 1.0}
LEAST_SPEEDUP = {"int8": 1.6}
OUTLIERS, GAIN = 4, 64.0
ENGINE: dict[str, Any] = {"device": "cpu", "kv_memory": "256MiB", "share": False}


def passages() -> list[list[int]]:
    """The held-out passages as token ids, each after the token that begins a text."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = (FOLDER / "heldout.txt").read_text("utf-8").removesuffix("\n").split("\n%%\n")
    return [[tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)] for text in texts]


def perplexity(model: Any, texts: list[list[int]], **options: Any) -> tuple[float, list[int]]:
    """Of the tokens of `texts` after their first; and the likeliest token at each of these places."""
    params = SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=1)
    with LLM(model, dtype="float32", prefix_caching=False, **ENGINE, **options) as llm:
        outputs = llm.generate(texts, params)
    found = [one for output in outputs for one in output.prompt_logprobs if one is not None]
    return math.exp(-sum(one.logprob for one in found) / len(found)), [one.top[0][0] for one in found]


def with_outliers(seed: int) -> nn.Module:
    """The demo model in float32 with outlier channels. Its outputs are the same but for rounding."""
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    head = model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)  # it was tied
    followed = [(model.model.norm, [head])]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        followed.append((layer.input_layernorm, inputs))
        followed.append((layer.post_attention_layernorm, [mlp.gate_proj.weight, mlp.up_proj.weight]))
    for norm, weights in followed:
        channels = torch.randperm(len(norm.weight), generator=generator)[:OUTLIERS]
        norm.weight[channels] *= GAIN
        for weight in weights:
            weight[:, channels] /= GAIN
    model.config.tie_word_embeddings = False
    return model


def losses(name: str, model: Any, texts: list[list[int]], bounds: dict[str, float]) -> list[Figure]:
    """The perplexity of `model`, and how much each form raises it."""
    plain, _ = perplexity(model, texts)
    figures = [Figure(f"{name}, float32", plain, "")]
    for form in FORMS:
        loss = 100 * (perplexity(model, texts, quantization=form)[0] / plain - 1)
        figures.append(Figure(f"{name}, {form}: loss", loss, "%", bounds.get(form)))
    return figures


def decode_seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds from the first step's tokens to the last's: `new_tokens` decode steps."""
    params = SamplingParams(max_new_tokens=1 + new_tokens, temperature=0, ignore_eos=True)
    times = [time.perf_counter() for _ in llm.stream(prompts, params)]
    return times[-1] - times[0]


def speeds(args: argparse.Namespace) -> list[Figure]:
    """Decoded tokens per second in each form, and the ratio to bfloat16."""
    model = random_qwen2(
        args.hidden, args.layers, args.seed, intermediate_size=11 * args.hidden // 4, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=args.vocab, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    rng = np.random.default_rng(args.seed)
    prompts = [rng.integers(1, args.vocab, 16).tolist() for _ in range(args.sequences)]
    found: dict[str | None, list[float]] = {}
    with ExitStack() as stack:
        engines = {
            form: stack.enter_context(LLM(model, quantization=form, prefix_caching=False, **ENGINE)) for form in (None, *FORMS)
        }
        for llm in engines.values():
            decode_seconds(llm, prompts, 1)  # a warm-up
        for _ in range(args.rounds):
            for form, llm in engines.items():
                seconds = decode_seconds(llm, prompts, args.new_tokens)
                found.setdefault(form, []).append(args.sequences * args.new_tokens / seconds)
    figures = []
    for form, samples in found.items():
        name = f"decoding, {form or 'bfloat16'}"
        figures.append(median(name, samples, "tokens/s", better="higher"))
        if form is not None:
            ratios = [a / b for a, b in zip(samples, found[None], strict=True)]
            target = LEAST_SPEEDUP.get(form)
            figures.append(median(f"{name} / bfloat16", ratios, "x", target, "higher"))
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--passages", type=whole, help="of the held-out text (all)")
    parser.add_argument("--hidden", type=whole, default=1024, help="of the random model, a multiple of 32 (%(default)s)")
    parser.add_argument("--layers", type=whole, default=24, help="of the random model (%(default)s)")
    parser.add_argument("--vocab", type=whole, default=32768, help="of the random model (%(default)s)")
    parser.add_argument("--sequences", type=whole, default=16, help="in a batch (%(default)s)")
    parser.add_argument("--new-tokens", type=whole, default=32, help="of each sequence (%(default)s)")
    args = parser.parse_args(argv)
    if args.hidden % 32:
        parser.error(f"16 heads of an even size need a hidden size that is a multiple of 32, got {args.hidden}")
    texts = passages()[: args.passages]
    figures = losses("perplexity", FOLDER, texts, MOST_LOSS)
    figures += losses("perplexity with outliers", with_outliers(args.seed), texts, MOST_LOSS_WITH_OUTLIERS)
    figures += speeds(args)
    report("Quantized weights", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

"""Tokens per second on the CPU, side by side with transformers on the same model, prompts and machine.

    python -m benchmarks.engine_cpu [--json FILE] [--rounds 3] [--dtypes float32 bfloat16] [--seed 0]
                                    [--hidden 512] [--layers 8] [--prompts 16] [--new-tokens 64]
                                    [--peers DIR [--only REGEX] [--busy 0] [--long-prompt 2048]]

A random Llama (hidden 512, 8 layers, 8 heads over 4 KV heads, vocabulary 8192), 16 ragged prompts of 64 to 256 tokens, 64
new tokens each, greedy, output tokens from end to end. Targets are for these sizes. The engines take turns, so that drift in
the machine's speed affects all of them; a figure is the median over the rounds of the ratio within a round. transformers'
`generate` gets the prompts padded on the left; its `generate_batch` is tuned: pages of 64, just enough blocks, 4,096 tokens
a batch.

With `--peers DIR` OpenVINO GenAI and llama.cpp run instead of transformers, in the environments and on the models that
`python -m benchmarks.peers.make DIR` makes; `--busy N` has N busy processes run beside every engine. The cores that others used
meanwhile are a figure: a row in which they are more than those N was not measured alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import agreement, prompts, save_model
from benchmarks.peers.compare import compare as compare_peers
from pagetide import LLM, SamplingParams

HIDDEN, LAYERS, PROMPTS, NEW_TOKENS = 512, 8, 16, 64
TARGETS = {"float32": 1.3, "bfloat16": 1.0}


def padded(model: Any, inputs: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' `generate`, all prompts in one batch padded on the left."""
    width = max(map(len, inputs))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in inputs])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in inputs])
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return [row[width:].tolist() for row in out]


def continuous(model: Any, inputs: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' `generate_batch`, tuned."""
    page = 64
    blocks = sum(-(-(len(p) + new_tokens) // page) for p in inputs) + 4
    out = model.generate_batch(
        inputs,
        generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=page, num_blocks=blocks, max_batch_tokens=4096),
    )
    ordered = sorted(out.values(), key=lambda o: int(o.request_id.rsplit("_", 1)[-1]))
    return [o.generated_tokens for o in ordered]


def timed(run: Callable[[], list[list[int]]], num: int, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Output tokens a second, and the tokens of `num` sequences. Raises when one is too short."""
    start = time.perf_counter()
    out = run()
    seconds = time.perf_counter() - start
    if [len(o) for o in out] != [new_tokens] * num:
        raise RuntimeError(f"an engine gave {[len(o) for o in out]} tokens instead of {new_tokens} each")
    return num * new_tokens / seconds, out


def compare(folder: Path, dtype: str, inputs: list[list[int]], new_tokens: int, rounds: int) -> list[Figure]:
    """Figures of one dtype."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with LLM(folder, device="cpu", dtype=dtype, kv_memory="256MiB", prefix_caching=False) as llm:
        engines: dict[str, Callable[[], list[list[int]]]] = {
            "generate": lambda: padded(model, inputs, new_tokens),
            "generate_batch": lambda: continuous(model, inputs, new_tokens),
            "pagetide": lambda: [o.token_ids for o in llm.generate(inputs, sampling)],
        }
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        tokens = {name: timed(run, len(inputs), new_tokens)[1] for name, run in engines.items()}  # a warm-up each
        for _ in range(rounds):
            for name, run in engines.items():
                speeds[name].append(timed(run, len(inputs), new_tokens)[0])
    better = map(max, speeds["generate"], speeds["generate_batch"])
    ratios = [ours / theirs for ours, theirs in zip(speeds["pagetide"], better, strict=True)]
    figures = [median(f"{dtype} {name}", some, "tokens/s", None, "higher") for name, some in speeds.items()]
    figures.append(median(f"{dtype} pagetide / better of the two", ratios, "x", TARGETS[dtype], "higher"))
    same = agreement(tokens["pagetide"], tokens["generate"])
    return [*figures, Figure(f"{dtype} tokens before a first difference to generate", same, "share", better="higher")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--hidden", type=whole, default=HIDDEN, help="of the model, a multiple of 16 (%(default)s)")
    parser.add_argument("--layers", type=whole, default=LAYERS, help="of the model (%(default)s)")
    parser.add_argument("--prompts", type=whole, default=PROMPTS, help="in a batch (%(default)s)")
    parser.add_argument("--new-tokens", type=whole, default=NEW_TOKENS, help="of each prompt (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=sorted(TARGETS))
    parser.add_argument("--peers", type=Path, metavar="DIR", help="other engines, made by benchmarks.peers.make")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside the peers (%(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="the workloads with peers, by their names")
    parser.add_argument("--long-prompt", type=whole, default=2048, help="tokens before the peers' first (%(default)s)")
    args = parser.parse_args(argv)
    if args.peers is not None:
        found = compare_peers(
            args.peers.absolute(), args.only, args.prompts, args.new_tokens, args.long_prompt, args.rounds, args.busy, args.seed
        )
        report(f"engines on the CPU, {args.busy} busy processes", found, args.seed, args.json)
        return
    if args.hidden % 16:
        parser.error(f"8 heads of an even size need a hidden size that is a multiple of 16, got {args.hidden}")
    inputs = prompts(args.prompts, args.seed)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        save_model(Path(scratch), args.hidden, args.layers, args.seed)
        for dtype in args.dtypes:
            figures += compare(Path(scratch), dtype, inputs, args.new_tokens, args.rounds)
    report("engine on the CPU", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

"""Latent attention on the CPU: the absorbed form, K and V that are expanded for a chunk, and a cache of K and V of all heads.

    python -m benchmarks.latent_attention [--json FILE] [--heads 16] [--rank 512] [--nope 128] [--rope 64] [--value 128]
                                          [--dtypes float32 bfloat16] [--decodes 8x2048] [--chunks 512+0 2048+0 512+4096]
                                          [--kernel auto] [--rounds 5] [--seed 0]

One layer's attention with random weights, of DeepSeek-V2-Lite's shape as given, products by head included. `8x2048` is a decode
step of 8 sequences of 2,048 tokens, `512+4096` a chunk of 512 tokens behind 4,096 cached ones. All forms take turns.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.engine.attention.backends import AUTO, AttentionSpec
from pagetide.engine.attention.choose import Site, choose
from pagetide.engine.attention.context import AttentionCall, AttentionKernel, LayerCache, StepContext, lengths_on
from pagetide.engine.loading import latent_attention
from pagetide.engine.loading.latent_attention import LatentAttention

BLOCK_SIZE = 16
NEVER = 1 << 30
Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """Chunks of the same length behind the same number of cached tokens."""

    name: str
    sequences: int
    tokens: int
    cached: int


def case(text: str) -> Case:
    """A case as an argument gives it: `8x2048` or `512+4096`."""
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        return Case(f"decoding {text}", int(match[1]), 1, int(match[2]) - 1)
    if match := re.fullmatch(r"(\d+)\+(\d+)", text):
        return Case(f"chunk {text}", 1, int(match[1]), int(match[2]))
    raise argparse.ArgumentTypeError(f"a case is SEQUENCESxTOKENS or TOKENS+CACHED, got {text!r}")


def step_of(kernel: AttentionKernel, of: Case) -> StepContext:
    """A step of the case's chunks over blocks of their own."""
    length = of.cached + of.tokens
    width = -(-length // BLOCK_SIZE)
    q_lens, kv_lens = (np.full(of.sequences, n, np.int32) for n in (of.tokens, length))
    return StepContext(
        layers=(),
        kernel=kernel,
        q_starts=np.arange(of.sequences, dtype=np.int32) * of.tokens,
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_decodes=of.sequences if of.tokens == 1 else 0,
        **lengths_on("cpu", q_lens, kv_lens),
        tables=(torch.arange(1, of.sequences * width + 1).view(of.sequences, width),),
        write_blocks=(),
        write_offsets=torch.empty(0, dtype=torch.int64),
        block_size=BLOCK_SIZE,
    )


def forms(args: argparse.Namespace, dtype: torch.dtype, of: Case) -> dict[str, Attend]:
    """Attention in each form, over the same latents."""
    heads, rank, nope, rope = args.heads, args.rank, args.nope, args.rope
    num_blocks = 1 + of.sequences * -(-(of.cached + of.tokens) // BLOCK_SIZE)
    weight = (torch.randn(heads, nope + args.value, rank) / rank**0.5).to(dtype)
    query = torch.randn(of.sequences * of.tokens, heads, nope + rope).to(dtype)
    latents = torch.randn(num_blocks, BLOCK_SIZE, 1, rank + rope).to(dtype)
    both = (latents[..., 0, :rank] @ weight.flatten(0, 1).T).unflatten(-1, (heads, -1))
    key = torch.cat((both[..., :nope], latents[..., rank:].expand(-1, -1, heads, -1)), -1)
    layer, cached = LatentAttention(weight, nope, rope), LayerCache(latents, latents[..., :rank], v_in_k=True)
    expanded = LayerCache(key, both[..., nope:].contiguous())

    def attention(cache: LayerCache, expanded_from: int | None) -> Attend:
        shape = LayerShape(cache.key.shape[2], cache.key.shape[3], cache.value.shape[3], v_in_k=cache.v_in_k)
        geometry = Geometry((shape,), BLOCK_SIZE, str(dtype).removeprefix("torch."))
        spec = AttentionSpec(heads, shape.num_kv_heads, shape.k_dim, shape.v_dim)
        kernel = choose(args.kernel, Site.of(torch.device("cpu"), dtype, geometry), Counter([spec]))
        step = step_of(kernel, of)
        places = (
            step.tables[0].repeat_interleave(BLOCK_SIZE, 1),
            torch.arange(BLOCK_SIZE).repeat(step.tables[0].shape[1]),
        )
        own = slice(of.cached, of.cached + of.tokens)
        rows = [part[places[0][:, own], places[1][own]].flatten(0, 1) for part in (cache.key, cache.value)]
        call = AttentionCall(query, rows[0], rows[1], cache, step, (nope + rope) ** -0.5)

        def attend() -> torch.Tensor:
            if expanded_from is None:
                return kernel.attend(call)
            latent_attention.EXPANDED_FROM = expanded_from
            return layer.attend(call)

        return attend

    found = {"absorbed": attention(cached, NEVER), "all heads cached": attention(expanded, None)}
    return found if of.tokens == 1 else found | {"expanded": attention(cached, 1)}


def measured(args: argparse.Namespace, dtype: torch.dtype, of: Case) -> list[Figure]:
    """The time of each form, and how it compares with the absorbed one."""
    functions, samples = forms(args, dtype, of), dict[str, list[float]]()
    for round_number in range(-1, args.rounds):  # the first one is a warm-up
        for form, attend in functions.items():
            began = time.perf_counter()
            attend()
            if round_number >= 0:
                samples.setdefault(form, []).append(1000 * (time.perf_counter() - began))
    name = f"{of.name}, {str(dtype).removeprefix('torch.')}"
    figures = [
        Figure(f"{name}, {form}", statistics.median(times), "ms", samples=times) for form, times in samples.items()
    ]
    for form in list(samples)[1:]:
        ratios = [one / absorbed for one, absorbed in zip(samples[form], samples["absorbed"], strict=True)]
        figures.append(Figure(f"{name}, {form} / absorbed", statistics.median(ratios), "x", samples=ratios))
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--heads", type=whole, default=16)
    parser.add_argument("--rank", type=whole, default=512, help="elements of a latent (%(default)s)")
    parser.add_argument(
        "--nope", type=whole, default=128, help="elements of a head's K that are not rotated (%(default)s)"
    )
    parser.add_argument("--rope", type=whole, default=64, help="elements of K that are rotated (%(default)s)")
    parser.add_argument("--value", type=whole, default=128, help="elements of a head's V (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--decodes", nargs="+", type=case, default=[case("8x2048")], metavar="SEQUENCESxTOKENS")
    chunks = [case(text) for text in ("512+0", "2048+0", "512+4096")]
    parser.add_argument("--chunks", nargs="+", type=case, default=chunks, metavar="TOKENS+CACHED")
    parser.add_argument("--kernel", default=AUTO, help="of attention (%(default)s)")
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    with torch.inference_mode():
        figures = [
            figure
            for dtype in args.dtypes
            for of in (*args.decodes, *args.chunks)
            for figure in measured(args, getattr(torch, dtype), of)
        ]
    report("Latent attention on the CPU", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

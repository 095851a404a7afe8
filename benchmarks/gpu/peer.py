"""transformers' `generate_batch` on the same model, with its best attention implementation and CUDA graphs if they help.

By itself it takes graphs only with flash attention. So many sequences are decoded first as it chooses, then with graphs in any
case, and decode is measured in the faster of the two ways; a first token as it chooses, for graphs serve no long prompt.
Both engines get the same prompts in one run. Decode is measured alike: between the moment when the last sequence has its first
token and the one when the first sequence ends, so that neither prefill nor start-up counts. A first token is timed from the
moment when the request is known to the manager, which runs already, with its graphs captured.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from benchmarks.figures import Figure

from .bench import Bench
from .decode import FIRST, MANY, ONE
from .parts import Item, Unmeasured, bounded, unmeasured

PAGE = 256


def measure(bench: Bench) -> Iterator[Item]:
    """Needs what `decode` measured in the same run."""
    scale, model = bench.scale, bench.model()
    length = scale.context - scale.new_tokens // 2
    speeds: dict[bool | None, float] = {}
    yield from _tried(bench, model, length, speeds)
    graphs = max(speeds, key=lambda way: speeds[way])
    for rows, name, ours in [(scale.rows, "many sequences", MANY), (1, "one sequence", ONE)]:
        speed = _speed(bench, model, bench.prompts(rows, length, 2), graphs)
        yield Figure(f"decode, {name}: generate_batch", speed, "tokens/s", better="higher")
        if ours not in bench.known:
            if rows > 1:
                yield unmeasured("rows", "decode has no figure to compare with")
        elif rows > 1:
            yield bounded("rows", bench.known[ours] / speed)
        else:
            yield Figure(f"decode, {name}: pagetide / generate_batch", bench.known[ours] / speed, "x", better="higher")
    samples = []
    for seed in range(3):
        (output,) = _run(bench, model, bench.prompts(1, scale.prompt, 10 + seed), 2, None)
        samples.append(1e3 * (output.timestamps[0] - output.created_time))
    theirs = statistics.median(samples[1:])
    yield Figure("time to first token: generate_batch", theirs, "ms", samples=samples[1:])
    if FIRST in bench.known:
        yield bounded("first_token", bench.known[FIRST] / theirs)
    else:
        yield unmeasured("first_token", "decode has no figure to compare with")


def _tried(bench: Bench, model: Any, length: int, speeds: dict[bool | None, float]) -> Iterator[Item]:
    """The speed with many sequences in either way, which goes into `speeds` too: graphs, or as it chooses. Warms up."""
    for name, graphs in [("as it chooses", None), ("with CUDA graphs in any case", True)]:
        title, began = f"... generate_batch tried {name}", time.monotonic()
        try:
            speeds[graphs] = _speed(bench, model, bench.prompts(bench.scale.rows, length, 1), graphs)
        except Exception as error:
            if graphs is None:
                raise
            yield Unmeasured(title, f"{type(error).__name__}: {error}")
            continue
        yield Figure(title, speeds[graphs], "tokens/s", better="higher")
        if 5 * (time.monotonic() - began) > bench.left_s:
            return  # so that the rest has time


def settings(rows: int, tokens: int, graphs: bool | None) -> ContinuousBatchingConfig:
    """Pages of 256, which its fast path wants; blocks for all, and as many again; batches as large as pagetide's steps."""
    names = {f.name for f in dataclasses.fields(ContinuousBatchingConfig)}
    size = {"page_size" if "page_size" in names else "block_size": PAGE}  # its name up to transformers 5.17
    blocks = 2 * rows * (-(-tokens // PAGE) + 1) + 4
    return ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=8192, use_cuda_graph=graphs, **size)


def rate(timestamps: list[list[float]]) -> float:
    """Tokens a second while all sequences decode. Raises ValueError where they never do."""
    began, ended = max(times[0] for times in timestamps), min(times[-1] for times in timestamps)
    tokens = sum(began < at <= ended for times in timestamps for at in times)
    if ended <= began or not tokens:
        raise ValueError("the first sequence ended before the last one had its first token")
    return tokens / (ended - began)


def _speed(bench: Bench, model: Any, prompts: list[list[int]], graphs: bool | None) -> float:
    return rate([output.timestamps for output in _run(bench, model, prompts, bench.scale.new_tokens, graphs)])


def _run(bench: Bench, model: Any, prompts: list[list[int]], new_tokens: int, graphs: bool | None) -> list[Any]:
    """The outputs. Raises RuntimeError where one is missing or too short."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=settings(len(prompts), len(prompts[0]) + new_tokens, graphs),
        record_timestamps=True,
        progress_bar=False,
    )
    bench.clean()
    given = [len(output.generated_tokens) for output in outputs.values()]
    if given != [new_tokens] * len(prompts):
        raise RuntimeError(f"generate_batch gave {given} tokens instead of {new_tokens} for each of {len(prompts)} prompts")
    return list(outputs.values())

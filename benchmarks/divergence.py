"""How much a request's tokens and log-probabilities depend on concurrent requests, in float32 and in bfloat16.

    python -m benchmarks.divergence [--json FILE] [--model demo] [--device cpu] [--dtypes float32 bfloat16] [--prompts 16]
                                    [--new-tokens 48] [--seed 0]

Prompts come from the held-out text; sampling is greedy. The reference is each request alone, in the same type, with its
prompt in one piece and nothing cached. Compared with it: all requests at once; a prefix hit (a request with the first half of
each prompt ran before; one at a time); prompts in chunks of 16 (one at a time); and all at once in two fifths of the blocks
that they need, where preempted requests are recomputed, or swapped to the host and back.

Each comparison has two figures: the share of tokens before a request's first difference; and the largest difference of a
log-probability, over the whole vocabulary, at the positions up to there, which have the same history. Both come from
rounding: a sum over another number of rows is taken in another order. In float32 every token must be the same, and
log-probabilities within 1e-4; in bfloat16 the figures are only recorded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model
from pagetide.engine.errors import EngineError
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.outcome import Stats
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
CHUNK_TOKENS = 16
SHARE = 0.4  # of the blocks that all need, in a pool that is too small
WORDS = (12, 48)  # of a prompt
TARGETS = {"float32": (1.0, 1e-4), "bfloat16": (None, None)}  # share of tokens, difference of log-probabilities


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt, the tokens that came, and the log-probabilities [vocabulary] that each came from."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[torch.Tensor]


Run = list[ServedPrompt]


class AlwaysSwap(SwapCost):
    """Swapping is worth it, however fast a small model computes."""

    def swap_s(self, num_blocks: int) -> float:
        return 0.0

    def observe(self, plan: Plan, result: Result) -> None:
        pass


class LogprobRecorder:
    """A logits processor that keeps the log-probabilities of every token of its request, and changes nothing."""

    def __init__(self) -> None:
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.log_probs.append(torch.log_softmax(scores[0].float(), -1).cpu())
        return scores


class GreedyAdmissionEngine:
    """an engine that admits whatever fits now."""

    def __init__(self, model: str, device: str, dtype: str, kv_memory: int | str, **options: Any) -> None:
        self.llm = LLM(
            model, device=device, dtype=dtype, kv_memory=kv_memory, block_size=BLOCK_SIZE, share=False, **options
        )
        self.block_bytes = self.llm.stats()["kv_bytes_per_token"] * BLOCK_SIZE
        with self.llm.locked_engine() as engine:
            scheduler = engine.core.scheduler
            limits = replace(scheduler.limits, forecast=False)  # else hardly anybody would be preempted
            cost = AlwaysSwap(self.block_bytes, BLOCK_SIZE) if scheduler.cache.host.capacity else None
            engine.core.scheduler = Scheduler(scheduler.cache, limits, cost)

    def counters(self) -> Stats:
        """What the scheduler counted since the start."""
        with self.llm.locked_engine() as engine:
            return deepcopy(engine.core.scheduler.stats)

    def run(self, prompts: Sequence[Any], new_tokens: int) -> Run:
        """Greedy continuations of `prompts`: texts or token ids."""
        recorders = [LogprobRecorder() for _ in prompts]
        params = [
            SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True, logits_processors=[recorder])
            for recorder in recorders
        ]
        outputs = self.llm.generate(list(prompts), params, progress=False)
        assert all(len(output.token_ids) == new_tokens for output in outputs), [output.error for output in outputs]
        return [
            ServedPrompt(output.prompt_token_ids, output.token_ids, recorder.log_probs)
            for output, recorder in zip(outputs, recorders, strict=True)
        ]


def texts(num: int, seed: int) -> list[str]:
    """Pieces of the held-out text."""
    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    passages = [passage.split() for passage in text.split("\n%%\n") if len(passage.split()) > max(WORDS)]
    rng = np.random.default_rng(seed)
    pieces = []
    for i in range(num):
        words, length = passages[i % len(passages)], int(rng.integers(*WORDS))
        first = int(rng.integers(len(words) - length))
        pieces.append(" ".join(words[first : first + length]))
    return pieces


def differences(run: Run, right: Run) -> tuple[list[float], list[float]]:
    """For each prompt the share of tokens before the first difference, and the largest difference of log-probabilities."""
    shares, largest = [], []
    for got, expected in zip(run, right, strict=True):
        pairs = enumerate(zip(got.token_ids, expected.token_ids, strict=True))
        same = next((n for n, (a, b) in pairs if a != b), len(got.token_ids))
        both = zip(got.log_probs[: same + 1], expected.log_probs, strict=False)
        shares.append(same / len(got.token_ids))
        largest.append(max(float((a - b).abs().max()) for a, b in both))
    return shares, largest


def runs(model: str, device: str, dtype: str, num: int, new_tokens: int, seed: int) -> tuple[Run, dict[str, Run]]:
    """What is right, and what each way of being served gives. Raises RuntimeError where a way did not come about."""
    bare: dict[str, Any] = {"prefix_caching": False}
    engine = GreedyAdmissionEngine(model, device, dtype, "256MiB", max_seqs=1, **bare)
    with engine.llm:
        right, block_bytes = engine.run(texts(num, seed), new_tokens), engine.block_bytes
    prompts = [one.prompt_token_ids for one in right]
    each = [-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts]
    room, little = (block_bytes * (1 + n) for n in (2 * sum(each), max(max(each), int(SHARE * sum(each)))))

    def served(kv_memory: int, shows: str, before: Sequence[list[int]] = (), **options: Any) -> Run:
        engine = GreedyAdmissionEngine(model, device, dtype, kv_memory, **options)
        with engine.llm:
            if before:
                engine.run(before, 1)
            run = engine.run(prompts, new_tokens)
            stats = engine.counters()
            if not attrgetter(shows)(stats) or (kv_memory == little and 4 * stats.preemptions < num):
                raise RuntimeError(f"with {options} it says nothing: {shows} was to be shown, and there was {stats}")
        return run

    return right, {
        "all at once": served(room, "steps", **bare),
        "prefix hits": served(room, "prefix_lookups.hit_tokens", [p[: len(p) // 2] for p in prompts], max_seqs=1),
        "chunks": served(room, "steps", max_seqs=1, max_chunk_tokens=CHUNK_TOKENS, **bare),
        "computed again": served(little, "recomputed_tokens", **bare),
        "swapped": served(little, "promoted_blocks", host_kv_memory=room),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--model", default="demo", help="a name or a folder, as LLM takes it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--prompts", type=whole, default=16)
    parser.add_argument("--new-tokens", type=whole, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    figures = []
    for dtype in args.dtypes:
        try:
            right, ways = runs(args.model, args.device, dtype, args.prompts, args.new_tokens, args.seed)
        except EngineError as error:
            parser.error(str(error))
        for way, run in ways.items():
            shares, largest = differences(run, right)
            name = f"{dtype}, {way}"
            share, nats = TARGETS[dtype]
            figures += [
                Figure(
                    f"{name}: tokens before a difference", sum(shares) / len(shares), "share", share, "higher", shares
                ),
                Figure(f"{name}: log-probabilities, largest difference", max(largest), "nats", nats, samples=largest),
            ]
    report("divergence from each request alone", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

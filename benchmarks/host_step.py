"""The host time of a whole engine step: plan, batch, upload, sample, apply, deliver; everything but the model.

    python -m benchmarks.host_step [--json FILE] [--sequences 256 4096] [--steps 200] [--rounds 3] [--seed 0]

A real `LLM` on the CPU decodes sequences of some 20 to 260 tokens, greedily and all at once. A stand-in takes the place of its
model: it returns logits that were made before, over 512 tokens, so that the argmax over them hardly counts. The time of a step
is the time from one return of the stand-in to its next call. "token ids" are those of `LLM.generate`, which makes texts at the
end; "text" is the same where every token becomes text at once, as for a request with stop strings. The parts come from a run of
their own, with clocks that cost some microseconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from benchmarks.profile_step import clocked
from benchmarks.stand_ins import num_kept, output_of
from pagetide import LLM, SamplingParams
from pagetide.engine.attention.context import StepContext

TARGETS = {256: 400.0, 4096: 3000.0}  # us
VOCAB_SIZE, WHOLE_TEXTS = 512, (300, 512)  # ids of the demo tokenizer in this range are texts, not single bytes
NEVER = "\x00"  # a stop string that does not occur
FIRST_STEPS = 8  # after the last prompt, not counted


class ClockedLogits:
    """In place of the model: logits made before. Keeps the time of each call that decodes `num_rows` sequences, and what the
    parts in `spent` had taken until then.
    """

    def __init__(self, num_rows: int, seed: int, spent: Mapping[str, float]) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(*WHOLE_TEXTS, (num_rows,), generator=generator) for _ in range(3)]
        self._turns: Iterator[SimpleNamespace] = cycle([output_of(some, VOCAB_SIZE) for some in ids])
        self._num_rows, self._spent = num_rows, spent
        self.calls: list[tuple[tuple[float, float], tuple[float, float]]] = []  # (begin, end), each by `_now`
        self.spent: list[dict[str, float]] = []

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, step: StepContext,
        logits_to_keep: torch.Tensor | int,
    ) -> SimpleNamespace:  # fmt: skip
        """See `Runner.model`."""
        begin = _now()
        logits = next(self._turns).logits[:, : num_kept(logits_to_keep)]
        if step.num_decodes == self._num_rows:
            self.spent.append(dict(self._spent))
            self.calls.append((begin, _now()))
        return SimpleNamespace(logits=logits)

    @property
    def between_us(self) -> tuple[list[float], list[float]]:
        """Microseconds between two calls, and those of them in which the thread ran."""
        between = [
            (1e6 * (begin[0] - end[0]), 1e6 * (begin[1] - end[1]))
            for (_, end), (begin, _) in pairwise(self.calls[FIRST_STEPS:])
        ]
        return [took for took, _ in between], [ran for _, ran in between]

    def part_s(self, name: str) -> float:
        """Median seconds that the part `name` took in a step."""
        return statistics.median(after[name] - before[name] for before, after in pairwise(self.spent[FIRST_STEPS:]))


def _now() -> tuple[float, float]:
    """Seconds, and the thread's seconds on a core."""
    return time.perf_counter(), time.thread_time()


def save_model(folder: Path, seed: int) -> None:
    """A model of next to no size: its KV and its packing count, its products do not."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def decode(llm: LLM, num_seqs: int, steps: int, seed: int, *, text: bool, parts: bool = False) -> ClockedLogits:
    """Let `num_seqs` sequences gain a token in each of `steps` steps, perhaps with clocks around the `parts` of a step."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(*WHOLE_TEXTS, int(n)).tolist() for n in rng.integers(8, 56, num_seqs)]  # staggered borders
    new_tokens = steps + FIRST_STEPS + 1
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True, stop=[NEVER] if text else None)
    spent: dict[str, float] = defaultdict(float)
    model = ClockedLogits(num_seqs, seed, spent)
    gc.collect()
    with ExitStack() as clocks:
        with llm.locked_engine() as engine:
            core = engine.core
            core.runner.model = model
            for owner, name in (
                (core, "step"), (core.scheduler, "schedule"), (core.runner, "begin"), (core.runner.sampler, "sample"),
                (core.scheduler, "apply"),
            ) if parts else ():  # fmt: skip
                clocks.enter_context(clocked(owner, name, spent))
        outputs = llm.generate(prompts, sampling, progress=False)
    if [len(output.token_ids) for output in outputs] != [new_tokens] * num_seqs:
        raise RuntimeError("a sequence ended early")
    return model


def measure(folder: Path, num_seqs: int, steps: int, rounds: int, seed: int) -> list[Figure]:
    """The figures of one number of sequences."""
    longest = 64 + steps + FIRST_STEPS
    name, figures = f"{num_seqs:,} rows", []
    with LLM(
        folder, tokenizer="demo", device="cpu", dtype="float32", kv_memory=num_seqs * (longest + 16) * 128 + (1 << 22),
        max_seqs=num_seqs, max_step_tokens=64 * num_seqs, max_model_len=longest, share=False,
    ) as llm:  # fmt: skip
        for text in (False, True):
            took, ran = zip(
                *(decode(llm, num_seqs, steps, seed + n, text=text).between_us for n in range(rounds)), strict=True
            )
            samples = [round(us, 1) for one in took for us in one]
            what, median = f"{name}, {'text' if text else 'token ids'}", statistics.median(samples)
            target = None if text else TARGETS.get(num_seqs)
            figures += [
                Figure(f"{what}, median", median, "us", target, samples=samples),
                Figure(f"{what}, p99 / median", float(np.percentile(samples, 99)) / median, "x"),
                Figure(f"{what}, time on a core, median", statistics.median(us for one in ran for us in one), "us"),
            ]
        part_s = decode(llm, num_seqs, steps, seed, text=False, parts=True).part_s
        seconds = {
            "plan": part_s("schedule"),
            "batch, upload": part_s("begin") - part_s("sample"),
            "sample": part_s("sample"),
            "apply": part_s("apply"),
        }
        seconds["memory and the rest of the step"] = part_s("step") - sum(seconds.values())
    return figures + [Figure(f"{name}: {part}", 1e6 * one, "us") for part, one in seconds.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--sequences", type=whole, nargs="+", default=list(TARGETS), help="that decode (256, 4096)")
    parser.add_argument("--steps", type=whole, default=200, help="of a round (%(default)s)")
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        save_model(Path(scratch), args.seed)
        for num_seqs in args.sequences:
            figures += measure(Path(scratch), num_seqs, args.steps, args.rounds, args.seed)
    report("host time of an engine step without the model", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

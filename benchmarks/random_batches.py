"""Random batches of requests of all kinds, for long runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pagetide import SamplingParams
from pagetide.engine import demo_model

CONTEXT = 1024
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z ]{1,20}"},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "yes" | "no" | "perhaps " start'},
)


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Prompts of a call, as token ids, and what each asks for."""

    prompts: list[list[int]]
    params: list[SamplingParams]


def save_model(folder: Path, hidden: int, layers: int, seed: int) -> int:
    """A random Llama behind the demo's tokenizer. Returns the size of its vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(str(Path(str(demo_model.__file__)).parent))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, initializer_range=0.05,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return len(tokenizer)


class RandomBatches:
    """Draws batches of 1 to `most` requests over a vocabulary of `vocab_size`. The same seed draws the same ones.

    Lengths go from one token to most of the context; some prompts begin as earlier ones did. A request may be drawn or
    greedy, with any of the treatments, as several continuations, as beams, or within a constraint.
    """

    def __init__(self, vocab_size: int, most: int, seed: int, constraints: bool = True) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._most = most
        self._constraints = constraints
        self._earlier: list[list[int]] = []

    def draw(self) -> RequestBatch:
        """The next one."""
        rng = self._rng
        count = rng.choice([1, 2, 4, 8, rng.randint(1, self._most), rng.randint(1, self._most)])
        longest = rng.choice([16, 64, 256, 600])
        prompts = [self._prompt(rng.randint(1, longest)) for _ in range(min(count, self._most))]
        return RequestBatch(prompts, [self._params() for _ in prompts])

    def _prompt(self, length: int) -> list[int]:
        rng = self._rng
        tokens = [rng.randrange(self._vocab_size) for _ in range(length)]
        if self._earlier and rng.random() < 0.3:
            known = rng.choice(self._earlier)
            tokens = (known[: rng.randint(1, len(known))] + tokens)[: max(length, 1)]
        self._earlier = [*self._earlier[-15:], tokens]
        return tokens

    def _params(self) -> SamplingParams:
        rng = self._rng
        asked: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 24),
            "ignore_eos": True,
            "seed": rng.randrange(1 << 30),
        }
        kind = rng.random()
        if kind < 0.1:
            return SamplingParams(**asked, num_beams=rng.randint(2, 4), n=2)
        if kind < 0.2 and self._constraints:
            return SamplingParams(**asked | {"ignore_eos": False}, **rng.choice(CONSTRAINTS))
        if rng.random() < 0.5:
            asked |= {"temperature": rng.choice([0.7, 1.0, 1.5]), "n": rng.choice([1, 1, 1, 2, 4])}
        for name, value in (
            ("top_p", rng.uniform(0.5, 1.0)), ("top_k", rng.randint(1, 50)), ("min_p", rng.uniform(0.0, 0.2)),
            ("repetition_penalty", 1.1), ("frequency_penalty", 0.5), ("presence_penalty", 0.5),
            ("logit_bias", {rng.randrange(self._vocab_size): 2.0}), ("logprobs", rng.randint(0, 5)),
            ("prompt_logprobs", rng.randint(0, 3)), ("bad_words_ids", [[rng.randrange(self._vocab_size)]]),
        ):  # fmt: skip
            if rng.random() < 0.1:
                asked[name] = value
        return SamplingParams(**asked)

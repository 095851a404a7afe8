"""What benchmarks serve: random models and prompts, random batches of requests, public or synthetic traces, bursty arrivals.

An id of a trace stands for as many tokens as in its source (512 Mooncake, 64 agentic). Traces do not say which ids an output
has in the next prompt, so no output is found again in them.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from pagetide import SamplingParams
from pagetide.engine import demo_model

VOCABULARY = 8192  # token ids of prompts are below it


def save_model(folder: Path, hidden: int, layers: int, seed: int, positions: int = 2048) -> None:
    """The random Llama, with logits far enough apart that its greedy tokens are its own."""
    _save_llama(folder, hidden, layers, seed, positions, vocab_size=VOCABULARY, num_key_value_heads=4)


def _save_llama(folder: Path, hidden: int, layers: int, seed: int, positions: int, **options: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers, num_attention_heads=8,
        max_position_embeddings=positions, initializer_range=0.05, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def random_qwen2(hidden: int, layers: int, seed: int, **options: Any) -> Any:
    """A Qwen2-like model with random weights in bfloat16."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, bos_token_id=None, eos_token_id=None, dtype=torch.bfloat16, **options
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def save_qwen2(folder: Path, hidden: int, layers: int, seed: int, positions: int = 2048) -> None:
    """One with the output head tied to the embedding, as in small Qwen2 models."""
    random_qwen2(
        hidden, layers, seed, intermediate_size=19 * hidden // 4, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=max(VOCABULARY, 32 * hidden), max_position_embeddings=positions, tie_word_embeddings=True, pad_token_id=0,
    ).save_pretrained(folder)  # fmt: skip


def save_qwen3(folder: Path, hidden: int, layers: int, seed: int, positions: int = 2048) -> None:
    """One with the ratios of Qwen3's small models: 0.6 billion parameters at 1,024 x 28, 1.7 at 2,048 x 28."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=max(VOCABULARY, 151_936 * min(hidden, 1024) // 1024),
        max_position_embeddings=positions, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def random_qwen3_5(hidden: int, layers: int, seed: int, positions: int) -> Any:
    """A model with Qwen3.5's layers in float32: three with the gated delta rule, 16 heads of 128, to one with attention."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=max(VOCABULARY, 32 * hidden), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=256, tie_word_embeddings=True,
        layer_types=["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)],
        linear_num_value_heads=16, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        max_position_embeddings=positions, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def save_qwen3_5(folder: Path, hidden: int, layers: int, seed: int, positions: int = 2048) -> None:
    """The same in a folder."""
    random_qwen3_5(hidden, layers, seed, positions).save_pretrained(folder)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Ragged prompts of 64 to 256 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCABULARY, int(n)).tolist() for n in rng.integers(64, 257, count)]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first that differs, over all prompts."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, ours))


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


def save_text_model(folder: Path, hidden: int, layers: int, seed: int) -> int:
    """A random Llama behind the demo's tokenizer. Returns the size of its vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(str(Path(str(demo_model.__file__)).parent))
    tokenizer.save_pretrained(folder)
    _save_llama(folder, hidden, layers, seed, CONTEXT, vocab_size=len(tokenizer), num_key_value_heads=8)
    return len(tokenizer)


class RandomBatches:
    """Draws batches of 1 to `most` requests over a vocabulary of `vocab_size`. The same seed draws the same ones.

    Lengths go from one token to most of the context; some prompts begin as earlier ones did. A request may be drawn or
    greedy, with any of the treatments, as several continuations, as beams, or within a constraint.
    """

    def __init__(self, vocab_size: int, most: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._most = most
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
        asked: dict[str, Any] = {"max_new_tokens": rng.randint(1, 24), "ignore_eos": True, "seed": rng.randrange(1 << 30)}
        kind = rng.random()
        if kind < 0.1:
            return SamplingParams(**asked, num_beams=rng.randint(2, 4), n=2)
        if kind < 0.2:
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


Ids = npt.NDArray[np.int64]
Row = TypeVar("Row")

_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request. `ids` may cover less than the prompt, or more: then what is generated too."""

    at_s: float
    prompt_tokens: int
    output_tokens: int  # the stop token included
    ids: Ids

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < float("inf"):
            raise ValueError(f"a request comes at a time from 0 s on, got {self.at_s}")
        for name, tokens in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not isinstance(tokens, int) or tokens < 1:
                raise ValueError(f"a request has at least 1 token of {name}, got {tokens!r}")


class BadTrace(ValueError):
    """A trace's file is not there, or not what its name says: the message says which line, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Turns in order of time."""

    source: str
    turns: list[Turn]


def mooncake(folder: Path) -> Trace:
    """The source rounds times to 3 s; requests of one instant are spread evenly over the 3 s that follow."""
    file = folder / "mooncake_conversation_0-20min.jsonl"

    def turn(line: str) -> Turn:
        row = _object(line)
        ids = np.array(row["hash_ids"], np.int64)
        return Turn(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids)

    turns = _turns(file, _lines(file), turn)
    _, first, counts = np.unique([turn.at_s for turn in turns], return_index=True, return_counts=True)
    place = (np.arange(len(turns)) - np.repeat(first, counts)) / np.repeat(counts, counts)
    spread = [replace(turn, at_s=turn.at_s + 3 * share) for turn, share in zip(turns, place.tolist(), strict=True)]
    return Trace(f"{file.name} (times spread over their 3 s)", spread)


def agentic(folder: Path) -> Trace:
    """Sessions of coding agents; times as they are, whether or not the session's turn before has ended."""
    file = folder / "agentic_sessions.jsonl"

    def turn(line: str) -> Turn:
        row = _object(line)
        ids = np.concatenate([np.arange(at, at + count, dtype=np.int64) for at, count in row["hash_runs"]] or [_NO_IDS])
        return Turn(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids)

    return Trace(file.name, _turns(file, _lines(file), turn))


def azure(folder: Path, kind: str = "code") -> Trace:
    """Code completions, or chats ("conv"): times and lengths alone, no prefix is shared."""
    file = folder / f"azure2023_{kind}_0-20min.csv"

    def turn(row: dict[str, str]) -> Turn:
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        return Turn(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), _NO_IDS)

    turns = _turns(file, csv.DictReader(_lines(file)), turn, header_lines=1)
    return Trace(file.name, [replace(turn, at_s=turn.at_s - turns[0].at_s) for turn in turns])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): name the folder of traces by --data, or "
            "'none' for a synthetic load"
        ) from None


def _object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a line is a JSON object, got {line[:40]}")
    return row


def _turns(file: Path, rows: Iterable[Row], turn: Callable[[Row], Turn], header_lines: int = 0) -> list[Turn]:
    """`turn` of each of the file's rows, in order of time. Raises BadTrace for the first one that is none."""
    turns = []
    for number, row in enumerate(rows):
        try:
            turns.append(turn(row))
        except (ValueError, TypeError, KeyError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise BadTrace(f"line {number + 1 + header_lines} of {file} is not a request of this trace: {why}") from None
    if not turns:
        raise BadTrace(f"{file} holds no request")
    return sorted(turns, key=lambda turn: turn.at_s)


TRACE_S = 1200.0
SHIFT = 0.125  # of the trace, by which the second stream is ahead: its bursts mostly come in the gaps of the first
PROMPT_DIVISOR, LEAST_PROMPT, MOST_PROMPT = 5, 16, 800  # tokens; the demo model's context is 1,024
OUTPUT_FACTOR, LEAST_OUTPUT, MOST_OUTPUT = 4, 16, 192
BURSTY_REQUESTS = 3600
BURSTY = (
    f"a synthetic trace: {BURSTY_REQUESTS:,} requests in four bursts, each a tenth of the time, prompts log-normal around "
    "1,400 tokens (sigma 1.1), outputs around 13 (sigma 0.9)"
)


def two_streams(folder: Path | None, seconds: float, per_second: float) -> tuple[tuple[list[Turn], list[Turn]], str]:
    """The arrivals at both engines in `seconds`, `per_second` at each on average; and where they come from.

    Without a folder the trace is synthetic. Raises BadTrace where the folder has no such trace.
    """
    trace = Trace(BURSTY, _bursty()) if folder is None else azure(folder)
    step = len(trace.turns) / (per_second * seconds)
    thinned = [trace.turns[int(i * step)] for i in range(int(len(trace.turns) / step))] if step > 1 else trace.turns
    return (_compressed(thinned, seconds, 0.0), _compressed(thinned, seconds, SHIFT)), trace.source


def _bursty() -> list[Turn]:
    """See BURSTY."""
    rng = random.Random(1)
    turns = []
    for _ in range(BURSTY_REQUESTS):
        at = rng.choice((0.15, 0.45, 0.70, 0.90)) + rng.betavariate(1, 3) / 10
        prompt, output = int(rng.lognormvariate(7.24, 1.1)), int(rng.lognormvariate(2.56, 0.9))
        turns.append(Turn(TRACE_S * at, max(1, prompt), max(1, output), _NO_IDS))
    return sorted(turns, key=lambda turn: turn.at_s)


def _compressed(turns: list[Turn], seconds: float, ahead: float) -> list[Turn]:
    """In `seconds`, with lengths that suit the demo model."""
    arrivals = [
        Turn(
            (turn.at_s / TRACE_S - ahead) % 1.0 * seconds,
            min(MOST_PROMPT, max(LEAST_PROMPT, turn.prompt_tokens // PROMPT_DIVISOR)),
            min(MOST_OUTPUT, max(LEAST_OUTPUT, turn.output_tokens * OUTPUT_FACTOR)),
            _NO_IDS,
        )
        for turn in turns
    ]
    return sorted(arrivals, key=lambda turn: turn.at_s)

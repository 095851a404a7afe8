"""What a user asks for: a prompt and how to continue it. Checked at the door, then resolved once into a frozen object."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

DEFAULT_MAX_NEW_TOKENS = 256
MOST_FORKS = 4096  # continuations of a prompt
_MOST = 2**31 - 1  # token ids and counts are 32 bits wide


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. `None` everywhere means: as the model's `generation_config.json` says, else the default.

    Args:
        n: Continuations of each prompt, which is computed once for all of them (default 1). Each draws for itself; where
            nothing is drawn (temperature 0) they are all alike.
        max_new_tokens: Most tokens to generate, at least 1 (default 256). Generation also ends at the model's context.
        min_new_tokens: No end id and no stop id is sampled before so many tokens.
        temperature: 0 is greedy. Defaults to 0 unless the model's generation config says `do_sample`, or one of
            `top_k`, `top_p`, `min_p` is given here (then 1).
        top_k: Sample among the k most likely tokens; 0 is off.
        top_p: Sample among the fewest tokens that hold this probability, in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens already in the prompt or the output.
        stop: A string or strings that end the text; the text is cut before it.
        stop_token_ids: Ids that end the text, besides the model's own end ids.
        ignore_eos: Go on past the model's own end ids.
        seed: The same request with the same seed gives the same tokens; `None` takes one at random.
        add_special_tokens: Let the tokenizer add its special tokens (BOS) to a prompt given as a string.

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    add_special_tokens: bool = True
    n: int | None = None

    def __post_init__(self) -> None:
        _check_integer("n", self.n, least=1, most=MOST_FORKS)
        _check_integer("max_new_tokens", self.max_new_tokens, least=1, most=_MOST)
        _check_integer("min_new_tokens", self.min_new_tokens, least=0, most=_MOST)
        _check_integer("top_k", self.top_k, least=0, most=_MOST)
        _check_integer("seed", self.seed, least=-(2**63), most=2**64 - 1)
        _check_number("temperature", self.temperature, 0.0, math.inf, "must be 0 (greedy) or above")
        _check_number("top_p", self.top_p, 0.0, 1.0, "must be in (0, 1]", open_below=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "must be in [0, 1]")
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "must be above 0", open_below=True)
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Iterable) or isinstance(value, Mapping)):
                raise ValueError(f"{name} must be a list, got {value!r}")
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop must be non-empty strings, got {stop!r}")
        for token_id in () if self.stop_token_ids is None else self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, least=0, most=_MOST)
        for name in ("ignore_eos", "add_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with `defaults` where this one says None."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if self.temperature is None and any(v is not None for v in (self.top_k, self.top_p, self.min_p)):
            given["temperature"] = defaults.temperature or 1.0
        if self.min_new_tokens is None and self.max_new_tokens is not None and defaults.min_new_tokens is not None:
            given["min_new_tokens"] = min(defaults.min_new_tokens, self.max_new_tokens)  # what was asked for wins
        if self.max_new_tokens is None and self.min_new_tokens is not None and defaults.max_new_tokens is not None:
            given["max_new_tokens"] = max(defaults.max_new_tokens, self.min_new_tokens)
        return replace(defaults, **given)

    def resolve(self, eos_token_ids: Sequence[int] = ()) -> Sampling:
        """The settings as the engine uses them: nothing is None any more, and a missing seed is drawn."""
        least = int(self.min_new_tokens or 0)
        most = max(DEFAULT_MAX_NEW_TOKENS, least) if self.max_new_tokens is None else int(self.max_new_tokens)
        own = () if self.stop_token_ids is None else self.stop_token_ids
        ends = [int(i) for i in (*own, *(() if self.ignore_eos else eos_token_ids))]
        return Sampling(
            max_new_tokens=most,
            min_new_tokens=least,
            temperature=float(self.temperature or 0.0),
            top_k=int(self.top_k or 0),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            min_p=float(self.min_p or 0.0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            stop_token_ids=tuple(dict.fromkeys(ends)),
            seed=int.from_bytes(os.urandom(8), "little") if self.seed is None else int(self.seed) % 2**64,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling settings; plain data. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # with the model's end ids, unless they are ignored
    seed: int = 0
    index: int = 0  # among the continuations of a prompt: with the seed it says what is drawn


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to continue. A lower `priority` goes first; equal ones go by `arrival` (seconds, any clock).

    Prefixes are shared with requests of the same `cache_salt` alone; None is a key space of its own. `fork_of` names a request
    with the same prompt and salt, waiting or running: its prompt is computed once for both.
    """

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    sampling: Sampling
    priority: int = 0
    arrival: float = 0.0
    cache_salt: bytes | None = None
    fork_of: str | None = None

    def forked(self, n: int) -> list[Request]:
        """This request, and n - 1 that share its prompt and draw for themselves."""
        forks = (
            replace(
                self,
                request_id=f"{self.request_id}.{i}",
                sampling=replace(self.sampling, index=i),
                fork_of=self.request_id,
            )
            for i in range(1, n)
        )
        return [self, *forks]


def _check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def _check_number(name: str, value: object, low: float, high: float, rule: str, open_below: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (open_below and number <= low):
        raise ValueError(f"{name} {rule}, got {value}")

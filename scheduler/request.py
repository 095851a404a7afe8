"""Requests: a prompt with its resolved sampling settings, frozen plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..cache.retention import Retention

_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)
_NO_TOKENS.flags.writeable = False

LogitsProcessor = Callable[..., Any]  # (input_ids [1, tokens], scores [1, vocabulary]) -> scores
TokenLists = tuple[tuple[int, ...], ...]
Constraint = tuple[Literal["json_schema", "regex", "grammar"], str]


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
    stop_token_ids: tuple[int, ...] = ()  # including the model's end ids, unless ignored
    seed: int = 0
    index: int = 0  # among a prompt's continuations; with the seed it determines the draws
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: TokenLists = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()  # the only field that is not plain data
    constraint: Constraint | None = None
    logprobs: int | None = None  # most likely tokens returned per generated token; None: no log-probabilities
    prompt_logprobs: int | None = None
    num_candidates: int = 0  # above 0, this many candidates are returned instead of a token (beam search)

    @property
    def ahead_from(self) -> int | None:
        """Generated tokens from which on a step can be planned before the host knows the newest token.

        From there the next token depends only on its logits, these settings and its position. None: never, because the
        host keeps state of the tokens or returns data of the logits.
        """
        penalties = self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        processed = penalties or self.bad_words or self.logit_bias or self.logits_processors or self.constraint
        told = self.logprobs is not None or self.prompt_logprobs is not None or self.num_candidates
        if processed or told:
            return None
        return self.min_new_tokens if self.stop_token_ids else 0


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to continue. A lower `priority` goes first; equal ones go by `arrival` (seconds, any clock).

    Only requests with the same `cache_salt` share prefixes; None is a key space of its own. `fork_of` names a waiting
    or running request with the same prompt and salt. Tokens `generated` before, in another engine, count as if
    generated here. `label` is the caller's name for it, for watchers: it need not be unique. `retention` is a hint of
    how long the prompt's blocks are worth keeping. `pin` names a new pin of them (cache/pinned_prefixes.py); empty: none.
    """

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    sampling: Sampling
    priority: int = 0
    arrival: float = 0.0
    cache_salt: bytes | None = None
    fork_of: str | None = None
    generated: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    label: str = ""
    retention: Retention | None = None
    pin: str = ""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The prompt, and the tokens generated before."""
        return np.append(self.prompt_token_ids, self.generated) if len(self.generated) else self.prompt_token_ids

    def forked(self, n: int) -> list[Request]:
        """This request and n - 1 forks, which share its prompt, draw their own tokens and return no prompt
        log-probabilities.
        """
        forks = (
            replace(
                self,
                request_id=f"{self.request_id}.{i}",
                sampling=replace(self.sampling, index=i, prompt_logprobs=None),
                fork_of=self.request_id,
            )
            for i in range(1, n)
        )
        return [self, *forks]

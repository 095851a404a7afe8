"""Requests: a prompt with its resolved sampling settings, frozen plain data; its state in the scheduler; why one is rejected.

The status of a `Sequence` is one state machine, changed by `Sequence.set_status` alone:

    waiting   NEW ──► WAITING ◄──► DEFERRED, WAITING_FOR_PROMPT, WAITING_FOR_MOVE; READING ──► WAITING
                 │ admitted   ▲ preempted       │ a beam was preempted, spare or moved
                 ▼            │                 │
    running   PREFILLING ──► DECODING ◄──► PAUSED

    ended     any ──► FINISHED, or FINISHING ──► FINISHED if a pending plan refers to the row

A request to abort is no status: `abort_reason` holds it until the sequence is ended. Reasons:
docs/decisions/0041-structure-of-classes.md.

SchedulerError
├── RequestRejected   (a ValueError) the request cannot be served; nothing of it is kept
│   ├── PromptTooLong     it can never fit: the model's context or the whole pool is too small
│   └── DuplicateRequest  its id is in use
└── InvalidCallOrder  (plan.py) schedule and apply were not called in turn, or with another plan's result
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..cache.block_table import KeptBlocks
from ..cache.disk_index import PrefixRead
from ..cache.prefix_hash import Chain
from ..cache.retention import Retention

_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)
_NO_TOKENS.flags.writeable = False

LogitsProcessor = Callable[..., Any]  # (input_ids [1, tokens], scores [1, vocabulary]) -> scores
TokenLists = tuple[tuple[int, ...], ...]
Constraint = tuple[Literal["json_schema", "regex", "grammar"], str]
NOTHING = -1
FinishReason = Literal["stop", "length", "aborted", "error"]
# How the error of a completion begins if its request asked for something that cannot be followed: no fault of the engine.
NO_TOKEN_LEFT = "what was asked for rules out every token that could come next"
LOGITS_OVERFLOW = "the logits overflow under the temperature, the penalties or the biases that were asked for"
CANNOT_FOLLOW = "the constraint cannot be followed"
REQUEST_FAULTS = (NO_TOKEN_LEFT, LOGITS_OVERFLOW, CANNOT_FOLLOW)


class SchedulerError(Exception):
    """Base class of the scheduler's errors."""


class RequestRejected(SchedulerError, ValueError):
    """The request cannot be served; the scheduler is unchanged."""


class PromptTooLong(RequestRejected):
    """The prompt can never fit."""


class DuplicateRequest(RequestRejected):
    """A request with this id is waiting or running."""


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


class SequenceStatus(enum.Enum):
    """Where a sequence stands. A named container holds it exactly while it has this status."""

    # Created, and not queued yet.
    NEW = "new"
    # For a row, in Waiting.queue.
    WAITING = "waiting"
    # It needs more blocks than the pool's limit; in Waiting.deferred.
    DEFERRED = "deferred"
    # Blocks of its prompt are read from disk; in Waiting.reading.
    READING = "reading"
    # A fork of a leader with a prompt that is not computed; in the leader's Sequence.forks, where queued forks are too.
    WAITING_FOR_PROMPT = "waiting for prompt"
    # A beam without a row: its next move decides about its tokens.
    WAITING_FOR_MOVE = "waiting for move"
    # It lacks more than its newest token; in SchedulerState.prefilling.
    PREFILLING = "prefilling"
    # It lacks only its newest token; its row is in SchedulerState.decoding.
    DECODING = "decoding"
    # A beam with a row: its candidates are reported, and no move was made yet; in SchedulerState.paused.
    PAUSED = "paused"
    # Ended and reported, but a pending plan refers to its row; in SchedulerState.finishing.
    FINISHING = "finishing"
    FINISHED = "finished"


_S = SequenceStatus
TRANSITIONS: dict[SequenceStatus, tuple[SequenceStatus, ...]] = {
    _S.NEW: (_S.WAITING, _S.WAITING_FOR_PROMPT, _S.READING),
    _S.READING: (_S.WAITING, _S.FINISHED),
    _S.WAITING: (_S.READING, _S.PREFILLING, _S.DEFERRED, _S.WAITING_FOR_PROMPT, _S.WAITING_FOR_MOVE, _S.FINISHED),
    _S.DEFERRED: (_S.WAITING, _S.WAITING_FOR_PROMPT, _S.WAITING_FOR_MOVE, _S.FINISHED),
    _S.WAITING_FOR_PROMPT: (_S.WAITING, _S.WAITING_FOR_MOVE, _S.FINISHED),
    _S.WAITING_FOR_MOVE: (_S.WAITING, _S.FINISHED),
    _S.PREFILLING: (_S.DECODING, _S.PAUSED, _S.WAITING, _S.WAITING_FOR_MOVE, _S.FINISHING, _S.FINISHED),
    _S.DECODING: (_S.PAUSED, _S.WAITING, _S.FINISHING, _S.FINISHED),
    _S.PAUSED: (_S.DECODING, _S.WAITING_FOR_MOVE, _S.FINISHED),
    _S.FINISHING: (_S.FINISHED,),
    _S.FINISHED: (),
}


class Sequence:
    """A request that has a row, or waits with its known tokens."""

    __slots__ = (
        "_status", "abort_reason", "admitted_at", "chain", "computed", "forks", "kept", "key", "leader", "num_cached_tokens",
        "num_disk_tokens", "number", "passes", "preemptions", "read", "refusal", "request", "root", "row", "scored", "shares",
        "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, chain: Chain, leader: Sequence | None = None) -> None:
        self._status = SequenceStatus.NEW
        self.request = request
        self.number = number  # order of submission
        self.chain = chain  # hashes for the prefix cache
        self.key = (request.priority, request.arrival, number)  # scheduling order of running sequences
        self.computed = 0  # computed tokens when it was preempted
        self.tokens = request.token_ids  # current only while it waits
        self.row: int | None = None
        self.scored = 0  # prompt tokens, after the first, with log-probabilities already returned
        self.preemptions = 0
        self.passes = 0  # how often others passed it while it waits
        # Number of the decision that refused it, since it began to wait; 0: none did
        self.refusal = 0
        self.kept: KeptBlocks | None = None  # what an engine that fell asleep had computed, until it is admitted
        self.read: PrefixRead | None = None  # what comes from disk, until it is admitted
        self.abort_reason: FinishReason | None = None  # to be ended, with this reason, as soon as possible
        self.leader = leader  # the sequence with the same first tokens, to be shared
        self.shares = len(self.tokens)  # number of these tokens; NOTHING once admitted
        self.root: Sequence = self if leader is None else leader.root  # all sequences of a root have the same prompt
        self.num_cached_tokens: int | None = None  # of a root: prompt tokens that its family's first member found
        self.num_disk_tokens = 0  # of a root: of these, those that were read from disk
        self.admitted_at: float | None = None  # of a root: when that was (seconds of the caller's clock)
        self.forks: dict[Sequence, None] = {}  # forks not admitted yet, in order

    @property
    def status(self) -> SequenceStatus:
        """The present status."""
        return self._status

    def set_status(self, status: SequenceStatus) -> None:
        """Change the status. Raises RuntimeError for a transition that is not in TRANSITIONS.

        Only the container that takes the sequence calls it.
        """
        if status not in TRANSITIONS[self._status]:
            raise RuntimeError(
                f"request {self.request.request_id!r} cannot change from {self._status.value!r} to {status.value!r}"
            )
        self._status = status

    @property
    def is_running(self) -> bool:
        """Whether it has a row and has not ended."""
        return self._status in (SequenceStatus.PREFILLING, SequenceStatus.DECODING, SequenceStatus.PAUSED)

    @property
    def is_computed(self) -> bool:
        """Whether it runs and has a step's result for its tokens, so that its blocks can be shared."""
        return self._status in (SequenceStatus.DECODING, SequenceStatus.PAUSED)

    @property
    def has_ended(self) -> bool:
        """Whether its end is reported, or about to be."""
        return self._status in (SequenceStatus.FINISHING, SequenceStatus.FINISHED)

    @property
    def is_unscored(self) -> bool:
        """Whether prompt log-probabilities were requested and some are not returned yet."""
        asks = self.request.sampling.prompt_logprobs is not None
        return asks and self.scored < len(self.request.prompt_token_ids) - 1

    @property
    def sharable(self) -> int:
        """How many of its tokens a waiting sequence need not compute itself.

        All but the last, which it samples from. While it is unscored: those with log-probabilities already returned.
        """
        return self.scored if self.is_unscored else len(self.tokens) - 1

    @property
    def is_unchosen(self) -> bool:
        """Whether it is a beam for which nothing is chosen behind the prompt: its leader tells candidates for all."""
        return self.request.sampling.num_candidates > 0 and len(self.tokens) == len(self.request.prompt_token_ids)

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

"""The scheduler's state of one request, and its status: one state machine, changed by `Sequence.set_status` alone.

    waiting   NEW ──► WAITING ◄──► DEFERRED, WAITING_FOR_PROMPT, WAITING_FOR_MOVE; READING ──► WAITING
                 │ admitted   ▲ preempted       │ a beam was preempted, spare or moved
                 ▼            │                 │
    running   PREFILLING ──► DECODING ◄──► PAUSED

    ended     any ──► FINISHED, or FINISHING ──► FINISHED if a pending plan refers to the row

A request to abort is no status: `abort_reason` holds it until the sequence is ended. Reasons:
docs/decisions/0041-structure-of-classes.md.
"""

from __future__ import annotations

import enum
from typing import Literal

from ..cache.block_table import KeptBlocks
from ..cache.disk_index import PrefixRead
from ..cache.prefix_hash import Chain
from .request import Request

NOTHING = -1
FinishReason = Literal["stop", "length", "aborted", "error"]


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
    _S.WAITING: (_S.PREFILLING, _S.DEFERRED, _S.WAITING_FOR_PROMPT, _S.WAITING_FOR_MOVE, _S.FINISHED),
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

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

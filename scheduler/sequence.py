"""The scheduler's state of one request."""

from __future__ import annotations

from typing import Literal

from ..cache.prefix_hash import Chain
from .request import Request

NOTHING = -1
FinishReason = Literal["stop", "length", "aborted", "error"]


class Sequence:
    """A request that has a row, or waits with its known tokens. The scheduler mutates it."""

    __slots__ = (
        "behind", "chain", "computed", "forks", "held", "key", "leader", "marked", "num_cached_tokens", "number", "passes",
        "preemptions", "refused", "request", "root", "row", "scored", "shares", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, chain: Chain, leader: Sequence | None = None) -> None:
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
        self.refused = False  # whether its refusal is in the decisions, since it began to wait
        self.marked: FinishReason | None = None  # to be ended, with this reason, as soon as possible
        self.leader = leader  # the sequence with the same first tokens, to be shared
        self.shares = len(self.tokens)  # number of these tokens; NOTHING once admitted
        self.root: Sequence = self if leader is None else leader.root  # all sequences of a root have the same prompt
        self.num_cached_tokens: int | None = None  # of a root: prompt tokens that its family's first member found
        self.held = False  # its candidates are reported; no beam choice was made yet
        self.behind = False  # outside the queue until its leader's prompt is computed
        self.forks: dict[Sequence, None] = {}  # forks not admitted yet, in order

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

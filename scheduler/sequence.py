"""One request on its way through the scheduler."""

from __future__ import annotations

from typing import Literal

from ..cache.prefix_hash import Chain
from .request import Request

NOTHING = -1
FinishReason = Literal["stop", "length", "aborted", "error"]


class Sequence:
    """A request in a row, or waiting with the tokens known of it. The scheduler mutates it."""

    __slots__ = (
        "behind", "chain", "computed", "forks", "held", "key", "leader", "marked", "num_cached_tokens", "number", "passes",
        "preemptions", "refused", "request", "root", "row", "scored", "shares", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, chain: Chain | None, leader: Sequence | None = None) -> None:
        self.request = request
        self.number = number  # in the order of submission
        self.chain = chain  # of the tokens that may be found or made findable; None where nothing is cached
        self.key = (request.priority, request.arrival, number)  # of whoever runs, first one first
        self.computed = 0  # tokens when it was preempted
        self.tokens = request.token_ids  # current only while it waits
        self.row: int | None = None
        self.scored = 0  # tokens of the prompt, behind the first, whose log-probabilities are out
        self.preemptions = 0
        self.passes = 0  # by others, while it waits
        self.refused = False  # and told of, since it waits
        self.marked: FinishReason | None = None  # to be ended at the next chance
        self.leader = leader  # whose first tokens it has, to be shared
        self.shares = len(self.tokens)  # how many of them; NOTHING once it was seated
        self.root: Sequence = self if leader is None else leader.root  # all with the same root have the same prompt
        self.num_cached_tokens: int | None = None  # of a root: what the first of its family found of the prompt
        self.held = False  # its candidates are told, and nobody has chosen among them
        self.behind = False  # out of the queue, until its leader's prompt is computed
        self.forks: dict[Sequence, None] = {}  # who were not seated yet, in order

    @property
    def is_unscored(self) -> bool:
        """Whether log-probabilities of its prompt were asked for, and some are not out yet."""
        asks = self.request.sampling.prompt_logprobs is not None
        return asks and self.scored < len(self.request.prompt_token_ids) - 1

    @property
    def sharable(self) -> int:
        """While it waits: how many of its tokens it need not compute itself. All but the last one, behind which it samples;
        while it is unscored those whose log-probabilities are out.
        """
        return self.scored if self.is_unscored else len(self.tokens) - 1

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

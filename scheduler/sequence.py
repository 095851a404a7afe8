"""One request on its way through the scheduler."""

from __future__ import annotations

from typing import Literal

from ..cache.prefix_hash import Chain
from .request import Request

FinishReason = Literal["stop", "length", "aborted", "error"]


class Sequence:
    """A request in a row, or waiting with the tokens known of it. The scheduler mutates it."""

    __slots__ = (
        "behind", "chain", "computed", "forks", "key", "leader", "marked", "number", "passes", "preemptions", "refused",
        "request", "root", "row", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, chain: Chain | None, leader: Sequence | None = None) -> None:
        self.request = request
        self.number = number  # in the order of submission
        self.chain = chain  # of the tokens that may be found or made findable; None where nothing is cached
        self.key = (request.priority, request.arrival, number)  # of whoever runs, first one first
        self.computed = 0  # tokens when it was preempted
        self.tokens = request.prompt_token_ids  # current only while it waits
        self.row: int | None = None
        self.preemptions = 0
        self.passes = 0  # by others, while it waits
        self.refused = False  # and told of, since it waits
        self.marked: FinishReason | None = None  # to be ended at the next chance
        self.leader = leader  # whose prompt it has, to be shared
        self.root: Sequence = self if leader is None else leader.root  # all with the same root have the same prompt
        self.behind = False  # out of the queue, until its leader's prompt is computed
        self.forks: dict[Sequence, None] = {}  # who were not seated yet, in order

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

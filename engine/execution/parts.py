"""Parts of a step: first all chunks of a plan; halves of them if computing them together raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...cache.block_table import Index, Int32
from ...scheduler.plan import NO_TOKENS, Bool, Candidates, ChunkLogprobs, Plan

if TYPE_CHECKING:
    from .transfers import Download


@dataclass(frozen=True, slots=True, eq=False)
class ChunkGroup:
    """Chunks of a plan that are computed together, or a piece of one chunk: tokens `starts[i] .. starts[i] + lengths[i]` of
    `rows[i]` for chunk `chunks[i]` of the plan. The arrays have equal lengths. With `samples[i]`, a token is sampled after
    them.
    """

    chunks: Index
    rows: Index
    starts: Index
    lengths: Index
    samples: Bool

    @classmethod
    def of(cls, plan: Plan) -> ChunkGroup:
        """All chunks of `plan`."""
        return cls(np.arange(len(plan.rows)), plan.rows, plan.starts, plan.lengths, plan.samples)

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, places: slice | Bool) -> ChunkGroup:
        """Some of the chunks."""
        return ChunkGroup(
            self.chunks[places], self.rows[places], self.starts[places], self.lengths[places], self.samples[places]
        )

    def halves(self) -> tuple[ChunkGroup, ...]:
        """Two halves of this part, in the order to compute them; none for a single token."""
        if len(self) > 1:
            half = len(self) // 2
            return self[:half], self[half:]
        half = int(self.lengths[0]) // 2
        if not half:
            return ()
        head = ChunkGroup(self.chunks, self.rows, self.starts, np.array([half]), np.zeros(1, np.bool_))
        return head, ChunkGroup(self.chunks, self.rows, self.starts + half, self.lengths - half, self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class PendingTokens:
    """Tokens being copied from the device: those `at` of `rows`, sampled by the chunks at `places` of their part."""

    places: Index
    chunks: Index  # of the plan
    rows: Index
    at: Index
    found: Download


@dataclass(slots=True)
class Computed:
    """The outputs of a part. Mutated while it is computed. Chunks are identified by their place in the plan."""

    tokens: Int32  # one per chunk of the part; 0 without a sample
    failures: dict[int, str] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)  # not computed; to be planned again
    scores: list[ChunkLogprobs] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)
    drawn: PendingTokens | None = None  # tokens not on the host yet
    lost_blocks: Int32 = field(default_factory=lambda: NO_TOKENS)  # of states that a fault left unknown

    def add(self, part: ChunkGroup, given: Computed) -> None:
        """Add the outputs of `part`; this object covers all chunks of the plan."""
        self.tokens[part.chunks] = given.tokens
        self.failures |= given.failures
        self.scores += given.scores
        self.candidates += given.candidates
        self.complete += given.complete

    def drop(self, chunk: int) -> None:
        """Discard the outputs of the first pieces of `chunk`, because its other pieces could not be computed."""
        self.scores = [scores for scores in self.scores if scores.index != chunk]

"""Parts of a step: all chunks of a plan at first, and halves of them where computing them together raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...cache.block_table import Index, Int32
from ...scheduler.plan import Bool, Candidates, ChunkLogprobs, Plan

if TYPE_CHECKING:
    from .transfers import Download


@dataclass(frozen=True, slots=True, eq=False)
class ChunkGroup:
    """Chunks of a plan that are computed together, or a piece of one chunk: tokens `starts[i] .. starts[i] + lengths[i]` of
    `rows[i]` for chunk `chunks[i]` of the plan. Arrays of one length; a token is sampled behind those with `samples[i]`.
    """

    chunks: Index
    rows: Index
    starts: Index
    lengths: Index
    samples: Bool

    @classmethod
    def of(cls, plan: Plan, chunks: Index) -> ChunkGroup:
        """Whole chunks of `plan`."""
        return cls(chunks, plan.rows[chunks], plan.starts[chunks], plan.lengths[chunks], plan.samples[chunks])

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, places: slice | Bool) -> ChunkGroup:
        """Some of the chunks."""
        return ChunkGroup(
            self.chunks[places], self.rows[places], self.starts[places], self.lengths[places], self.samples[places]
        )  # fmt: skip

    def halves(self) -> tuple[ChunkGroup, ...]:
        """Two parts that together are this one, the first to be computed first; none for a single token."""
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
    """Tokens on their way from the device: those `at` of `rows`, sampled by the chunks at `places` of their part."""

    places: Index
    chunks: Index  # of the plan
    rows: Index
    at: Index
    found: Download


@dataclass(slots=True)
class Computed:
    """What a part gave. Mutated while it is computed; chunks are named by their place in the plan."""

    tokens: Int32  # one for each chunk of the part; 0 for a chunk without a sample
    failures: dict[int, str] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)  # not computed, and to be planned again
    scores: list[ChunkLogprobs] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)
    drawn: PendingTokens | None = None  # tokens that are yet to come

    def add(self, part: ChunkGroup, given: Computed) -> None:
        """Take in what `part` gave, where this is what all chunks of the plan gave."""
        self.tokens[part.chunks] = given.tokens
        self.failures |= given.failures
        self.scores += given.scores
        self.candidates += given.candidates
        self.complete += given.complete

    def drop(self, chunk: int) -> None:
        """Forget what the first pieces of `chunk` gave: its other pieces could not be computed."""
        self.scores = [scores for scores in self.scores if scores.index != chunk]

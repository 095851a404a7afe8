"""Plans and results of steps, as plain data that can cross a process boundary.

A row is a running sequence's index in the arrays of scheduler and runner. The runner keeps each row's tokens (from
`admitted`, then its own samples) and block table (from `TableUpdate`), so a plan contains only changes and the tokens
to compute. Execution order:

1. rows are released (`released`) and taken (`admitted`); tokens (`given`) and table entries (`tables`) are added
2. extents get memory (`resize.map`)
3. blocks are swapped out (`swaps`), filled from disk (`reads`) and copied (`copies`), so that they are read before they are
   written
4. extents lose memory (`resize.unmap`)
5. the chunks run

Blocks that no chunk uses are swapped concurrently with the chunks, and are ready when the step is over. No chunk uses a
block of an extent that its own plan maps, so a refused mapping stops nothing else. Arrays in a plan or result are never
written again. Plans are executed in the order they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..cache.block_table import BlockBytes, BlockCopies, Index, Int32, TableUpdate
from ..cache.host_tier import Swaps
from .request import Request, SchedulerError

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

NO_ROWS: Index = np.empty(0, np.int64)
NO_TOKENS: Int32 = np.empty(0, np.int32)
NO_EXTENTS: Index = np.empty(0, np.int64)
NO_LOGPROBS: Float32 = np.empty(0, np.float32)
for _none in (NO_ROWS, NO_TOKENS, NO_EXTENTS, NO_LOGPROBS):
    _none.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """Tokens chosen outside: `tokens[i]` goes to `positions[i]` of row `rows[i]`, which has all tokens before it."""

    rows: Index
    positions: Index
    tokens: Int32


def given_tokens(by_row: Mapping[int, tuple[int, int]]) -> ForcedTokens | None:
    """Forced tokens from (position, token) by row; None for none."""
    if not by_row:
        return None
    places = np.array(list(by_row.values()), np.int64)
    return ForcedTokens(np.array(list(by_row), np.int64), places[:, 0], places[:, 1].astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """Extents to map in a step, and extents to unmap once the step's copies are done."""

    map: Index = field(default_factory=lambda: NO_EXTENTS)
    unmap: Index = field(default_factory=lambda: NO_EXTENTS)

    def __bool__(self) -> bool:
        return bool(len(self.map) or len(self.unmap))


NO_RESIZE = Resize()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One forward pass over `len(rows)` chunks; chunk i computes `lengths[i]` tokens of its row from `starts[i]`.

    Chunks of one token come first. A chunk with `samples[i]` samples a token after its last position.
    """

    step_id: int
    rows: Index  # [n]
    starts: Index  # [n]
    lengths: Index  # [n], each >= 1
    samples: Bool  # [n]
    released: Index = field(default_factory=lambda: NO_ROWS)
    admitted: Mapping[int, Request] = field(default_factory=dict)  # by row: what takes it, with all its tokens so far
    tables: tuple[TableUpdate, ...] = ()  # one per block table, or empty if none grew
    copies: BlockCopies | None = None
    resize: Resize = NO_RESIZE
    swaps: Swaps | None = None
    given: ForcedTokens | None = None
    reads: tuple[BlockBytes, ...] = ()

    @property
    def moves_memory(self) -> bool:
        """Whether the plan swaps, copies, maps, unmaps or puts bytes into blocks: ending its requests cannot undo that."""
        return bool(self.copies is not None or self.swaps is not None or self.resize or self.reads)

    @property
    def is_empty(self) -> bool:
        """Whether the plan has nothing to execute."""
        changes = len(self.released) or self.admitted or self.tables or self.given
        return not (len(self.rows) or changes or self.moves_memory)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """Chunk `index` of the plan could not be computed; `message` gives the reason."""

    index: int
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLogprobs:
    """Log-probabilities from chunk `index` for m tokens of its row, starting at position `first`.

    Line j describes token `first + j`: the token itself in column 0, then the k most likely tokens, best first. `ranks`
    counts the tokens at least as likely as it.
    """

    index: int
    first: int
    token_ids: Int32  # [m, 1 + k]
    logprobs: Float32  # [m, 1 + k]
    ranks: Int32  # [m], from 1


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidate next tokens of chunk `index`, best first, for rows with tokens chosen outside (beams).

    Empty if the output satisfies its constraint in full. `logprobs` are those after logits processing. If tokens are
    drawn, the sampling transforms are applied too, and `keys` give the order of the draw; otherwise `keys` equal
    `logprobs`.
    """

    index: int
    token_ids: Int32  # [k]
    logprobs: Float32  # [k]
    keys: Float32  # [k], descending


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Output of a plan's chunks: chunk i sampled `counts[i]` tokens, stored chunk after chunk in `tokens`.

    Chunks of rows with tokens chosen outside return candidates instead; some chunks return scores too. Chunks that are
    `deferred` gave nothing and must be planned again. Chunks in `failures` end their requests.

    `mapped` (all of `resize.map`, or none) and `unmapped` are the resizes done; `refused` gives the reason for the
    rest. All swaps were done, except those out to `lost_slots`, for which the host had no memory. Copies that raised
    leave `failed_slots` and `failed_blocks`: their contents, and what chunks computed from them, are unknown. `swap_s`
    is the time of `swapped` copies and `compute_s` that of the chunks; 0 if not measured.
    """

    step_id: int
    # [n]; 0 for chunks without a sample, failed and deferred ones, and those with candidates
    counts: Index
    tokens: Int32  # [sum of counts]
    failures: tuple[Failure, ...] = ()
    mapped: Index = field(default_factory=lambda: NO_EXTENTS)
    unmapped: Index = field(default_factory=lambda: NO_EXTENTS)
    refused: str | None = None
    lost_slots: Int32 = field(default_factory=lambda: NO_TOKENS)
    failed_slots: Int32 = field(default_factory=lambda: NO_TOKENS)
    failed_blocks: Int32 = field(default_factory=lambda: NO_TOKENS)
    deferred: Index = field(default_factory=lambda: NO_ROWS)
    swapped: int = 0
    swap_s: float = 0.0
    compute_s: float = 0.0
    scores: tuple[ChunkLogprobs, ...] = ()
    candidates: tuple[Candidates, ...] = ()
    # Chunks with an output that now satisfies its constraint.
    complete: Index = field(default_factory=lambda: NO_ROWS)

    def deferring(self, chunks: Index) -> Result:
        """This result with `chunks` deferred, whatever they gave."""
        kept = np.ones(len(self.counts), np.bool_)
        kept[chunks] = False
        return replace(
            self,
            counts=np.where(kept, self.counts, 0),
            tokens=self.tokens[np.repeat(kept, self.counts)],
            failures=tuple(failure for failure in self.failures if kept[failure.index]),
            deferred=np.union1d(self.deferred, chunks),
            scores=tuple(scores for scores in self.scores if kept[scores.index]),
            candidates=tuple(candidates for candidates in self.candidates if kept[candidates.index]),
            complete=self.complete[kept[self.complete]],
        )


class InvalidCallOrder(SchedulerError):
    """A plan is pending without its result, or the result belongs to another plan."""


class PendingPlans:
    """Plans without a result: none, the `first`, or the `first` and the one `behind` it.

    `is_ahead` says whether the first was planned by `schedule_ahead`, behind another plan. `stale` are the rows of the
    first that an earlier plan deferred: their chunks have invalid input. `unknown` are blocks of rows of the first with
    contents that an earlier plan lost.
    """

    __slots__ = ("behind", "first", "is_ahead", "stale", "unknown")

    def __init__(self) -> None:
        self.first: Plan | None = None
        self.behind: Plan | None = None
        self.is_ahead = False
        self.stale = NO_ROWS
        self.unknown: Int32 = NO_TOKENS

    def shift(self, without: Index) -> None:
        """Remove the first plan, which has its result; its chunks of the rows `without` gave nothing."""
        self.first, self.behind, self.is_ahead = self.behind, None, self.behind is not None
        self.stale = without if self.is_ahead else NO_ROWS

    def check_turn(self) -> None:
        """Raise InvalidCallOrder while a plan is pending: it refers to the present blocks and extents."""
        if self.first is not None:
            raise InvalidCallOrder(f"plan {self.first.step_id} is out: this is done between steps")

    def names(self, row: int) -> bool:
        """Whether a pending plan computes a chunk of `row`."""
        return any(plan is not None and bool((plan.rows == row).any()) for plan in (self.first, self.behind))

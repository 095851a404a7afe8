"""What one step shall do, and what came out of it: plain data that can cross a process border.

A row is a running sequence's place in the arrays of scheduler and runner. The runner keeps, per row, what it was told:
the tokens (from `Admission`, then from its own samples) and the block table (from `TableUpdate`). A plan therefore says
only what changed, and which stretch of which row to compute: rows leave (`released`), rows are taken (`admitted`), tokens
are added (`given`), tables grow (`tables`), extents get memory (`resize.map`), blocks are swapped out (`swaps`) and copied
(`copies`), extents lose theirs (`resize.unmap`), then the chunks run. So what leaves is read before anything is written. Beside
the chunks those blocks are swapped out and in which none of them touches; they are there when the step is over.
No chunk uses a block of an extent that its own plan maps: a refusal stops nothing else. Arrays in a plan or result are never
written again. Plans are executed in the order they are made; some are made before the result of the one before is known, and
begin with the tokens that the runner sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..cache.block_table import BlockCopies, Index, Int32, TableUpdate
from ..cache.host_tier import Swaps
from .request import Sampling

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

NO_ROWS: Index = np.empty(0, np.int64)
NO_TOKENS: Int32 = np.empty(0, np.int32)
NO_EXTENTS: Index = np.empty(0, np.int64)
NO_LOGPROBS: Float32 = np.empty(0, np.float32)
for _none in (NO_ROWS, NO_TOKENS, NO_EXTENTS, NO_LOGPROBS):
    _none.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A sequence takes row `row`, with every token known of it so far: its prompt, and what it sampled before."""

    row: int
    request_id: str
    token_ids: Int32  # [known]
    num_prompt: int
    sampling: Sampling


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """Tokens that somebody else has chosen: `tokens[i]` stands at `positions[i]` of row `rows[i]`, which has all before it."""

    rows: Index
    positions: Index
    tokens: Int32


def given_tokens(by_row: Mapping[int, tuple[int, int]]) -> ForcedTokens | None:
    """By row a position and its token; None for none."""
    if not by_row:
        return None
    places = np.array(list(by_row.values()), np.int64)
    return ForcedTokens(np.array(list(by_row), np.int64), places[:, 0], places[:, 1].astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """Extents that get memory in a step, and extents that lose theirs once the step's copies are done."""

    map: Index = field(default_factory=lambda: NO_EXTENTS)
    unmap: Index = field(default_factory=lambda: NO_EXTENTS)

    def __bool__(self) -> bool:
        return bool(len(self.map) or len(self.unmap))


NO_RESIZE = Resize()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One forward pass over `len(rows)` chunks; chunk i computes tokens `starts[i] .. starts[i] + lengths[i]` of its row.

    Chunks of one token come first. A token is sampled behind the last position of the chunks with `samples[i]`.
    """

    step_id: int
    rows: Index  # [n]
    starts: Index  # [n]
    lengths: Index  # [n], each >= 1
    samples: Bool  # [n]
    released: Index = field(default_factory=lambda: NO_ROWS)
    admitted: tuple[Admission, ...] = ()
    tables: tuple[TableUpdate, ...] = ()  # one a group, or none when no table grew
    copies: BlockCopies | None = None
    resize: Resize = NO_RESIZE
    swaps: Swaps | None = None
    given: ForcedTokens | None = None

    @property
    def moves_memory(self) -> bool:
        """Whether the plan copies, maps or unmaps: what cannot be undone by ending the requests of its chunks."""
        return bool(self.copies is not None or self.swaps is not None or self.resize)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to execute."""
        changes = len(self.released) or self.admitted or self.tables or self.given
        return not (len(self.rows) or changes or self.moves_memory)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """Chunk `index` of the plan could not be computed; `message` says why."""

    index: int
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLogprobs:
    """Log-probabilities that chunk `index` gave of m tokens of its row, the first of them at position `first`.

    Line j tells of token `first + j`: itself in column 0, then the k most likely ones, best first. `ranks` says how many are
    at least as likely as it is.
    """

    index: int
    first: int
    token_ids: Int32  # [m, 1 + k]
    logprobs: Float32  # [m, 1 + k]
    ranks: Int32  # [m], from 1


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The tokens that chunk `index` could go on with, best first, for rows that somebody else chooses for. None at all where
    the output has the whole of the form that was asked for.

    `logprobs` are those of the tokens once treated; where tokens are drawn `keys` say the order of the draw, else they are the
    same numbers.
    """

    index: int
    token_ids: Int32  # [k]
    logprobs: Float32  # [k]
    keys: Float32  # [k], descending


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a plan's chunks gave: chunk i sampled `counts[i]` tokens, which stand one chunk after the other in `tokens`.
    Chunks of rows that somebody else chooses for give candidates instead; some give scores besides.

    Chunks that are `deferred` gave nothing, and are to be planned again. Those that failed end their requests.

    Of the plan's resize, `mapped` (all of `resize.map`, or none) and `unmapped` were really done; `refused` says why the rest
    was not. Of its swaps all were done, but those out to `lost_slots`, for which the host had no memory. Copies that raised
    leave `failed_slots` and `failed_blocks`: what lies there is unknown, and so is what chunks computed from it. `swap_s` is
    the time that `swapped` copies took, `compute_s` that of the chunks; 0 where nobody measured.
    """

    step_id: int
    counts: Index  # [n]; 0 for chunks without a sample, failed and deferred ones, and those with candidates
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
    # Chunks whose token completes the form that was asked of the output.
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

"""Running sequences: those that have a row and blocks, what each lacks, and what changed since the last plan.

A row is decoding if its sequence lacks only the newest token, and prefilling if it lacks more. A row is paused if its
sequence has reported candidates for its next token, lacks no token, and waits for a beam choice. A row is finishing if
its sequence has ended but a pending plan refers to it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from ..cache.block_table import BlockCopies, Index, Int32, TableUpdate
from ..cache.manager import CacheManager, Extension
from ..cache.prefix_index import PrefixHit
from .plan import NO_ROWS, Admission
from .rows import Rows
from .sequence import NOTHING, Sequence, SequenceStatus
from .waiting import Waiting


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionPlan:
    """What a sequence starts with: a prefix-cache hit, or the blocks of `leader_row`. It uses `num_blocks` available
    blocks.
    """

    num_blocks: int
    hit: PrefixHit
    leader_row: int | None = None


@dataclass(slots=True, eq=False)
class Changes:
    """Changes to rows since the last plan. Mutable until a plan takes them."""

    released: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    tables: list[tuple[TableUpdate, ...]] = field(default_factory=list)
    copies: list[BlockCopies] = field(default_factory=list)
    given: dict[int, tuple[int, int]] = field(default_factory=dict)  # by row: a position and its token

    def __bool__(self) -> bool:
        return bool(self.tables or self.released or self.given)


class Running:
    """Sequences with their rows. The scheduler reads the attributes and changes them through the methods only.

    Beam moves mutate `waiting` too.
    """

    def __init__(self, cache: CacheManager, rows: Rows, waiting: Waiting) -> None:
        self._cache = cache
        self._rows = rows
        self._waiting = waiting
        self.by_row: dict[int, Sequence] = {}
        self.decoding: Index = NO_ROWS
        self.prefilling: list[Sequence] = []  # in order
        self.paused: dict[int, Sequence] = {}  # by row
        self.finishing: dict[int, Sequence] = {}  # by row; not in `by_row`
        self.changes = Changes()

    def __len__(self) -> int:
        return len(self.by_row)

    @property
    def rows(self) -> Index:
        """The rows of running sequences."""
        return np.fromiter(self.by_row, np.int64, len(self.by_row))

    def take_changes(self) -> Changes:
        """Return the changes since the last call, and start a new record."""
        changes = self.changes
        if changes:
            self.changes = Changes()
        return changes

    def assign_row(self, sequence: Sequence, start: AdmissionPlan) -> Extension:
        """Give `sequence` a row and the blocks that `start` allows. Returns the extension of its block tables."""
        request, tokens = sequence.request, sequence.tokens
        num_prompt = len(request.prompt_token_ids)
        row = self._rows.assign(request.request_id, tokens, num_prompt, request.sampling)
        if start.leader_row is None:
            extension = self._cache.admit(row, len(tokens), start.hit, request.request_id)
        else:
            extension = self._cache.fork(start.leader_row, row, len(tokens) - 1, len(tokens))
        assert extension is not None, "admitted without enough blocks"
        if extension.copies is not None:
            self.changes.copies.append(extension.copies)
        self._rows.computed[row] = extension.num_computed
        sequence.set_status(SequenceStatus.PREFILLING)
        sequence.row, sequence.shares = row, NOTHING
        self.by_row[row] = sequence
        bisect.insort(self.prefilling, sequence)
        self.changes.tables.append(extension.tables)
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and not sequence.is_unscored:
            sampling = replace(sampling, prompt_logprobs=None)  # already returned, and not returned again
        self.changes.admitted.append(Admission(row, request.request_id, tokens, num_prompt, sampling))
        return extension

    def leave(self, sequences: Iterable[Sequence], computed: bool = True, keep_tails: bool = False) -> None:
        """Take rows and blocks back; the sequences keep their tokens. If `computed`, their blocks stay findable."""
        self._free(self._detach(sequences, computed, keep_tails))

    def finish(self, sequence: Sequence, computed: bool = True) -> None:
        """End a sequence with a row that a pending plan refers to; keep row and blocks until `release_finished`."""
        (row,) = self._detach([sequence], computed)
        sequence.set_status(SequenceStatus.FINISHING)
        self.finishing[row] = sequence

    def release_finished(self, rows: list[int]) -> None:
        """Free finishing `rows`, to which no pending plan refers any more, and their blocks."""
        for row in rows:
            self.finishing.pop(row).set_status(SequenceStatus.FINISHED)
        self._free(rows)

    def commit(self, sequence: Sequence) -> None:
        """Make the computed tokens of `sequence` findable in the prefix cache; no effect if it has no row."""
        if sequence.row is None:
            return
        is_prompt = sequence.status is not SequenceStatus.PREFILLING  # all of it is computed, and nothing more
        if updates := self._commit(sequence, sequence.row, is_prompt):
            self.changes.tables.append(updates)

    def promote(self) -> list[Sequence]:
        """Move prefilling sequences that lack only their newest token to decoding. Returns them."""
        known = self._rows.known
        done = [s for s in self.prefilling if known[s.row] > len(s.tokens)]  # sampled since admission
        if done:
            self.prefilling = [s for s in self.prefilling if known[s.row] <= len(s.tokens)]
            self.decoding = np.append(self.decoding, np.array([s.row for s in done]))
            for sequence in done:
                sequence.set_status(SequenceStatus.DECODING)
        return done

    def pause(self, rows: Index) -> list[Sequence]:
        """Pause the sequences of `rows`: their candidates are reported. Returns them."""
        paused = [self.by_row[row] for row in rows.tolist()]
        self.paused.update(zip(rows.tolist(), paused, strict=True))
        self.decoding = self.decoding[~np.isin(self.decoding, rows)]
        self.prefilling = [s for s in self.prefilling if s.row not in self.paused]
        for sequence in paused:
            sequence.set_status(SequenceStatus.PAUSED)
        return paused

    def move_beam(self, sequence: Sequence, source: Sequence, token: int) -> None:
        """Continue `sequence` from the tokens of `source`, which may be itself, with `token`.

        `sequence` is paused, waits for a move, or is not admitted yet.
        """
        if sequence is not source:
            self._follow(sequence, source)
        if sequence.row is not None:
            self._resume(sequence, sequence.row, token)
            return
        sequence.tokens = np.append(sequence.tokens, np.int32(token))
        if sequence.status is SequenceStatus.WAITING_FOR_MOVE:
            self._waiting.requeue_moved(sequence)

    def set_beam_aside(self, sequence: Sequence) -> None:
        """Let a beam, paused or not admitted yet, wait without a row until a move names it."""
        if sequence.is_running:
            self.leave([sequence])
        self._waiting.wait_for_move(sequence)

    def tokens_of(self, sequence: Sequence) -> Int32:
        """A copy of the known tokens of `sequence`, running or waiting."""
        row = sequence.row
        known: Int32 = sequence.tokens if row is None else self._rows.tokens[row, : self._rows.known[row]]
        return known.copy()

    def check_invariants(self) -> None:
        """Recompute every derived fact. Raises AssertionError naming what does not hold."""
        rows, blocks = self._rows, self._cache.row_tables.lengths
        assert all(s.row == row for row, s in self.by_row.items()), "a sequence's row is not its own"
        by_status: dict[SequenceStatus, list[int]] = defaultdict(list)
        for row, sequence in self.by_row.items():
            assert sequence.is_running, f"row {row} has a sequence that is {sequence.status.value}"
            by_status[sequence.status].append(row)
        prefilling = [-1 if s.row is None else s.row for s in self.prefilling]
        assert sorted(prefilling) == sorted(by_status[SequenceStatus.PREFILLING]), "other rows prefill"
        assert sorted(self.decoding.tolist()) == sorted(by_status[SequenceStatus.DECODING]), "other rows decode"
        assert sorted(self.paused) == sorted(by_status[SequenceStatus.PAUSED]), "other rows are paused"
        assert all(self.by_row[row] is sequence for row, sequence in self.paused.items()), "a paused row is another's"
        assert self.prefilling == sorted(self.prefilling), "prefills are out of order"
        assert not set(self.finishing) & set(self.by_row), "a sequence runs in a row that is given up"
        for sequence in self.finishing.values():
            assert sequence.status is SequenceStatus.FINISHING, "a row is kept for a sequence that has not ended"
        assert set(np.flatnonzero(blocks).tolist()) <= {*self.by_row, *self.finishing}, "a free row holds blocks"
        for row, sequence in self.by_row.items():
            lacking, prefills = rows.known[row] - rows.computed[row], sequence.status is SequenceStatus.PREFILLING
            least = 0 if row in self.paused else 1
            assert lacking == least or (lacking > 1 and prefills), f"row {row} lacks {lacking} tokens"
            assert not prefills or rows.known[row] == len(sequence.tokens), f"row {row} prefills, but has a result"
            assert blocks[row] * self._cache.block_size >= rows.computed[row], f"row {row} has too few blocks"
            assert rows.request_ids[row] == sequence.request.request_id, f"row {row} has another's id"

    def _detach(self, sequences: Iterable[Sequence], computed: bool, keep_tails: bool = False) -> list[int]:
        """Stop running those of `sequences` that have a row. Returns their former rows, which still hold the blocks."""
        sequences = [sequence for sequence in sequences if sequence.row is not None]
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        for sequence, row in zip(sequences, rows, strict=True):
            if computed:
                self._commit(sequence, row)
                if keep_tails:
                    count = int(self._rows.computed[row])
                    self._cache.keep_for(sequence.request.request_id, row, sequence.chain, count)
        self.decoding = self.decoding[~np.isin(self.decoding, rows)]
        for sequence, row in zip(sequences, rows, strict=True):
            del self.by_row[row]
            self.paused.pop(row, None)
            self.changes.given.pop(row, None)
            sequence.tokens = self.tokens_of(sequence)
            sequence.row = None
        if self.prefilling:
            self.prefilling = [s for s in self.prefilling if s.row is not None]
        return rows

    def _free(self, rows: list[int]) -> None:
        """Free `rows`, in which no sequence runs any more, and their blocks."""
        self._cache.release(np.array(rows))
        self.changes.released += rows
        self.changes.tables = [tuple(u.without(rows) for u in updates) for updates in self.changes.tables]
        for row in rows:
            self._rows.free(row)

    def _resume(self, sequence: Sequence, row: int, token: int) -> None:
        """Append `token` to the paused `sequence`; its row decodes again."""
        sequence.set_status(SequenceStatus.DECODING)
        del self.paused[row]
        rows = np.array([row])
        self.changes.given[row] = int(self._rows.known[row]), token
        self._rows.append(rows, np.array([token], np.int32))
        self.decoding = np.append(self.decoding, rows)

    def _follow(self, sequence: Sequence, source: Sequence) -> None:
        """Let `sequence` wait for a move, with the tokens of `source` and its blocks to share."""
        if sequence.is_running:
            self.leave([sequence], computed=False)
        self._waiting.wait_for_move(sequence)
        self._cache.swapping.suspended.drop(sequence.request.request_id)
        self.commit(source)  # so that the shared tokens become findable once
        sequence.tokens = self.tokens_of(source)
        sequence.chain = self._cache.chain(sequence.tokens, sequence.request.cache_salt)
        sequence.leader, sequence.shares = source, len(sequence.tokens)
        sequence.computed = 0

    def _commit(self, sequence: Sequence, row: int, is_prompt: bool = False) -> tuple[TableUpdate, ...]:
        """Make the computed tokens in `row` findable. Returns the table entries that changed."""
        chain, computed = sequence.chain, int(self._rows.computed[row])
        if computed > chain.num_tokens:
            chain.append(self._rows.tokens[row, chain.num_tokens : computed])
        return self._cache.commit(row, chain, computed, is_prompt)

"""The state of a scheduler: every sequence that has not ended, its place, and what the next plan has to say of it.

    waiting   in `waiting` (waiting.py), with its tokens and no row
    running   in `by_row`: `decoding` if it lacks only the newest token, `prefilling` if it lacks more, `paused` if it has
              reported candidates for its next token, lacks no token and waits for a beam move
    ended     its `Finished` is in `finished` until a step reports it; in `finishing` while a pending plan refers to its row

The modules beside this one decide: they read these attributes, and change the place of a sequence by the methods only.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..cache.block_table import BlockBytes, BlockCopies, Index, Int32, TableUpdate
from ..cache.manager import CacheManager, Extension
from ..cache.prefix_hash import Chain
from ..cache.prefix_index import PrefixHit
from .cost import SwapCost
from .forecast import LengthForecast
from .outcome import Decisions, Ends, Finished, Stats
from .plan import NO_ROWS, NO_TOKENS, Bool, PendingPlans
from .request import NOTHING, FinishReason, Request, Sampling, Sequence, SequenceStatus
from .waiting import Waiting

LEAST_SCORED_TOKENS = 64  # prompt tokens with log-probabilities per step
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's limits. At most `max_step_tokens` sequences run, because each decode gets a token in every step."""

    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    max_chunk_tokens: int | None = None
    forecast: bool = True  # False admits every request that fits now

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_step_tokens", "max_model_len", "max_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def max_scored_tokens(self) -> int:
        """Prompt tokens with log-probabilities computed per step.

        As many as sequences may run, because memory is planned for that many logits; at least LEAST_SCORED_TOKENS.
        """
        return max(self.max_seqs, LEAST_SCORED_TOKENS)

    @property
    def num_rows(self) -> int:
        """Sequences that may run at the same time."""
        return min(self.max_seqs, self.max_step_tokens)


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
    admitted: dict[int, Request] = field(default_factory=dict)  # by row
    tables: list[tuple[TableUpdate, ...]] = field(default_factory=list)
    copies: list[BlockCopies] = field(default_factory=list)
    reads: list[BlockBytes] = field(default_factory=list)
    given: dict[int, tuple[int, int]] = field(default_factory=dict)  # by row: a position and its token

    def __bool__(self) -> bool:
        return bool(self.tables or self.released or self.given)


class Rows:
    """Arrays for up to `num_rows` running sequences. The scheduler mutates them; values of a free row are undefined.

    tokens    [num_rows, max_tokens]  prompt and sampled ids; only the part that sequences reached uses memory
    known     known tokens;  computed  tokens with K and V in the cache
    prompt    tokens of the user's prompt;  limit  `known` at which the sequence ends by length
    ahead_from  `known` from which on a step may be planned before the newest token is known (`Sampling.ahead_from`)
    steered   whether its tokens are chosen outside (beams);  request_ids  the id of its request
    assigned  the running number of the row's assignment, from 1 on; 0: the row is free

    So that a step over all running sequences takes a handful of vector operations. `ones` and `trues` are constants.
    """

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self._flat = self.tokens.reshape(-1)
        self.known = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.prompt = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.ahead_from = np.zeros(num_rows, np.int64)
        self.steered = np.zeros(num_rows, np.bool_)
        self.request_ids = np.empty(num_rows, object)
        self.assigned = np.zeros(num_rows, np.int64)
        self.ones, self.trues = np.ones(num_rows, np.int64), np.ones(num_rows, np.bool_)
        self.ones.flags.writeable = self.trues.flags.writeable = False
        self._num_assigned = 0
        self._free = list(range(num_rows - 1, -1, -1))
        self._may_stop = np.zeros(1, np.bool_)  # by token id; the last entry, never a stop, stands for all ids beyond

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def assign(self, request_id: str, token_ids: Int32, num_prompt: int, sampling: Sampling) -> int:
        """Put a sequence with no computed tokens into a free row. Returns the row."""
        row = self._free.pop()
        known = len(token_ids)
        self.tokens[row, :known] = token_ids
        self.known[row] = known
        self.computed[row] = 0
        self.prompt[row] = num_prompt
        self.limit[row] = self.limit_of(num_prompt, sampling)
        least = sampling.ahead_from
        self.ahead_from[row] = _NEVER if least is None else num_prompt + least
        self.steered[row] = sampling.num_candidates > 0
        self.request_ids[row] = request_id
        self._num_assigned += 1
        self.assigned[row] = self._num_assigned
        self._may_stop = _with(self._may_stop, sampling.stop_token_ids)
        return row

    def append(self, rows: Index, tokens: Int32) -> Index:
        """Append one token to each of `rows`. Returns their numbers of known tokens."""
        known = self.known[rows]
        self._flat[rows * self.tokens.shape[1] + known] = tokens  # takes half the time of indexing by row and column
        known += 1
        self.known[rows] = known
        return known

    def may_stop(self, tokens: Int32) -> Bool:
        """Which of `tokens` are a stop id of any sequence so far; check the sequence's own ids afterwards."""
        return self._may_stop.take(tokens, mode="clip")

    def limit_of(self, num_prompt: int, sampling: Sampling) -> int:
        """Tokens, prompt included, at which a sequence ends by length."""
        return min(num_prompt + sampling.max_new_tokens, self.tokens.shape[1])

    def free(self, row: int) -> None:
        """Free `row`."""
        self.request_ids[row] = None
        self.assigned[row] = 0
        self._free.append(row)


class SchedulerState:
    """The sequences of a scheduler with their rows and blocks, its logs, and the bounds that its pool has at present.

    Attributes:
        cost: Of swapping and computing; without a host tier only reported in decisions.
        by_id: The sequences that have not ended, by request id.
        by_row: Those that run, by row. `decoding` has rows; `prefilling` has sequences, in order.
        paused, finishing: By row. Those in `finishing` are not in `by_row`.
        aborted: To be ended as soon as possible.
        finished: Ends that no step has reported yet, in order.
        changes: For the next plan.
        limit_blocks: The most blocks that the pool may have (`ElasticPool.limit_blocks`).
        withheld_blocks: Free blocks that the next step may not give to new sequences: they are to be given back.
        has_preempted: Whether victims were queued again since the last plan.
        evicted_blocks: Evictions of the cache that plans have counted.
        now: The time of the last `schedule`, in seconds.

    `earlier` is the state of a scheduler that this one replaces: its counters, logs, forecast and limit go on.
    """

    def __init__(
        self, cache: CacheManager, limits: Limits, cost: SwapCost | None, earlier: SchedulerState | None = None
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.cost = cost
        self.forecast: LengthForecast = earlier.forecast if earlier else LengthForecast()
        self.stats: Stats = earlier.stats if earlier else Stats()
        self.decisions: Decisions = earlier.decisions if earlier else Decisions()
        self.ends: Ends = earlier.ends if earlier else Ends()
        self.limit_blocks: int = earlier.limit_blocks if earlier else cache.pool.capacity
        self.withheld_blocks = 0
        self.has_preempted = False
        self.evicted_blocks = 0
        self.now = 0.0
        self.rows = Rows(limits.num_rows, min(limits.max_model_len, cache.max_tokens))
        self.plans = PendingPlans()
        self.waiting = Waiting()
        self.by_id: dict[str, Sequence] = {}
        self.by_row: dict[int, Sequence] = {}
        self.decoding: Index = NO_ROWS
        self.prefilling: list[Sequence] = []
        self.paused: dict[int, Sequence] = {}
        self.finishing: dict[int, Sequence] = {}
        self.aborted: list[Sequence] = []
        self.finished: list[Finished] = []
        self.changes = Changes()
        self._numbers = itertools.count()
        self.weigh()

    @property
    def running_rows(self) -> Index:
        """The rows of running sequences."""
        return np.fromiter(self.by_row, np.int64, len(self.by_row))

    @property
    def admits(self) -> bool:
        """Whether the next step may admit sequences: a victim that returned at once would be the next victim, unless no other
        sequence computes.
        """
        return not self.has_preempted or len(self.by_row) == len(self.paused)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row, including preempted ones."""
        return len(self.by_id) - len(self.by_row)

    @property
    def num_dependent(self) -> int:
        """Waiting sequences that wait for another one: a fork for its prompt, a beam for its next move."""
        waiting = self.waiting
        return self.num_waiting - len(waiting.queue) - len(waiting.deferred) - len(waiting.reading)

    @property
    def most_pinned(self) -> int:
        """Blocks that pins may hold: of the largest pool, those that one request of the greatest length does not need."""
        return self.limit_blocks - self.cache.blocks_for(self.cache.max_tokens - 1)

    def weigh(self) -> None:
        """Pass the current worth of swapping to the host tier."""
        if self.cache.host.capacity and self.cost is not None:
            self.cache.set_swap_costs(least_chance=self.cost.least_chance, promotes=self.cost.promotes)

    def take_changes(self) -> Changes:
        """Return the changes since the last call, and start a new record."""
        changes = self.changes
        if changes:
            self.changes = Changes()
        return changes

    def tokens_of(self, sequence: Sequence) -> Int32:
        """A copy of the known tokens of `sequence`, running or waiting."""
        row = sequence.row
        known: Int32 = sequence.tokens if row is None else self.rows.tokens[row, : self.rows.known[row]]
        return known.copy()

    def create(self, request: Request) -> Sequence:
        """Return a new sequence of a valid `request`. It is in `by_id`, and still to be queued."""
        chain = self.cache.chain(request.token_ids, request.cache_salt)
        leader = None if request.fork_of is None else self.by_id[request.fork_of]
        sequence = Sequence(request, next(self._numbers), chain, leader)
        self.by_id[request.request_id] = sequence
        return sequence

    def start(self, sequence: Sequence, start: AdmissionPlan) -> Extension:
        """Give `sequence` a row and the blocks that `start` allows. Returns the extension of its block tables."""
        request, tokens = sequence.request, sequence.tokens
        num_prompt = len(request.prompt_token_ids)
        row = self.rows.assign(request.request_id, tokens, num_prompt, request.sampling)
        if start.leader_row is None:
            extension = self.cache.admit(row, len(tokens), start.hit, request.request_id)
        else:
            extension = self.cache.fork(start.leader_row, row, len(tokens) - 1, len(tokens))
        assert extension is not None, "admitted without enough blocks"
        if sequence.kept is not None:
            extension = self._take_kept(sequence, row, extension)
        if sequence.read is not None:
            extension = self._take_read(sequence, row, extension)
        if extension.copies is not None:
            self.changes.copies.append(extension.copies)
        self.rows.computed[row] = extension.num_computed
        sequence.set_status(SequenceStatus.PREFILLING)
        sequence.row, sequence.shares = row, NOTHING
        self.by_row[row] = sequence
        bisect.insort(self.prefilling, sequence)
        self.changes.tables.append(extension.tables)
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and not sequence.is_unscored:
            sampling = replace(sampling, prompt_logprobs=None)  # already returned, and not returned again
        self.changes.admitted[row] = replace(request, sampling=sampling, generated=tokens[num_prompt:])
        return extension

    def _take_read(self, sequence: Sequence, row: int, extension: Extension) -> Extension:
        """`extension`, of the admission of `sequence` to `row`, with what was read from disk for it.

        Nothing was if the disk tier has failed since.
        """
        read, sequence.read = sequence.read, None
        assert read is not None
        if self.cache.disk is None:
            read.stop()
            return extension
        data, before = self.cache.disk.finish(read), extension.num_computed
        if read.chain is sequence.chain:
            extension = self._put(row, extension, (read.chain, read.first, read.upto), data)
        num_read = extension.num_computed - before
        self.stats.disk_tokens += num_read
        if sequence.root.num_cached_tokens is None:  # not of one that was suspended
            sequence.root.num_disk_tokens = num_read
        self.decisions.was_read(self.stats.steps, sequence.request.request_id, before, num_read, read.seconds, read.why)
        return extension

    def _take_kept(self, sequence: Sequence, row: int, extension: Extension) -> Extension:
        """`extension`, of the admission of `sequence` to `row`, with what was kept of it while the engine slept."""
        kept, sequence.kept = sequence.kept, None
        assert kept is not None
        data = kept.data(sequence.sharable // self.cache.block_size)
        return self._put(row, extension, (sequence.chain, 0, len(data)), data)

    def _put(self, row: int, extension: Extension, blocks_of: tuple[Chain, int, int], data: npt.NDArray[np.uint8]) -> Extension:
        """As `CacheManager.put`, with the plan; no block gets any from which the plan copies."""
        copied = np.concatenate([NO_TOKENS, *(copies.sources for copies in self.changes.copies)])
        put = self.cache.put(row, extension, blocks_of, data, copied)
        if put.read is not None and put.read is not extension.read:
            self.changes.reads.append(put.read)
        return put

    def take_over(self, other: SchedulerState) -> None:
        """Queue the sequences of `other`, none of which has a row, behind those that are here: none.

        They end by length where the pool is too small for them by now.
        """
        assert not (self.by_id or other.by_row or other.finishing), "sequences are taken over where none run"
        self.by_id, self.waiting, self._numbers = other.by_id, other.waiting, other._numbers
        self.aborted, self.finished = other.aborted, other.finished
        waiting, cache = self.waiting, self.cache
        for sequence in waiting.reading.copy():
            waiting.remove(sequence)
            waiting.add(sequence)
        waiting.requeue_deferred()
        for sequence in list(self.by_id.values()):
            sequence.chain = cache.chain(sequence.tokens, sequence.request.cache_salt)
            sequence.read, sequence.refusal = None, 0  # of the other's decisions
            self.stats.recomputed_tokens += sequence.computed  # reduced on admission by what is found
            self._open_pin(sequence.request)
            known, most = len(sequence.tokens), self.rows.tokens.shape[1]
            if known >= most or cache.blocks_for(known) > cache.pool.capacity:
                self.end(sequence, "length")

    def _open_pin(self, request: Request) -> None:
        """Begin the pin of `request`, if it asks for one, and there is room for it beside those that are here."""
        cache, tokens = self.cache, len(request.prompt_token_ids)
        fits = cache.blocks_to_pin(tokens) <= self.most_pinned - cache.pins.num_promised
        if request.pin and fits and cache.pins.has_nodes_for(tokens // cache.block_size, cache.index):
            cache.open_pin(request.pin, tokens)

    def can_fork(self, leader: Sequence, fork: Sequence) -> bool:
        """Whether `fork` can begin with the blocks of `leader`, which has a row, for all of its tokens but the last.

        While the leader prefills, the next plan may fill them: what it begins with is brought, or its state is copied.
        """
        row = leader.row
        assert row is not None
        if not self.cache.row_tables.can_fork(row, fork.sharable, int(self.rows.computed[row])):
            return False
        is_new = row in self.changes.admitted
        return leader.is_computed or not (fork.is_unchosen or is_new or row in self._arriving_rows)

    @property
    def forkable(self) -> list[Sequence]:
        """The prefilling sequences with a fork that can begin now."""
        return [sequence for sequence in self.prefilling if any(self.can_fork(sequence, fork) for fork in sequence.forks)]

    @property
    def _arriving_rows(self) -> set[int]:
        """The rows with blocks that are targets of copies of the next plan."""
        return {row for one in self.changes.copies for row in self.cache.row_tables.rows_with(one.targets).tolist()}

    def promote(self) -> list[Sequence]:
        """Move prefilling sequences that lack only their newest token to decoding. Returns them."""
        known = self.rows.known
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
            self.waiting.requeue_moved(sequence)

    def set_beam_aside(self, sequence: Sequence) -> None:
        """Let a beam, paused or not admitted yet, wait without a row until a move names it."""
        if sequence.is_running:
            self.leave([sequence])
        self.waiting.wait_for_move(sequence)

    def commit(self, sequence: Sequence) -> None:
        """Make the computed tokens of `sequence` findable in the prefix cache; no effect if it has no row."""
        if sequence.row is None:
            return
        is_prompt = sequence.status is not SequenceStatus.PREFILLING  # all of it is computed, and nothing more
        if updates := self._commit(sequence, sequence.row, is_prompt):
            self.changes.tables.append(updates)

    def leave(self, sequences: Iterable[Sequence], computed: bool = True, keep_tails: bool = False) -> None:
        """Take rows and blocks back; the sequences keep their tokens. If `computed`, their blocks stay findable."""
        self._free(self._detach(sequences, computed, keep_tails))

    def not_aborted(self, request_id: str) -> Sequence | None:
        """The sequence with this id; None if it is unknown, has ended or is to be ended already."""
        sequence = self.by_id.get(request_id)
        return None if sequence is None or sequence.abort_reason else sequence

    def end_aborted(self) -> None:
        """End the aborted sequences that have not ended otherwise."""
        for sequence in self.aborted:
            if sequence.abort_reason is not None and not sequence.has_ended:
                self.end(sequence, sequence.abort_reason)
        self.aborted.clear()

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End `sequence`. Its row and blocks are free, or once no pending plan refers to them (`release_finished`)."""
        computed = error is None
        if sequence.row is not None and self.plans.names(sequence.row):
            (row,) = self._detach([sequence], computed)
            sequence.set_status(SequenceStatus.FINISHING)
            self.finishing[row] = sequence
        else:
            if sequence.is_running:
                self.leave([sequence], computed)
            else:
                self.waiting.remove(sequence)
            sequence.set_status(SequenceStatus.FINISHED)
        if sequence.forks:
            self._hand_over_forks(sequence)
        self.cache.swapping.suspended.drop(sequence.request.request_id)
        self.waiting.look_again()
        prompt = len(sequence.request.prompt_token_ids)
        if reason in ("stop", "length"):
            allowed = self.rows.limit_of(prompt, sequence.request.sampling) - prompt
            self.forecast.observe(len(sequence.tokens) - prompt, allowed)
        self.finished.append(self._end_of(sequence, sequence.tokens, reason, error))
        del self.by_id[sequence.request.request_id]

    def release_finished(self) -> None:
        """Free the rows and blocks of ended sequences to which no pending plan refers any more."""
        if rows := [row for row in self.finishing if not self.plans.names(row)]:
            for row in rows:
                self.finishing.pop(row).set_status(SequenceStatus.FINISHED)
            self._free(rows)

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the ends that were not reported yet; they count as reported."""
        finished, self.finished = tuple(self.finished), []
        return finished

    def failed(self, error: str) -> tuple[Finished, ...]:
        """The unreported ends, and one with `error` for every other sequence: reads only what a half-made change leaves."""
        ended = {end.request_id for end in self.finished}
        others = [sequence for request_id, sequence in self.by_id.items() if request_id not in ended]
        return (*self.finished, *[self._end_of(s, self.tokens_of(s), "error", error) for s in others])

    def check_invariants(self) -> None:
        """Recompute every derived fact. Raises AssertionError naming what does not hold."""
        self.cache.check_invariants()
        assert self.cache.pins.num_blocks <= max(0, self.most_pinned), "pins leave too little"
        for request_id, sequence in self.by_id.items():
            status = sequence.status
            assert sequence.request.request_id == request_id, f"{request_id!r} names another request"
            assert status is not SequenceStatus.NEW and not sequence.has_ended, f"{request_id!r} is {status.value}"
            runs = sequence.row is not None and self.by_row.get(sequence.row) is sequence
            assert sequence.is_running == runs, f"{request_id!r}, {status.value}, runs or does not"
            assert sequence.is_running == (sequence.row is not None), f"{request_id!r} is {status.value} in a row"
        assert set(self.by_row.values()) <= set(self.by_id.values()), "a sequence runs that has ended"
        for sequence in self.aborted:
            assert sequence.abort_reason is not None, f"{sequence.request.request_id!r} is ended without a reason"
        self.waiting.check_invariants(self.by_id.values())
        self._check_rows()
        plans = (self.plans.first, self.plans.behind)
        named = {row for plan in plans if plan is not None for row in plan.rows.tolist()}
        assert named <= {*self.by_row, *self.finishing}, "a row was given up which a plan that is out names"
        assert set(self.finishing) <= named, "a row is still kept which no plan names any more"

    def _check_rows(self) -> None:
        rows, blocks = self.rows, self.cache.row_tables.lengths
        taken = len(self.by_row) + len(self.finishing)
        assert rows.num_free + taken == self.limits.num_rows, "a row is lost"
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
            assert blocks[row] * self.cache.block_size >= rows.computed[row], f"row {row} has too few blocks"
            assert rows.request_ids[row] == sequence.request.request_id, f"row {row} has another's id"

    def _end_of(self, sequence: Sequence, tokens: Int32, reason: FinishReason, error: str | None) -> Finished:
        """The end of `sequence` with all its `tokens`, which is in the log of ends now."""
        request, root = sequence.request, sequence.root
        generated = tokens[len(request.prompt_token_ids) :]
        end = Finished(
            request.request_id, reason, generated, sequence.preemptions, error, root.num_cached_tokens, root.admitted_at,
            root.num_disk_tokens,
        )  # fmt: skip
        self.ends.add(request, end)
        return end

    def _detach(self, sequences: Iterable[Sequence], computed: bool, keep_tails: bool = False) -> list[int]:
        """Stop running those of `sequences` that have a row. Returns their former rows, which still hold the blocks."""
        sequences = [sequence for sequence in sequences if sequence.row is not None]
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        arriving = self._arriving_rows
        for sequence, row in zip(sequences, rows, strict=True):
            if computed:
                self._commit(sequence, row)
                if keep_tails:
                    count = int(self.rows.computed[row])
                    self.cache.keep_for(sequence.request.request_id, row, sequence.chain, count, row not in arriving)
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
        self.cache.release(np.array(rows))
        self.changes.released += rows
        self.changes.copies = [copies for one in self.changes.copies if (copies := self.cache.still_due(one)) is not None]
        self.changes.tables = [tuple(u.without(rows) for u in updates) for updates in self.changes.tables]
        for row in rows:
            self.rows.free(row)

    def _resume(self, sequence: Sequence, row: int, token: int) -> None:
        """Append `token` to the paused `sequence`; its row decodes again."""
        sequence.set_status(SequenceStatus.DECODING)
        del self.paused[row]
        rows = np.array([row])
        self.changes.given[row] = int(self.rows.known[row]), token
        self.rows.append(rows, np.array([token], np.int32))
        self.decoding = np.append(self.decoding, rows)

    def _follow(self, sequence: Sequence, source: Sequence) -> None:
        """Let `sequence` wait for a move, with the tokens of `source` and its blocks to share."""
        if sequence.is_running:
            self.leave([sequence], computed=False)
        self.waiting.wait_for_move(sequence)
        self.cache.swapping.suspended.drop(sequence.request.request_id)
        self.commit(source)  # so that the shared tokens become findable once
        sequence.tokens = self.tokens_of(source)
        sequence.chain = self.cache.chain(sequence.tokens, sequence.request.cache_salt)
        sequence.leader, sequence.shares = source, len(sequence.tokens)
        sequence.computed, sequence.kept = 0, None

    def _commit(self, sequence: Sequence, row: int, is_prompt: bool = False) -> tuple[TableUpdate, ...]:
        """Make the computed tokens in `row` findable. Returns the table entries that changed."""
        chain, computed = sequence.chain, int(self.rows.computed[row])
        if computed > chain.num_tokens:
            chain.append(self.rows.tokens[row, chain.num_tokens : computed])
        updates = self.cache.commit(row, chain, computed, is_prompt)
        request = sequence.request
        if computed >= (num_prompt := len(request.prompt_token_ids)):
            if request.retention is not None:
                self.cache.retain(row, chain, num_prompt, request.retention, self.now)
            if request.pin:
                self.cache.pin(row, num_prompt, request.pin)
        return updates

    def _hand_over_forks(self, leader: Sequence) -> None:
        """Reassign the waiting forks of `leader`, which has ended, to a family member for the prompt."""
        # no other sequence has as many tokens
        for fork in [s for s in leader.forks if s.shares > len(s.request.prompt_token_ids)]:
            self.waiting.detach_fork(fork)
        if not leader.forks:
            return
        family = [s for s in self.by_row.values() if s.root is leader.root and s.is_computed]
        heir = family[0] if family else leader.leader
        if heir is not None and self.by_id.get(heir.request.request_id) is not heir:
            heir = None
        self.waiting.hand_over_forks(leader, heir)


def _with(table: Bool, ids: tuple[int, ...]) -> Bool:
    """`table` with `ids` set, grown as needed."""
    beyond = max(ids, default=-1) + 2
    if beyond > len(table):
        table = np.append(table, np.zeros(beyond - len(table), np.bool_))
    table[list(ids)] = True
    return table

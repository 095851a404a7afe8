"""The scheduler: decides which sequences compute how many tokens in the next step, and in which blocks.

Every step computes some tokens that are known but not yet computed: a prompt chunk, a decode token and a resumed
sequence are handled alike. Rules:

- Running sequences are ordered by (priority, arrival). The waiting queue has its own order (waiting.py).
- Decodes (sequences that lack one token) come first, all of them in every step, unless a copy still uses their next
  block. Unfinished prompts follow in order, each by at most `max_chunk_tokens`; then waiting requests, while rows,
  tokens and blocks last.
- Admission allocates the blocks of all known tokens; admission.py decides which request, and when. Layers with a window
  get blocks chunk by chunk instead, and give them back as soon as no later token reads them (layer_groups.py). If blocks are
  short, chunks are smaller.
- A fork starts with the blocks of its leader's prompt; the last token is computed again to sample from. With states it starts
  with a copy of its leader's state, in the step before which the leader has computed all of the prompt but the last token.
- An admitted request reuses cached prefix blocks under the same salt, for all tokens but the last. If it asks for
  prompt log-probabilities, it reuses only tokens for which it has returned them. Prompt blocks enter the prefix cache
  chunk by chunk, generated tokens when the sequence gives up its row.
- A sequence with L known tokens has ceil((L - 1) / block_size) blocks between steps: the newest token gets its
  place when it is computed.
- When blocks run out, the last sequence in order is preempted (with a host tier the cheapest: preemption.py). The last
  running sequence ends with reason "length" if it needs more than `limit_blocks` (at most the pool's capacity); if the
  pool is only small at the moment, it waits too.
- With a host tier nothing is computed twice while the tier has slots and swapping is cheaper than computing (cost.py).
- For a sequence with tokens chosen outside (a beam), a step returns candidates instead of a token. It keeps its row and
  blocks until `apply_beam_moves` names its token, or another beam that it continues; it then shares that beam's blocks
  as a fork does. If another sequence needs blocks, such waiting beams are preempted; their candidates are kept.
- Between steps the pool can grow and give idle extents back (pool.py).
- Pinned prefixes keep their blocks, unless a recall or a lower limit takes these, or the pool cannot grow for requests.

`schedule` assigns rows and blocks, preempts and ends sequences; the plan that it returns tells the runner. `apply` appends the
step's tokens, ends what they end, and reports every end, those of `schedule` too. The two alternate, but the next plan may
be made while one is pending, if it only continues that plan (steps.py). Rows and blocks of a finished sequence are
not reused while a pending plan refers to them.

What they change is one `SchedulerState` (state.py); the functions of admission.py, preemption.py and steps.py take it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..cache.block_table import Index, Int32, KeptBlocks
from ..cache.manager import CacheManager
from . import admission
from .cost import SwapCost
from .outcome import BeamMove, Decision, Finished, StepOutputs
from .plan import NO_ROWS, InvalidCallOrder, Plan, Result
from .pool import ElasticPool
from .preemption import preempt, preempt_until
from .request import FinishReason, Request, Sequence
from .state import AdmissionPlan, Limits, SchedulerState
from .steps import apply_result, continuation, plan_ahead, plan_step

log = logging.getLogger(__name__)

READ_WAIT_S = 0.005  # of a step with nothing to do but wait for the disk
PIN_WAIT_S = 10.0  # for which requests wait while nothing runs, before a pin ends for them


class Scheduler:
    """Continuous-batching scheduler; the module docstring gives its rules.

    Call `add` and `abort` at any time; `schedule`, then `apply`, in turn, with `schedule_ahead` in between; other
    methods that change state only while no plan is pending. Not thread-safe.
    """

    def __init__(
        self, cache: CacheManager, limits: Limits, cost: SwapCost | None = None, *, replaces: Scheduler | None = None
    ) -> None:
        if cache.host.capacity and cost is None:
            raise ValueError("a cache with a host tier needs to know what swapping costs: give the scheduler a SwapCost")
        self.state: SchedulerState = SchedulerState(cache, limits, cost, replaces.state if replaces else None)
        state = self.state
        self.cache, self.rows = cache, state.rows
        self.stats, self.decisions, self.ends = state.stats, state.decisions, state.ends
        self.pool = ElasticPool(state)
        self._stuck_since = math.inf  # nothing runs, and requests do not fit beside pins
        self._num_pinned = 0  # blocks, at the last look

    def rebuilt(self, error: str, mapped: Iterable[int] | None = None) -> tuple[Scheduler, StepOutputs]:
        """Return an empty replacement scheduler, and outputs that finish every request with `error`.

        For recovery from a half-made change: it reads only what such a change leaves readable. `mapped` are the extents
        with memory; None takes them from the broken bookkeeping.
        """
        fresh = Scheduler(self.cache.rebuilt(mapped), self.state.limits, self.state.cost, replaces=self)
        return fresh, StepOutputs(self.stats.steps, [], [], self.state.failed(error))

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row and have not ended."""
        return len(self.state.by_row)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row, including preempted ones."""
        return self.state.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether there are requests, a pending plan, an unreported end or a resize to do."""
        return bool(self.state.by_id or self.state.plans.first or self.state.finished or self.pool.is_resizing)

    @property
    def starving(self) -> bool:
        """Whether all work waits for the pool to grow or for its limit to be raised.

        True once a step has found this. Steps then do nothing until `grow`, `limit_blocks` or another request.
        """
        state = self.state
        if state.plans.first is not None or state.aborted or state.finished or self.pool.is_resizing or state.waiting.reading:
            return False
        if len(state.by_row) > len(state.paused):
            return False
        if state.paused and state.waiting.queue:  # paused beams will be preempted
            return False
        return bool(state.by_id) and not state.waiting.has_candidates

    def add(self, request: Request) -> None:
        """Queue `request`. Raises what `check` raises, and then keeps nothing of the request."""
        self.check(request)
        admission.add(self.state, self.state.create(request))

    def check(self, request: Request) -> None:
        """Raise RequestRejected, PromptTooLong or DuplicateRequest if `add` would refuse `request`."""
        admission.check_request(self.state, request)

    def abort(self, request_id: str, reason: FinishReason = "aborted") -> bool:
        """End a request in any state. The next `StepOutputs` contain its `Finished`, once.

        Returns False, and changes nothing, for an unknown, ended or already aborted request. Its blocks are free before
        `schedule` plans the next step. A pending plan made by `schedule` still gives it a token; a plan made by
        `schedule_ahead` does not.
        """
        sequence = self.state.not_aborted(request_id)
        if sequence is not None:
            sequence.abort_reason = reason
            self.state.aborted.append(sequence)
        return sequence is not None

    def withdraw(self, request_id: str) -> Finished | None:
        """End a request at once, between two steps, and free its blocks. Its `Finished` is returned here only.

        Returns None, and changes nothing, for an unknown, ended or already aborted request.
        """
        self.state.plans.check_turn()
        if (sequence := self.state.not_aborted(request_id)) is None:
            return None
        self.state.end(sequence, "aborted")
        self._stuck_since = math.inf
        return self.state.finished.pop()

    def suspend(self, read: Callable[[Int32], npt.NDArray[np.uint8]] | None) -> None:
        """Take rows and blocks from all sequences, between two steps, for `take_over` by the scheduler of another engine.

        As many blocks as the host tier has slots are kept until then, those of the first sequences in order, with those that
        are kept from before: the tier of the next engine uses only what they leave.

        Args:
            read: Gives the bytes [n, payload_bytes] in places as of `CacheManager.bytes_of`, once; None: none are kept.
        """
        state, store = self.state, dict[int, int]()
        most_blocks = 0 if read is None else max(0, self.cache.host.num_slots - self.cache.host.num_withheld)
        state.plans.check_turn()
        state.end_aborted()
        if state.by_row:
            preempt(state, list(state.by_row.values()))
        kept: list[tuple[Sequence, Index]] = []
        for sequence in sorted(state.by_id.values()):
            places = self.cache.bytes_of(sequence.chain, min(sequence.computed, sequence.sharable)).tolist()
            new = list(dict.fromkeys(place for place in places if place not in store))[: most_blocks - len(store)]
            store.update(zip(new, range(len(store), len(store) + len(new)), strict=True))
            known = [store[place] for place in itertools.takewhile(store.__contains__, places)]
            if known and (sequence.kept is None or len(known) > len(sequence.kept.places)):
                kept.append((sequence, np.array(known, np.int64)))
        if not kept or read is None:
            return
        try:
            data = read(np.fromiter(store, np.int32, len(store)))
        except Exception:
            log.exception("%d blocks of %d requests cannot be kept, and are computed again", len(store), len(kept))
            return
        for sequence, known_places in kept:
            sequence.kept = KeptBlocks(data, known_places)

    def take_over(self, suspended: Scheduler, *, keeps: bool = True) -> None:
        """Go on with the sequences of a scheduler that was suspended. None is here.

        They read from disk or compute again what was not kept, and everything without `keeps`: the bytes are of other weights,
        or lie otherwise.
        """
        if not keeps:
            for sequence in suspended.state.by_id.values():
                sequence.kept = None
        self.state.take_over(suspended.state)
        kept = [sequence.kept for sequence in self.state.by_id.values() if sequence.kept is not None]
        self.cache.host.withhold({id(one.store): one.store for one in kept}.values())
        admission.begin_reads(self.state)

    def schedule(self, now: float = 0.0) -> Plan:
        """Plan the next step. The plan may hold no chunk; it must still go through `apply`.

        Aborted sequences end, and others lose or get rows and blocks, before this returns: the plan tells the runner.

        `now` (seconds) is the time of the admissions. The order of waiting requests does not depend on it (waiting.py).
        """
        state = self.state
        if state.plans.first is not None:
            raise InvalidCallOrder(f"plan {state.plans.first.step_id} is out: apply its result first")
        state.now = now
        self.cache.index.retained.expire(now)
        state.end_aborted()
        self._look_at_pins()
        if state.waiting.reading:
            state.waiting.requeue_read(0.0 if state.by_row or state.waiting.has_candidates else READ_WAIT_S)
        prefilling = np.array([sequence.row for sequence in state.prefilling], np.int64)
        if len(prefilling):
            self.cache.release_passed(prefilling, self._computed)
        decodes = self._extend_decodes()
        step = _Step(decodes, self.state.limits.max_step_tokens - len(decodes), self.state.limits.max_scored_tokens)
        if self._chunk_prefills(step):
            self.cache.release_passed(prefilling, self.rows.computed.take)  # also what forks wait for
            preempt_until(state, lambda: self._chunk_prefills(step), state.by_row)
        if state.waiting.queue and step.num_tokens > 0 and not step.lacks_blocks:
            preempt_until(state, lambda: self._admit(step), state.paused)
        self._yield_pins()
        self.pool.reopen_admission()
        plan = state.plans.first = plan_step(state, decodes, step.chunks, *self.pool.take_resize())
        return plan

    def schedule_ahead(self) -> Plan | None:
        """Plan the step after the pending plan, valid for any result of that plan.

        Execute and apply it after the pending plan. Returns None, and changes nothing, if the pending result is needed
        first. Admits and preempts no sequence. Raises InvalidCallOrder unless exactly one plan is pending.
        """
        state = self.state
        out = state.plans.first
        if out is None or state.plans.behind is not None:
            raise InvalidCallOrder("a step is planned ahead of the result of one plan: none is out, or two are")
        if state.aborted or len(state.plans.stale):
            return None
        self._look_at_pins()
        if state.waiting.has_candidates and (self.rows.num_free or state.finishing):
            return None
        if (decided := continuation(state, out)) is None:
            return None
        decodes, known = decided
        short = self.cache.row_tables.short(decodes, known)
        if len(short):
            extension = self.cache.advance(short, self.rows.known[short] + 1, self._computed)
            if extension is None:
                return None
            state.changes.tables.append(extension.tables)
        plan = state.plans.behind = plan_ahead(state, decodes, known)
        return plan

    def apply(self, plan: Plan, result: Result) -> StepOutputs:
        """Apply the result of the oldest pending plan."""
        return apply_result(self.state, self.pool, plan, result)

    def limit_of(self, request: Request) -> int:
        """Tokens, prompt included, at which a sequence of `request` ends by length at the latest."""
        return self.rows.limit_of(len(request.prompt_token_ids), request.sampling)

    def apply_beam_moves(self, moves: Iterable[BeamMove], spare: Iterable[str] = ()) -> None:
        """Apply the beam choices for all waiting beams of a family, paused or still to be admitted.

        A beam that continues another beam's tokens starts with that beam's blocks; the other beam must continue its
        own. `spare` beams give up rows and blocks, and wait until a later move names them.
        """
        state = self.state
        state.plans.check_turn()
        # sources last, so that their tokens stay unchanged until then
        moves = sorted(moves, key=lambda move: move.request_id == move.source_id)
        by_id = state.by_id
        for move in moves:
            state.move_beam(by_id[move.request_id], by_id[move.source_id], move.token)
        for request_id in spare:
            state.set_beam_aside(by_id[request_id])
        state.waiting.look_again()

    def explain(self) -> list[Decision]:
        """The last 64 decisions made when blocks ran short, with their numbers: plain data, oldest first.

        Kinds of decisions:

            "wait"     a request that did not fit when last considered: the blocks it needs, those available, and the
                       forecast for it and all running sequences; since which step it has been refused
            "pass"     a smaller request that was admitted before others
            "preempt"  a victim: the blocks won, and the seconds that swapping or computing its loss would take
            "return"   a readmitted request: the tokens it had and those it found
            "cut"      a request that ended because the pool can hold no more
            "read"     a new request with a prefix on disk: the tokens found in memory and those read, the seconds that this
                       took, and why not all were read ("computing takes less time": none was)
            "give up"  the cached blocks demoted and evicted over a range of steps, the cost per block of either way, and
                       how likely a block is to be needed again
        """
        return self.decisions.to_list()

    def check_invariants(self) -> None:
        """Recompute every derived fact. Raises AssertionError naming what does not hold."""
        self.state.check_invariants()

    def _extend_decodes(self) -> Index:
        """Allocate a block for each decoding row at a block border; preempt if blocks are short.

        Returns the rows that decode in this step: all, unless a copy still uses their new block.
        """
        state = self.state
        known, later = self.rows.known, NO_ROWS
        short = self.cache.row_tables.short(state.decoding, known[state.decoding])
        if len(short):
            extension = self.cache.advance(short, known[short], self._computed)
            if extension is None:
                self.cache.release_passed(short, self.rows.computed.take)  # also what forks wait for
                short = self._make_room(short)
                now = self.cache.pool.available // max(1, self.cache.row_tables.num_tables)
                short, later = short[:now], short[now:]
                extension = self.cache.extend(short, known[short])
                assert extension is not None, "room was made for these rows"
            state.changes.tables.append(extension.tables)
        return state.decoding[~np.isin(state.decoding, later)] if len(later) else state.decoding

    def _make_room(self, short: Index) -> Index:
        """Preempt until each remaining row of `short` can have a block, now or after the next plan's copies.

        Returns the remaining rows.
        """
        state, pool, num_tables = self.state, self.cache.pool, self.cache.row_tables.num_tables

        def lacking() -> int:
            rows = np.count_nonzero(self.rows.assigned[short])
            return int(rows) * num_tables - pool.available - pool.pending_free_blocks

        if preempt_until(state, lacking, state.by_row, spared=1) > 0:
            (last,) = state.by_row.values()
            needed = self.cache.blocks_for(int(self.rows.known[last.row]))
            if needed <= self.pool.limit_blocks:
                preempt(state, [last])  # it waits for the pool to grow
            else:
                self.decisions.cut(self.stats.steps, last.request.request_id, needed, self.pool.limit_blocks)
                state.end(last, "length")  # the limit forbids it: the sequence cannot get longer
        return short[self.rows.assigned[short] > 0]

    def _computed(self, rows: Index) -> Index:
        """The computed tokens of each of `rows`, up to where a fork is to go on that waits for them."""
        computed: Index = self.rows.computed[rows]
        by_row = self.state.by_row
        for i, row in enumerate(rows.tolist()):
            if forks := by_row[row].forks:
                computed[i] = min(int(computed[i]), *(len(fork.tokens) - 1 for fork in forks))
        return computed

    def _look_at_pins(self) -> None:
        """Let refused requests be tried again if pins have ended, whatever ended them."""
        before, self._num_pinned = self._num_pinned, self.cache.pins.num_blocks
        if self._num_pinned < before:
            self.state.waiting.look_again()

    def _yield_pins(self) -> None:
        """End the newest pin if requests have not begun beside the pins for a while: the pool cannot grow as it should."""
        state = self.state
        if state.by_row or not state.waiting.queue or not len(self.cache.pins):
            self._stuck_since = math.inf
            return
        self._stuck_since = min(self._stuck_since, state.now)
        if state.now - self._stuck_since >= PIN_WAIT_S:
            self.cache.end_newest_pin()
            state.waiting.look_again()

    def _chunk_prefills(self, step: _Step) -> int:
        """Add the next chunks of running prompts to `step`. Returns 1 if it is empty, since blocks are short; else 0."""
        step.lacks_blocks = False
        for sequence in self.state.prefilling:
            if step.num_tokens <= 0:
                break
            self._chunk(step, sequence)
        return int(step.lacks_blocks and step.is_empty)

    def _admit(self, step: _Step) -> int:
        """Assign rows to waiting sequences while admission and the token budget (at least 1) allow it, and add their first
        chunks to `step`. Returns 1 if it is empty though a sequence waits that may be admitted; else 0.
        """
        state = self.state
        for sequence, start, passed in admission.admitted(state):
            if not self._assign_row(sequence, start):
                self._chunk(step, sequence)
            if passed:
                self.decisions.passed(self.stats.steps, sequence.request.request_id, start.num_blocks, passed)
            if step.num_tokens <= 0:
                break
        return int(state.admits and step.is_empty and bool(state.waiting.queue))

    def _chunk(self, step: _Step, sequence: Sequence) -> None:
        """Add the next chunk of `sequence` (with a row) to `step`.

        None if the budget for prompt log-probabilities is used up, or if windows need blocks and none are available.
        """
        assert sequence.row is not None
        computed = int(self.rows.computed[sequence.row])
        lacking = int(self.rows.known[sequence.row]) - computed
        length = min(lacking, step.num_tokens, self.state.limits.max_chunk_tokens or lacking)
        to_score = 0
        if sequence.is_unscored:
            to_score = max(0, len(sequence.request.prompt_token_ids) - 1 - computed)
            if to_score > step.num_scored:
                length = min(length, step.num_scored)
        if not length:
            return
        length = min([length, *(at - computed for at in self._ends_for_forks(sequence, computed, computed + length))])
        room = admission.room(self.state)
        reached, extension = self.cache.reach(sequence.row, computed, computed + length, room)
        if extension.tables:
            self.state.changes.tables.append(extension.tables)
        if extension.copies is not None:
            self.state.changes.copies.append(extension.copies)
        length = reached - computed
        if length:
            step.chunks.append((sequence.row, length))
            step.num_tokens -= length
            step.num_scored -= min(length, to_score)
        elif not self.cache.pool.pending_free_blocks:
            step.lacks_blocks = True

    def _ends_for_forks(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Where a chunk of `sequence` from `start` to `end` is to end earlier, as forks begin there that cannot at its end."""
        assert sequence.row is not None
        tables, ends = self.cache.row_tables, {fork.sharable for fork in sequence.forks if not fork.is_unchosen}
        return [at for at in ends if start < at < end and not tables.can_fork(sequence.row, at, end)]

    def _assign_row(self, sequence: Sequence, start: AdmissionPlan) -> bool:
        """Assign a row and blocks. Returns whether the sequence waits for copies concurrent with this step's
        chunks.
        """
        extension = self.state.start(sequence, start)
        request, root, num_hit = sequence.request, sequence.root, start.hit.num_tokens
        if extension.read is not None:
            num_hit = extension.num_computed
        is_new = root.num_cached_tokens is None
        if is_new:
            root.num_cached_tokens = found = min(num_hit, len(request.prompt_token_ids))
            root.admitted_at = self.state.now
            self.stats.prompt_tokens += len(request.prompt_token_ids)
            self.stats.cached_prompt_tokens += found
        if start.leader_row is not None:
            self.stats.forks += 1
        elif self.cache.index.capacity:
            self.stats.looked_up(len(sequence.tokens), num_hit, is_new and not len(request.generated))
        self.stats.recomputed_tokens -= min(sequence.computed, extension.num_computed)
        if sequence.preemptions:
            self.decisions.returned(self.stats.steps, request.request_id, sequence.computed, extension.num_computed)
        return extension.waits


@dataclass(slots=True, eq=False)
class _Step:
    """A step while `schedule` plans it: what it computes so far, and how much more it may."""

    decodes: Index
    num_tokens: int  # that it may still compute
    num_scored: int  # of prompts with log-probabilities, of these
    chunks: list[tuple[int, int]] = field(default_factory=list)  # rows of prompts, with the lengths of their chunks
    lacks_blocks: bool = False  # a prompt's next chunk waits for blocks that only a preemption frees

    @property
    def is_empty(self) -> bool:
        return not len(self.decodes) and not self.chunks

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
- A fork starts with the blocks of its leader's prompt; the last token is computed again to sample from.
- An admitted request reuses cached prefix blocks under the same salt, for all tokens but the last. If it asks for
  prompt log-probabilities, it reuses only tokens for which it has returned them. Prompt blocks enter the prefix cache
  chunk by chunk, generated tokens when the sequence gives up its row.
- A sequence with L known tokens has ceil((L - 1) / block_size) blocks between steps: the newest token gets its slot
  when it is computed.
- When blocks run out, the last sequence in order is preempted (with a host tier the cheapest: preemption.py). The last
  running sequence ends with reason "length" if it needs more than `limit_blocks` (at most the pool's capacity); if the
  pool is only small at the moment, it waits too.
- With a host tier nothing is computed twice while the tier has slots and swapping is cheaper than computing (cost.py).
- For a sequence with tokens chosen outside (a beam), a step returns candidates instead of a token. It keeps its row and
  blocks until `apply_beam_moves` names its token, or another beam that it continues; it then shares that beam's blocks
  as a fork does. If another sequence needs blocks, such waiting beams are preempted; their candidates are kept.
- Between steps the pool can grow and give idle extents back (pool.py).

`schedule` assigns rows and blocks, preempts and ends sequences; the plan that it returns tells the runner. `apply` appends the
step's tokens, ends what they end, and reports every end, those of `schedule` too. The two alternate, but the next plan may
be made while one is pending, if it only continues that plan (steps.py). Rows and blocks of a finished sequence are
not reused while a pending plan refers to them.

What they change is one `SchedulerState` (state.py); the functions of admission.py, preemption.py and steps.py take it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager
from . import admission
from .cost import SwapCost
from .errors import InvalidCallOrder
from .outcome import BeamMove, Decision, Finished, StepOutputs
from .plan import NO_ROWS, Plan, Result
from .pool import ElasticPool
from .preemption import by_worth, preempt
from .request import Request
from .sequence import FinishReason, Sequence
from .state import AdmissionPlan, Limits, SchedulerState
from .steps import apply_result, continuation, plan_ahead, plan_step


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
        self._lacks_blocks = False  # a prompt's next chunk waits for blocks that only a preemption frees
        self._scorable = 0  # prompt tokens with log-probabilities that this step may still compute

    def rebuilt(self, error: str, mapped: Iterable[int] | None = None) -> tuple[Scheduler, StepOutputs]:
        """Return an empty replacement scheduler, and outputs that finish every request with `error`.

        For recovery from a half-made change: it reads only what such a change leaves readable. `mapped` are the extents
        with memory; None takes them from the broken bookkeeping.
        """
        fresh = Scheduler(self.cache.rebuilt(mapped), self.limits, self.cost, replaces=self)
        return fresh, StepOutputs(self.stats.steps, [], [], self.state.failed(error))

    @property
    def limits(self) -> Limits:
        """The limits of this scheduler."""
        return self.state.limits

    @property
    def cost(self) -> SwapCost | None:
        """Of swapping and computing; without a host tier only reported in decisions."""
        return self.state.cost

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row and have not ended."""
        return len(self.state.by_row)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row, including preempted ones."""
        return self.state.num_waiting

    @property
    def num_dependent(self) -> int:
        """Waiting sequences that wait for another one: a fork for its prompt, a beam for its next move."""
        return self.state.num_dependent

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
        if state.plans.first is not None or state.aborted or state.finished or self.pool.is_resizing:
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
        return self.state.abort(request_id, reason)

    def withdraw(self, request_id: str) -> Finished | None:
        """End a request at once, between two steps, and free its blocks. Its `Finished` is returned here only.

        Returns None, and changes nothing, for an unknown, ended or already aborted request.
        """
        self.state.plans.check_turn()
        return self.state.withdraw(request_id)

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
        preemptions = self.stats.preemptions
        prefilling = np.array([sequence.row for sequence in state.prefilling], np.int64)
        if len(prefilling):
            self.cache.release_passed(prefilling, self._computed)
        decodes = self._extend_decodes()
        budget = self.limits.max_step_tokens - len(decodes)
        self._scorable = self.limits.max_scored_tokens
        chunks = self._chunk_prefills(budget)
        if self._lacks_blocks and not len(decodes) and not chunks:  # forks have to find what they wait for
            self.cache.release_passed(prefilling, self.rows.computed.take)
            chunks = self._chunk_prefills(budget)
        while self._lacks_blocks and not len(decodes) and not chunks:
            preempt(state, [by_worth(state, state.by_row.values())[-1]])
            chunks = self._chunk_prefills(budget)
        budget -= sum([length for _, length in chunks])
        # a sequence just preempted does not return at once
        settled = self.stats.preemptions == preemptions or not state.by_row
        if budget > 0 and settled and not self._lacks_blocks and state.waiting.has_candidates:
            chunks += self._admit(budget)
        while not len(decodes) and not chunks and state.paused and state.waiting.queue and state.admits:
            preempt(state, [by_worth(state, state.paused.values())[-1]])
            chunks += self._admit(budget)
        self.pool.reopen_admission()
        plan = state.plans.first = plan_step(state, decodes, chunks, *self.pool.take_resize())
        return plan

    def schedule_ahead(self, now: float = 0.0) -> Plan | None:
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
        state = self.state
        victims = by_worth(state, state.by_row.values())
        while len(short) * self.cache.row_tables.num_tables > self.cache.pool.available + self.cache.pool.pending_free_blocks:
            victim = victims.pop()
            short = short[short != victim.row]
            if victims or self.cache.blocks_for(int(self.rows.known[victim.row])) <= self.pool.limit_blocks:
                preempt(state, [victim])  # a lone sequence waits for the pool to grow
            else:
                name, known = victim.request.request_id, int(self.rows.known[victim.row])
                self.decisions.cut(self.stats.steps, name, self.cache.blocks_for(known), self.pool.limit_blocks)
                state.end(victim, "length")  # the limit forbids it: the sequence cannot get longer
        return short

    def _computed(self, rows: Index) -> Index:
        """The computed tokens of each of `rows`, up to where a fork is to go on that waits for them."""
        computed: Index = self.rows.computed[rows]
        by_row = self.state.by_row
        for i, row in enumerate(rows.tolist()):
            if forks := by_row[row].forks:
                computed[i] = min(int(computed[i]), *(len(fork.tokens) - 1 for fork in forks))
        return computed

    def _chunk_prefills(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks = []
        self._lacks_blocks = False
        for sequence in self.state.prefilling:
            if budget <= 0:
                break
            if length := self._chunk(sequence, budget):
                chunks.append((sequence, length))
                budget -= length
        return chunks

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Assign rows to waiting sequences while admission and the token budget (at least 1) allow it."""
        chunks = []
        for sequence, start, passed in admission.admitted(self.state):
            if not self._assign_row(sequence, start) and (length := self._chunk(sequence, budget)):
                chunks.append((sequence, length))
                budget -= length
            if passed:
                self.decisions.passed(self.stats.steps, sequence.request.request_id, start.num_blocks, passed)
            if budget <= 0:
                break
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of `sequence` (with a row) to compute now.

        0 if the budget for prompt log-probabilities is used up, or if windows need blocks and none are available.
        """
        assert sequence.row is not None
        computed = int(self.rows.computed[sequence.row])
        lacking = int(self.rows.known[sequence.row]) - computed
        length = min(lacking, budget, self.limits.max_chunk_tokens or lacking)
        to_score = 0
        if sequence.is_unscored:
            to_score = max(0, len(sequence.request.prompt_token_ids) - 1 - computed)
            if to_score > self._scorable:
                length = min(length, self._scorable)
        if length:
            room = admission.room(self.state)
            reached, extension = self.cache.reach(sequence.row, computed, computed + length, room)
            if extension.tables:
                self.state.changes.tables.append(extension.tables)
            if extension.copies is not None:
                self.state.changes.copies.append(extension.copies)
            length = reached - computed
            self._lacks_blocks |= not length and not self.cache.pool.pending_free_blocks
        self._scorable -= min(length, to_score)
        return length

    def _assign_row(self, sequence: Sequence, start: AdmissionPlan) -> bool:
        """Assign a row and blocks. Returns whether the sequence waits for copies concurrent with this step's chunks."""
        extension = self.state.start(sequence, start)
        request, root, num_hit = sequence.request, sequence.root, start.hit.num_tokens
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

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

`schedule` and `apply` alternate, but the next plan may be made while one is pending, if it only continues that plan
(plan_builder.py). Decisions take effect in `apply`, and are not visible outside before. Rows and blocks of a finished
sequence are not reused while a pending plan refers to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager, Extension
from .admission import AdmissionController, check_request
from .cost import SwapCost
from .errors import InvalidCallOrder
from .forecast import ExpectedBlocks, LengthForecast
from .outcome import BeamMove, Decision, Decisions, Ends, Finished, Stats, StepOutputs
from .plan import NO_ROWS, Plan, Result
from .plan_builder import PendingPlans, PlanBuilder, continuation
from .pool import ElasticPool
from .preemption import Preemption
from .request import Request
from .results import ResultProcessor
from .rows import Rows
from .running import AdmissionPlan, Running
from .sequence import FinishReason, Sequence
from .sequence_table import SequenceTable
from .snapshot import SchedulerView
from .waiting import Waiting

LEAST_SCORED_TOKENS = 64  # prompt tokens with log-probabilities per step


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


class Scheduler:
    """Continuous-batching scheduler; the module docstring gives its rules.

    Call `add` and `abort` at any time; `schedule`, then `apply`, in turn, with `schedule_ahead` in between; other
    methods that change state only while no plan is pending. Not thread-safe.
    """

    def __init__(
        self, cache: CacheManager, limits: Limits, cost: SwapCost | None = None, forecast: LengthForecast | None = None,
        stats: Stats | None = None, decisions: Decisions | None = None, ends: Ends | None = None,
    ) -> None:  # fmt: skip
        if cache.host.capacity and cost is None:
            raise ValueError(
                "a cache with a host tier needs to know what swapping costs: give the scheduler a SwapCost"
            )
        self.cache = cache
        self.limits = limits
        self.cost = cost  # of swapping and computing; without a host tier only reported in decisions
        self.stats = stats or Stats()
        self.forecast = forecast or LengthForecast()
        self.decisions = decisions or Decisions()
        self.ends = ends or Ends()
        self.rows = rows = Rows(limits.num_rows, min(limits.max_model_len, cache.max_tokens))
        self._now = 0.0  # of the last `schedule`
        self._lacks_blocks = False  # a prompt's next chunk waits for blocks that only a preemption frees
        self._scorable = 0  # prompt tokens with log-probabilities that this step may still compute
        self._plans = plans = PendingPlans()
        self._waiting = waiting = Waiting()
        self._running = running = Running(cache, rows, waiting)
        self._sequences = SequenceTable(cache, rows, running, waiting, plans, self.forecast, self.ends)
        self._preemption = Preemption(cache, rows, running, waiting, cost, self.stats, self.decisions)
        expected = ExpectedBlocks(cache, rows, self.forecast)
        self.pool = ElasticPool(cache, rows, running, waiting, plans, self._sequences, self._preemption, expected)
        self._admission = AdmissionController(
            cache, self.pool, rows, waiting, running, expected, lambda: self.limits.forecast
        )
        self._plan_builder = PlanBuilder(cache, rows, running, cost, limits.num_rows, self.stats, self.decisions)
        self._results = ResultProcessor(
            cache, rows, running, waiting, plans, self._sequences, self._preemption, self.pool, cost, self.stats
        )

    def rebuilt(self, error: str, mapped: Iterable[int] | None = None) -> tuple[Scheduler, StepOutputs]:
        """Return an empty replacement scheduler, and outputs that finish every request with `error`.

        For recovery from a half-made change: it reads only what such a change leaves readable. `mapped` are the extents
        with memory; None takes them from the broken bookkeeping.
        """
        cache = self.cache.rebuilt(mapped)
        fresh = Scheduler(cache, self.limits, self.cost, self.forecast, self.stats, self.decisions, self.ends)
        fresh.pool.limit_blocks = self.pool.limit_blocks
        return fresh, StepOutputs(self.stats.steps, [], [], self._sequences.failed(error))

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row and have not ended."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row, including preempted ones."""
        return len(self._sequences) - len(self._running)

    @property
    def num_dependent(self) -> int:
        """Waiting sequences that wait for another one: a fork for its prompt, a beam for its next move."""
        return self.num_waiting - len(self._waiting.queue) - len(self._waiting.deferred)

    @property
    def has_work(self) -> bool:
        """Whether there are requests, a pending plan, an unreported end or a resize to do."""
        return bool(self._sequences or self._plans.first or self._sequences.finished or self.pool.is_resizing)

    @property
    def starving(self) -> bool:
        """Whether all work waits for the pool to grow or for its limit to be raised.

        True once a step has found this. Steps then do nothing until `grow`, `limit_blocks` or another request.
        """
        table = self._sequences
        if self._plans.first is not None or table.aborted or table.finished or self.pool.is_resizing:
            return False
        if len(self._running) > len(self._running.paused):
            return False
        if self._running.paused and self._waiting.queue:  # paused beams will be preempted
            return False
        return bool(table) and not self._waiting.has_candidates

    @property
    def waiting_ids(self) -> list[str]:
        """Ids of requests that wait for a row, in order; without forks that wait for their leader's prompt."""
        return [sequence.request.request_id for sequence in self._waiting]

    @property
    def view(self) -> SchedulerView:
        """Blocks, rows and waiting sequences, for watchers. Valid between two calls of this scheduler."""
        return SchedulerView(self.cache, self.rows, self._running, self._waiting, self._sequences)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises what `check` raises, and then keeps nothing of the request."""
        self.check(request)
        self._admission.add(self._sequences.create(request))

    def check(self, request: Request) -> None:
        """Raise RequestRejected, PromptTooLong or DuplicateRequest if `add` would refuse `request`."""
        check_request(request, self._sequences.by_id, self.limits.max_model_len, self.cache)

    def abort(self, request_id: str, reason: FinishReason = "aborted") -> bool:
        """End a request in any state. The next `StepOutputs` contain its `Finished`, once.

        Returns False, and changes nothing, for an unknown, ended or already aborted request. Its blocks are free before
        `schedule` plans the next step. A pending plan made by `schedule` still gives it a token; a plan made by
        `schedule_ahead` does not.
        """
        return self._sequences.abort(request_id, reason)

    def withdraw(self, request_id: str) -> Finished | None:
        """End a request at once, between two steps, and free its blocks. Its `Finished` is returned here only.

        Returns None, and changes nothing, for an unknown, ended or already aborted request.
        """
        self._plans.check_turn()
        return self._sequences.withdraw(request_id)

    def schedule(self, now: float = 0.0) -> Plan:
        """Plan the next step. The plan may hold no chunk; it must still go through `apply`.

        `now` (seconds) is the time of the admissions. The order of waiting requests does not depend on it (waiting.py).
        """
        if self._plans.first is not None:
            raise InvalidCallOrder(f"plan {self._plans.first.step_id} is out: apply its result first")
        self._now = now
        self._sequences.end_aborted()
        preemptions = self.stats.preemptions
        prefilling = NO_ROWS
        if self.cache.row_tables.has_windows and self._running.prefilling:
            prefilling = np.array([sequence.row for sequence in self._running.prefilling])
            self.cache.release_passed(prefilling, self._passed(prefilling))
        decodes = self._extend_decodes()
        budget = self.limits.max_step_tokens - len(decodes)
        self._scorable = self.limits.max_scored_tokens
        chunks = self._chunk_prefills(budget)
        if self._lacks_blocks and not len(decodes) and not chunks:  # forks have to find what they wait for
            self.cache.release_passed(prefilling, self.rows.computed[prefilling])
            chunks = self._chunk_prefills(budget)
        while self._lacks_blocks and not len(decodes) and not chunks:
            self._preemption.preempt([self._preemption.by_worth(self._running.by_row.values())[-1]])
            chunks = self._chunk_prefills(budget)
        budget -= sum([length for _, length in chunks])
        # a sequence just preempted does not return at once
        settled = self.stats.preemptions == preemptions or not self._running
        if budget > 0 and settled and not self._lacks_blocks and self._waiting.has_candidates:
            chunks += self._admit(budget)
        while not len(decodes) and not chunks and self._running.paused and self._waiting.queue and self.pool.admits:
            self._preemption.preempt([self._preemption.by_worth(self._running.paused.values())[-1]])
            chunks += self._admit(budget)
        self.pool.reopen_admission()
        plan = self._plans.first = self._plan_builder.step(decodes, chunks, *self.pool.take_resize())
        return plan

    def schedule_ahead(self, now: float = 0.0) -> Plan | None:
        """Plan the step after the pending plan, valid for any result of that plan.

        Execute and apply it after the pending plan. Returns None, and changes nothing, if the pending result is needed
        first. Admits and preempts no sequence. Raises InvalidCallOrder unless exactly one plan is pending.
        """
        out = self._plans.first
        if out is None or self._plans.behind is not None:
            raise InvalidCallOrder("a step is planned ahead of the result of one plan: none is out, or two are")
        if self._sequences.aborted or len(self._plans.stale):
            return None
        if self._waiting.has_candidates and (self.rows.num_free or self._running.finishing):
            return None
        if (decided := continuation(out, self.rows, self._running)) is None:
            return None
        decodes, known = decided
        short = self.cache.row_tables.short(decodes, known)
        if len(short):
            extension = self._extend(short, self.rows.known[short] + 1)
            if extension is None:
                return None
            self._running.changes.tables.append(extension.tables)
        plan = self._plans.behind = self._plan_builder.ahead(decodes, known)
        return plan

    def apply(self, plan: Plan, result: Result) -> StepOutputs:
        """Apply the result of the oldest pending plan."""
        return self._results.apply(plan, result)

    def limit_of(self, request: Request) -> int:
        """Tokens, prompt included, at which a sequence of `request` ends by length at the latest."""
        return self.rows.limit_of(len(request.prompt_token_ids), request.sampling)

    def apply_beam_moves(self, moves: Iterable[BeamMove], spare: Iterable[str] = ()) -> None:
        """Apply the beam choices for all waiting beams of a family, paused or still to be admitted.

        A beam that continues another beam's tokens starts with that beam's blocks; the other beam must continue its
        own. `spare` beams give up rows and blocks, and wait until a later move names them.
        """
        self._plans.check_turn()
        # sources last, so that their tokens stay unchanged until then
        moves = sorted(moves, key=lambda move: move.request_id == move.source_id)
        by_id = self._sequences.by_id
        for move in moves:
            self._running.move_beam(by_id[move.request_id], by_id[move.source_id], move.token)
        for request_id in spare:
            self._running.set_beam_aside(by_id[request_id])
        self._waiting.look_again()

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
        self.cache.check_invariants()
        self._running.check_invariants()
        self._sequences.check_invariants()
        taken = len(self._running) + len(self._running.finishing)
        assert self.rows.num_free + taken == self.limits.num_rows, "a row is lost"
        self._plans.check_invariants(self._running)

    def _extend_decodes(self) -> Index:
        """Allocate a block for each decoding row at a block border; preempt if blocks are short.

        Returns the rows that decode in this step: all, unless a copy still uses their new block.
        """
        known, later = self.rows.known, NO_ROWS
        short = self.cache.row_tables.short(self._running.decoding, known[self._running.decoding])
        if len(short):
            extension = self._extend(short, known[short])
            if extension is None:
                self.cache.release_passed(short, self.rows.computed[short])  # also what forks wait for
                short = self._make_room(short)
                now = self.cache.pool.available // self.cache.row_tables.num_tables
                short, later = short[:now], short[now:]
                extension = self.cache.extend(short, known[short])
                assert extension is not None, "room was made for these rows"
            self._running.changes.tables.append(extension.tables)
        return self._running.decoding[~np.isin(self._running.decoding, later)] if len(later) else self._running.decoding

    def _make_room(self, short: Index) -> Index:
        """Preempt until each remaining row of `short` can have a block, now or after the next plan's copies.

        Returns the remaining rows.
        """
        victims = self._preemption.by_worth(self._running.by_row.values())
        while (
            len(short) * self.cache.row_tables.num_tables
            > self.cache.pool.available + self.cache.pool.pending_free_blocks
        ):
            victim = victims.pop()
            short = short[short != victim.row]
            if victims or self.cache.blocks_for(int(self.rows.known[victim.row])) <= self.pool.limit_blocks:
                self._preemption.preempt([victim])  # a lone sequence waits for the pool to grow
            else:
                name, known = victim.request.request_id, int(self.rows.known[victim.row])
                self.decisions.cut(self.stats.steps, name, self.cache.blocks_for(known), self.pool.limit_blocks)
                self._sequences.end(victim, "length")  # the limit forbids it: the sequence cannot get longer
        return short

    def _passed(self, rows: Index) -> Index:
        """The tokens of each of `rows` that are computed for good, up to where a fork is to go on that waits for them."""
        computed: Index = self.rows.computed[rows]
        by_row = self._running.by_row
        for i, row in enumerate(rows.tolist()):
            if forks := by_row[row].forks:
                computed[i] = min(int(computed[i]), *(len(fork.tokens) - 1 for fork in forks))
        return computed

    def _extend(self, rows: Index, known: Index) -> Extension | None:
        """Extend the tables of decoding `rows`, each at a block border, to `known` tokens."""
        if self.cache.row_tables.has_windows:
            return self.cache.advance(rows, self._passed(rows))
        return self.cache.extend(rows, known)

    def _chunk_prefills(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks = []
        self._lacks_blocks = False
        for sequence in self._running.prefilling:
            if budget <= 0:
                break
            if length := self._chunk(sequence, budget):
                chunks.append((sequence, length))
                budget -= length
        return chunks

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Assign rows to waiting sequences while admission and the token budget (at least 1) allow it."""
        chunks = []
        for sequence, start, passed in self._admission.open(self.stats.steps, self.decisions):
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
        if self.cache.row_tables.has_windows and length:
            reached, tables = self.cache.reach(sequence.row, computed + length, self._admission.room)
            if tables:
                self._running.changes.tables.append(tables)
            length = reached - computed
            self._lacks_blocks |= not length and not self.cache.pool.pending_free_blocks
        self._scorable -= min(length, to_score)
        return length

    def _assign_row(self, sequence: Sequence, start: AdmissionPlan) -> bool:
        """Assign a row and blocks. Returns whether the sequence waits for copies concurrent with this step's chunks."""
        extension = self._running.assign_row(sequence, start)
        request, root, num_hit = sequence.request, sequence.root, start.hit.num_tokens
        is_new = root.num_cached_tokens is None
        if is_new:
            root.num_cached_tokens = found = min(num_hit, len(request.prompt_token_ids))
            root.admitted_at = self._now
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

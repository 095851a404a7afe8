"""The scheduler: decides which sequences compute how many tokens in the next step, and in which blocks.

There are no prefill and decode phases. Every step computes some tokens that are known but not yet computed: a prompt
chunk, a decode token and a resumed sequence are handled alike. Rules:

- Running sequences are ordered by (priority, arrival): lower priority numbers first, then first come, first served. The
  waiting queue has its own order (waiting.py).
- Decodes (sequences that lack one token) come first, all of them in every step, unless a copy still uses their next
  block. Unfinished prompts follow in order, each by at most `max_chunk_tokens`; then waiting requests, while rows,
  tokens and blocks last.
- Admission allocates the blocks of all known tokens; admission.py decides which request, and when.
- A fork starts with the blocks of its leader's prompt: full blocks are shared, the partly filled block is copied, and
  the last token is computed again to sample from.
- An admitted request reuses cached prefix blocks under the same salt, for all tokens but the last. If it asks for
  prompt log-probabilities, it reuses only tokens for which it has returned them. Prompt blocks enter the prefix cache
  chunk by chunk, generated tokens when the sequence gives up its row.
- A sequence with L known tokens has ceil((L - 1) / block_size) blocks between steps: the newest token gets its slot
  when it is computed.
- When blocks run out, the last sequence in order is preempted (with a host tier the cheapest: victims.py). It loses its
  blocks, keeps its tokens and queue place, and is recomputed. The last running sequence ends with reason "length" if it
  needs more than `limit_blocks` (at most the pool's capacity); if the pool is only small at the moment, it waits too.
- With a host tier, computed blocks of a preempted sequence are swapped out as their space is needed, and swapped in on
  readmission. Nothing is computed twice while the tier has slots and swapping is cheaper than computing (cost.py).
- For a sequence with tokens chosen outside (a beam), a step returns candidates instead of a token. It keeps its row and
  blocks until `apply_beam_moves` names its token, or another beam that it continues; it then shares that beam's blocks
  as a fork does. If another sequence needs blocks, such waiting beams are preempted; their candidates are kept.
- Between steps the pool can grow and give idle extents back (pool_size.py). Preemption makes extents idle.

`schedule` and `apply` alternate, but the next plan may be made while one is pending, if it only continues that plan
(plan_builder.py). Decisions take effect in `apply`, and are not visible outside before. Rows and blocks of a finished
sequence are not reused while a pending plan refers to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..cache.block_table import Index, Int32
from ..cache.manager import CacheManager
from .admission import AdmissionController, AdmissionPlan, check_request
from .cost import SwapCost
from .errors import InvalidCallOrder
from .forecast import ExpectedBlocks, LengthForecast
from .outcome import BeamMove, Decision, Decisions, Finished, Stats, StepOutputs
from .plan import NO_ROWS, Bool, ChunkLogprobs, Plan, Result
from .plan_builder import PendingPlans, PlanBuilder, continuation
from .pool_size import PoolSize
from .request import Request
from .rows import Rows
from .running import Running
from .sequence import FinishReason, Sequence
from .steering import BeamSteering
from .victims import Victims
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
    def seats(self) -> int:
        """Sequences that may run at the same time."""
        return min(self.max_seqs, self.max_step_tokens)


class Scheduler:
    """Continuous-batching scheduler; the module docstring gives its rules.

    Call `add` and `abort` at any time; `schedule`, then `apply`, in turn, with `schedule_ahead` in between; other
    methods that change state only while no plan is pending. Not thread-safe.
    """

    def __init__(
        self, cache: CacheManager, limits: Limits, cost: SwapCost | None = None, forecast: LengthForecast | None = None
    ) -> None:  # fmt: skip
        if cache.host is not None and cost is None:
            raise ValueError(
                "a cache with a host tier needs to know what swapping costs: give the scheduler a SwapCost"
            )
        self.cache = cache
        self.limits = limits
        self.cost = cost  # of swapping and computing; without a host tier only reported in decisions
        self._weigh()
        self.stats = Stats()
        self.forecast = forecast or LengthForecast()
        self.decisions = Decisions()
        self.rows = Rows(limits.seats, min(limits.max_model_len, cache.max_tokens))
        self._victims = Victims(cache, self.rows, cost)
        self._expected = ExpectedBlocks(cache, self.rows, self.forecast)
        self._sequences: dict[str, Sequence] = {}
        self._size = PoolSize(cache)
        self._waiting = Waiting()
        self._running = Running(cache, self.rows)
        self._admission = AdmissionController(
            self._size, self.rows, self._waiting, self._running.by_row, self._expected, lambda: self.limits.forecast
        )  # fmt: skip
        self._marked: list[Sequence] = []
        self._finished: list[Finished] = []  # not reported yet
        self._out = PendingPlans()
        self._plan_builder = PlanBuilder(cache, self._size, self.rows, self._running, cost, limits.seats)
        self._beam_steering = BeamSteering(cache, self._running, self._waiting)
        self._numbers = itertools.count()
        self._scorable = 0  # prompt tokens with log-probabilities that this step may still compute

    def rebuilt(self, error: str, mapped: Iterable[int] | None = None) -> tuple[Scheduler, StepOutputs]:
        """Return an empty replacement scheduler, and outputs that finish every request with `error`.

        For recovery from a half-made change: it reads only what such a change leaves readable. `mapped` are the extents
        with memory; None takes them from the broken bookkeeping.
        """
        fresh = Scheduler(self.cache.rebuilt(mapped), self.limits, self.cost, self.forecast)
        fresh.stats, fresh.decisions = self.stats, self.decisions
        fresh.limit_blocks = self.limit_blocks
        ends = list(self._finished)
        told = {end.request_id for end in ends}
        for request_id, sequence in self._sequences.items():
            prompt = len(sequence.request.prompt_token_ids)
            tokens = self._running.tokens_of(sequence)
            if request_id not in told:
                found = sequence.root.num_cached_tokens
                ends.append(Finished(request_id, "error", tokens[prompt:], sequence.preemptions, error, found))
        return fresh, StepOutputs(self.stats.steps, [], [], tuple(ends))

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row and have not ended."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row, including preempted ones."""
        return len(self._sequences) - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether there are requests, a pending plan, an unreported end or a resize to do."""
        return bool(self._sequences or self._out.first or self._finished or self._size.pending)

    @property
    def starving(self) -> bool:
        """Whether all work waits for the pool to grow or for its limit to be raised. Read-only.

        True once a step has found this. Steps then do nothing until `grow`, `limit_blocks` or another request.
        """
        if self._out.first is not None or self._marked or self._finished or self._size.pending:
            return False
        if len(self._running) > len(self._running.held):
            return False
        if self._running.held and self._waiting.queue:  # held beams will be preempted
            return False
        return bool(self._sequences) and not self._admission.has_candidates

    @property
    def waiting_ids(self) -> list[str]:
        """Ids of requests that wait for a row, in order; without forks that wait for their leader's prompt."""
        return [sequence.request.request_id for sequence in self._waiting]

    def add(self, request: Request) -> None:
        """Queue `request`. Raises what `check` raises, and then keeps nothing of the request."""
        self.check(request)
        chain = self.cache.chain(request.token_ids, request.cache_salt)
        leader = None if request.fork_of is None else self._sequences[request.fork_of]
        sequence = Sequence(request, next(self._numbers), chain, leader)
        self._sequences[request.request_id] = sequence
        self._admission.add(sequence)

    def check(self, request: Request) -> None:
        """Raise RequestRejected, PromptTooLong or DuplicateRequest if `add` would refuse `request`. Read-only."""
        check_request(request, self._sequences, self.limits.max_model_len, self.cache)

    def abort(self, request_id: str, reason: FinishReason = "aborted") -> bool:
        """End a request in any state. The next `StepOutputs` contain its `Finished`, once.

        Returns False, and changes nothing, for an unknown, ended or already aborted request. Its blocks are free before
        `schedule` plans the next step. A pending plan made by `schedule` still gives it a token; a plan made by
        `schedule_ahead` does not.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.marked:
            return False
        sequence.marked = reason
        self._marked.append(sequence)
        return True

    def withdraw(self, request_id: str) -> Finished | None:
        """End a request at once, between two steps, and free its blocks. Its `Finished` is returned here only.

        Returns None, and changes nothing, for an unknown, ended or already aborted request.
        """
        self._check_turn(0)
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.marked:
            return None
        self._end(sequence, "aborted")
        return self._finished.pop()

    @property
    def limit_blocks(self) -> int:
        """Upper bound of the pool's size in blocks: its capacity, unless the caller sets less.

        A limit below the mapped size takes nothing from running sequences, but no request is admitted above it, and
        `excess_extents` says how many extents to give back. Values are clamped to the capacity. A waiting request that
        needs more is skipped until the limit is raised.
        """
        return self._size.limit_blocks

    @limit_blocks.setter
    def limit_blocks(self, blocks: int) -> None:
        if blocks < 0:
            raise ValueError(f"limit_blocks cannot be negative, got {blocks}")
        self._size.limit_blocks = min(blocks, self.cache.capacity)
        self._waiting.call_back()
        self._admission.look_again()

    @property
    def num_extents(self) -> int:
        """Extents with memory after the next plan. Read-only."""
        return self._size.num_extents

    @property
    def excess_extents(self) -> int:
        """Extents above the limit that are still to be given back; 0 when the limit is met. Read-only."""
        return max(0, self._size.num_extents - self._size.most_extents)

    @property
    def idle_extents(self) -> int:
        """Extents that `give_back` could give back now. Read-only."""
        return self._size.idle_extents

    def running_blocks(self) -> int:
        """Forecast peak of blocks for the running sequences; a smaller pool soon preempts one. Read-only."""
        return self._expected.needed(self._running.rows, [])

    def wanted_blocks(self) -> int:
        """Forecast peak of blocks for the running sequences and the waiting ones that free rows can take. Read-only.

        At least what the next step needs, at most the pool's capacity. Costs about as much as planning a step: not for
        every step.
        """
        newcomers, needed = [], 0
        for sequence in self._waiting.queue[: self.rows.num_free]:
            if needed >= self.cache.capacity:
                break
            newcomers.append(sequence)
            needed += self.cache.blocks_for(len(sequence.tokens))
        return self._expected.needed(self._running.rows, newcomers)

    def grow(self, num_extents: int) -> int:
        """Let the next plan map up to `num_extents` more extents, within the limit. Returns how many it will.

        Their blocks are available when the plan's result is in. Extents already queued for unmapping are kept first.
        """
        self._check_turn(num_extents)
        grown = self._size.grow(num_extents)
        if grown:  # extents kept from unmapping are available at once
            self._admission.lift()
            self._admission.look_again()
        return grown

    def give_back(self, num_extents: int) -> int:
        """Let the next plan unmap up to `num_extents` unneeded extents. Returns how many it will.

        Empty extents go first, then those with the fewest live blocks, which move into holes elsewhere.
        """
        self._check_turn(num_extents)
        self._end_marked()
        given, moved = self._size.give_back(num_extents)
        if moved:
            self._running.changes.tables.append(moved)
        self._admission.given_back(given * self.cache.blocks_per_extent)
        return given

    def make_idle(self, num_extents: int) -> None:
        """Preempt sequences, in the order of victims.py, until `give_back` has `num_extents` or none runs.

        The next step withholds these extents from admission, so that a pool can be given back slice by slice. After a
        preemption it admits no request at all: the next call would preempt what the step computes.
        """
        self._check_turn(num_extents)
        self._end_marked()
        due = min(num_extents, self._size.removable_extents)
        while self._running and (missing := self._size.missing_blocks(due)) > 0:
            victims = self._victims.by_worth(self._running.by_row.values())[::-1]
            held = np.cumsum(self.cache.held_blocks(np.array([s.row for s in victims])))
            self._preempt(victims[: int(np.searchsorted(held, missing)) + 1])  # some blocks may be shared: check again
            self._admission.shut()
        self._admission.withhold(due * self.cache.blocks_per_extent)

    def schedule(self, now: float = 0.0) -> Plan:
        """Plan the next step. The plan may hold no chunk; it must still go through `apply`.

        `now` (seconds) is reserved for policies that weigh waiting times; the current order does not use it
        (waiting.py).
        """
        if self._out.first is not None:
            raise InvalidCallOrder(f"plan {self._out.first.step_id} is out: apply its result first")
        self._end_marked()
        preemptions = self.stats.preemptions
        decodes = self._extend_decodes()
        budget = self.limits.max_step_tokens - len(decodes)
        self._scorable = self.limits.max_scored_tokens
        chunks = self._chunk_prefills(budget)
        budget -= sum([length for _, length in chunks])
        # a sequence just preempted does not return at once
        settled = self.stats.preemptions == preemptions or not self._running
        if budget > 0 and settled and self._admission.has_candidates:
            chunks += self._admit(budget)
        while (
            not len(decodes)
            and not chunks
            and self._running.held
            and self._waiting.queue
            and not self._admission.is_shut
        ):
            self._preempt([self._victims.by_worth(self._running.held.values())[-1]])
            chunks += self._admit(budget)
        self._admission.lift()
        plan = self._out.first = self._plan_builder.step(decodes, chunks, self.stats, self.decisions)
        return plan

    def schedule_ahead(self, now: float = 0.0) -> Plan | None:
        """Plan the step after the pending plan, valid for any result of that plan.

        Execute and apply it after the pending plan. Returns None, and changes nothing, if the pending result is needed
        first. Admits and preempts no sequence. `now` is as for `schedule`. Raises InvalidCallOrder unless exactly one
        plan is pending.
        """
        out = self._out.first
        if out is None or self._out.behind is not None:
            raise InvalidCallOrder("a step is planned ahead of the result of one plan: none is out, or two are")
        if self._marked or len(self._out.stale):
            return None
        if self._admission.has_candidates and (self.rows.num_free or self._running.leaving):
            return None
        if (decided := continuation(out, self.rows, self._running)) is None:
            return None
        decodes, known = decided
        short = self.cache.short(decodes, known)
        if len(short):
            extension = self.cache.extend(short, self.rows.known[short] + 1)
            if extension is None:
                return None
            self._running.changes.tables.append(extension.tables)
        plan = self._out.behind = self._plan_builder.ahead(decodes, known, self.stats, self.decisions)
        return plan

    def apply(self, plan: Plan, result: Result) -> StepOutputs:
        """Apply the result of the oldest pending plan.

        The pool takes its new size, sampled tokens are appended, and finished sequences leave. Their blocks are free,
        unless the other pending plan refers to them.
        """
        if plan is not self._out.first or result.step_id != plan.step_id or len(result.counts) != len(plan.rows):
            raise InvalidCallOrder(f"the result of step {result.step_id} does not belong to the plan that is out first")
        if len(self._out.stale) or len(result.failed_blocks):
            result = self._deferring(plan, result)
        sampled, tokens = self._sampled_rows(plan, result), result.tokens
        if plan.moves_memory:
            self._settle(plan, result)
        if self.cost is not None:
            self.cost.observe(plan, result)
            self._weigh()
        if self._out.is_ahead:  # without planning ahead, this plan would have been made after these aborts
            self._end_marked()
        rows, leaving = self.rows, self._running.leaving
        if leaving:  # ended sequences get no token of this plan
            stays = ~np.isin(sampled, list(leaving))
            sampled, tokens = sampled[stays], tokens[stays]
        deferred = self._advance(plan, result)
        ended = rows.append(sampled, tokens) >= rows.limit[sampled]
        ended |= rows.may_stop(tokens)
        request_ids: list[str] = rows.request_ids[sampled].tolist()
        told = tuple([self._scored(plan, scores) for scores in result.scores])
        self._out.shift(deferred)
        prefilled = self._running.prefilling
        if prefilled:
            self._release_forks(self._running.promote())
        candidates = tuple([(str(rows.request_ids[plan.rows[c.index]]), c) for c in result.candidates])
        if candidates:
            self._release_forks(self._running.hold(plan.rows[[c.index for c in result.candidates]]))
        for failure in result.failures:
            if (row := int(plan.rows[failure.index])) not in leaving:
                self._end(self._running.by_row[row], "error", failure.message)
        if len(result.complete):
            for row in plan.rows[result.complete].tolist():
                ended[sampled == row] = False
                self._end(self._running.by_row[row], "stop")
        if np.count_nonzero(ended):
            for i in np.flatnonzero(ended):
                self._end_if_due(self._running.by_row[int(sampled[i])], int(tokens[i]))
        self._end_marked()
        for sequence in prefilled:
            # Sharing others' blocks frees the sequence's own. The pending plan reads these before a later plan writes
            # to them.
            self._running.commit(sequence)
        if done := [row for row in leaving if not self._out.names(row)]:
            self._running.vacate(done)
        if len(result.failed_blocks):
            self._compute_again(result.failed_blocks)
        finished, self._finished = tuple(self._finished), []
        return StepOutputs(plan.step_id, request_ids, tokens.tolist(), finished, told, candidates)

    def limit_of(self, request: Request) -> int:
        """Tokens, prompt included, at which a sequence of `request` ends by length at the latest. Read-only."""
        return self.rows.limit_of(len(request.prompt_token_ids), request.sampling)

    def apply_beam_moves(self, moves: Iterable[BeamMove], spare: Iterable[str] = ()) -> None:
        """Apply the beam choices for all waiting beams of a family, held or still to be admitted.

        A beam that continues another beam's tokens starts with that beam's blocks; the other beam must continue its
        own. `spare` beams give up rows and blocks, and wait until a later move names them.
        """
        self._check_turn(0)
        # sources last, so that their tokens stay unchanged until then
        moves = sorted(moves, key=lambda move: move.request_id == move.source_id)
        for move in moves:
            self._beam_steering.move(self._sequences[move.request_id], self._sequences[move.source_id], move.token)
        for request_id in spare:
            self._beam_steering.set_aside(self._sequences[request_id])
        self._admission.look_again()

    def explain(self) -> list[Decision]:
        """The last 64 decisions made when blocks ran short, with their numbers: plain data, oldest first.

        "wait"     a request that did not fit when first considered: the blocks it needs, those available, and the
                   forecast for it and all running sequences
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
        assert len(self._waiting) == self.num_waiting, "a sequence neither waits nor runs"
        taken = len(self._running) + len(self._running.leaving)
        assert self.rows.num_free + taken == self.limits.seats, "a row is lost"
        self._out.check_invariants(self._running)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _extend_decodes(self) -> Index:
        """Allocate a block for each decoding row at a block border; preempt if blocks are short.

        Returns the rows that decode in this step: all, unless a copy still uses their new block.
        """
        known, later = self.rows.known, NO_ROWS
        short = self.cache.short(self._running.decoding, known[self._running.decoding])
        if len(short):
            extension = self.cache.extend(short, known[short])
            if extension is None:
                short = self._make_room(short)
                now = self.cache.available // len(self.cache.tables)
                short, later = short[:now], short[now:]
                extension = self.cache.extend(short, known[short])
                assert extension is not None, "room was made for these rows"
            self._running.changes.tables.append(extension.tables)
        return self._running.decoding[~np.isin(self._running.decoding, later)] if len(later) else self._running.decoding

    def _make_room(self, short: Index) -> Index:
        """Preempt until each remaining row of `short` can have a block, now or after the next plan's copies.

        Returns the remaining rows. Victims are chosen in the order of victims.py.
        """
        groups = len(self.cache.tables)
        victims = self._victims.by_worth(self._running.by_row.values())
        while len(short) * groups > self.cache.available + self.cache.pending_free_blocks:
            victim = victims.pop()
            short = short[short != victim.row]
            if victims or self.cache.blocks_for(int(self.rows.known[victim.row])) <= self.limit_blocks:
                self._preempt([victim])  # a lone sequence waits for the pool to grow
            else:
                name, known = victim.request.request_id, int(self.rows.known[victim.row])
                self.decisions.cut(self.stats.steps, name, self.cache.blocks_for(known), self.limit_blocks)
                self._end(victim, "length")  # the limit forbids it: the sequence cannot get longer
        return short

    def _chunk_prefills(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks = []
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
            if not self._seat(sequence, start) and (length := self._chunk(sequence, budget)):
                chunks.append((sequence, length))
                budget -= length
            if passed:
                self.decisions.passed(self.stats.steps, sequence.request.request_id, start.num_blocks, passed)
            if budget <= 0:
                break
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of `sequence` (with a row) to compute now; 0 if the budget for prompt log-probabilities is used up."""
        assert sequence.row is not None
        computed = int(self.rows.computed[sequence.row])
        lacking = int(self.rows.known[sequence.row]) - computed
        length = min(lacking, budget, self.limits.max_chunk_tokens or lacking)
        if sequence.is_unscored:
            to_score = max(0, len(sequence.request.prompt_token_ids) - 1 - computed)
            if to_score > self._scorable:
                length = min(length, self._scorable)
            self._scorable -= min(length, to_score)
        return length

    def _seat(self, sequence: Sequence, start: AdmissionPlan) -> bool:
        """Assign a row and blocks. Returns whether the sequence waits for copies concurrent with this step's chunks."""
        extension = self._running.assign_row(sequence, start)
        request, root, num_hit = sequence.request, sequence.root, start.hit.num_tokens
        is_new = root.num_cached_tokens is None
        if is_new:
            root.num_cached_tokens = min(num_hit, len(request.prompt_token_ids))
        if start.leader_row is not None:
            self.stats.forks += 1
        elif sequence.chain is not None:
            self.stats.looked_up(len(sequence.tokens), num_hit, is_new and not len(request.generated))
        self.stats.recomputed_tokens -= min(sequence.computed, extension.num_computed)
        if sequence.preemptions:
            self.decisions.returned(self.stats.steps, request.request_id, sequence.computed, extension.num_computed)
        return extension.waits

    def _check_turn(self, num_extents: int) -> None:
        """Raise InvalidCallOrder while a plan is pending: it refers to the present blocks and extents."""
        if num_extents < 0:
            raise ValueError(f"cannot resize by {num_extents} extents")
        if self._out.first is not None:
            raise InvalidCallOrder(f"plan {self._out.first.step_id} is out: this is done between steps")

    # -- applying ------------------------------------------------------------------------------------------------

    def _sampled_rows(self, plan: Plan, result: Result) -> Index:
        """Rows that got a token. Raises InvalidCallOrder if the counts differ from what the plan asked for."""
        got = result.counts == 1
        if np.count_nonzero(got) == len(got) == np.count_nonzero(plan.samples):  # takes a third of the time of `all`
            return plan.rows
        without = np.zeros(len(got), np.bool_)
        without[[f.index for f in result.failures]] = True
        without[result.deferred] = True
        expected: Bool = plan.samples & ~without & ~self.rows.steered[plan.rows]
        if (result.counts != expected).any():
            raise InvalidCallOrder(f"step {plan.step_id}: one token was due from each chunk that samples, and no other")
        return plan.rows[expected]

    def _advance(self, plan: Plan, result: Result) -> Index:
        """Mark the chunks of `plan` as computed, except deferred ones. Returns the rows of the deferred chunks."""
        computed = self.rows.computed
        if not len(result.deferred):
            computed[plan.rows] = plan.starts + plan.lengths
            return NO_ROWS
        deferred = plan.rows[result.deferred]
        before = computed[deferred]
        computed[plan.rows] = plan.starts + plan.lengths
        computed[deferred] = before
        return deferred

    def _deferring(self, plan: Plan, result: Result) -> Result:
        """`result` with chunks of invalid input deferred: an earlier plan gave no output, or a copy failed."""
        unsound = np.append(self._out.stale, self.cache.rows_with(result.failed_blocks))
        return result.deferring(np.flatnonzero(np.isin(plan.rows, unsound)))

    def _scored(self, plan: Plan, scores: ChunkLogprobs) -> tuple[str, ChunkLogprobs]:
        """The request id of `scores`, with them; records how much of the prompt has log-probabilities now."""
        sequence = self._running.by_row[int(plan.rows[scores.index])]
        last = min(scores.first + len(scores.ranks), len(sequence.request.prompt_token_ids)) - 1
        sequence.scored = max(sequence.scored, last)
        return sequence.request.request_id, scores

    def _settle(self, plan: Plan, result: Result) -> None:
        """Apply the memory part of `result` to the pool and the host tier."""
        self.stats.moved_blocks += self._size.settle(plan, result)
        if len(result.lost_slots):
            self.cache.lost(result.lost_slots)
        if len(result.failed_slots):
            self.cache.forget_slots(result.failed_slots)
        self._admission.look_again()
        self.stats.grown_extents += len(result.mapped)
        self.stats.given_back_extents += len(result.unmapped)
        self.stats.refused_resizes += result.refused is not None

    def _release_forks(self, leaders: list[Sequence]) -> None:
        """Queue the forks of `leaders`: the prompt that they share is computed."""
        for sequence in leaders:
            if sequence.forks:
                self._waiting.release_forks(sequence)
                self._admission.look_again()

    def _preempt(self, victims: list[Sequence]) -> None:
        """Preempt `victims`: they lose rows and blocks, keep their tokens and wait at their old places in the queue."""
        self.stats.preemptions += len(victims)
        self._victims.explain(victims, self.stats.steps, self.decisions)
        for sequence in victims:
            sequence.preemptions += 1
        self._requeue(victims, keep_tails=True)

    def _compute_again(self, blocks: Int32) -> None:
        """Requeue sequences that hold one of `blocks` (of unknown contents); drop the blocks from the prefix cache."""
        rows = self.cache.rows_with(blocks).tolist()
        if rows:
            self._requeue([self._running.by_row[row] for row in rows], computed=False)
        self.cache.forget(blocks)

    def _requeue(self, sequences: list[Sequence], computed: bool = True, keep_tails: bool = False) -> None:
        """Take rows and blocks back; the sequences wait at their old places. `computed` blocks stay findable."""
        for sequence in sequences:
            sequence.refused = False
            sequence.computed = int(self.rows.computed[sequence.row])
            self.stats.recomputed_tokens += sequence.computed  # reduced on readmission by what is found
        self._running.leave(sequences, computed, keep_tails)
        self._admission.look_again()
        for sequence in sequences:
            if sequence.held:
                self._waiting.hold(sequence)
            else:
                self._waiting.add(sequence)

    def _weigh(self) -> None:
        """Pass the current worth of swapping to the host tier."""
        if self.cache.host is not None and self.cost is not None:
            self.cache.host.least_chance, self.cache.host.promotes = self.cost.least_chance, self.cost.promotes

    def _end_if_due(self, sequence: Sequence, token: int) -> None:
        sampling, row = sequence.request.sampling, sequence.row
        generated = self.rows.known[row] - self.rows.prompt[row]
        if token in sampling.stop_token_ids and generated >= sampling.min_new_tokens:
            self._end(sequence, "stop")
        elif self.rows.known[row] >= self.rows.limit[row]:
            self._end(sequence, "length")

    def _end_marked(self) -> None:
        for sequence in self._marked:
            if sequence.request.request_id in self._sequences and sequence.marked:
                self._end(sequence, sequence.marked)
        self._marked.clear()

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        request = sequence.request
        if sequence.row is None:
            self._waiting.remove(sequence)
        elif self._out.names(sequence.row):
            self._running.end(sequence, computed=error is None)
        else:
            self._running.leave([sequence], computed=error is None)
        if sequence.forks:
            self._admission.hand_over_forks(sequence, self._sequences)
        self.cache.drop_for(request.request_id)
        self._admission.look_again()
        generated = sequence.tokens[len(request.prompt_token_ids) :]
        if reason in ("stop", "length"):
            prompt = len(request.prompt_token_ids)
            self.forecast.observe(len(generated), self.rows.limit_of(prompt, request.sampling) - prompt)
        found = sequence.root.num_cached_tokens
        self._finished.append(Finished(request.request_id, reason, generated, sequence.preemptions, error, found))
        del self._sequences[request.request_id]

"""A fleet in modelled time: workers with prefix caches and memory, one queue, and a routing policy. No engine, no sleeping.

A worker batches continuously. A step has up to STEP_TOKENS tokens: one of each decoding sequence, then chunks of prompts in
the order of admission. Its time is the roofline's (`replay_clock`): the FLOPs or the bytes, whichever take longer, and the
overhead. Steps that decode alone are taken together, up to the next arrival in the fleet. A prompt's full blocks can be found
from the end of its prefill on; evictable blocks leave in the order of last use, of one sequence the deepest first. Blocks of
outputs are not found, as traces do not say what they are in the next prompt.

A prompt is admitted in order of assignment, if its blocks and the forecast growth of all running sequences fit; the forecast
is the mean output of the requests that ended. The pool grows before it evicts. If a growing sequence finds no block, or a
recall of the lease leaves too few, the sequences admitted last return to the queue: they count as returned, keep their output,
and are computed again elsewhere or here, less what is found of them.

The queue learns of a worker by reports: its memory, its load, and changes of its cache, sent after each step, which arrive
`delay_s` later. It adds what it assigned since.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.replay_clock import Roofline
from benchmarks.replay_traces import Trace

Ids = npt.NDArray[np.int64]
STEP_TOKENS = 8_192
MAX_RUNNING = 256
FIRST_FORECAST_TOKENS = 400  # of an output, before any has ended
_NONE: Ids = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One request and its state. `ids` are those of the prompt's full blocks. Mutated by the worker that has it."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: Ids
    done_tokens: int = 0  # of the output
    first_token_s: float = -1.0
    end_s: float = -1.0
    hit_blocks: int = -1  # at the first admission
    held_s: float = -1.0  # when it was first held for a worker while another asked for work
    # While a worker has it:
    growth_blocks: int = 0
    expected_blocks: int = 0  # to compute, as the queue sees it at assignment
    assignment: int = -1  # numbers assignments to one worker
    held_ids: Ids = field(default_factory=lambda: _NONE)
    own_blocks: int = 0  # held, and not findable
    left_tokens: int = 0  # to prefill
    grown_blocks: int = 0
    started: int = -1  # the worker's count of decode steps when it began to decode
    stored_tokens: int = 0  # at that time

    def length(self) -> int:
        """Tokens of prompt and output so far, which a prefill computes."""
        return self.prompt_tokens + self.done_tokens


def requests_of(trace: Trace, block_tokens: int) -> tuple[list[ModelRequest], int]:
    """The trace's requests with dense ids of full prompt blocks, and the number of ids."""
    chains = [turn.ids[: turn.prompt_tokens // block_tokens] for turn in trace.turns]
    distinct, dense = np.unique(np.concatenate(chains), return_inverse=True)
    ends = np.cumsum([len(chain) for chain in chains])
    requests = [
        ModelRequest(number, turn.at_s, turn.prompt_tokens, turn.output_tokens, dense[end - len(chain) : end])
        for number, (turn, chain, end) in enumerate(zip(trace.turns, chains, ends.tolist(), strict=True))
    ]
    return requests, len(distinct)


class StepClock:
    """Seconds of a step from its totals: the same roofline as `replay_clock.ReplayClock`, without a plan."""

    def __init__(self, roofline: Roofline, block_tokens: int) -> None:
        gpu, model = roofline.gpu, roofline.model
        self.overhead_s = roofline.overhead_s
        self.flops = gpu.flops * roofline.reached * roofline.gpus
        self.bytes_per_s = gpu.bytes_per_s * roofline.reached * roofline.gpus
        self.token_flops, self.sample_flops = 2 * model.layer_weights, 2 * model.head_weights
        self.attended_flops = 4 * model.layers * model.heads * model.head_dim
        self.weight_bytes = 2 * (model.layer_weights + model.head_weights)
        self.kv_bytes = model.kv_bytes
        self.map_s_per_block = gpu.map_s * roofline.block_bytes(block_tokens) / (112 << 20)

    def step_s(self, tokens: int, samples: int, attended: int, before: int) -> float:
        """`attended`: positions that the step's tokens attend, `before`: tokens of which it reads K and V."""
        flops = self.token_flops * tokens + self.sample_flops * samples + self.attended_flops * attended
        moved = self.weight_bytes + self.kv_bytes * (before + 2 * tokens)
        return max(flops / self.flops, moved / self.bytes_per_s) + self.overhead_s

    def prefill_s(self, tokens: int, before: int) -> float:
        """Seconds to compute a prompt's tokens in chunks of full steps, after `before` cached ones."""
        steps = -(-tokens // STEP_TOKENS)
        attended = tokens * before + tokens * tokens // 2
        return self.step_s(tokens, 1, attended, before) + (steps - 1) * self.overhead_s


class PrefixCache:
    """Blocks of one worker's pool: held by sequences, evictable with a cached prefix, or unused. An id is a whole prefix."""

    def __init__(self, limit_blocks: int, mapped_blocks: int, num_ids: int) -> None:
        self.limit, self.mapped = limit_blocks, mapped_blocks
        self.held = self.evictable = 0
        self.changes: list[tuple[Ids, int]] = []  # since the last report, in order: ids added (1) and evicted (-1)
        self._references = np.zeros(num_ids, np.int32)
        self._resident = np.zeros(num_ids, np.bool_)
        self._used_at = np.zeros(num_ids, np.int64)
        self._now = 0

    @property
    def unused(self) -> int:
        return self.mapped - self.held - self.evictable

    @property
    def growable(self) -> int:
        return max(0, self.limit - self.mapped)

    @property
    def room(self) -> int:
        """Blocks that can be had: unused, by growth, and by eviction."""
        return self.limit - self.held

    def found(self, ids: Ids) -> int:
        """Leading blocks that are cached."""
        return leading(self._resident[ids])

    def evictable_of(self, ids: Ids) -> int:
        """Of these cached blocks, the ones that no sequence holds."""
        return int(np.count_nonzero(self._references[ids] == 0))

    def hold(self, ids: Ids) -> None:
        """Take cached blocks."""
        self._references[ids] += 1
        taken = int(np.count_nonzero(self._references[ids] == 1))
        self.held += taken
        self.evictable -= taken

    def allocate(self, blocks: int) -> int:
        """Take blocks: unused ones, by growth, then by eviction. Returns by how many the pool grew. There must be room."""
        grown = min(max(0, blocks - self.unused), self.growable)
        self.mapped += grown
        self._evict(blocks - self.unused)
        self.held += blocks
        return grown

    def register(self, ids: Ids) -> int:
        """Make computed blocks findable. Returns how many were findable already and are freed, one being enough."""
        new = ids[~self._resident[ids]]
        self._resident[new] = True
        self.changes.append((new, 1))
        self._references[ids] += 1
        again = int(np.count_nonzero(self._references[ids] == 1)) - len(new)  # evictable until now
        self.evictable -= again
        self.held -= len(ids) - len(new) - again
        return len(ids) - len(new)

    def release(self, ids: Ids, own_blocks: int) -> None:
        """Return a sequence's blocks. Those that nothing holds become evictable, or unused without an id."""
        self._references[ids] -= 1
        free = self._references[ids] == 0
        self._used_at[ids[free]] = self._now + np.arange(len(ids), 0, -1)[free]  # the deepest leave first
        self._used_at[ids[~free]] = self._now + len(ids)
        self._now += len(ids) + 1
        count = int(np.count_nonzero(free))
        self.evictable += count
        self.held -= count + own_blocks

    def recall(self, limit_blocks: int) -> None:
        """Set the lease's limit, and unmap blocks above it that no sequence holds."""
        self.limit = limit_blocks
        excess = min(self.mapped - self.limit, self.unused + self.evictable)
        if excess > 0:
            self._evict(excess - self.unused)
            self.mapped -= excess

    def check_invariants(self, own_blocks: int) -> None:
        """Count all blocks anew. `own_blocks` are held by sequences, and not findable."""
        held = int(np.count_nonzero(self._references))
        assert not self._references[~self._resident].any() and (self._references >= 0).all()
        assert self.held == held + own_blocks
        assert self.evictable == int(np.count_nonzero(self._resident)) - held
        assert self.unused >= 0 and self.held <= self.mapped <= self.limit

    def _evict(self, blocks: int) -> None:
        if blocks <= 0:
            return
        ids = np.flatnonzero(self._resident & (self._references == 0))
        if blocks < len(ids):
            ids = ids[np.argpartition(self._used_at[ids], blocks - 1)[:blocks]]
        assert len(ids) == blocks, "more than the evictable blocks are needed"
        self._resident[ids] = False
        self.evictable -= blocks
        self.changes.append((ids, -1))


def leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first one that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker reports after a step. Blocks of waiting prompts count as taken, and their growth as growth."""

    free: int
    unused: int
    growable: int
    running: int
    backlog: int
    growth: int
    assignment: int  # the last one that it has
    computed: tuple[int, ...]  # requests that have their prompts computed, or left it
    changes: tuple[tuple[Ids, int], ...]  # of the cache


class ModelWorker:
    """One engine: continuous batching over a `PrefixCache`. The fleet calls `plan_step` and, at its end, `end_step`."""

    def __init__(self, cache: PrefixCache, clock: StepClock, block_tokens: int) -> None:
        self.cache = cache
        self.waiting: deque[ModelRequest] = deque()
        self.running: dict[int, ModelRequest] = {}  # by number, in order of admission
        self.left: list[ModelRequest] = []  # ended or returned; taken by the fleet
        self.is_stepping = False
        self.busy_s = 0.0
        self.reported: list[int] = []
        self.last_assignment = -1
        self._clock, self._block = clock, block_tokens
        self._prefilling: deque[ModelRequest] = deque()
        self._chunks: list[tuple[ModelRequest, int]] = []
        self._steps = 0  # decode steps so far
        self._planned = 0  # decode steps of the plan
        self._context = 0  # tokens of all decoding sequences
        self._decoding = 0
        self._growth = 0
        self._ends: list[tuple[int, int, int]] = []  # (decode step, number, started)
        self._boundaries: list[tuple[int, int, int]] = []  # the same: when a sequence needs a block
        self._grown = 0

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan_step(self, now: float, until: float) -> float | None:
        """Plan a step. Returns when it ends, or None if nothing runs. Decode steps alone may be several, up to `until`."""
        self._grow_sequences()
        self._chunks, budget = [], STEP_TOKENS - self._decoding
        tokens, samples, attended, before = self._decoding, self._decoding, self._context, self._context
        for request in self._prefilling:
            budget = self._chunk(request, budget)
        while budget > 0 and self.waiting and self._admit(self.waiting[0]):
            budget = self._chunk(self._prefilling[-1], budget)
        for request, chunk in self._chunks:
            start = request.length() - request.left_tokens
            tokens += chunk
            samples += chunk == request.left_tokens
            attended += start * chunk + chunk * chunk // 2
            before += start
        if not tokens:
            return None
        seconds = self._clock.step_s(tokens, samples, attended, before) + self._grown * self._clock.map_s_per_block
        self._grown, self._planned = 0, 1 if self._decoding else 0
        if not self._chunks:
            self._planned = self._decode_steps(seconds, now, until)
            seconds *= self._planned
        self.busy_s += seconds
        self.is_stepping = True
        return now + seconds

    def _chunk(self, request: ModelRequest, budget: int) -> int:
        chunk = min(request.left_tokens, budget)
        if chunk > 0:
            self._chunks.append((request, chunk))
        return budget - max(chunk, 0)

    def _decode_steps(self, seconds: float, now: float, until: float) -> int:
        self._drop_stale()
        steps = self._ends[0][0] - self._steps
        if self._boundaries:
            steps = min(steps, self._boundaries[0][0] - 1 - self._steps)
        return max(1, min(steps, -int(-(until - now) // seconds)))

    def end_step(self, now: float) -> None:
        """Apply the planned step at its end: `now`."""
        self.is_stepping = False
        if self._planned:
            self._steps += self._planned
            self._context += self._decoding * self._planned
            while self._ends and self._ends[0][0] <= self._steps:
                _, number, started = heapq.heappop(self._ends)
                request = self.running.get(number)
                if request is not None and request.started == started:
                    self._end(request, now)
        for request, chunk in self._chunks:
            if request.left_tokens and self.running.get(request.number) is request:
                request.left_tokens -= chunk
                if not request.left_tokens:
                    self._begin_decoding(request, now)
        self._chunks = []

    def _begin_decoding(self, request: ModelRequest, now: float) -> None:
        self._prefilling.remove(request)
        new = request.ids[len(request.held_ids) :]
        request.own_blocks -= len(new)
        self.cache.register(new)
        request.held_ids = request.ids
        self.reported.append(request.number)
        stored = request.stored_tokens = request.length()
        request.done_tokens += 1
        if request.first_token_s < 0:
            request.first_token_s = now
        request.started = self._steps
        self._decoding += 1
        self._context += stored
        rest = request.output_tokens - request.done_tokens
        if rest <= 0:
            self._end(request, now)
            return
        heapq.heappush(self._ends, (self._steps + rest, request.number, self._steps))
        due = -(-stored // self._block) * self._block - stored + 1
        heapq.heappush(self._boundaries, (self._steps + due, request.number, self._steps))

    def _end(self, request: ModelRequest, now: float) -> None:
        request.end_s = now
        self._remove(request)
        request.done_tokens = request.output_tokens
        self.left.append(request)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _admit(self, request: ModelRequest) -> bool:
        """Begin the first waiting request, if it fits."""
        if len(self.running) >= MAX_RUNNING:
            return False
        cache, length = self.cache, request.length()
        hit = min(cache.found(request.ids), (length - 1) // self._block)  # one token is computed at least
        found = request.ids[:hit]
        needed = -(-length // self._block) - hit
        room = cache.room - cache.evictable_of(found)
        if needed + (self._growth + request.growth_blocks if self.running else 0) > room:
            return False
        self.waiting.popleft()
        cache.hold(found)
        self._grown += cache.allocate(needed)
        if request.hit_blocks < 0:
            request.hit_blocks = hit
        request.held_ids, request.own_blocks, request.grown_blocks = found, needed, 0
        request.left_tokens = length - hit * self._block
        self._growth += request.growth_blocks
        self.running[request.number] = request
        self._prefilling.append(request)
        return True

    def _drop_stale(self) -> None:
        for heap in (self._ends, self._boundaries):
            while heap and not self._is_current(heap[0]):
                heapq.heappop(heap)

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        request = self.running.get(entry[1])
        return request is not None and request.started == entry[2]

    def _grow_sequences(self) -> None:
        """Give a block to each sequence that needs one for its next token; without room the last admitted one returns."""
        while self._boundaries and self._boundaries[0][0] <= self._steps + 1:
            entry = heapq.heappop(self._boundaries)
            if not self._is_current(entry):
                continue
            request = self.running[entry[1]]
            while self.cache.room < 1 and request.number in self.running:
                self._return_last()
            if request.number not in self.running:
                continue
            self._grown += self.cache.allocate(1)
            request.own_blocks += 1
            self._growth -= request.grown_blocks < request.growth_blocks
            request.grown_blocks += 1
            heapq.heappush(self._boundaries, (entry[0] + self._block, entry[1], entry[2]))

    def recall(self, limit_blocks: int) -> None:
        """Lower the lease. Sequences that no longer fit return to the queue, the last admitted ones first."""
        self.cache.recall(limit_blocks)
        while self.cache.held > limit_blocks:
            self._return_last()
            self.cache.recall(limit_blocks)

    def _return_last(self) -> None:
        request = next(reversed(self.running.values()))
        if request.started >= 0:
            request.done_tokens += self._steps - request.started
        else:
            self._prefilling.remove(request)
        self._remove(request)
        self.left.append(request)

    def _remove(self, request: ModelRequest) -> None:
        del self.running[request.number]
        self.cache.release(request.held_ids, request.own_blocks)
        if request.started >= 0:
            self._decoding -= 1
            self._context -= request.stored_tokens + self._steps - request.started
        self._growth -= max(0, request.growth_blocks - request.grown_blocks)
        request.held_ids, request.own_blocks, request.started = _NONE, 0, -1
        self.reported.append(request.number)

    def check_invariants(self) -> None:
        """Count the load anew."""
        running = self.running.values()
        decoding = [request for request in running if request.started >= 0]
        self.cache.check_invariants(sum(request.own_blocks for request in running))
        assert self._decoding == len(decoding)
        assert self._context == sum(r.stored_tokens + self._steps - r.started for r in decoding)
        assert self._growth == sum(max(0, r.growth_blocks - r.grown_blocks) for r in running)
        assert [r for r in running if r.started < 0] == list(self._prefilling)
        for r in running:
            stored = r.length() if r.started < 0 else r.stored_tokens + self._steps - r.started
            following = stored + (self.is_stepping and r.started >= 0)  # its block is there when the step is planned
            assert len(r.held_ids) + r.own_blocks in (-(-stored // self._block), -(-following // self._block))

    # -- reports -----------------------------------------------------------------------------------------------------

    def report(self) -> WorkerReport:
        """The state now, with the changes of the cache since the last report."""
        cache = self.cache
        prompts = sum(request.expected_blocks for request in self.waiting)
        backlog_tokens = sum(request.left_tokens for request in self._prefilling)
        computed, changes = tuple(self.reported), tuple(cache.changes)
        self.reported, cache.changes = [], []
        return WorkerReport(
            cache.mapped - cache.held - prompts,
            cache.unused - prompts,
            cache.growable,
            len(self.running) + len(self.waiting),
            -(-backlog_tokens // self._block) + prompts,
            self._growth + sum(request.growth_blocks for request in self.waiting),
            self.last_assignment,
            computed,
            changes,
        )

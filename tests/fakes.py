"""A runner without a model: it keeps token ids where a model keeps K and V, so that a wrong block shows as a wrong token.

With several block tables every one of them holds the token ids that its group of layers reads; the blocks of a row's state hold
a hash of the tokens that it has seen. The next token of a sequence
is a hash of everything read through its block tables; `continuation` computes the same from the plain list of tokens. What was
never written is poison, and so is what lies in an extent without memory. The host tier is a pool of token ids too.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.block_table import BlockCopies, joined
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import Chain, PrefixHasher
from pagetide.cache.retention import Retention
from pagetide.cache.state_tables import tables_for
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.outcome import BeamMove, Finished, StepOutputs
from pagetide.scheduler.plan import NO_EXTENTS, NO_TOKENS, Candidates, ChunkLogprobs, Failure, Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits
from pagetide.scheduler.waiting import age

POISON = -7  # mapped, and never written
UNMAPPED = -9
VOCAB = 997


def next_token(tokens) -> int:
    """The token after `tokens`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


def fake_logprob(before) -> float:
    """What the fake says of any token behind `before`."""
    return -next_token(before) / 64


def fake_candidates(tokens, count: int) -> list[int]:
    """The tokens that the fake would go on with behind `tokens`, best first."""
    return [(next_token(tokens) + 7 * i) % VOCAB for i in range(count)]


def continuation(prompt, sampling: Sampling, most: int = 10_000) -> list[int]:
    """What the request gives when it is alone in the world, or the first `most` tokens of that."""
    tokens, new = list(prompt), []
    while len(new) < min(sampling.max_new_tokens, most):
        token = next_token(tokens)
        tokens.append(token)
        new.append(token)
        if token in sampling.stop_token_ids and len(new) >= sampling.min_new_tokens:
            break
    return new


def _state(tokens, num_blocks: int) -> np.ndarray:
    """What the blocks of a state hold that has seen `tokens`: [num_blocks, 1]."""
    return (next_token(tokens) + np.arange(num_blocks, dtype=np.int32))[:, None]


def _copies_of(plan: Plan) -> BlockCopies | None:
    """From block to block, all at once."""
    back = None if plan.swaps is None else plan.swaps.back
    return joined([one for one in (back, plan.copies) if one is not None])


class FakeRunner:
    """Executes plans over a pool of token ids. `fail` holds request ids whose chunks fail; with `refuses_map` or
    `refuses_unmap` the device says no; with `refuses_slots` the host has no memory for slots that were never written. With
    `faults` some chunks are deferred, and some copies fail, which leaves garbage in their targets.

    Plans can be begun before the results of others are waited for. They are executed one after the other, of what the runner
    was told by plans alone: at once, or, while it is `lazy`, when a result is waited for.
    """

    overlaps = True

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, *, num_extents: int = 1, mapped=(0,),
        host_slots: int = 0, groups: tuple[LayerGroup, ...] = (LayerGroup(),),
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.group_of = [group for group in groups if not group.is_state for _ in range(group.num_tables)]  # by table
        self.num_state_blocks = sum(group.num_tables for group in groups if group.is_state)
        self.state_table = np.zeros((num_rows, self.num_state_blocks), np.int32)
        self.pool = np.full((num_blocks, block_size), UNMAPPED, np.int32)
        self.by_extent = self.pool.reshape(num_extents, -1)
        self.by_extent[list(mapped)] = POISON
        self.mapped = set(mapped)
        self.refuses_map = self.refuses_unmap = self.refuses_slots = False
        self.host = np.full((host_slots + 1, block_size), POISON, np.int32)
        self.on_host: set[int] = set()  # slots that have memory
        self.tables = np.zeros((len(self.group_of), num_rows, -(-max_tokens // block_size)), np.int32)
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self.owner: dict[int, str] = {}
        self.written = np.zeros(num_rows, np.int64)  # tokens of each row, what it found included
        self.waits: set[int] = set()  # rows without a chunk yet: how much they found their first one says
        # Tables and places in these rows, of blocks that are new to them.
        self.taken: dict[int, set[tuple[int, int]]] = {}
        self.first_starts: dict[str, int] = {}  # by request: where its first chunk began
        self.fail: set[str] = set()
        self.faults: np.random.Generator | None = None
        self.faulty = False  # whether anything has failed so far
        self.failed_blocks: list[int] = []  # by the plan that is executed
        self.failed_slots: list[int] = []
        self.lazy = False
        self._begun: deque[PendingStep] = deque()  # and not executed
        # Rows that want log-probabilities, with the length of the prompt.
        self.asks: dict[int, tuple[Sampling, int]] = {}

    def begin(self, plan: Plan) -> PendingStep:
        """Execute `plan` behind those that were begun before."""
        step = PendingStep(self, plan)
        self._begun.append(step)
        if not self.lazy:
            step.wait()
        return step

    def execute_next(self) -> None:
        """Execute the first plan that was begun and not executed."""
        step = self._begun.popleft()
        step.result = self.execute(step.plan)

    def execute(self, plan: Plan) -> Result:
        mapped = self._map(plan)
        self.failed_blocks, self.failed_slots = [], []
        lost = self._swap_before(plan)
        for row in plan.released:
            del self.owner[int(row)]
            self.waits.discard(int(row))
            self.taken.pop(int(row), None)
        for row, new in plan.admitted.items():
            assert row not in self.owner, "a row was taken before it was released"
            self.owner[row] = new.request_id
            self.tokens[row, : len(new.token_ids)] = new.token_ids
            self.waits.add(row)
            self.asks[row] = new.sampling, len(new.prompt_token_ids)
        if plan.given is not None:
            self.tokens[plan.given.rows, plan.given.positions] = plan.given.tokens
        *of_kv, of_states = plan.tables if plan.tables and self.num_state_blocks else (*plan.tables, None)
        if of_states is not None:
            self.state_table[of_states.rows, of_states.columns] = of_states.blocks
            assert UNMAPPED not in self.pool[of_states.blocks], "a state in memory that is gone"
            self._poison(plan, of_states.blocks)
        for number, update in enumerate(of_kv):
            self.tables[number, update.rows, update.columns] = update.blocks
            assert UNMAPPED not in self.pool[update.blocks], "a table names a block without memory"
            known = ~np.isin(update.rows, list(self.waits))
            written = self.written[update.rows[known]]
            self._poison(plan, update.blocks[known][update.columns[known] * self.block_size >= written])
            for row, slot in zip(update.rows[~known].tolist(), update.columns[~known].tolist(), strict=True):
                self.taken.setdefault(row, set()).add((number, slot))
        for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
            if row in self.waits:
                self.waits.remove(row)
                self.written[row] = start
                self.first_starts.setdefault(self.owner[row], start)
                for number, slot in self.taken.pop(row, ()):
                    if slot * self.block_size >= start:
                        self._poison(plan, self.tables[number, row, [slot]])
        self._fresh(mapped["mapped"])
        self.came_back = None
        if (back := None if plan.swaps is None else plan.swaps.back) is not None and plan.reads:
            self.came_back = back.targets, self.pool[back.sources]
            plan = replace(plan, swaps=replace(plan.swaps, back=None))
        for read in plan.reads:
            assert UNMAPPED not in self.pool[read.blocks], "what was read goes to memory that is gone"
            self.pool[read.blocks] = read.data
        moved = self._move_memory(plan)
        assert list(plan.lengths == 1) == sorted(plan.lengths == 1, reverse=True), "chunks of one token come first"
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in a step"
        refused = mapped["refused"] or moved["refused"]
        result = self._compute(plan)
        lost = np.append(lost, self._swap_beside(plan))  # as late as can be
        failed = {
            "failed_blocks": np.array(self.failed_blocks, np.int32),
            "failed_slots": np.array(self.failed_slots, np.int32),
        }
        return replace(result, **{**mapped, **moved, "refused": refused, "lost_slots": lost, **failed})

    def _poison(self, plan: Plan, blocks: np.ndarray) -> None:
        """`blocks` are new to a row: nothing of it was written there. What a copy is to read is still there."""
        copies = _copies_of(plan)
        self.pool[blocks if copies is None else np.setdiff1d(blocks, copies.sources)] = POISON

    def _fails(self) -> bool:
        fails = self.faults is not None and bool(self.faults.random() < 0.1)
        self.faulty |= fails
        return fails

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """From block to block."""
        self.pool[targets] = self.pool[sources]
        if self._fails():
            self.pool[targets] = POISON
            self.failed_blocks += targets.tolist()

    def _fresh(self, extents: np.ndarray) -> None:
        """Nothing was written in `extents`."""
        self.by_extent[extents] = POISON

    def _map(self, plan: Plan) -> dict:
        """Returns what the result says about it. No table may name a block of it yet."""
        mapped, refused = plan.resize.map, None
        if len(mapped) and self.refuses_map:
            mapped, refused = NO_EXTENTS, "planted"
        assert not self.mapped & set(mapped.tolist()), "an extent is mapped twice"
        self.mapped |= set(mapped.tolist())
        return {"mapped": mapped, "refused": refused}

    def _swap_before(self, plan: Plan) -> np.ndarray:
        """Copy out what must leave first. Returns the slots that got no memory."""
        swaps = plan.swaps
        if swaps is None:
            return NO_TOKENS
        assert len(set(swaps.out_slots.tolist())) == len(swaps.out_slots), "two copies to one slot"
        assert 0 not in swaps.out_slots and 0 not in swaps.out_blocks, "the null block is swapped"
        assert not {*swaps.out_slots.tolist()} & {*swaps.in_slots.tolist()}, "a slot is overwritten while it is read"
        return self._swap_out(swaps.out_blocks[: swaps.num_before], swaps.out_slots[: swaps.num_before])

    def _swap_out(self, blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        assert UNMAPPED not in self.pool[blocks], "a copy from memory that is gone"
        lost = slots[[self.refuses_slots and slot not in self.on_host for slot in slots.tolist()]]
        done = ~np.isin(slots, lost)
        self.host[slots[done]] = self.pool[blocks[done]]
        self.on_host |= set(slots[done].tolist())
        if done.any() and self._fails():
            self.host[slots[done]] = POISON
            self.failed_slots += slots[done].tolist()
        return lost

    def _swap_beside(self, plan: Plan) -> np.ndarray:
        """Copy what no chunk depends on. Returns the slots that got no memory."""
        swaps = plan.swaps
        if swaps is None:
            return NO_TOKENS
        lost = self._swap_out(swaps.out_blocks[swaps.num_before :], swaps.out_slots[swaps.num_before :])
        slots, blocks = swaps.in_slots, swaps.in_blocks
        assert set(slots.tolist()) <= self.on_host, "a copy from a slot that was never written"
        assert len(set(blocks.tolist())) == len(blocks), "two copies to one block"
        assert UNMAPPED not in self.pool[blocks], "a copy to memory that is not there"
        self.pool[blocks] = self.host[slots]
        if len(blocks) and self._fails():
            self.pool[blocks] = POISON
            self.failed_blocks += blocks.tolist()
        return lost

    def _move_memory(self, plan: Plan) -> dict:
        """Copy, write what came back, unmap. Returns what the result says about it."""
        unmapped = plan.resize.unmap
        if (copies := _copies_of(plan)) is not None:
            sources, targets = copies.sources, copies.targets
            assert len(set(targets.tolist())) == len(targets), "two copies to one block"
            assert UNMAPPED not in self.pool[sources], "a copy from memory that is gone"
            assert UNMAPPED not in self.pool[targets], "a copy to memory that is not there"
            self._copy(sources, targets)
        if self.came_back is not None:
            targets, of_sources = self.came_back
            self.pool[targets] = of_sources
            if self._fails():
                self.pool[targets] = POISON
                self.failed_blocks += targets.tolist()
        refused = None
        if len(unmapped) and self.refuses_unmap:
            unmapped, refused = unmapped[:-1], "planted"
        assert set(unmapped.tolist()) <= self.mapped - {0}, "an extent is unmapped twice"
        self.mapped -= set(unmapped.tolist())
        self.by_extent[unmapped] = UNMAPPED
        return {"unmapped": unmapped, "refused": refused}

    def _compute(self, plan: Plan) -> Result:
        sampled, failures, scores, candidates, deferred = [], [], [], [], []
        counts = plan.samples.astype(np.int32)
        for i, (row, start, length) in enumerate(zip(plan.rows, plan.starts, plan.lengths, strict=True)):
            if self.owner[int(row)] in self.fail:
                counts[i] = 0
                failures.append(Failure(i, "planted"))
                continue
            if self._fails():
                counts[i] = 0
                deferred.append(i)
                if self.num_state_blocks and start and self.faults is not None and self.faults.random() < 0.3:
                    self.failed_blocks += self.state_table[row].tolist()  # as behind a fault within a mixer
                    self.pool[self.state_table[row]] = POISON
                continue
            if start > self.written[row]:  # behind a chunk that was deferred: garbage, to be thrown away
                sampled += [0] * int(counts[i])
                continue
            state = self.state_table[row]
            if start and not np.isin(self.failed_blocks, state).any():
                held = self.pool[state]
                assert (held == _state(self.tokens[row, :start], self.num_state_blocks)).all(), "another state than the row's"
            for position in range(start, start + length):
                blocks, offset = self.tables[:, row, position // self.block_size], position % self.block_size
                assert len({*blocks.tolist()} - {0}) == len(blocks), "wrote to the null block, or twice to a block"
                assert UNMAPPED not in self.pool[blocks, offset], "wrote to memory that is gone"
                self.pool[blocks, offset] = self.tokens[row, position]
            self.written[row] = start + length
            if self.num_state_blocks:
                self.pool[state] = _state(self.tokens[row, : start + length], self.num_state_blocks)
            read, blocks = self._read(int(row), int(start), int(start + length))
            scores += self._scores(i, int(row), start, read, bool(plan.samples[i]))
            if plan.samples[i]:
                if np.isin(self.failed_blocks, blocks).any():
                    read = np.zeros(start + length, np.int32)  # garbage, which the scheduler is to throw away
                assert POISON not in read, "read what was never written"
                assert UNMAPPED not in read, "read memory that is gone"
                if count := self.asks[int(row)][0].num_candidates:
                    counts[i] = 0
                    ids = np.array(fake_candidates(read, count), np.int32)
                    values = -np.arange(count, dtype=np.float32)
                    candidates.append(Candidates(i, ids, values, values))
                    continue
                token = next_token(read)
                self.tokens[row, start + length] = token
                sampled.append(token)
        tokens = np.array(sampled, np.int32)
        return Result(
            plan.step_id, counts, tokens, tuple(failures), scores=tuple(scores), candidates=tuple(candidates),
            deferred=np.array(deferred, np.int64),
        )  # fmt: skip

    def _read(self, row: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens up to `end` as a chunk from `start` on reads them, and the blocks that it reads.

        Tokens that no group reads, and those that all groups read right, are those of the row.
        """
        read, found = self.tokens[row, :end].copy(), []
        for group, table in zip(self.group_of, self.tables[:, row], strict=True):
            first = group.first_read(start)
            blocks = table[first // self.block_size : -(-end // self.block_size)]
            skipped = first % self.block_size
            got = self.pool[blocks].ravel()[skipped : skipped + end - first]
            wrong = got != self.tokens[row, first:end]
            read[first:][wrong] = got[wrong]
            found.append(blocks)
        return read, np.concatenate([self.state_table[row], *found])

    def _scores(self, index: int, row: int, start: int, read: np.ndarray, samples: bool) -> list[ChunkLogprobs]:
        """Of the prompt's tokens behind `read[start:]`, and of the one that is sampled, where they are asked for."""
        sampling, num_prompt = self.asks[row]
        stretches = []
        if sampling.prompt_logprobs is not None:
            stretches.append(range(start + 1, min(len(read), num_prompt - 1) + 1))
        if sampling.logprobs is not None and samples:
            stretches.append(range(len(read), len(read) + 1))
        return [
            ChunkLogprobs(
                index, stretch[0], np.zeros((len(stretch), 1), np.int32),
                np.array([[fake_logprob(read[:p])] for p in stretch], np.float32), np.ones(len(stretch), np.int32),
            )
            for stretch in stretches if stretch
        ]  # fmt: skip


class PendingStep:
    """A plan that the runner has begun."""

    def __init__(self, runner: FakeRunner, plan: Plan) -> None:
        self.plan = plan
        self.result: Result | None = None
        self._runner = runner

    def wait(self) -> Result:
        while self.result is None:
            self._runner.execute_next()
        return self.result


class FakeRead:
    """A read of the blocks `span` of `chain`, which hold their tokens, and of other groups, that is over after some looks."""

    why, seconds = "", 0.0

    def __init__(self, chain: Chain, span: tuple[int, int], data: np.ndarray, looks: int) -> None:
        self.chain, self.data = chain, data
        self.first, self.upto = span
        self._looks = looks

    @property
    def is_over(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def wait(self, seconds: float) -> None:
        pass

    def stop(self) -> None:
        """No effect once it is over."""
        if self._looks >= 0:
            self.data = self.data[:0]


class FakeDisk:
    """A disk tier without an end, with all of `groups`, the other ones. Some reads are not worth it, of some a part comes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.num_read = 0
        self.groups: tuple[LayerGroup, ...] = ()
        self.blocks_have_bytes = True  # else all layers have windows or states
        self._rng = rng
        self._kept: set[tuple[bytes | None, bytes]] = set()

    def begin(self, chain: Chain, num_found: int, most_tokens: int, tokens_per_s: float) -> FakeRead | None:
        size = chain.hasher.block_size
        first = num = num_found // size
        while (num + 1) * size <= most_tokens and self._key(chain, num + 1) in self._kept:
            num += 1
        if num == first:
            return None
        if self._rng.random() < 0.2:
            num = int(self._rng.integers(first, num))
        blocks = chain.tokens[: num * size].copy().reshape(-1, size)
        data = [blocks[first:] if self.blocks_have_bytes else blocks[:0]]
        for group in self.groups if num > first else ():
            begin = max(first, group.first_read(num * size) // size)
            state = np.repeat(_state(blocks.ravel(), group.num_tables), size, 1)
            data.append(state if group.is_state else np.tile(blocks[begin:], (group.num_tables, 1)))
        return FakeRead(chain, (first, num), np.concatenate(data), int(self._rng.integers(8)))

    def finish(self, read: FakeRead) -> np.ndarray:
        self.num_read += len(read.data)
        return read.data

    def committed(self, chain: Chain, num_blocks: int, retention: Retention | None = None) -> None:
        self._kept |= {self._key(chain, num + 1) for num in range(num_blocks)}

    def clear(self) -> None:
        self._kept.clear()

    def _key(self, chain: Chain, num_blocks: int) -> tuple[bytes | None, bytes]:
        return chain.salt, chain.tokens[: num_blocks * chain.hasher.block_size].tobytes()


class World:
    """Scheduler, manager and fake runner together; checks invariants around every step.

    With `blocks_per_extent` the pool is elastic: `usable` blocks and the null block are a whole number of extents, of which
    the first `num_mapped` have memory at the start (None: all). At most `max_cached` blocks stay cached (None: no bound).
    With `host_slots` there is a host tier, which `cost` (None: always) says the worth of; what it holds is compared after
    every step. With `disk` there is a disk tier. With `ahead` a step is planned and begun while the one before it is out,
    wherever that can be.
    """

    def __init__(
        self, usable: int, block_size: int = 16, *, max_seqs: int = 256, max_step_tokens: int = 8192,
        max_model_len: int = 4096, max_chunk_tokens: int | None = None, forecast: bool = False,
        blocks_per_extent: int | None = None, num_mapped: int | None = None, caching: bool = False,
        max_cached: int | None = None, host_slots: int = 0, cost: SwapCost | None = None, ahead: bool = False,
        disk: FakeDisk | None = None, groups: tuple[LayerGroup, ...] = (LayerGroup(),),
    ) -> None:  # fmt: skip
        num_extents = (usable + 1) // (blocks_per_extent or usable + 1)
        mapped = range(num_extents if num_mapped is None else num_mapped)
        limits = Limits(max_seqs, max_step_tokens, max_model_len, max_chunk_tokens, forecast)

        def made() -> tuple[CacheManager, Scheduler, FakeRunner]:
            pool = BlockAllocator(usable + 1, blocks_per_extent=blocks_per_extent, mapped=mapped if blocks_per_extent else None)
            cache = CacheManager(
                tables_for(groups, pool, block_size, max_seqs, max_model_len),
                PrefixHasher(block_size, b"seed") if caching else None,
                max_cached_blocks=max_cached,
                host_slots=host_slots,
            )
            if disk is not None and groups:
                cache.disk, disk.groups = disk, cache.index.windows.groups
                disk.blocks_have_bytes = groups[0].window is None
            runner = FakeRunner(
                usable + 1, block_size, max_seqs, max_model_len, num_extents=num_extents, mapped=mapped,
                host_slots=host_slots, groups=groups,
            )  # fmt: skip
            return cache, Scheduler(cache, limits, cost or SwapCost(1, block_size)), runner

        self._made = made
        self.now = 0.0
        self.cache, self.scheduler, self.runner = made()
        self.rng = np.random.default_rng(0)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Finished] = {}
        self.before: dict[str, list[int]] = {}  # tokens that were generated elsewhere
        self.emitted: dict[str, list[int]] = {}
        self.scored: dict[str, dict[int, float]] = {}  # by position
        self.started: list[str] = []
        self.plans: list[Plan] = []
        self.ahead = ahead
        self.begun: list[PendingStep] = []  # whose results were not applied
        self.planned_ahead: list[Plan] = []
        self.num_states_on_host = 0  # of nodes, looked at
        self.num_left = 0  # sequences that ended while a plan that names them was out
        self.aborted: set[str] = set()
        self.family_of: dict[str, Family] = {}
        self.check_every = 1
        self.look: Callable[[World], None] | None = None  # called after each check
        self._num_checks = 0

    def check(self) -> bool:
        """Check invariants at one in `check_every` calls. Returns whether it did."""
        self._num_checks += 1
        if self._num_checks % self.check_every:
            return False
        self.scheduler.check_invariants()
        if self.look is not None:
            self.look(self)
        return True

    @property
    def waiting_ids(self) -> list[str]:
        """Of requests that wait for a row, in order; without forks that wait for their leader's prompt."""
        waiting = self.scheduler.state.waiting
        return [sequence.request.request_id for sequence in sorted(waiting.queue + waiting.deferred, key=age)]

    def prompt(self, length: int) -> np.ndarray:
        return self.rng.integers(0, VOCAB, length).astype(np.int32)

    def add(
        self, name: str, prompt: int | np.ndarray, max_new: int = 16, *, priority: int = 0, arrival: float = 0.0,
        salt: bytes | None = None, fork_of: str | None = None, num_generated: int = 0, retention: Retention | None = None,
        **more,
    ) -> None:  # fmt: skip
        """`prompt` is a number of random tokens, or the tokens. `num_generated` of the output were generated before."""
        tokens = self.prompt(prompt) if isinstance(prompt, int) else prompt
        sampling = Sampling(max_new, **more)
        generated = np.array(continuation(tokens, sampling, num_generated), np.int32)
        request = Request(name, tokens, sampling, priority, arrival, salt, fork_of, generated, retention=retention)
        self.add_request(request)

    def add_request(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.before[request.request_id] = request.generated.tolist()

    def schedule(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        assert plan.num_tokens <= self.scheduler.state.limits.max_step_tokens
        self.check()
        self.plans.append(plan)
        self.started += [new.request_id for new in plan.admitted.values()]
        return plan

    def nap(self, keeps: bool = True) -> None:
        """Suspend all requests between two steps, and go on with another pool, with what was kept or without."""
        old, runner = self.scheduler, self.runner
        old.suspend(lambda places: np.stack([runner.pool[at] if at > 0 else runner.host[-at] for at in places.tolist()]))
        self.cache, self.scheduler, self.runner = self._made()
        for name in ("faults", "faulty", "fail", "first_starts"):
            setattr(self.runner, name, getattr(runner, name))
        self.scheduler.take_over(old, keeps=keeps)
        self.check()

    def due(self) -> Plan:
        """The plan whose result comes next: the one that was planned ahead, or a new one."""
        return self.begun[0].plan if self.begun else self.schedule()

    def go_ahead(self) -> Plan | None:
        """Plan the step behind the plan that is out, if that can be, and begin both; every third is executed late."""
        plan = self.scheduler.schedule_ahead()
        self.check()
        if plan is not None:
            self.begun = self.begun or [self.runner.begin(self.plans[-1])]
            self.runner.lazy = plan.step_id % 3 == 0
            self.begun.append(self.runner.begin(plan))
            self.plans.append(plan)
            self.planned_ahead.append(plan)
        return plan

    def abort(self, name: str) -> bool:
        done = self.scheduler.abort(name)
        if done:
            self.aborted.add(name)
        return done

    def finish(self, plan: Plan) -> StepOutputs:
        step = self.begun.pop(0) if self.begun else self.runner.begin(plan)
        assert step.plan is plan, "results come in the order of the plans"
        emissions = self.scheduler.apply(plan, step.wait())
        looks = self.check()
        self.num_left += len(self.scheduler.state.finishing)
        if any(plan is other for other in self.planned_ahead):
            assert not self.aborted & set(emissions.request_ids), "a token of a plan that should not have been made"
        if len(self.runner.by_extent) > 1:
            assert set(self.cache.pool.mapped_extents.tolist()) == self.runner.mapped, "bookkeeping and memory differ"
        if looks and self.cache.host.capacity and not any(step.plan.swaps for step in self.begun):
            self._check_contents()
        for name, token in zip(emissions.request_ids, emissions.tokens, strict=True):
            self.emitted.setdefault(name, []).append(token)
        for name, scores in emissions.scores:
            for p, (logprob, *_) in enumerate(scores.logprobs.tolist(), scores.first):
                assert self.scored.setdefault(name, {}).setdefault(p, logprob) == logprob, "another one than before"
        for end in emissions.finished:
            assert end.request_id not in self.finished, "a request ended twice"
            self.finished[end.request_id] = end
            self._check_cached_tokens(end)
            if end.request_id in self.family_of:
                self._end_family(end)
                continue
            told = self.before.get(end.request_id, []) + self.emitted.get(end.request_id, [])
            assert end.token_ids.tolist() == told, "told tokens differ from the output"
        for name, candidates in emissions.candidates:
            if name in self.family_of:
                self.family_of[name].tell(name, candidates)
        for family in {id(f): f for f in self.family_of.values()}.values():
            family.go_on(self)
        return emissions

    def _check_cached_tokens(self, end: Finished) -> None:
        """What was found of a prompt was not computed: the first chunk begins behind it. Forks have the number of a family."""
        request, start = self.requests.get(end.request_id), self.runner.first_starts.get(end.request_id)
        assert start is None or end.num_cached_tokens is not None, "it was computed and never admitted"
        if request is None or request.fork_of is not None or start is None or end.num_preemptions or self.runner.faulty:
            return
        assert end.num_cached_tokens == min(start, len(request.prompt_token_ids)), "it began elsewhere"

    def add_family(self, name: str, prompt: int | np.ndarray, beams: int, max_new: int, **more) -> None:
        """Sequences whose tokens a `Family` chooses."""
        tokens = self.prompt(prompt) if isinstance(prompt, int) else prompt
        sampling = Sampling(max_new, num_candidates=2 * beams)
        requests = Request(name, tokens, sampling, **more).forked(beams)
        for request in requests:
            self.scheduler.add(request)
        longest = self.scheduler.limit_of(requests[0])
        family = Family([r.request_id for r in requests], tokens, longest, np.random.default_rng(len(tokens)))
        self.family_of |= {r.request_id: family for r in requests}

    def _end_family(self, end: Finished) -> None:
        """All of them end with the first one."""
        family = self.family_of[end.request_id]
        told = end.token_ids.tolist()
        assert family.tokens[end.request_id][family.num_prompt :] == told, "told tokens differ from those chosen"
        for name in family.names:
            self.abort(name)
        family.over = True

    def _check_contents(self) -> None:
        """Whatever can be found on the device or the host is what it says it is; so are the tails of who waits."""
        index, runner = self.cache.index, self.runner
        leaving = self.cache.host._leaving
        for node in index._table.contents().tolist():
            places = [(index.blocks, index.slots)] if self.cache.row_tables.anchors is self.cache.pool else []
            windows = [window for window in index.windows if not window.group.is_state]
            places += [pair for window in windows for pair in zip(window.blocks, window.slots, strict=True)]
            for blocks, slots in places:
                block, slot = int(blocks.of_node[node]), int(slots.of_node[node])
                if block < 0 and slot < 0:
                    continue  # window blocks that a window has passed
                if slot >= 0 and leaving[slot]:
                    continue  # the next plan brings it there
                if block >= 0:
                    block = int(self.cache._bytes_at[block])
                found = runner.pool[block] if block >= 0 else runner.host[slot]
                assert found.tolist() == index._tokens[node].tolist(), f"block {block} or slot {slot} holds something else"
            for window in [window for window in index.windows if window.group.is_state]:
                slots = np.array([int(places.of_node[node]) for places in window.slots])
                if slots[0] >= 0 and not leaving[slots].any():
                    tokens = index._tokens[index._tree.path_to(node)].ravel()
                    assert (runner.host[slots] == _state(tokens, len(slots))).all(), "another state than its node's"
                    self.num_states_on_host += 1
        waiting = {s.request.request_id: s for s in self.scheduler.state.by_id.values() if s.row is None}
        for name, tail in self.cache.host.tails.items():
            rest = tail.num_tokens % self.cache.block_size
            tokens = waiting[name].tokens[tail.num_tokens - rest : tail.num_tokens]
            of_kv, of_state = np.split(tail.slots, [len(tail.slots) - runner.num_state_blocks])
            for slot in of_kv[leaving[of_kv] == 0].tolist():
                assert runner.host[slot, :rest].tolist() == tokens.tolist(), "a tail is not its sequence's"
            if not leaving[of_state].any():
                wanted = _state(waiting[name].tokens[: tail.num_tokens], len(of_state))
                assert (runner.host[of_state] == wanted).all(), "a tail with another state"

    def step(self) -> StepOutputs:
        plan = self.due()
        if self.ahead:
            self.go_ahead()
        return self.finish(plan)

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            assert not self.scheduler.starving, "what is left waits for memory"
            self.step()
        raise AssertionError(f"work is left after {most} steps")

    def run_until_preempted(self) -> None:
        while not self.scheduler.stats.preemptions:
            self.step()

    def complete(self, *, but: tuple[str, ...] = ()) -> None:
        """Run to the end; every request but some gave what it gives alone, and nothing is held."""
        self.run()
        self.check_outputs(but=but)
        self.check_empty()

    def known(self, name: str) -> int:
        """Tokens known of a request: its prompt, and what it was told."""
        if name in self.family_of:
            return len(self.family_of[name].tokens[name])
        return len(self.requests[name].token_ids) + len(self.emitted.get(name, []))

    def lengths(self, plan: Plan) -> list[int]:
        """Tokens of the plan's chunks by age of their request."""
        ids = [self.scheduler.rows.request_ids[row] for row in plan.rows]
        order = sorted(range(len(ids)), key=lambda i: list(self.requests).index(ids[i]))
        return [int(plan.lengths[i]) for i in order]

    @property
    def used(self) -> int:
        return self.cache.pool.counts().live

    def check_outputs(self, *, but: tuple[str, ...] = ()) -> None:
        """Every request but some gave what it gives alone."""
        for name, request in self.requests.items():
            if name not in but:
                expected = continuation(request.prompt_token_ids, request.sampling)
                assert self.finished[name].token_ids.tolist() == expected, name

    def check_empty(self) -> None:
        counts = self.cache.pool.counts()
        assert (counts.live, counts.free + counts.cached) == (0, self.cache.pool.usable)
        assert self.cache.index.capacity or not counts.cached
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.cache.host.tails, "a tail of a sequence that ended"


class Family:
    """Sequences with one prompt, whose tokens this chooses at random among the candidates that they tell, like beams do."""

    def __init__(self, names: list[str], prompt: np.ndarray, longest: int, rng: np.random.Generator) -> None:
        self.names = names
        self.tokens = {name: prompt.tolist() for name in names}
        self.num_prompt = len(prompt)
        self.longest = longest
        self.told: dict[str, list[int]] = {}
        self.over = False
        self._rng = rng

    def tell(self, name: str, candidates: Candidates) -> None:
        assert name not in self.told, "candidates are told twice"
        told = candidates.token_ids.tolist()
        assert told == fake_candidates(self.tokens[name], len(told)), "it read something else than its tokens"
        self.told[name] = told

    def go_on(self, world: World) -> None:
        """Choose, once all have told; behind the prompt one speaks for all."""
        first = len(self.tokens[self.names[0]]) == self.num_prompt
        if self.over or not (len(self.told) == len(self.names) or (first and self.names[0] in self.told)):
            return
        if len(self.tokens[self.names[0]]) + 1 >= self.longest:
            for name in self.names:
                world.scheduler.abort(name, "stop")
            self.over = True
            return
        stay = self.names if first else [n for n in self.names if self._rng.random() < 0.6] or self.names[:1]
        moves = []
        for name in self.names:
            source = name if name in stay else str(self._rng.choice(stay))
            token = int(self._rng.choice(self.told[self.names[0] if first else source]))
            moves.append(BeamMove(name, source, token))
        before, self.told = {name: list(tokens) for name, tokens in self.tokens.items()}, {}
        for move in moves:
            self.tokens[move.request_id] = [*before[move.source_id], move.token]
        world.scheduler.apply_beam_moves(moves)
        world.scheduler.check_invariants()

"""A device that several engines share, on a modelled clock: real schedulers, caches and policies, no model and no memory.

Each engine is the real `Scheduler`, `CacheManager` and, with a lease, `EngineMemory`; the broker is the real `LeaseTable` with
its `DeviceAccount` and `decide`. Modelled are time, the GPU, the arena and the socket:

    a step     by its `Shape`: the roofline of modelled_clock.py, EXTENT_S for each extent mapped or unmapped, and copies at
               COPY_BYTES_PER_S; or what a caller has measured
    the GPU    computes one step at a time; engines take turns in the order in which they are ready. Or each has a core
    messages   arrive MESSAGE_S later; the device is measured, and the broker decides, every TICK_S and PAUSE_S after messages
    outputs    unknown to the scheduler until the stop token, unless it `knows_lengths`

A run depends on its arguments alone.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.modelled_clock import Roofline
from pagetide.allocator import wire
from pagetide.allocator.arena import ExtentSet
from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.broker_connection import Peer
from pagetide.allocator.errors import GrantExceeded
from pagetide.allocator.lease_account import LeaseAccount
from pagetide.allocator.lease_balance import LeaseBalance
from pagetide.allocator.lease_events import Event, Recalled
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.lease_record import LeaseRecordWriter
from pagetide.allocator.lease_table import LeaseTable
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import PoolBounds
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.memory.pool_use import SchedulerPoolUse
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind, DeviceMemory
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.plan import NO_EXTENTS, Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

MESSAGE_S = 1e-3
TICK_S = 0.02  # between two measurements, and ticks of the broker
PAUSE_S = 0.002  # least time between two decisions for messages
LOOK_S = 0.25  # an idle engine looks at its memory this often without a message
EXTENT_S = 140e-6  # to map or unmap an extent
COPY_BYTES_PER_S = 1e12  # of block moves, within the device
BLOCK_SIZE = 64
EXTENT_TARGET_BYTES = 32 << 20
MAX_STEP_TOKENS = 2048
MAX_SEQS = 64
TOKEN, STOP = 3, 2
VOCABULARY = 1 << 30
DEVICE = "GPU-modelled"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pool and the steps of an engine are made of."""

    plan_s: Callable[[Plan], float]  # seconds that computing a plan takes
    block_bytes: int
    block_size: int = BLOCK_SIZE
    blocks_per_extent: int = 1
    max_seqs: int = MAX_SEQS
    max_step_tokens: int = MAX_STEP_TOKENS
    map_s: float = EXTENT_S  # for each extent
    unmap_s: float = EXTENT_S
    copied_bytes_per_s: float = COPY_BYTES_PER_S
    knows_lengths: bool = False  # whether each request says how many tokens it will get

    @classmethod
    def of(cls, roofline: Roofline) -> Shape:
        """That of a model on a card."""
        block_bytes = BLOCK_SIZE * roofline.model.kv_bytes
        return cls(roofline.plan_s, block_bytes, blocks_per_extent=max(1, EXTENT_TARGET_BYTES // block_bytes))

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent."""
        return self.blocks_per_extent * self.block_bytes


class Clock:
    """Events in order of time; equal times in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self, until: Callable[[], bool]) -> None:
        """Handle events until there is none, or `until` holds."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()


class Memory(Protocol):
    """What an arrangement does to an engine's pool around steps: see `EngineMemory`."""

    def prepare(self) -> None: ...
    def after_step(self) -> None: ...
    @property
    def due(self) -> bool: ...


class FixedMemory:
    """A pool that stays as it is."""

    due = False

    def prepare(self) -> None: ...
    def after_step(self) -> None: ...


class ModelledArena(ExtentSet):
    """Counts extents. See `Arena`."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        super().__init__(num_extents, extent_bytes, {0})
        self.buffer: object = None

    def map(self, extents: Sequence[int]) -> None:
        self._mapped |= set(extents)

    def unmap(self, extents: Sequence[int]) -> None:
        self._mapped -= set(extents)

    def close(self) -> None:
        self._mapped = frozenset()


@dataclass(slots=True, eq=False)
class Served:
    """One request as its user sees it; seconds on the modelled clock."""

    engine: int
    due: float
    prompt_tokens: int
    output_tokens: int
    ids: npt.NDArray[np.int64]  # of its full blocks: equal ids are equal prefixes
    first: float | None = None
    last: float | None = None


class ModelledEngine:
    """An engine of the device: its scheduler, and the memory that an arrangement gives it."""

    def __init__(self, number: int, shape: Shape, num_extents: int, mapped: int, max_tokens: int, *,
                 forecast: bool = True, max_cached_tokens: int | None = None) -> None:  # fmt: skip
        self.number, self.shape = number, shape
        self.per_extent, self.extent_bytes = shape.blocks_per_extent, shape.extent_bytes
        allocator = BlockAllocator(num_extents * self.per_extent, blocks_per_extent=self.per_extent, mapped=range(mapped))
        limits = Limits(shape.max_seqs, shape.max_step_tokens, max_tokens, forecast=forecast)
        cached = None if max_cached_tokens is None else max_cached_tokens // shape.block_size
        cache = CacheManager(
            RowTables(allocator, shape.block_size, limits.num_rows, max_tokens), PrefixHasher(shape.block_size, b"sharing"),
            max_cached_blocks=cached,
        )  # fmt: skip
        self.scheduler = Scheduler(cache, limits, SwapCost(shape.block_bytes, shape.block_size))
        self.arena = ModelledArena(num_extents, self.extent_bytes)
        self.arena.map(range(mapped))
        self.leased: LeasedArena | ModelledArena = self.arena
        self.memory: Memory = FixedMemory()
        self.is_ready = self.is_stepping = False
        self.moving_s = 0.0  # that a plan takes to unmap: what the arena says of it is said that much later
        self._last = np.zeros(limits.num_rows, np.int64)  # by row: tokens computed when the stop token is sampled
        self._requests: dict[str, Served] = {}

    def add(self, request: Served, name: str) -> None:
        """Queue a request; its prompt is made of its ids, and a tail of its own."""
        rng = np.random.default_rng((1, int(name)))
        size = self.shape.block_size
        ids = request.ids[: request.prompt_tokens // size]
        head = ((ids[:, None] * size + np.arange(size)) % (VOCABULARY - 4) + 4).astype(np.int32).ravel()
        tail = rng.integers(4, VOCABULARY, request.prompt_tokens - len(head), dtype=np.int32)
        sampling = Sampling(max(2048, request.output_tokens), stop_token_ids=(STOP,))
        if self.shape.knows_lengths:
            sampling = Sampling(request.output_tokens)
        self._requests[name] = request
        self.scheduler.add(Request(name, np.concatenate((head, tail)), sampling, arrival=request.due))

    def begin(self, now: float) -> tuple[Plan, Result, float]:
        """Plan a step; it takes the returned seconds from now on. What it maps and unmaps is done now."""
        self.memory.prepare()
        plan = self.scheduler.schedule(now)
        for row, new in plan.admitted.items():
            request = self._requests[new.request_id]
            self._last[row] = request.prompt_tokens + request.output_tokens - 1
        mapped, refused = plan.resize.map, None
        self.moving_s = self.shape.unmap_s * len(plan.resize.unmap)
        self.leased.unmap(plan.resize.unmap.tolist())
        try:
            self.leased.map(mapped.tolist())
        except GrantExceeded as error:
            mapped, refused = NO_EXTENTS, str(error)
        sampled = plan.rows[plan.samples]
        computed = (plan.starts + plan.lengths)[plan.samples]
        tokens = np.where(computed == self._last[sampled], STOP, TOKEN).astype(np.int32)
        compute_s = self.shape.plan_s(plan) if len(plan.rows) else 0.0
        copied_bytes = 0 if plan.copies is None else len(plan.copies.sources) * self.shape.block_bytes
        moves_s = self.moving_s + self.shape.map_s * len(mapped) + copied_bytes / self.shape.copied_bytes_per_s
        self.moving_s = 0.0
        result = Result(
            plan.step_id, plan.samples.astype(np.int32), tokens, mapped=mapped, unmapped=plan.resize.unmap,
            refused=refused, compute_s=compute_s,
        )  # fmt: skip
        return plan, result, compute_s + moves_s

    def end(self, plan: Plan, result: Result, now: float) -> int:
        """Apply the step. Returns how many requests have ended."""
        outputs = self.scheduler.apply(plan, result)
        for request_id in outputs.request_ids:
            request = self._requests[request_id]
            request.first = now if request.first is None else request.first
        for end in outputs.finished:
            assert end.reason == ("length" if self.shape.knows_lengths else "stop"), (end.reason, end.error)
            self._requests[end.request_id].last = now
        self.memory.after_step()
        return len(outputs.finished)

    @property
    def wants_step(self) -> bool:
        """Whether the next step would do something."""
        return self.scheduler.has_work and not self.scheduler.starving


class ModelledDevice:
    """The GPU, the engines and their clock. `serve` runs a load to its end. With `cores` each engine computes by itself."""

    def __init__(self, clock: Clock, engines: Sequence[ModelledEngine], *, cores: bool = False) -> None:
        self.clock, self.engines = clock, engines
        self.ended = 0
        self._turns: deque[ModelledEngine] = deque()
        self._places = len(engines) if cores else 1  # where steps may run

    def serve(self, load: Sequence[Served], within_s: float = 4.0) -> None:
        """Serve `load`; requests that have not ended when `within_s` times the arrivals' time is over stay unfinished."""
        for number, request in enumerate(load):
            self.clock.at(request.due, lambda r=request, n=number: self._arrive(r, str(n)))  # type: ignore[misc]
        for engine in self.engines:
            self._look(engine)
        end = max(request.due for request in load) * within_s
        self.clock.run(lambda: self.ended == len(load) or self.clock.now > end)

    def kick(self, engine: ModelledEngine) -> None:
        """Let the engine have a step if it wants one, or if its memory is due."""
        if engine.is_ready or engine.is_stepping:
            return
        if not engine.wants_step:
            if not engine.scheduler.num_waiting and engine.memory.due:
                self._step(engine, on_gpu=False)
                return
            if not engine.scheduler.num_waiting:
                return
        engine.is_ready = True
        self._turns.append(engine)
        self._next()

    def _arrive(self, request: Served, name: str) -> None:
        engine = self.engines[request.engine]
        engine.add(request, name)
        self.kick(engine)

    def _look(self, engine: ModelledEngine) -> None:
        starving = engine.scheduler.num_waiting > 0
        self.clock.after(TICK_S if starving else LOOK_S, lambda: self._look(engine))
        self.kick(engine)

    def _next(self) -> None:
        if self._places and self._turns:
            self._places -= 1
            engine = self._turns.popleft()
            engine.is_ready = False
            self._step(engine, on_gpu=True)

    def _step(self, engine: ModelledEngine, on_gpu: bool) -> None:
        engine.is_stepping = True
        plan, result, seconds = engine.begin(self.clock.now)
        self.clock.after(max(seconds, 1e-6), lambda: self._done(engine, plan, result, on_gpu))

    def _done(self, engine: ModelledEngine, plan: Plan, result: Result, on_gpu: bool) -> None:
        engine.is_stepping = False
        self.ended += engine.end(plan, result, self.clock.now)
        if on_gpu:
            self._places += 1
        if engine.wants_step:
            self.kick(engine)
        self._next()


# ---- the real broker ----------------------------------------------------------------------------


class _Readings:
    """The monitor: measures the engines' memory at every tick."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes, self.at_ns = 0, 0

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(DEVICE, "0", DeviceKind.GPU),)

    def memory(self, uuid: str) -> DeviceMemory:
        free = self.capacity_bytes - self.used_bytes
        return _Fresh(self.at_ns, int(TICK_S * 1e9), self.capacity_bytes, free, None, 1, 0)


class _Fresh(DeviceMemory):
    def is_stale(self, now_ns: int | None = None) -> bool:
        return False


class _Connection:
    """The broker's end of a lease's socket."""

    def __init__(self, number: int, broker: ModelledBroker) -> None:
        self.peer = Peer(number + 1, 0)
        self.lease_id: int | None = None
        self.lease: ModelledLease | None = None
        self._broker = broker

    def send(self, message: wire.Message, fd: int | None = None) -> None:
        self._broker.deliver(self, message, fd)


class ModelledBroker:
    """The real table of leases behind messages that take MESSAGE_S."""

    def __init__(self, clock: Clock, capacity_bytes: int, rules: Rules) -> None:
        self.clock = clock
        self.device: ModelledDevice | None = None
        self.recalls = 0
        self._readings = _Readings(capacity_bytes)
        self.table = LeaseTable(self._readings, rules=lambda info, capacity: rules, clock=lambda: int(clock.now * 1e9) + 10**9)
        self._leases: list[ModelledLease] = []
        self._decides_at: float | None = None
        self._decided_at = -1.0
        self.tick()

    def register(self, engine: ModelledEngine, min_bytes: int, max_bytes: int, held_bytes: int) -> ModelledLease:
        """A lease of the engine, at once."""
        connection = _Connection(engine.number, self)
        lease = connection.lease = ModelledLease(engine, connection, self, min_bytes, max_bytes, held_bytes)
        self._leases.append(lease)
        self.table.register(  # type: ignore[arg-type]
            connection,
            wire.RegisterMessage(
                f"engine {engine.number}", DEVICE, min_bytes, max_bytes, 1.0, 0, engine.extent_bytes, held_bytes
            ),
        )
        return lease

    def account_of(self, lease: ModelledLease) -> LeaseAccount:
        assert lease.connection.lease_id is not None
        return self.table.leases[lease.connection.lease_id]

    def tick(self) -> None:
        """Measure the device, and decide."""
        self._readings.used_bytes = sum(lease.held_bytes for lease in self._leases)
        self._readings.at_ns = self.table.clock()
        self.table.measure_all()
        self.table.decide_all()
        self.clock.after(TICK_S, self.tick)

    def receive(self, message: Callable[[], None], decides: bool, after_s: float = 0.0) -> None:
        """Handle a message that an engine sends in `after_s`, when it has arrived."""

        def arrive() -> None:
            message()
            if decides and self._decides_at is None:
                self._decides_at = max(self.clock.now, self._decided_at + PAUSE_S)
                self.clock.at(self._decides_at, self._decide)

        self.clock.after(after_s + MESSAGE_S, arrive)

    def _decide(self) -> None:
        self._decides_at, self._decided_at = None, self.clock.now
        self.table.decide_all()

    def deliver(self, connection: _Connection, message: wire.Message, fd: int | None) -> None:
        lease = connection.lease
        assert lease is not None
        if isinstance(message, wire.RegisteredMessage):
            assert fd is not None
            lease.balance.register(message, LeaseRecordWriter(fd), lease.most_bytes)
            return
        if fd is not None:
            os.close(fd)
        self.recalls += isinstance(message, wire.RecallMessage)
        self.clock.after(MESSAGE_S, lambda: self._delivered(lease, message))

    def _delivered(self, lease: ModelledLease, message: wire.Message) -> None:
        assert isinstance(message, wire.GrantMessage | wire.RecallMessage | wire.WithdrawMessage | wire.LimitMessage)
        if (event := lease.balance.apply(message)) is not None:
            lease.events.append(event)
        assert self.device is not None
        self.device.kick(lease.engine)


class ModelledLease:
    """The engine's end of a lease: the real balance, messages that take MESSAGE_S. See `Lease`."""

    device_uuid = DEVICE
    connected = True

    def __init__(
        self, engine: ModelledEngine, connection: _Connection, broker: ModelledBroker, min_bytes: int, max_bytes: int, held: int
    ) -> None:
        self.engine, self.connection, self._broker = engine, connection, broker
        self.name, self.min_bytes, self.most_bytes = f"engine {engine.number}", min_bytes, max_bytes
        self.balance = LeaseBalance(held, max_bytes, "the modelled broker", lambda: broker.clock.now)
        self.events: list[Event] = []
        self._report: wire.ReportMessage | None = None

    @property
    def max_bytes(self) -> int | None:
        return self.balance.max_bytes

    @property
    def granted_bytes(self) -> int:
        return self.balance.granted_bytes

    @property
    def held_bytes(self) -> int:
        return self.balance.upper_bytes

    @property
    def recall(self) -> Recalled | None:
        return self.balance.recall

    def shift(self, lower_bytes: int, upper_bytes: int) -> None:
        self.balance.shift(lower_bytes, upper_bytes)

    def report(
        self,
        held: Mapping[str, int],
        free_bytes: int,
        kept_bytes: int = 0,
        *,
        moving_bytes: int = 0,
        num_waiting: int = 0,
        reused: bool = True,
    ) -> None:
        total = sum(held.values())
        self.balance.set_bounds(total - moving_bytes, total)
        report = wire.ReportMessage(dict(held), free_bytes, kept_bytes, num_waiting, reused)
        if report != self._report:
            self._report = report
            self._send(lambda lease: self._broker.table.report(lease, report), decides=False)

    def ask(self, target_bytes: int, *, expires_s: float = 1.0, waiting_s: float = 0.0, keep_bytes: int = 0) -> None:
        message = wire.AskMessage(target_bytes, wire.milliseconds(expires_s), int(1e3 * waiting_s), keep_bytes)
        self._send(lambda lease: self._broker.table.ask(lease, message))

    def lower_min(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._send(lambda lease: self._broker.table.lower_min(lease, wire.LowerMinMessage(min_bytes)))

    def answer_unmapped(self, keep_bytes: int) -> None:
        self.balance.reduce(keep_bytes, self.min_bytes)
        message = wire.UnmappedMessage(keep_bytes, self.balance.generation)

        def answer(lease: LeaseAccount) -> None:
            if message.generation >= lease.generation:  # else it crossed a newer grant and is refused
                self._broker.table.unmapped(lease, message)

        self._send(answer)

    def poll(self) -> tuple[Event, ...]:
        events, self.events = tuple(self.events), []
        return events

    def wait(self, timeout_s: float) -> tuple[Event, ...]:
        return self.poll()

    def _send(self, message: Callable[[LeaseAccount], None], decides: bool = True) -> None:
        self._broker.receive(lambda: message(self._broker.account_of(self)), decides, self.engine.moving_s)


def lease_memory(engine: ModelledEngine, broker: ModelledBroker, *, base_bytes: int, min_extents: int) -> EngineMemory:
    """The real memory of an engine with a lease."""
    arena = engine.arena
    most = base_bytes + arena.num_extents * arena.extent_bytes
    lease = broker.register(engine, base_bytes + min_extents * arena.extent_bytes, most, base_bytes + arena.mapped_bytes)
    engine.leased = leased = LeasedArena(arena, lease)  # type: ignore[arg-type]
    bounds = PoolBounds(arena.num_extents, min_extents, arena.extent_bytes, None)
    base = BaseMemory(lambda: base_bytes, weights_bytes=base_bytes, reserve_bytes=0, trim=lambda: None)
    pool = SchedulerPoolUse(lambda: engine.scheduler, bounds, lambda: broker.clock.now)
    return EngineMemory(pool, leased, base, lease=lease, clock=lambda: broker.clock.now)


# ---- pools that no broker divides ----------------------------------------------------------------


class SharedPool:
    """The extents that engines take from each other without delay."""

    def __init__(self, num_bytes: int, *, evicts_others: bool) -> None:
        self.free_bytes = num_bytes
        self.evicts_others = evicts_others  # one pool; else what others hold stays theirs until they give it back
        self.members: list[PooledMemory] = []

    def take(self, taker: PooledMemory, num_extents: int) -> int:
        """Extents for `taker`, up to `num_extents`: free ones, then idle ones of the engine that has most of them."""
        size = taker.engine.extent_bytes
        while self.evicts_others and self.free_bytes < num_extents * size:
            others = [one for one in self.members if one is not taker and one.engine.scheduler.pool.idle_extents > 0]
            if not others:
                break
            if not max(others, key=lambda one: one.engine.scheduler.pool.idle_extents).give(1):
                break
        taken = min(num_extents, self.free_bytes // size)
        self.free_bytes -= taken * size
        return taken


class PooledMemory:
    """An engine's part of a `SharedPool`: what requests need now is mapped at once, before a cached block is evicted."""

    due = False

    def __init__(self, engine: ModelledEngine, shared: SharedPool, *, gives_back: bool) -> None:
        self.engine, self.shared, self._gives_back = engine, shared, gives_back
        shared.members.append(self)
        shared.free_bytes -= engine.arena.mapped_bytes

    def prepare(self) -> None:
        scheduler = self.engine.scheduler
        cache, queue = scheduler.cache, scheduler.state.waiting.queue
        needed = scheduler.num_running
        for sequence in queue[: scheduler.rows.num_free]:
            needed += cache.needed(len(sequence.tokens), cache.lookup(sequence.chain, len(sequence.tokens) - 1))
            if needed > cache.pool.capacity:
                break
        lacking = -(-(needed - cache.pool.num_free) // self.engine.per_extent)
        most = self.engine.arena.num_extents - len(cache.pool.mapped_extents)
        if (taken := self.shared.take(self, min(lacking, most)) if lacking > 0 else 0) > 0:
            scheduler.pool.grow(taken)
            resize, _ = scheduler.pool.take_resize()
            self.engine.arena.map(resize.map.tolist())
            cache.resizer.grow(resize.map)

    def after_step(self) -> None:
        if self._gives_back:
            self.give(len(self.engine.arena.mapped_extents) - 1, evict=False)

    def give(self, num_extents: int, evict: bool = True) -> int:
        """Give up to `num_extents` back at once: with `evict` idle ones, out of which blocks in use move; else empty ones."""
        cache = self.engine.scheduler.cache
        if not evict:
            plan = cache.pool.plan_drain(num_extents)
            held = set((plan.moves // self.engine.per_extent).tolist())
            num_extents = next((i for i, extent in enumerate(plan.extents.tolist()) if extent in held), len(plan.extents))
        if not num_extents or (shrink := cache.resizer.shrink(num_extents)) is None:
            return 0
        if shrink.copies is not None:
            cache.resizer.moved(shrink.copies)
        cache.resizer.unmapped(shrink.extents)
        self.engine.arena.unmap(shrink.extents.tolist())
        self.shared.free_bytes += len(shrink.extents) * self.engine.extent_bytes
        return len(shrink.extents)

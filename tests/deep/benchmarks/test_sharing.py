"""Memory that engines keep for prefixes, and how soon a neighbour's burst has it: modelled clock, real policies and broker."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.modelled_clock import Roofline
from benchmarks.shared_device import Clock, ModelledBroker, ModelledDevice, ModelledEngine, Served, Shape, lease_memory
from benchmarks.sharing import MIXES, REACHED
from pagetide.allocator.lease_policy import Rules

MIX = MIXES["2x14b"]
PROMPT, LEAST = 6_400, 4
BURST = 3  # prompts, of about a quarter of the memory
# Prompts of the first engine that nothing else shares: they fill nearly all of the memory.
KEPT = [Served(0, 0.5 * i, PROMPT, 10, i * 1_000 + np.arange(PROMPT // 64)) for i in range(24)]


def burst_at(at: float, load: list[Served], watch: Callable[[Clock, ModelledEngine], None]) -> float:
    """Serve `load`, and a burst of the second engine at `at`: seconds until that engine is granted the burst's memory."""
    clock, shape = Clock(), Shape.of(Roofline(MIX.gpu, MIX.model, REACHED))
    total = MIX.kv_bytes // shape.extent_bytes
    engines = [ModelledEngine(number, shape, total, LEAST, PROMPT + 700) for number in range(2)]
    broker = ModelledBroker(clock, MIX.capacity_bytes, Rules.of(MIX.capacity_bytes))
    broker.device = device = ModelledDevice(clock, engines)
    leases = [lease_memory(engine, broker, base_bytes=MIX.base_bytes, min_extents=LEAST) for engine in engines]
    for engine, memory in zip(engines, leases, strict=True):
        engine.memory = memory
    needed_bytes = MIX.base_bytes + BURST * PROMPT * MIX.model.kv_bytes
    had: list[float] = []

    def look() -> None:
        lease = leases[1].lease
        assert lease is not None
        if lease.granted_bytes >= needed_bytes:
            had.append(clock.now - at)
        else:
            clock.after(1e-4, look)

    clock.at(at, look)
    watch(clock, engines[0])
    device.serve([*load, *(Served(1, at, PROMPT, 10, np.empty(0, np.int64)) for _ in range(BURST))])
    return had[0]


def test_idle_engines_keep_everything_for_ten_minutes_and_a_burst_then_has_its_memory_within_a_tenth_of_a_second() -> None:
    held: list[int] = []

    def watch(clock: Clock, first: ModelledEngine) -> None:
        for seconds in (20.0, 619.9):
            clock.at(seconds, lambda: held.append(first.arena.mapped_bytes))

    took_s = burst_at(620.0, KEPT, watch)
    assert held[0] == held[1] > 0.8 * MIX.kv_bytes, "0 bytes given back"
    assert took_s < 0.1


def test_beside_the_steps_of_the_engine_that_gives_a_burst_has_its_memory_as_soon() -> None:
    """The engine gives back with its next step but one, and says so at the end of that: here steps take 15 ms."""
    running = [Served(0, 12.5, 500, 600, np.empty(0, np.int64)) for _ in range(4)]
    for hundredths in range(3):  # of a second: at other places of a step
        assert burst_at(14.0 + hundredths / 100, [*KEPT, *running], lambda clock, first: None) < 0.1

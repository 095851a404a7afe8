"""An engine with a lease and a monitor of its own, for the parts that measure memory."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pagetide import LLM
from pagetide.allocator import wire
from pagetide.allocator.broker_client import Channel

from .bench import Bench
from .decode import engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from monitors import MonitorProcess

DEADLINE_S = 30.0
# In this time the broker greets a new connection, and an engine without steps notices that no caller waits for the next one.
QUIET_S = 0.1
FOR_EVER_S = 1e6


class PoolRig:
    """The engine's inside: its pool brought into shape, recalls ordered as people order them."""

    def __init__(self, bench: Bench, llm: LLM, socket: Path) -> None:
        self.bench, self.llm = bench, llm
        self._socket = socket
        with llm.locked_engine() as engine:
            if engine.core.memory is None or engine.core.memory.lease is None:
                raise RuntimeError("the engine has no elastic pool with a lease here; its log says why")
            self.arena, self.lease = engine.arena, engine.core.memory.lease
            self.blocks_per_extent = engine.core.scheduler.cache.pool.blocks_per_extent
            self.block_size = engine.plan.block_size

    @property
    def extent_bytes(self) -> int:
        return int(self.arena.extent_bytes)

    def held_bytes(self) -> int:
        """What is held of the device, as its driver says; on a CPU, where others come and go, as the arena says."""
        if self.bench.clock.cuda:
            free, total = torch.cuda.mem_get_info()
            return total - free
        return int(self.arena.mapped_bytes)

    def have_granted(self, more_bytes: int) -> None:
        """Ask until the lease covers so much more than is held; steps may go on meanwhile. Raises TimeoutError."""
        deadline = time.monotonic() + DEADLINE_S
        while self.lease.granted_bytes < (target := self.lease.held_bytes + more_bytes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{target:,} bytes are not granted, only {self.lease.granted_bytes:,}")
            self.lease.ask(target, expires_s=1.0)  # not granted before the cool-down of the last recall is over
            time.sleep(0.02)  # meanwhile steps, or the keeper of memory, take in what the broker says

    def resize_to(self, num_extents: int) -> None:
        """Resize the pool to `num_extents` mapped extents while no request needs them.

        Raises TimeoutError if the lease is not granted more, and RuntimeError if another number is mapped afterwards.
        """
        missing = num_extents - len(self.arena.mapped_extents)
        if missing > 0:
            self.have_granted(missing * self.extent_bytes)
        with self.llm.locked_engine() as engine:
            scheduler = engine.core.scheduler
            missing = num_extents - scheduler.pool.num_extents
            if missing > 0:
                scheduler.pool.grow(missing)
            else:
                scheduler.pool.give_back(-missing)
            engine.core.catch_up()
            if len(self.arena.mapped_extents) != num_extents:
                raise RuntimeError(f"{len(self.arena.mapped_extents)} extents are mapped instead of {num_extents}")

    def idle_extents(self) -> int:
        """Extents that a recall has without preempting anybody."""
        with self.llm.locked_engine() as engine:
            return int(engine.core.scheduler.pool.idle_extents)

    def recall(self, num_bytes: int) -> float:
        """Seconds from the order until the device has the memory back, but for 1/64 of it. Raises TimeoutError."""
        channel = Channel(self._socket)
        time.sleep(QUIET_S)
        target = self.held_bytes() - num_bytes + num_bytes // 64
        try:
            began = time.perf_counter()
            channel.send(wire.RecallBytesMessage(self.lease.name, num_bytes))
            while (held := self.held_bytes()) > target:
                if time.perf_counter() - began > DEADLINE_S:
                    raise TimeoutError(f"{held - target:,} bytes were not back after {DEADLINE_S:g} s")
                time.sleep(0.0001)
            took = time.perf_counter() - began
            channel.wait(time.monotonic() + DEADLINE_S, wire.RecallingMessage)
            return took
        finally:
            channel.close()


@contextmanager
def rig(bench: Bench, members: tuple[int, ...] = (), **options: Any) -> Iterator[PoolRig]:
    """An LLM with a lease from a monitor that is its own. On a CPU both share a test device with the processes `members`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        before = os.environ.get("PAGETIDE_RUNTIME_DIR")
        os.environ["PAGETIDE_RUNTIME_DIR"] = str(directory)
        arguments: list[str] = []
        if bench.scale.capacity_bytes is not None:
            arguments += ["--capacity", str(bench.scale.capacity_bytes)]
            arguments += ["--members", ",".join(map(str, members))] if members else []
        source = "nvml" if bench.clock.cuda else "host"
        try:
            with (
                MonitorProcess(directory, *arguments, source=source),
                engine(bench, share=True, **options) as llm,
            ):
                socket = next(path for path in directory.iterdir() if path.is_socket())
                yield PoolRig(bench, llm, socket)
        finally:
            if before is None:
                del os.environ["PAGETIDE_RUNTIME_DIR"]
            else:
                os.environ["PAGETIDE_RUNTIME_DIR"] = before

"""Users of a test device: engines that serve bursts and check every token.

Run as a program it is one of them, told what to do by lines on its standard input:
`light JSON` is an engine without a model: real scheduler, cache, arena, lease and memory, and tokens that depend on what
lies in the blocks (`ArenaRunner`); `llm JSON` is `LLM("demo")`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from broker_rig import Process, lines, processes, say
from fakes import VOCAB, FakeRunner

from pagetide.allocator.arena import Arena
from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.errors import GrantExceeded, OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.lease import Lease
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.common.host_memory import free_host_bytes
from pagetide.engine.core import EngineCore
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import PoolBounds
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.memory.pool_use import SchedulerPoolUse
from pagetide.monitor.runtime_dir import RuntimeDir
from pagetide.scheduler.plan import NO_EXTENTS, Plan
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

MIB = 1 << 20
BLOCK_SIZE = 16
WARM_S = 1.0  # a burst every so often, on average


class ArenaRunner(FakeRunner):
    """A `FakeRunner` whose pool is the memory of an arena: token ids lie where a model has K and V, far apart."""

    def __init__(self, arena: Arena, num_blocks: int, block_size: int, num_rows: int, max_tokens: int) -> None:
        super().__init__(num_blocks, block_size, num_rows, max_tokens)
        self.arena = arena
        words = np.frombuffer(arena.buffer, np.int32)  # type: ignore[call-overload]
        self.pool = words.reshape(num_blocks, block_size, -1)[:, :, 0]
        del self.by_extent, self.mapped

    @property
    def mapped_extents(self) -> frozenset[int]:
        return self.arena.mapped_extents

    def _fresh(self, extents: np.ndarray) -> None:
        """What is mapped is zero, as the kernel gives it."""

    def _map(self, plan: Plan) -> dict[str, Any]:
        mapped, refused = NO_EXTENTS, None
        if len(plan.resize.map):
            try:
                self.arena.map(plan.resize.map.tolist())
                mapped = plan.resize.map
            except (OutOfDeviceMemory, GrantExceeded) as error:
                refused = str(error)
        return {"mapped": mapped, "refused": refused}

    def _move_memory(self, plan: Plan) -> dict[str, Any]:
        unmapped = NO_EXTENTS
        if plan.copies is not None:
            self.pool[plan.copies.targets] = self.pool[plan.copies.sources]
        if len(plan.resize.unmap):
            self.arena.unmap(plan.resize.unmap.tolist())
            unmapped = plan.resize.unmap
        return {"unmapped": unmapped, "refused": None}


def core_over(
    arena: Arena, *, blocks_per_extent: int, max_seqs: int = 64, max_model_len: int = 1024, forecast: bool = True,
    hasher: PrefixHasher | None = None, overlaps: bool = False,
) -> EngineCore:  # fmt: skip
    """A core over an arena, of which what is mapped is the pool at the start. With a hasher prefixes are cached; where it
    `overlaps` steps are begun before the result of the one before them is in.
    """
    num_blocks = arena.num_extents * blocks_per_extent
    pool = BlockAllocator(num_blocks, blocks_per_extent=blocks_per_extent, mapped=arena.mapped_extents)
    cache = CacheManager(RowTables(pool, BLOCK_SIZE, max_seqs, max_model_len), hasher)
    scheduler = Scheduler(cache, Limits(max_seqs, 8192, max_model_len, forecast=forecast))
    runner: Any = ArenaRunner(arena, num_blocks, BLOCK_SIZE, max_seqs, cache.max_tokens)
    runner.overlaps = overlaps
    return EngineCore(scheduler, runner)


def alone(prompt: np.ndarray, new: int) -> list[int]:
    """As `fakes.continuation`, in a hundredth of its time: an engine that computes this serves no recall meanwhile."""
    read, tokens = zlib.crc32(prompt.tobytes()), []
    for _ in range(new):
        tokens.append(read % VOCAB)
        read = zlib.crc32(np.int32(tokens[-1]).tobytes(), read)
    return tokens


class DeviceUser(Process):
    """One process of this file."""

    file = __file__

    def __init__(self, kind: str, config: object = None, *, env: dict[str, str] | None = None) -> None:
        super().__init__(kind, json.dumps(config), env=env)


def device_users() -> AbstractContextManager[Callable[..., DeviceUser]]:
    """Starts users, and ends them."""
    return processes(DeviceUser)


@dataclass
class Light:
    """What a light engine is made of. `kv_max` of KV in extents of `extent_bytes`, `kv_min` of them always."""

    directory: str
    device: str
    name: str
    seed: int
    kv_max: int = 1024 * MIB
    kv_min: int = 32 * MIB
    extent_bytes: int = 16 * MIB
    token_bytes: int = 16384
    base_slack: int = 24 * MIB
    idle_s: float = 0.5
    refused_maps: float = 0.0  # the share of them
    step_s: float = 0.01
    most_new: int = 300  # tokens that a request asks for
    weight: float = 1.0

    def start(self, start: Callable[..., DeviceUser]) -> DeviceUser:
        """As a process."""
        return start("light", asdict(self))


@dataclass
class Tally:
    """What became of the requests."""

    requests: int = 0
    finished: int = 0
    failed: int = 0  # ended with an error, or with other tokens than alone
    tokens: int = 0
    preemptions: int = 0
    first_failure: str = ""


class LightEngine:
    """A lease, an arena, a core; bursts of requests whose every token is checked."""

    def __init__(self, config: Light) -> None:
        self.config, self.rng = config, random.Random(config.seed)
        self.tally, self.expected = Tally(), dict[str, Request]()
        self.prompts: deque[list[int]] = deque(maxlen=16)  # the last ones
        process = psutil.Process()
        held = process.memory_info().rss
        min_bytes = held + config.base_slack + config.kv_min
        self.lease = Lease.register(
            RuntimeDir(Path(config.directory)).socket, name=config.name, device_uuid=config.device,
            min_bytes=min_bytes, weight=config.weight, granule_bytes=config.extent_bytes, held_bytes=held, timeout_s=30,
        )  # fmt: skip
        assert self.lease.wait_granted(min_bytes, 60), "the minimum is not granted"
        self.host = HostArena(config.kv_max // config.extent_bytes, config.extent_bytes, budget=self._budget, debug=True)
        self.budget_refuses = 0.0
        arena = LeasedArena(self.host, self.lease)
        arena.map(range(config.kv_min // config.extent_bytes))
        self.budget_refuses = config.refused_maps
        self.core = core_over(
            arena,
            blocks_per_extent=config.extent_bytes // (BLOCK_SIZE * config.token_bytes),
            hasher=PrefixHasher(BLOCK_SIZE, str(config.seed).encode()),
        )
        min_extents = config.kv_min // config.extent_bytes
        bounds = PoolBounds(arena.num_extents, min_extents, config.extent_bytes, config.idle_s)
        base = BaseMemory(
            lambda: process.memory_info().rss - self.host.mapped_bytes,
            weights_bytes=0,
            reserve_bytes=config.base_slack // 2,
            trim=lambda: None,
        )
        pool = SchedulerPoolUse(lambda: self.core.scheduler, bounds)
        self.core.memory = self.memory = EngineMemory(pool, arena, base, lease=self.lease)
        self.burst_at = time.monotonic()
        self.numbers = iter(range(10**9))

    def _budget(self) -> int:
        return 0 if self.rng.random() < self.budget_refuses else free_host_bytes()

    def prompt(self) -> list[int]:
        """Of random tokens; every other one begins as one of the last did."""
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(5, 500))]
        if self.prompts and self.rng.random() < 0.5:
            alike = self.rng.choice(self.prompts)[: self.rng.randint(1, len(prompt))]
            prompt[: len(alike)] = alike
        self.prompts.append(prompt)
        return prompt

    def burst(self, most: int = 24) -> None:
        """Some requests at once."""
        for _ in range(self.rng.randint(1, most)):
            name = f"r{next(self.numbers)}"
            prompt = np.array(self.prompt(), np.int32)
            sampling = Sampling(self.rng.randint(1, self.config.most_new))
            request = Request(name, prompt, sampling, 0, self.core.clock())
            self.expected[name] = request
            self.core.add(request)
            self.tally.requests += 1

    def work(self) -> None:
        """A step, if there is anything to do; else what the broker says is waited for."""
        if self.core.has_work:
            begun = time.monotonic()
            for end in self.core.step().finished:
                self.check(end)
            if self.core.scheduler.starving:
                self.memory.wait(0.02)
            else:
                time.sleep(max(0.0, self.config.step_s - (time.monotonic() - begun)))  # what a model would take
        elif self.memory.due:
            self.core.step()
        else:
            self.memory.wait(0.02)

    def check(self, end: Any) -> None:
        request = self.expected.pop(end.request_id)
        expected = alone(request.prompt_token_ids, request.sampling.max_new_tokens)
        self.tally.finished += 1
        self.tally.tokens += len(end.token_ids)
        self.tally.preemptions += end.num_preemptions
        if end.reason not in ("stop", "length") or end.token_ids.tolist() != expected:
            self.tally.failed += 1
            self.tally.first_failure = (
                self.tally.first_failure
                or f"{end.request_id}: {end.reason}, {end.error}, {len(end.token_ids)} tokens, {len(expected)} expected"
            )

    def state(self) -> dict[str, Any]:
        scheduler = self.core.scheduler
        return {
            **asdict(self.tally), "mapped": self.host.mapped_bytes, "memory": self.memory.to_dict(),
            "running": scheduler.num_running, "waiting": scheduler.num_waiting, "left": sorted(self.expected)[:3],
            "hit_tokens": scheduler.stats.prefix_lookups.hit_tokens,
        }  # fmt: skip

    def where(self) -> dict[str, int]:
        view = np.frombuffer(self.host.buffer, np.uint8)
        return {"start": view.ctypes.data, "length": len(view)}

    def end(self) -> dict[str, Any]:
        """Give the KV back; the address range stays for who wants to look at it."""
        self.core.scheduler.check_invariants()
        self.core.memory = None
        self.core.runner.arena.close()  # type: ignore[union-attr]
        self.lease.report({"other": psutil.Process().memory_info().rss}, 0)
        return self.state()


def _light(config: str) -> None:
    engine = LightEngine(Light(**json.loads(config)))
    bursts, open_end = False, True
    place = engine.where()
    say({"pid": os.getpid(), "min": engine.lease.min_bytes, **place})
    for line in lines(engine.work):
        match line:
            case "bursts":
                bursts = True
            case "quiet":
                bursts = False
            case "burst":
                engine.burst()
            case "state":
                say(engine.state())
            case "cut":
                engine.lease._link.is_open and engine.lease._link._channel._socket.shutdown(2)  # type: ignore[func-returns-value]
            case "end":
                say(engine.end())
                open_end = False
            case None if not open_end:
                time.sleep(0.01)
        if bursts and time.monotonic() >= engine.burst_at:
            engine.burst()
            engine.burst_at = time.monotonic() + engine.rng.expovariate(1 / WARM_S)
    engine.lease.close()


def _llm(config: str) -> None:
    """`LLM("demo")`. What its requests give alone is known from an engine that shares with nobody, before.

    With `waits` there is no engine before `start DIRECTORY`, which makes one in a process of its own (forked, as the libraries
    take seconds to read); that ends at `end`, so that there may be another.
    """
    from pagetide import LLM, SamplingParams

    given = json.loads(config)
    rng = random.Random(given.get("seed", 0))
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(5, 400))] for _ in range(given.get("prompts", 6))]
    params = SamplingParams(max_new_tokens=given.get("new", 100), temperature=0)
    with LLM("demo", share=False) as before:
        alone = [before.generate(prompt, params, progress=False)[0].token_ids for prompt in prompts]
    tally, bursts = Tally(), False

    def start() -> LLM:
        llm = LLM("demo")
        memory = llm.stats()["memory"]
        lease = memory["lease"] if memory else None
        say({"pid": os.getpid(), "lease": lease, "min": lease["min_bytes"] if lease else None})
        return llm

    def burst() -> None:
        chosen = [rng.randrange(len(prompts)) for _ in range(rng.randint(1, 12))]
        for i, output in zip(chosen, llm.generate([prompts[i] for i in chosen], params, progress=False), strict=True):
            tally.requests += 1
            tally.finished += 1
            tally.tokens += len(output.token_ids)
            tally.preemptions += output.num_preemptions
            if output.finish_reason not in ("stop", "length") or output.token_ids != alone[i]:
                tally.failed += 1
                tally.first_failure = tally.first_failure or f"{output.finish_reason}, {output.error}"

    def work() -> None:
        if bursts:
            burst()
        else:
            time.sleep(0.01)

    if given.get("waits", False):
        say({"pid": os.getpid()})
    else:
        llm = start()
    for line in lines(work):
        match line.split() if line else None:
            case ["start", directory]:
                if (child := os.fork()) != 0:
                    assert os.waitpid(child, 0)[1] == 0, "an engine's process failed"
                    continue
                os.environ["PAGETIDE_RUNTIME_DIR"] = directory
                llm = start()
            case ["bursts"]:
                bursts = True
            case ["quiet"]:
                bursts = False
            case ["burst"]:
                burst()
                say(asdict(tally))
            case ["state"]:
                say({**asdict(tally), "memory": llm.stats()["memory"]})
            case ["end"]:
                bursts = False
                llm.close()
                say(asdict(tally))
                if given.get("waits", False):
                    os._exit(0)


if __name__ == "__main__":
    {"light": _light, "llm": _llm}[sys.argv[1]](sys.argv[2])

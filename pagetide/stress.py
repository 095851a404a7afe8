"""`pagetide stress`: this machine's memory under pressure for a while, live, and a report of what happened.

Two engines with the bundled model share a private device of host memory. Clients ask for completions of random lengths; an
external process, which knows nothing of the engines, takes and returns memory at random; random parts of the pools are
recalled, as `vram-monitor recall` does it; with `kills`, engines are killed and started again, and what they were serving is
repeated. Afterwards an engine with room for all serves the same requests undisturbed, and every token is compared.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import random
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from .allocator.errors import LeaseError
from .common.units import MIB
from .demo.display import Show, fitted, open_display, print_result
from .demo.engines import DemoEngine, DemoOutput, DemoRequest, while_looking
from .demo.page import DemoState, demo_page
from .demo.results import counted
from .demo.shared import (
    CONTENDED_BYTES,
    HEADROOM,
    KV_MAX,
    KV_MIN,
    NAMES,
    Arrival,
    DemoDevice,
    DeviceSample,
    Visitor,
    WatchedDevice,
    engine_options,
    shared_device,
)  # fmt: skip
from .monitor.view.picture import picture
from .monitor.view.symbols import UNICODE
from .version import __version__

CLIENTS = 6  # of each engine
MOST_REQUESTS = 4000  # of each engine
PROMPT_TOKENS, OUTPUT_TOKENS = (10, 800), (1, 128)  # from, to
PAUSE_S, STAY_S, RECALL_S, KILL_S = (0.0, 1.0), (1.0, 5.0), (1.0, 4.0), (8.0, 16.0)  # between two of each
RECALL_BYTES = (1 * MIB, 64 * MIB)
VISIT_LEAVES = 24 * MIB  # for both pools, of the most that the external process takes
PIECE_BYTES = 16 * MIB  # at a time: less than the headroom
LATE_S = 1.0  # beyond the broker's deadline, until a recall counts as unanswered
GROWTH_BYTES = 48 * MIB  # that a program may grow by between the first and the last third
MOST_STARTS = 20  # of an engine that ends
SHOWN_FAULTS = 8
SIZE = (100, 30)  # of the picture, in cells

FIRST_STATE = DemoState(
    title="memory under pressure: two engines and an external process on one device",
    now="Starting two engines, each in a process of its own ...",
    intro="Clients ask two engines for completions of random lengths, while an external process takes and returns memory and "
    "parts of the pools are recalled, all at random. Then the same requests run undisturbed, and the tokens are compared.",
)


@dataclass(frozen=True, slots=True)
class StressReport:
    """What a run gave. `faults` says in words what went wrong; without any it has passed.

    `recall_s` are seconds from each order until the memory was back; `worst_wait_s` is the longest that a piece for the
    external process waited; `longest_gap_s` the longest between two tokens of a request; `growth_bytes` what each engine's
    program grew by, between the medians of the first and the last third.
    """

    seconds: float
    seed: int
    requests: int
    tokens: int
    preemptions: int
    recall_s: tuple[float, ...]
    kills: int
    repeated: int  # requests, after their engine was killed
    pieces: int  # that the external process took
    worst_wait_s: float
    longest_gap_s: float
    growth_bytes: tuple[int, ...]
    most_held_bytes: int
    capacity_bytes: int
    faults: tuple[str, ...]
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """Whether nothing went wrong."""
        return not self.faults

    def lines(self) -> list[str]:
        """The report as text; the first line is the verdict."""
        worst = f", at most {1000 * max(self.recall_s):,.0f} ms" if self.recall_s else ""
        verdict = "PASS: no token changed, no request lost, memory within every limit"
        if not self.has_passed:
            verdict = f"FAIL: {counted(len(self.faults), 'fault')}"
        more = len(self.faults) - SHOWN_FAULTS
        growth = " and ".join(f"{size / MIB:+,.0f} MiB" for size in self.growth_bytes)
        grown = f"; programs grew by {growth}" if growth else ""  # not compared where engines were killed
        return [
            verdict,
            *(f"  {fault}" for fault in self.faults[:SHOWN_FAULTS]),
            *([f"  and {more} more (--json has them)"] if more > 0 else []),
            f"{self.seconds:.0f} s, seed {self.seed}: {counted(self.requests, 'request')}, {self.tokens:,} tokens, "
            f"{counted(self.preemptions, 'preemption')}, {counted(self.kills, 'kill')}",
            f"{counted(len(self.recall_s), 'recall')} ordered{worst}; the external process took "
            f"{counted(self.pieces, 'piece')} and waited at most {1000 * self.worst_wait_s:,.0f} ms for one",
            f"longest gap between two tokens {1000 * self.longest_gap_s:,.0f} ms{grown}",
            f"at most {self.most_held_bytes / MIB:,.0f} of {self.capacity_bytes / MIB:,.0f} MiB were held",
            ", ".join(f"{name} {value}" for name, value in self.machine.items()),
        ]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {"passed": self.has_passed, **asdict(self)}


def run_stress(
    *, seconds: float = 60.0, seed: int = 0, kills: bool = False, as_json: bool = False, image: Path | None = None
) -> int:
    """Run it, print the report, and write the picture to `image`. Returns 0 if it has passed, else 1.

    Raises ValueError for a time below 5 s or without end and for a folder that is not there, ChildProcessError if an engine
    cannot be started.
    """
    if not 5 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 5, for engines to come under pressure, and finite; got {seconds:g}")
    if image is not None and not image.parent.is_dir():
        raise ValueError(
            f"the picture cannot be written to {image}: there is no folder {image.parent}; make it, or name another"
        )
    last = FIRST_STATE
    with open_display(FIRST_STATE, silent=as_json) as show:

        def keep(state: DemoState) -> None:
            nonlocal last
            last = state if state.holdings else last
            show(state)

        report = asyncio.run(under_pressure(keep, seconds=seconds, seed=seed, kills=kills))
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_result(report.lines())
    if image is not None:
        page = fitted(demo_page(last, seconds, *SIZE, UNICODE), *SIZE)
        image.write_text(picture(page, *SIZE, "pagetide stress", report.lines()[0]), encoding="utf-8")
    return 0 if report.has_passed else 1


async def under_pressure(show: Show, *, seconds: float, seed: int, kills: bool = False) -> StressReport:
    """Start the processes, disturb them for `seconds`, and compare with an undisturbed run."""
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(shared_device(KV_MIN, KV_MAX, CONTENDED_BYTES, HEADROOM))
        run = StressRun(shared, seed, stack)
        traces = [[run.arrival() for _ in range(MOST_REQUESTS)] for _ in NAMES]
        run.waiting = [iter(own) for own in await shared.requests(traces, seed)]
        visitor = Visitor(shared.device, shared.external, PIECE_BYTES, 0.0)
        state = replace(FIRST_STATE, capacity_bytes=shared.device.capacity_bytes)
        watched = WatchedDevice(show, state, run.engines, run.requests)
        ends_at = time.monotonic() + seconds
        for engine in run.engines:
            engine.began = time.monotonic()

        async def look() -> None:
            most_bytes = watched.state.contended_bytes - HEADROOM - VISIT_LEAVES
            visitor.advance(time.monotonic(), run.wanted_bytes(ends_at, max(0, most_bytes)))
            if run.starting:
                return  # its process is not there to be measured
            try:
                for engine in run.engines:
                    await engine.look()
                sample = shared.sample()
            except ChildProcessError:
                return  # killed in between; its clients start it again
            run.samples.append(sample)
            run.check_leases()
            watched.take(sample)

        await while_looking(run.disturbed(ends_at, kills), look)
        shared.external.hold(0)
        for number, own in enumerate(run.requests):
            again = shared.roomy.serve([replace(one, at_s=0.0) for one in own])
            right = await while_looking(again, lambda: watched.compare(shared.roomy))
            run.faults += faults_of(NAMES[number], run.outputs[number], right)
    return run.report(seconds, visitor)


class StressRun:
    """The engines under pressure, and what is seen of them. `requests` and `outputs` are those of each engine, in order."""

    def __init__(self, shared: DemoDevice, seed: int, stack: AsyncExitStack) -> None:
        self.engines = list(shared.engines)
        self.requests: list[list[DemoRequest]] = [[] for _ in NAMES]
        self.outputs: list[list[DemoOutput | None]] = [[] for _ in NAMES]
        self.waiting: list[Any] = []
        self.samples: list[DeviceSample] = []
        self.faults: list[str] = []
        self.starting = 0
        self._shared, self._seed, self._stack = shared, seed, stack
        self._rng = random.Random(seed)
        self._wanted, self._wanted_until = 0, 0.0
        self._locks = [asyncio.Lock() for _ in NAMES]
        self._starts = [0 for _ in NAMES]
        self._recall_s: list[float] = []
        self._killed: set[int] = set()
        self._repeated = self._preemptions = 0
        self._over: set[int] = set()  # leases that held more than they were granted at the last look

    def arrival(self) -> Arrival:
        """A request of random lengths."""
        return Arrival(0.0, self._rng.randint(*PROMPT_TOKENS), self._rng.randint(*OUTPUT_TOKENS))

    def wanted_bytes(self, ends_at: float, most_bytes: int) -> int:
        """What the external process wants now: another amount from time to time, nothing at the end."""
        now = time.monotonic()
        if now >= self._wanted_until and most_bytes:
            self._wanted, self._wanted_until = self._rng.randint(0, most_bytes), now + self._rng.uniform(*STAY_S)
        return self._wanted if now < ends_at else 0

    def check_leases(self) -> None:
        """Note engines that hold more than their lease grants, outside of a recall, at two looks in a row."""
        over = {}
        for lease in self._shared.device.leases():
            if lease.state == "ok" and lease.recall_target_bytes is None and lease.held_bytes > lease.granted_bytes:
                over[lease.lease_id] = lease
        for lease in (over[number] for number in self._over & over.keys()):
            self.faults.append(f"{lease.name} held {lease.held_bytes:,} bytes, and its lease granted {lease.granted_bytes:,}")
        self._over = set(over)

    async def disturbed(self, ends_at: float, kills: bool) -> None:
        """Serve clients, recall and kill until `ends_at`, and then what is still running."""
        others = [asyncio.ensure_future(self._recalls())]
        if kills:
            others.append(asyncio.ensure_future(self._kills()))
        try:
            clients = [self._client(number, ends_at) for number in range(len(NAMES)) for _ in range(CLIENTS)]
            await asyncio.gather(*clients)
        finally:
            for other in others:
                other.cancel()
            ended = await asyncio.gather(*others, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        self._preemptions += sum(engine.stats["preemptions"] for engine in self.engines)

    async def _client(self, number: int, ends_at: float) -> None:
        while time.monotonic() < ends_at and (request := next(self.waiting[number], None)) is not None:
            place = len(self.requests[number])
            self.requests[number].append(request)
            self.outputs[number].append(None)
            self.outputs[number][place] = await self._served(number, request)
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))

    async def _served(self, number: int, request: DemoRequest) -> DemoOutput:
        while True:
            engine = self.engines[number]
            try:
                (output,) = await engine.serve([request])
                return output
            except ChildProcessError as error:
                await self._start_again(number, engine, error)
                self._repeated += 1

    async def _start_again(self, number: int, ended: DemoEngine, error: ChildProcessError) -> None:
        """Put another engine in the place of one that has ended, once for all of its clients."""
        async with self._locks[number]:
            if self.engines[number] is not ended:
                return
            self._starts[number] += 1
            if ended.pid not in self._killed:
                self.faults.append(f"{NAMES[number]} ended by itself: {error}")
            if self._starts[number] > MOST_STARTS:
                raise error
            self.starting += 1
            try:
                self._preemptions += ended.stats.get("preemptions", 0)
                again = await DemoEngine.start(NAMES[number], *engine_options(self._shared.device, KV_MIN, KV_MAX))
                self._stack.push_async_callback(again.close)
                await again.look()
                again.began = ended.began
                self.engines[number] = again
                self._shared.engines[number] = again
            finally:
                self.starting -= 1

    async def _recalls(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*RECALL_S))
            number, size = self._rng.randrange(len(NAMES)), self._rng.randint(*RECALL_BYTES)
            await asyncio.to_thread(self._recall, number, self.engines[number].pid, size)

    def _recall(self, number: int, pid: int, num_bytes: int) -> None:
        client, began = self._shared.device.client, time.monotonic()
        try:
            order = client.recall(str(pid), num_bytes)
            while any(one.pid == pid and one.held_bytes > order.target_bytes for one in client.leases()):
                if time.monotonic() > began + order.deadline_ms / 1000 + LATE_S:
                    if pid not in self._killed:
                        self.faults.append(f"{NAMES[number]} did not give {num_bytes:,} bytes back in {order.deadline_ms:,} ms")
                    return
                time.sleep(0.005)
        except LeaseError:  # the engine has ended, or starts
            return
        self._recall_s.append(time.monotonic() - began)

    async def _kills(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*KILL_S))
            pid = self._rng.choice(self.engines).pid
            if pid not in self._killed and not self.starting:
                self._killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    def report(self, seconds: float, visitor: Visitor) -> StressReport:
        """The figures, with what went wrong."""
        capacity, outputs = self._shared.device.capacity_bytes, [one for own in self.outputs for one in own if one is not None]
        held = max((sample.held_bytes for sample in self.samples), default=0)
        faults = list(dict.fromkeys(self.faults))
        if held > capacity:
            faults.append(f"{held:,} bytes were held of a device of {capacity:,}")
        growth = () if self._killed else growths(self.samples)
        for name, size in zip(NAMES, growth, strict=False):
            if size > GROWTH_BYTES:
                faults.append(f"the program of {name} grew by {size / MIB:,.0f} MiB while it served")
        return StressReport(
            seconds, self._seed, sum(map(len, self.requests)), sum(len(one.token_ids) for one in outputs), self._preemptions,
            tuple(self._recall_s), len(self._killed), self._repeated, visitor.pieces, visitor.worst_wait_s,
            max((one.longest_gap_s for one in outputs), default=0.0), growth, held, capacity, tuple(faults), machine(),
        )  # fmt: skip


def faults_of(name: str, outputs: Sequence[DemoOutput | None], right: Sequence[DemoOutput]) -> list[str]:
    """What is wrong with an engine's outputs, compared with the undisturbed ones."""
    found = []
    for number, (ours, theirs) in enumerate(zip(outputs, right, strict=True)):
        what = f"{name}, request {number}"
        if theirs.is_failed:
            found.append(f"{what}: it was not served undisturbed ({theirs.finish_reason or 'no end'})")
        elif ours is None or ours.is_failed:
            found.append(f"{what}: it was lost ({'no answer' if ours is None else ours.finish_reason or 'no end'})")
        elif ours.token_ids != theirs.token_ids:
            pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
            at = next((at for at, (one, other) in pairs if one != other), min(len(ours.token_ids), len(theirs.token_ids)))
            one, other = (str(ids[at]) if at < len(ids) else "none" for ids in (ours.token_ids, theirs.token_ids))
            found.append(f"{what}: token {at} is {one}, undisturbed {other}")
    return found


def growths(samples: Sequence[DeviceSample]) -> tuple[int, ...]:
    """What each program grew by, without its pool, between the medians of the first and the last third of `samples`."""
    third = len(samples) // 3
    if not third:
        return ()
    of_engines = zip(*(sample.other for sample in samples), strict=True)
    return tuple(int(median(own[-third:]) - median(own[:third])) for own in of_engines)


def machine() -> dict[str, Any]:
    """Where it ran, for the report."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {
        "pagetide": __version__, **packages, "Python": platform.python_version(), "Linux": platform.release(),
        platform.machine(): f"{os.cpu_count()} cores",
    }  # fmt: skip

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
from .demo.engines import SAMPLE_S, DemoEngine, DemoOutput, DemoRequest, while_looking
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
    WatchedDevice,
    engine_options,
    shared_device,
)  # fmt: skip
from .engine.self_check.identity import driver_version
from .monitor.view.picture import picture
from .monitor.view.symbols import UNICODE
from .pressure import Card
from .scene import LeaseWatch, Scene, Swing
from .version import __version__

CLIENTS = 6  # of each engine
MOST_REQUESTS = 4000  # of each engine
PROMPT_TOKENS, OUTPUT_TOKENS = (10, 800), (1, 128)  # from, to
PAUSE_S, RECALL_S, KILL_S = (0.0, 1.0), (1.0, 4.0), (8.0, 16.0)  # between two of each
RECALL_BYTES = (1 * MIB, 64 * MIB)
VISIT_LEAVES = 24 * MIB  # for both pools, of the most that the external process takes
SWING = Swing(16 * MIB, 0.1, patience_s=30.0)  # an engine that starts may hold up a piece for seconds
SETTLE_S = 0.2  # until the monitor has measured a card again
LATE_S = 120.0  # without a token, after the time of pressure, until requests without an end are lost
LOOK_S = 5.0  # for the statistics of engines, of which one may hang
GROWTH_BYTES = 48 * MIB  # that a program may grow by between the first and the last third
MOST_STARTS = 20  # of an engine that ends
SHOWN_FAULTS = 8
TIE = 1e-3  # between log-probabilities of tokens that are equally likely but for rounding
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
    ties: int = 0  # requests that went another way where two tokens were equally likely, on a card
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
        ties = f"; {counted(self.ties, 'request')} went another way where two tokens were equally likely" if self.ties else ""
        grown = f"; programs grew by {growth}" if growth else ""  # not compared where engines were killed
        return [
            verdict,
            *(f"  {fault}" for fault in self.faults[:SHOWN_FAULTS]),
            *([f"  and {more} more (--json has them)"] if more > 0 else []),
            f"{self.seconds:.0f} s, seed {self.seed}: {counted(self.requests, 'request')}, {self.tokens:,} tokens, "
            f"{counted(self.preemptions, 'preemption')}, {counted(self.kills, 'kill')}",
            f"{counted(len(self.recall_s), 'recall')} ordered{worst}; the external process took "
            f"{counted(self.pieces, 'piece')} and waited at most {1000 * self.worst_wait_s:,.0f} ms for one",
            f"longest gap between two tokens {1000 * self.longest_gap_s:,.0f} ms{grown}{ties}",
            f"at most {self.most_held_bytes / MIB:,.0f} of {self.capacity_bytes / MIB:,.0f} MiB were held",
            ", ".join(f"{name} {value}" for name, value in self.machine.items()),
        ]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {"passed": self.has_passed, **asdict(self)}


def run_stress(
    *,
    seconds: float = 60.0,
    seed: int = 0,
    device: str = "cpu",
    kills: bool = False,
    as_json: bool = False,
    image: Path | None = None,
) -> int:
    """Run it, print the report, and write the picture to `image`. Returns 0 if it has passed, else 1.

    `device`: see `ExternalProcess`. Raises ValueError for a time below 5 s or without end, a device and a folder that are not
    there, ChildProcessError if an engine cannot be started.
    """
    if not 5 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 5, for engines to come under pressure, and finite; got {seconds:g}")
    if image is not None and (image.is_dir() or not image.parent.is_dir()):
        what = "that is a folder" if image.is_dir() else f"there is no folder {image.parent}"
        raise ValueError(f"the picture cannot be written to {image}: {what}; make or name another")
    last = FIRST_STATE
    with open_display(FIRST_STATE, silent=as_json) as show:

        def keep(state: DemoState) -> None:
            nonlocal last
            last = state if state.holdings else last
            show(state)

        report = asyncio.run(under_pressure(keep, seconds=seconds, seed=seed, kills=kills, device=device))
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_result(report.lines())
    if image is not None:
        page = fitted(demo_page(last, seconds, *SIZE, UNICODE), *SIZE)
        image.write_text(picture(page, *SIZE, "pagetide stress", report.lines()[0]), encoding="utf-8")
    return 0 if report.has_passed else 1


async def under_pressure(show: Show, *, seconds: float, seed: int, kills: bool = False, device: str = "cpu") -> StressReport:
    """Start the processes, disturb them for `seconds`, and compare with an undisturbed run."""
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(shared_device(KV_MIN, KV_MAX, CONTENDED_BYTES, HEADROOM, device))
        run = StressRun(shared, seed, stack)
        traces = [[run.arrival() for _ in range(MOST_REQUESTS)] for _ in NAMES]
        run.waiting = [iter(own) for own in await shared.requests(traces, seed)]
        state = replace(FIRST_STATE, capacity_bytes=shared.device.capacity_bytes)
        watched = WatchedDevice(show, state, run.engines, run.requests)
        await asyncio.to_thread(run.crowd)
        ends_at = time.monotonic() + seconds
        for engine in run.engines:
            engine.began = time.monotonic()

        async def look() -> None:
            run.look_at_monitor()
            if run.scene.loading:
                return  # its process is not there to be measured
            try:
                async with asyncio.timeout(LOOK_S):
                    for engine in run.engines:
                        await engine.look()
                sample = shared.sample()
            except (ChildProcessError, TimeoutError, LeaseError):
                return  # killed in between; its clients start it again. Or it hangs, or there is no broker: faults say so
            run.samples.append(sample)
            watched.take(sample)

        with LeaseWatch(run.scene, SAMPLE_S):
            await while_looking(run.disturbed(ends_at, kills), look)
        run.scene.let_go()
        for number, own in enumerate(run.requests):
            again = shared.roomy.serve([replace(one, at_s=0.0) for one in own])
            right = await while_looking(again, lambda: watched.compare(shared.roomy))
            if shared.device.card is not None:
                own_outputs = await without_ties(shared.roomy, run.outputs[number], right)
                run.ties += sum(one is not other for one, other in zip(own_outputs, run.outputs[number], strict=True))
                run.outputs[number] = own_outputs
            run.scene.faults += faults_of(NAMES[number], run.outputs[number], right)
    return run.report(seconds)


class StressRun:
    """The engines of a scene, and what is seen of them. `requests` and `outputs` are those of each engine, in order."""

    def __init__(self, shared: DemoDevice, seed: int, stack: AsyncExitStack) -> None:
        self.scene = Scene(shared.device, [shared.external], seed)
        self.scene.engines = {engine.pid: engine.name for engine in shared.engines}
        self.engines = list(shared.engines)
        self.requests: list[list[DemoRequest]] = [[] for _ in NAMES]
        self.outputs: list[list[DemoOutput | None]] = [[] for _ in NAMES]
        self.waiting: list[Any] = []
        self.samples: list[DeviceSample] = []
        self._shared, self._seed, self._stack = shared, seed, stack
        self._rng = random.Random(seed)
        self._least_bytes = 0  # that the external process keeps
        self._locks = [asyncio.Lock() for _ in NAMES]
        self._starts = [0 for _ in NAMES]
        self._killed: set[int] = set()
        self.ties = self._repeated = self._preemptions = 0

    def arrival(self) -> Arrival:
        """A request of random lengths."""
        return Arrival(0.0, self._rng.randint(*PROMPT_TOKENS), self._rng.randint(*OUTPUT_TOKENS))

    def crowd(self) -> None:
        """On a card, have the external process hold what is not to be contended for, until the end."""
        device, (external, *_) = self._shared.device, self.scene.externals
        if device.card is None:
            return
        while (spare := device.free_bytes() - device.headroom_bytes - CONTENDED_BYTES) > SWING.piece_bytes:
            before = external.held_bytes
            external.hold(before + spare // 2)
            time.sleep(SETTLE_S)
            if external.held_bytes == before:  # its driver has refused it
                break
        self._least_bytes = external.held_bytes

    async def disturbed(self, ends_at: float, kills: bool) -> None:
        """Serve clients, take memory, recall and kill until `ends_at`, and then serve what is still running."""
        first, device = self._shared.sample(), self._shared.device
        room = device.capacity_bytes - sum(first.other) - first.external - device.headroom_bytes - VISIT_LEAVES
        most_bytes = self._least_bytes + max(0, room)
        swing = asyncio.to_thread(self._swing, ends_at, most_bytes)
        served = asyncio.ensure_future(self._serve_clients(ends_at))  # not to start engines again after an error of the swing
        others = [served, asyncio.ensure_future(self._recalls())]
        if kills:
            others.append(asyncio.ensure_future(self._kills()))
        try:
            await asyncio.gather(swing, served)
        finally:
            self.scene.end()
            for other in others:
                other.cancel()
            ended = await asyncio.gather(*others, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        self._preemptions += sum(engine.stats.get("preemptions", 0) for engine in self.engines)

    def _swing(self, ends_at: float, most_bytes: int) -> None:
        """The external process comes and goes, and is gone at the end: an engine that was killed may be starting."""
        self.scene.swing(ends_at, self._least_bytes, most_bytes, SWING)
        self.scene.externals[0].hold(self._least_bytes)

    def look_at_monitor(self) -> None:
        """Name the end of the monitor as a fault."""
        if (how := self._shared.device.monitor_ended) is not None and (fault := f"the monitor {how}") not in self.scene.faults:
            self.scene.faults.append(fault)

    async def _serve_clients(self, ends_at: float) -> None:
        """Serve clients until all have ended, or no token comes any more: what is not served then is lost, its output None."""
        clients = asyncio.gather(*(self._client(number, ends_at) for number in range(len(NAMES)) for _ in range(CLIENTS)))
        tokens, late_at = -1, math.inf
        try:
            while not clients.done() and time.monotonic() < late_at:
                await asyncio.wait([clients], timeout=SAMPLE_S)
                before, tokens = tokens, sum(len(one.token_ids) for engine in self.engines for one in engine.outputs)
                if tokens != before or self.scene.loading:
                    late_at = max(time.monotonic(), ends_at) + LATE_S
            if clients.done():
                clients.result()
        finally:
            clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)

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
            self.scene.engines.pop(ended.pid, None)
            if ended.pid not in self._killed:
                self.scene.faults.append(f"{NAMES[number]} ended by itself: {error}")
            if self._starts[number] > MOST_STARTS:
                raise error
            self.scene.loading += 1
            try:
                self._preemptions += ended.stats.get("preemptions", 0)
                again = await DemoEngine.start(NAMES[number], *engine_options(self._shared.device, KV_MIN, KV_MAX))
                self._stack.push_async_callback(again.close)
                await again.look()
                again.began = ended.began
                self.engines[number] = again
                self._shared.engines[number] = again
                self.scene.engines[again.pid] = again.name
            except ValueError as refused:  # there was no room for it; its clients try again
                self.scene.faults.append(f"{NAMES[number]} could not be started again: {refused}")
            finally:
                self.scene.loading -= 1

    async def _recalls(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*RECALL_S))
            number, size = self._rng.randrange(len(NAMES)), self._rng.randint(*RECALL_BYTES)
            await asyncio.to_thread(self.scene.recall, self.engines[number].pid, size)

    async def _kills(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*KILL_S))
            pid = self._rng.choice(self.engines).pid
            if pid not in self._killed and not self.scene.loading:
                self._killed.add(pid)
                self.scene.engines.pop(pid, None)
                os.kill(pid, signal.SIGKILL)

    def report(self, seconds: float) -> StressReport:
        """The figures, with what went wrong."""
        capacity, outputs = self._shared.device.capacity_bytes, [one for own in self.outputs for one in own if one is not None]
        held = max((sample.held_bytes for sample in self.samples), default=0)
        faults = list(dict.fromkeys(self.scene.faults))
        if held > capacity:
            faults.append(f"{held:,} bytes were held of a device of {capacity:,}")
        growth = () if self._killed or any(self._starts) else growths(self.samples)
        for name, size in zip(NAMES, growth, strict=False):
            if size > GROWTH_BYTES:
                faults.append(f"the program of {name} grew by {size / MIB:,.0f} MiB while it served")
        return StressReport(
            seconds, self._seed, sum(map(len, self.requests)), sum(len(one.token_ids) for one in outputs), self._preemptions,
            tuple(self.scene.recall_s), len(self._killed), self._repeated, self.scene.pieces, self.scene.worst_wait_s,
            max((one.longest_gap_s for one in outputs), default=0.0), growth, held, capacity, tuple(faults),
            self.ties, machine(self._shared.device.card),
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


async def without_ties(
    roomy: DemoEngine, outputs: Sequence[DemoOutput | None], right: Sequence[DemoOutput]
) -> list[DemoOutput | None]:
    """The outputs, with the undisturbed ones in place of those that leave these where two tokens are equally likely.

    On a card the sums of a row depend on the rows beside it, by rounding: which of two such tokens is taken is chance.
    """
    found = list(outputs)
    for number, (ours, theirs) in enumerate(zip(outputs, right, strict=True)):
        if ours is None or ours.is_failed or theirs.is_failed or len(ours.token_ids) != len(theirs.token_ids):
            continue
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        at, pair = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (0, ()))
        if not pair:
            continue
        prompt = [*theirs.prompt, *theirs.token_ids[:at]]
        (again,) = await roomy.serve([DemoRequest(prompt, {"max_new_tokens": 1, "temperature": 0.0, "logprobs": 5})])
        likely = {token_id: logprob for score in again.scores for token_id, _, logprob in score.top}
        if set(pair) <= likely.keys() and abs(likely[pair[0]] - likely[pair[1]]) < TIE:
            found[number] = theirs
    return found


def growths(samples: Sequence[DeviceSample]) -> tuple[int, ...]:
    """What each program grew by, without its pool, between the medians of the first and the last third of `samples`."""
    third = len(samples) // 3
    if not third:
        return ()
    of_engines = zip(*(sample.other for sample in samples), strict=True)
    return tuple(int(median(own[-third:]) - median(own[:third])) for own in of_engines)


def machine(card: Card | None = None) -> dict[str, Any]:
    """Where it ran, for the report."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    device = {"on": "host memory"} if card is None else {"on": card.name, "CUDA": card.cuda, "driver": driver_version()}
    return {
        "pagetide": __version__, **packages, "Python": platform.python_version(), "Linux": platform.release(),
        platform.machine(): f"{os.cpu_count()} cores", **device,
    }  # fmt: skip

"""`pagetide demo --shared`: two engines and an external process on one private device of host memory, live.

Each engine is a process with one core that serves bursts of requests; the bursts alternate. The external process takes
and returns memory and knows nothing of the engines. The pools grow where requests need memory and give back where it is
recalled or idle. Afterwards each engine serves the same requests with room for all, and the tokens are compared.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.units import MIB
from ..pressure import ExternalProcess, PrivateDevice
from .device_use import DeviceSample, Visitor, sample_device
from .display import Display, open_display, print_result
from .engine_process import Arrival, EngineJob, TraceEngineProcess
from .results import counted
from .shared_view import COLUMN_S, SHARED_DRAWINGS, EngineCounts, Holding, SharedState

NAMES = ("engine A", "engine B")
Bursts = Sequence[tuple[float, int]]
BURSTS: tuple[Bursts, ...] = (((2.2, 9), (11.0, 7)), ((5.5, 9), (14.0, 7)))  # of each engine: second, requests
PROMPT_TOKENS, OUTPUT_TOKENS = (350, 750), (20, 48)  # from, to
SECONDS = 18.0  # that the live part lasts at least; the broker forgets in the first two how the processes grew at their start
CONTENDED_BYTES = 280 * MIB  # above the engines' minimums; an engine that loads needs some 200 MiB of it for a moment
VISIT_BYTES = 240 * MIB  # what the external process takes when it comes: more than a burst's pool leaves
# It comes when the pools have grown to so much, which any burst alone needs, however fast the machine serves it.
VISIT_FROM_KV, VISIT_S, BETWEEN_S, MOST_VISITS = 28 * MIB, 5.0, 4.0, 2
PIECE_BYTES, PIECE_S = 8 * MIB, 0.05  # of the external process, less than the headroom; and the time between two
KV_MIN, KV_MAX = 8 * MIB, 128 * MIB
HEADROOM = 48 * MIB  # more than two busy programs grow by at once, beyond what the broker sees in time
SAMPLE_S = 0.1
RECALL_SHOWN_S = 1.0
_START_S = 0.2
MOST_COLUMNS = 2000


@dataclass(frozen=True, slots=True)
class SharedResult:
    """What was seen, and what each engine told at its end."""

    capacity_bytes: int
    most_held_bytes: int
    most_kv_bytes: tuple[int, ...]
    most_external_bytes: int
    pieces: int  # that the external process took
    waits: int  # how often one did not fit at once
    engines: tuple[dict[str, Any], ...]

    @property
    def is_success(self) -> bool:
        """Whether all requests were served with the same tokens, and memory stayed within the limit."""
        return not (self._sum("failed") or self._sum("changed_tokens") or self.is_above)

    @property
    def is_above(self) -> bool:
        """Whether more memory was held than the device has."""
        return self.most_held_bytes > self.capacity_bytes

    def lines(self) -> list[str]:
        """Four lines; the last is the claim."""
        pools = " and ".join(f"{most / MIB:,.0f} MiB" for most in self.most_kv_bytes)
        recalls = sum(one["memory"]["recalls"] for one in self.engines)
        returned = sum(one["memory"]["given_back_bytes"] for one in self.engines)
        return [
            f"{counted(self._sum('requests'), 'request')}, {self._sum('tokens'):,} tokens; the pools grew to {pools}",
            f"{counted(recalls, 'recall')}, {self._sum('preemptions')} preemptions, {returned / MIB:,.0f} MiB given back; "
            f"external: {self.most_external_bytes / MIB:,.0f} MiB",
            f"at most {self.most_held_bytes / MIB:,.0f} of {self.capacity_bytes / MIB:,.0f} MiB were held at any time",
            self.claim(),
        ]

    def claim(self) -> str:
        """What the demo shows, as it was in this run."""
        failed = self._sum("failed")
        served = f"{counted(self._sum('requests') - failed, 'request')} served, {failed or 'none'} failed"
        limit = "memory above the limit" if self.is_above else "memory never above the limit"
        return f"{served}, {counted(self._sum('changed_tokens'), 'token')} changed, {limit}"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "capacity_bytes": self.capacity_bytes,
            "most_held_bytes": self.most_held_bytes,
            "most_kv_bytes": list(self.most_kv_bytes),
            "external": {"most_bytes": self.most_external_bytes, "pieces": self.pieces, "waits": self.waits},
            "engines": [{"name": name, **told} for name, told in zip(NAMES, self.engines, strict=True)],
            "claim": self.claim(),
        }

    def _sum(self, name: str) -> int:
        return sum(int(one[name]) for one in self.engines)


FIRST_STATE = SharedState(
    now="Starting two engines, each in a process of its own ...",
    intro="Two engines will serve bursts of requests in turn, on one device whose memory does not suffice for both and an "
    "external process. Each pool grows while its engine has work, and gives back memory when the other engine or the "
    "external process needs it. Then the same requests run with room for all, and the tokens are compared.",
)


def run_shared(*, seed: int = 0, as_json: bool = False) -> int:
    """Run it. Returns 0 if every request was served, no token changed and memory stayed within the limit, else 1.

    Raises ChildProcessError if a process ends early; then all end.
    """
    with open_display(FIRST_STATE, SHARED_DRAWINGS, silent=as_json) as display:
        result = share_device(display, seed=seed)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        print_result(result.lines())
    return 0 if result.is_success else 1


def engine_jobs(seed: int, bursts_of_engines: Sequence[Bursts] = BURSTS) -> list[EngineJob]:
    """The requests of each engine."""
    rng = random.Random(seed)
    return [
        EngineJob(
            [
                Arrival(at_s, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS))
                for at_s, requests in bursts
                for _ in range(requests)
            ],
            seed + 100_000 * number,
            KV_MIN,
            KV_MAX,
        )
        for number, bursts in enumerate(bursts_of_engines)
    ]


@contextlib.contextmanager
def engine_processes(all_jobs: Sequence[EngineJob]) -> Iterator[list[TraceEngineProcess]]:
    """The processes of both engines, which end with the context."""
    with contextlib.ExitStack() as stack:
        engines = []
        for name, job in zip(NAMES, all_jobs, strict=False):
            engines.append(TraceEngineProcess(name, job))
            stack.callback(engines[-1].close)
        yield engines


def share_device(
    display: Display[SharedState], *, seed: int = 0, seconds: float = SECONDS, bursts: Sequence[Bursts] = BURSTS
) -> SharedResult:
    """Start the processes on their device, watch them for at least `seconds`, and collect the results."""
    state, all_jobs = FIRST_STATE, engine_jobs(seed, bursts)
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(engine_processes(all_jobs))
        external = stack.enter_context(ExternalProcess())
        minimums = [int(engine.hear()["minimum_bytes"]) for engine in engines]
        capacity = sum(minimums) + CONTENDED_BYTES + HEADROOM
        device = stack.enter_context(PrivateDevice(capacity, HEADROOM, external))
        display.show(state := replace(state, now="The engines take their minimum of the device ..."))
        for engine in engines:
            engine.tell(device.environ)
        for engine in engines:
            engine.hear()
        state = replace(state, capacity_bytes=capacity)
        watched = SharedRun(display, state, engines, [len(job.arrivals) for job in all_jobs])
        visitor = Visitor(device, external, PIECE_BYTES, PIECE_S)
        watched.watch(device, external, visitor, seconds)
        return watched.result(visitor, watched.compare())


@dataclass(eq=False)
class SharedRun:
    """The live part as the display sees it."""

    display: Display[SharedState]
    state: SharedState
    engines: Sequence[TraceEngineProcess]
    totals: Sequence[int]  # requests of each engine
    _samples: list[DeviceSample] = field(default_factory=list)
    _served: set[int] = field(default_factory=set)
    _column: int = -1
    _recalled_at: dict[int, float] = field(default_factory=dict)  # when each engine was last seen being recalled
    _visits: list[float] = field(default_factory=list)  # when the external process came

    def watch(self, device: PrivateDevice, external: ExternalProcess, visitor: Visitor, seconds: float) -> None:
        """Start the bursts; sample, and move the external process, until the engines are done."""
        pids = [engine.pid for engine in self.engines]
        self.state = replace(self.state, engines=tuple(EngineCounts(total=total) for total in self.totals))
        began = time.monotonic() + _START_S
        for engine in self.engines:
            engine.tell(began)
        at_s = 0.0
        while len(self._served) < len(self.engines) or at_s < seconds or external.held_bytes:
            at_s = time.monotonic() - began
            visitor.advance(at_s, self._wanted(at_s))
            self._show(sample_device(at_s, pids, device, external), [self._counts(number) for number in range(len(pids))])
            time.sleep(SAMPLE_S)

    def compare(self) -> tuple[dict[str, Any], ...]:
        """Let the engines serve the same with room for all, and show how far they are. Returns what each told at its end."""
        counts = [replace(one, done=0) for one in self.state.engines]
        self.state = replace(self.state, now="The same again with room for all, to compare tokens ...", alarm=False)
        told = dict[int, dict[str, Any]]()
        for engine in self.engines:
            engine.tell("compare")
        while len(told) < len(self.engines):
            for number, engine in enumerate(self.engines):
                for message in engine.poll():
                    if "progress" in message:
                        counts[number] = replace(counts[number], **message["progress"])
                    else:
                        told[number] = message
            self.state = replace(self.state, engines=tuple(counts))
            self.display.show(self.state)
            time.sleep(SAMPLE_S)
        return tuple(told[number] for number in range(len(self.engines)))

    def result(self, visitor: Visitor, told: tuple[dict[str, Any], ...]) -> SharedResult:
        """The figures of the run."""
        kv = zip(*(sample.kv for sample in self._samples), strict=True)
        return SharedResult(
            capacity_bytes=self.state.capacity_bytes,
            most_held_bytes=max(sample.held_bytes for sample in self._samples),
            most_kv_bytes=tuple(max(one) for one in kv),
            most_external_bytes=max(sample.external for sample in self._samples) - self._samples[0].external,
            pieces=visitor.pieces,
            waits=visitor.refused,
            engines=told,
        )

    def _wanted(self, at_s: float) -> int:
        """What the external process wants now: it comes when the pools have grown, and leaves after a while."""
        last = self._visits[-1] if self._visits else -BETWEEN_S - VISIT_S
        if at_s < last + VISIT_S:
            return VISIT_BYTES
        grown = self._samples and sum(self._samples[-1].kv) >= VISIT_FROM_KV
        if grown and at_s >= last + VISIT_S + BETWEEN_S and len(self._visits) < MOST_VISITS:
            self._visits.append(at_s)
            return VISIT_BYTES
        return 0

    def _counts(self, number: int) -> EngineCounts:
        """The newest numbers of an engine. Raises ChildProcessError if its process has ended."""
        counts = self.state.engines[number]
        for message in self.engines[number].poll():
            if "served" in message:
                self._served.add(number)
                counts = replace(counts, running=0, waiting=0, done=self.totals[number])
            else:
                counts = replace(counts, **message["progress"])
        return counts

    def _show(self, sample: DeviceSample, counts: list[EngineCounts]) -> None:
        self._samples.append(sample)
        first = self._samples[0]
        recalled = tuple(
            is_recalled or one.recalls > before.recalls
            for is_recalled, one, before in zip(sample.recalling, counts, self.state.engines, strict=True)
        )
        self._recalled_at |= {number: sample.at_s for number, is_recalled in enumerate(recalled) if is_recalled}
        programs = max(0, sum(sample.other) - sum(first.other))
        holding = Holding(programs, sample.kv, max(0, sample.external - first.external), recalled)
        holdings, column = self.state.holdings, int(sample.at_s / COLUMN_S)
        if holdings and column == self._column:  # a recall stays marked for its column
            marked = tuple(now or before for now, before in zip(recalled, holdings[-1].recalled, strict=True))
            holdings, holding = holdings[:-1], replace(holding, recalled=marked)
        self._column = column
        shown = [number for number, at_s in self._recalled_at.items() if sample.at_s < at_s + RECALL_SHOWN_S]
        self.state = replace(
            self.state,
            now=_now(shown, holding, counts),
            alarm=bool(shown),
            engines=tuple(counts),
            contended_bytes=self.state.capacity_bytes - sum(first.other) - first.external,
            holdings=(*holdings, holding)[-MOST_COLUMNS:],
        )
        self.display.show(self.state)


def _now(recalled: Sequence[int], holding: Holding, counts: Sequence[EngineCounts]) -> str:
    """What happens, in a sentence."""
    if recalled:
        return f"RECALL: {' and '.join(NAMES[number] for number in sorted(recalled))} must give memory back."
    if holding.external > MIB:
        return "The external process holds memory; the engines share the rest."
    busy = [name for name, one in zip(NAMES, counts, strict=True) if one.running or one.waiting]
    if not busy:
        return "Idle: pools give their memory back."
    names = " and ".join(busy)
    return f"{names[0].upper()}{names[1:]} {'has' if len(busy) == 1 else 'have'} requests: pools grow as these need memory."

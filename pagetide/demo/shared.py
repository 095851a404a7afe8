"""`pagetide demo --shared`: two engines and an external process on one private device of host memory, live.

Each engine has one core and serves bursts of requests; the bursts alternate. The external process takes
and returns memory and knows nothing of the engines. On a fast machine a burst's clients go on asking until it has come and
memory was recalled. The pools grow where requests need memory and give back where it is
recalled or idle. Afterwards an engine with room for all serves the same requests, and the tokens are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.units import MIB
from ..monitor.sources.process_facts import resident_bytes
from ..pressure import ExternalProcess, PrivateDevice
from .display import Show, open_display, print_result
from .engines import SAMPLE_S, DemoEngine, DemoRequest, start_with_room, while_looking
from .page import COLUMN_S, Counts, DemoState, Holding
from .results import EngineRun, SharedResult
from .run import passages

NAMES = ("engine A", "engine B")
Bursts = Sequence[tuple[float, int]]
BURSTS: tuple[Bursts, ...] = (((2.2, 9), (11.0, 7)), ((5.5, 9), (14.0, 7)))  # of each engine: second, requests
PROMPT_TOKENS, OUTPUT_TOKENS = (350, 750), (20, 48)  # from, to
# That the live part lasts at least; the broker forgets in the first two how the processes grew at their start
SECONDS = 18.0
# Above the engines' minimums; an engine that loads needs some 200 MiB of it for a moment
CONTENDED_BYTES = 280 * MIB
VISIT_LEAVES = 40 * MIB  # for both pools, of what the external process takes when it comes: less than a burst's pool has
# It comes when the pools have grown to so much, which any burst alone needs, however fast the machine serves it.
VISIT_FROM_KV, VISIT_S, BETWEEN_S, MOST_VISITS = 28 * MIB, 3.5, 4.5, 2
MOST_FURTHER = 200  # requests of an engine's clients beyond the first ones
PIECE_BYTES, PIECE_S = 16 * MIB, 0.05  # of the external process, less than the headroom; and the time between two
KV_MIN, KV_MAX = 8 * MIB, 128 * MIB
# More than two busy programs grow by at once, beyond what the broker sees in time
HEADROOM = 48 * MIB
CARD_HEADROOM = 256 * MIB  # on a card, where CUDA's contexts and libraries grow too
RECALL_SHOWN_S = 1.0
MOST_COLUMNS = 2000
ONE_CORE = {"OMP_NUM_THREADS": "1"}

FIRST_STATE = DemoState(
    title="two engines and an external process on one device",
    now="Starting two engines, each in a process of its own ...",
    intro="Two engines will serve bursts of requests in turn, on one device whose memory does not suffice for both and an "
    "external process. Each pool grows while its engine has work, and gives back memory when the other engine or the "
    "external process needs it. Then the same requests run with room for all, and the tokens are compared.",
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request comes, and its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Bytes that each process held at one time; tuples list the engines in order."""

    at_s: float
    other: tuple[int, ...]  # programs and weights
    kv: tuple[int, ...]
    external: int
    recalling: tuple[bool, ...] = ()

    @property
    def held_bytes(self) -> int:
        """Bytes that all processes held together."""
        return sum(self.other) + sum(self.kv) + self.external


class Visitor:
    """The external process as it comes and goes: piece by piece up to what it wants, and in pieces down again."""

    def __init__(self, device: PrivateDevice, external: ExternalProcess, piece_bytes: int, piece_s: float) -> None:
        self.pieces = 0  # that the external process took
        self.refused = 0  # attempts at a piece that did not fit
        self._device, self._external = device, external
        self._piece_bytes, self._piece_s = piece_bytes, piece_s
        self._next_s = 0.0

    def advance(self, at_s: float, wanted_bytes: int) -> None:
        """Take or return the next piece on the way to `wanted_bytes`, if it is time."""
        held = self._external.held_bytes
        if at_s < self._next_s or abs(wanted_bytes - held) < MIB:
            return
        self._next_s = at_s + self._piece_s
        if wanted_bytes < held:
            self._external.hold(max(wanted_bytes, held - self._piece_bytes))
        elif self._device.free_bytes() >= (piece := min(self._piece_bytes, wanted_bytes - held)):
            self._external.hold(held + piece)
            self.pieces += 1
        else:
            self.refused += 1  # what a driver would answer


@dataclass(frozen=True, slots=True)
class DemoDevice:
    """Engines and an external process on a device of their own, and the engine with room for all."""

    roomy: DemoEngine
    engines: list[DemoEngine]
    external: ExternalProcess
    device: PrivateDevice

    def sample(self) -> DeviceSample:
        """Measure the processes now; on a card, where only leases tell them apart, all other memory is the external one's."""
        at_s = time.monotonic() - self.engines[0].began
        pids = [engine.pid for engine in self.engines]
        leases = {lease.pid: lease for lease in self.device.leases()}
        kv = tuple(leases[pid].held.get("kv", 0) if pid in leases else 0 for pid in pids)
        recalling = tuple(pid in leases and leases[pid].state in ("recalling", "overdue") for pid in pids)
        if self.device.card is not None:
            held = [leases[pid].held_bytes if pid in leases else 0 for pid in pids]
            outside = max(0, self.device.capacity_bytes - self.device.free_bytes() - sum(held))
            programs = tuple(max(0, size - mapped) for size, mapped in zip(held, kv, strict=True))
            return DeviceSample(at_s, programs, kv, outside, recalling)
        for _ in range(10):  # until no piece came between the readings: memory that moves would be counted twice
            outside = _resident(self.external.pid)
            other = tuple(max(0, _resident(pid) - mapped) for pid, mapped in zip(pids, kv, strict=True))
            if _resident(self.external.pid) == outside:
                break
        return DeviceSample(at_s, other, kv, outside, recalling)

    async def requests(self, traces: Sequence[Sequence[Arrival]], seed: int) -> list[list[DemoRequest]]:
        """The requests of each engine: pieces of the held-out text, as long as the arrivals say."""
        tokens = [token for text in passages() for token in (await self.roomy.call("tokenize", prompt=text))["tokens"]]
        drawn = {"temperature": 0.8 if self.device.card is None else 0.0}  # on a card rounding decides between near draws
        found = []
        for number, trace in enumerate(traces):
            own_seed = seed + 100_000 * number
            rng = random.Random(own_seed)
            starts = [rng.randrange(len(tokens) - one.prompt_tokens) for one in trace]
            found.append(
                [
                    DemoRequest(
                        tokens[start : start + one.prompt_tokens],
                        drawn | {"max_new_tokens": one.output_tokens, "seed": own_seed + i, "ignore_eos": True},
                        one.at_s,
                    )
                    for i, (one, start) in enumerate(zip(trace, starts, strict=True))
                ]
            )
        return found

    async def serve(
        self,
        requests: Sequence[list[DemoRequest]],
        seconds: float,
        look: Callable[[], Any],
        further: Callable[[int], DemoRequest | None] = lambda number: None,
    ) -> list[EngineRun]:
        """Serve the requests of each engine for at least `seconds`; `look` is called meanwhile. Its outputs with room are to
        come.

        When one has ended, its client asks for what `further` gives for the engine's number, which is added to its requests.
        """
        began = time.monotonic()
        for engine in self.engines:
            engine.began = began

        async def serve(number: int) -> EngineRun:
            engine, own = self.engines[number], requests[number]

            async def client(request: DemoRequest) -> None:
                await engine.serve([request])
                while (another := further(number)) is not None:
                    own.append(another)
                    await engine.serve([another])

            await asyncio.gather(*map(client, list(own)))
            took_s = time.monotonic() - began
            await engine.look()
            return EngineRun(engine.outputs, [], took_s, engine.stats, [one.at_s for one in own], engine.recalls)

        async def all_served() -> list[EngineRun]:
            runs = await asyncio.gather(*map(serve, range(len(self.engines))))
            while time.monotonic() - began < seconds or self.external.held_bytes:
                await asyncio.sleep(SAMPLE_S)
            return runs

        return await while_looking(all_served(), look)


@contextlib.asynccontextmanager
async def shared_device(kv_min: int, kv_max: int, contended: int, headroom: int, on: str = "cpu") -> AsyncIterator[DemoDevice]:
    """Both engines on a device that has so many bytes above their minimums, or on a card. All processes end with the context.

    `on`: see `ExternalProcess`. Raises ValueError if there is no such device.
    """
    async with contextlib.AsyncExitStack() as stack:
        external = stack.enter_context(ExternalProcess(on))
        card = external.card
        roomy = await start_with_room(device="cpu" if card is None else card.device)
        stack.push_async_callback(roomy.close)
        capacity = len(NAMES) * (roomy.stats["memory"]["base_bytes"] + kv_min) + contended + headroom
        if card is not None:
            capacity, headroom = card.total_bytes, CARD_HEADROOM
        device = stack.enter_context(PrivateDevice(capacity, headroom, external))
        engines = []
        for name in NAMES:  # one after the other: a model that loads needs more for a moment
            engines.append(await DemoEngine.start(name, *engine_options(device, kv_min, kv_max)))
            stack.push_async_callback(engines[-1].close)
        yield DemoDevice(roomy, engines, external, device)


def engine_options(device: PrivateDevice, kv_min: int, kv_max: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments of `AsyncLLM` and the environment of an engine on `device`."""
    options = {
        "device": "cpu" if device.card is None else device.card.device,
        "max_seqs": 128, "max_step_tokens": 512, "idle_s": 0.5, "kv_memory": {"min": kv_min, "max": kv_max},
    }  # fmt: skip
    return options, device.environ | ONE_CORE


def run_shared(*, seed: int = 0, as_json: bool = False) -> int:
    """Run it. Returns 0 if every request was served, no token changed and memory stayed within the limit, else 1.

    Raises ChildProcessError if a process ends early; then all end.
    """
    with open_display(FIRST_STATE, silent=as_json) as show:
        result = asyncio.run(share_device(show, seed=seed))
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        print_result(result.lines())
    return 0 if result.is_success else 1


def arrivals(seed: int) -> list[list[Arrival]]:
    """The requests of each engine, and behind them MOST_FURTHER for clients that go on asking."""
    rng = random.Random(seed)
    return [
        [
            Arrival(at_s, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS))
            for at_s, requests in (*bursts, (0.0, MOST_FURTHER))
            for _ in range(requests)
        ]
        for bursts in BURSTS
    ]


async def share_device(show: Show, *, seed: int = 0, seconds: float = SECONDS) -> SharedResult:
    """Start the processes on their device, watch them for at least `seconds`, and collect the results."""
    traces = arrivals(seed)
    async with shared_device(KV_MIN, KV_MAX, CONTENDED_BYTES, HEADROOM) as shared:
        requests = await shared.requests(traces, seed)
        rest = [iter(own[-MOST_FURTHER:]) for own in requests]
        requests = [own[:-MOST_FURTHER] for own in requests]
        visitor = Visitor(shared.device, shared.external, PIECE_BYTES, PIECE_S)
        state = replace(FIRST_STATE, capacity_bytes=shared.device.capacity_bytes)
        watched = WatchedDevice(show, state, shared.engines, requests)

        async def look() -> None:
            visitor.advance(time.monotonic() - shared.engines[0].began, watched.wanted_bytes())
            for engine in shared.engines:
                await engine.look()
            watched.take(shared.sample())

        def further(number: int) -> DemoRequest | None:
            request = next(rest[number], None) if watched.awaits_a_recall() else None
            return None if request is None else replace(request, at_s=time.monotonic() - shared.engines[0].began)

        runs = await shared.serve(requests, seconds, look, further)
        for run, own in zip(runs, requests, strict=True):
            again = shared.roomy.serve([replace(one, at_s=0.0) for one in own])
            run.with_room = await while_looking(again, lambda: watched.compare(shared.roomy))
    return watched.result(visitor, runs)


@dataclass(eq=False)
class WatchedDevice:
    """The device as the display shows it."""

    show: Show
    state: DemoState
    engines: Sequence[DemoEngine]
    requests: Sequence[Sequence[object]]  # of each engine, so far
    _samples: list[DeviceSample] = field(default_factory=list)
    _column: int = -1
    _recalled_at: dict[int, float] = field(default_factory=dict)  # when each engine was last seen being recalled
    _visits: list[float] = field(default_factory=list)  # when the external process came

    def wanted_bytes(self) -> int:
        """What the external process wants now: it comes when the pools have grown, and leaves after a while."""
        if not self._samples:
            return 0
        at_s = self._samples[-1].at_s
        last = self._visits[-1] if self._visits else -BETWEEN_S - VISIT_S
        visit_bytes = max(0, self.state.contended_bytes - HEADROOM - VISIT_LEAVES)
        if at_s < last + VISIT_S:
            return visit_bytes
        grown = sum(self._samples[-1].kv) >= VISIT_FROM_KV
        if grown and at_s >= last + VISIT_S + BETWEEN_S and len(self._visits) < MOST_VISITS:
            self._visits.append(at_s)
            return visit_bytes
        return 0

    def awaits_a_recall(self) -> bool:
        """Whether the external process is to come, or has come and no memory was recalled since."""
        if not self._samples:
            return False
        at_s = self._samples[-1].at_s
        if self._visits and at_s < self._visits[-1] + VISIT_S:
            return max(self._recalled_at.values(), default=0.0) < self._visits[-1]
        return len(self._visits) < MOST_VISITS and (not self._visits or at_s >= self._visits[-1] + VISIT_S + BETWEEN_S)

    def take(self, sample: DeviceSample) -> None:
        """Show `sample` and the engines' newest statistics."""
        self._samples.append(sample)
        first = self._samples[0]
        before = self.state.engines or tuple(Counts() for _ in self.engines)
        counts = tuple(map(_counts, self.engines, map(len, self.requests)))
        recalled = tuple(
            is_recalled or one.recalls > old.recalls
            for is_recalled, one, old in zip(sample.recalling, counts, before, strict=True)
        )
        self._recalled_at |= {number: sample.at_s for number, is_recalled in enumerate(recalled) if is_recalled}
        programs = max(0, sum(sample.other) - sum(first.other))
        holding = Holding(programs, sample.kv, max(0, sample.external - first.external), recalled)
        holdings, column = self.state.holdings, int(sample.at_s / COLUMN_S)
        if holdings and column == self._column:  # a recall stays marked for its column
            marked = tuple(now or old for now, old in zip(recalled, holdings[-1].recalled, strict=True))
            holdings, holding = holdings[:-1], replace(holding, recalled=marked)
        self._column = column
        shown = [number for number, at_s in self._recalled_at.items() if sample.at_s < at_s + RECALL_SHOWN_S]
        self.state = replace(
            self.state, now=_now(shown, holding, counts), alarm=bool(shown), engines=counts,
            contended_bytes=self.state.capacity_bytes - sum(first.other) - first.external,
            holdings=(*holdings, holding)[-MOST_COLUMNS:],
        )  # fmt: skip
        self.show(self.state)

    async def compare(self, roomy: DemoEngine) -> None:
        """Show how many requests the engine with room has served, of each engine in turn."""
        done = sum(output.ended_at is not None for output in roomy.outputs)
        before = [0, *itertools.accumulate(map(len, self.requests))]
        engines = tuple(
            replace(counts, running=0, waiting=0, done=min(max(done - first, 0), counts.total))
            for first, counts in zip(before, self.state.engines, strict=False)
        )
        now = "The same again with room for all, to compare tokens ..."
        self.state = replace(self.state, now=now, alarm=False, engines=engines)
        self.show(self.state)

    def result(self, visitor: Visitor, runs: Sequence[EngineRun]) -> SharedResult:
        """The figures of the run."""
        kv = zip(*(sample.kv for sample in self._samples), strict=True)
        return SharedResult(
            capacity_bytes=self.state.capacity_bytes,
            most_held_bytes=max(sample.held_bytes for sample in self._samples),
            most_kv_bytes=tuple(max(one) for one in kv),
            most_external_bytes=max(sample.external for sample in self._samples) - self._samples[0].external,
            pieces=visitor.pieces,
            waits=visitor.refused,
            engines=tuple({"name": name} | run.to_dict() for name, run in zip(NAMES, runs, strict=True)),
        )


def _counts(engine: DemoEngine, total: int) -> Counts:
    stats = engine.stats
    done = sum(output.ended_at is not None for output in engine.outputs)
    return Counts(stats["running"], stats["waiting"], stats["preemptions"], done, total, stats["memory"]["recalls"])


def _now(recalled: Sequence[int], holding: Holding, counts: Sequence[Counts]) -> str:
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


def _resident(pid: int) -> int:
    if (num_bytes := resident_bytes(pid)) is None:
        raise ChildProcessError(f"process {pid} has ended")
    return num_bytes

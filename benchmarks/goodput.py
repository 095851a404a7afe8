"""Goodput of two engines on one device: static halves, elastic pools, and a whole device for each engine.

    python -m benchmarks.goodput [--json FILE] [--data DIR] [--rounds 3] [--only static,pagetide,oracle]
                                 [--seconds 20] [--step-ms 10] [--seed 0]

Goodput is output tokens a second of the requests within the SLO: the first token at most 250 ms after the request was due,
which is ten times what an unloaded engine takes, and of the pauses between its tokens 95 % at most 50 ms, which is five
times. The seconds are those in which requests come. Three arrangements take turns and serve the same requests:

    static    each engine has a pool of half of POOL_BYTES, and no lease
    pagetide  both lease from one broker, a `vram-monitor serve`; each pool is between LEAST_BYTES and POOL_BYTES
    oracle    each engine has a pool of POOL_BYTES, and no lease

Under pagetide both pools together come to what the usual headroom (a sixteenth) and band (2 %) would leave of a device of
POOL_BYTES: less than the halves of `static` together. The test device is larger than that, since a lease covers a whole
process; what is over, besides its own headroom and band, is kept reserved from before the first growth on.

Each engine is a process on a core of its own with one thread (goodput_engine.py: its model is a stand-in with a step time
of its own, everything else is real). The requests are the trace of code completions of Azure's, thinned, compressed in
time, prompts a fifth as long and outputs four times (16 to 192 tokens), so that memory is what is short; the second engine
gets the same stream an eighth of the time earlier, so that its bursts mostly come in the gaps of the first
(goodput_load.py; with `--data none` a synthetic one).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.arguments import above_0, add_data, whole
from benchmarks.figures import Figure, report
from benchmarks.goodput_engine import Job, ServedRequest, Told, serve
from benchmarks.goodput_load import LoadArrival, load
from benchmarks.processes import Worker
from pagetide.allocator.lease_policy import Rules
from pagetide.monitor.units import GIB, MIB
from pagetide.pressure import PrivateDevice

FIRST_TOKEN_S, BETWEEN_S = 0.25, 0.05  # the SLO
STEP_MS, TOKEN_S = 10.0, 40e-6  # a step takes STEP_MS, and TOKEN_S for each token that it computes
PER_SECOND = 8.0  # requests of each engine, on average
POOL_BYTES = 96 * MIB
LEAST_BYTES = 9 * MIB  # whole extents: they are a 32nd of the pool
IDLE_S = 10.0  # as by default
CAPACITY_BYTES = 4 * GIB  # of the test device; all but what is contended is reserved
HEADROOM_BYTES = POOL_BYTES // 16
SETTLE_S = 2.5  # until the broker has forgotten how the processes grew at their start
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}  # large tensors go back when freed (glibc)
ARRANGEMENTS = ("static", "pagetide", "oracle")
Outputs = list[list[list[int]]]  # token ids, by engine and request


@dataclass(frozen=True, slots=True)
class Round:
    """What one arrangement gave in one round."""

    goodput: float  # tokens a second
    missed: float  # share of the requests
    first_token_s: list[float]
    between_s: list[float]  # all pauses of all requests
    preemptions: int
    recalls: int
    moved_bytes: int  # grown, given back, and copied
    most_bytes: int  # of KV that both held at one time
    unloaded_first_s: float
    unloaded_between_s: float
    outputs: Outputs


def run(arrangement: str, arrivals: Sequence[list[LoadArrival]], seconds: float, step_s: float, seed: int) -> Round:
    """One arrangement, from the start of both engines to their last token."""
    with ExitStack() as stack:
        if arrangement == "pagetide":
            device = stack.enter_context(PrivateDevice(CAPACITY_BYTES, HEADROOM_BYTES))
            stack.enter_context(device.here())
        jobs = [_job(arrangement, arrivals[i], step_s, seed + 100_000 * i) for i in range(len(arrivals))]
        workers = [stack.enter_context(Worker(serve, job, core=number)) for number, job in enumerate(jobs)]
        promised = [worker.receive() for worker in workers]
        if arrangement == "pagetide":  # before anybody grows
            (uuid,) = {lease.device_uuid for lease in device.leases()}
            stack.enter_context(device.client.reserve(uuid, _reserved_bytes(promised), timeout_s=30))
            time.sleep(SETTLE_S)
        _told_each(workers, "serve some alone")
        _told_each(workers, time.monotonic() + 0.2)
        told: list[Told] = _told_each(workers, "tell")
    return _summed(told, seconds)


def _job(arrangement: str, arrivals: list[LoadArrival], step_s: float, seed: int) -> Job:
    pools: dict[str, Any] = {
        "static": POOL_BYTES // 2,
        "pagetide": {"min": LEAST_BYTES, "max": POOL_BYTES},
        "oracle": POOL_BYTES,
    }
    return Job(arrivals, seed, pools[arrangement], arrangement == "pagetide", IDLE_S, step_s, TOKEN_S)


def _reserved_bytes(promised: list[int]) -> int:
    """What is to be reserved, so that both pools come to the contended bytes together."""
    usual = Rules.of(POOL_BYTES)
    growth = POOL_BYTES - usual.headroom_bytes - usual.band_bytes - len(promised) * LEAST_BYTES
    rules = Rules.of(CAPACITY_BYTES, HEADROOM_BYTES)
    return CAPACITY_BYTES - rules.headroom_bytes - rules.band_bytes - sum(promised) - growth


def _told_each(workers: list[Worker], message: object) -> list[Any]:
    """What each engine answers to `message`."""
    for worker in workers:
        worker.send(message)
    return [worker.receive() for worker in workers]


# ---- what came of it ------------------------------------------------------------------------------


def _summed(told: list[Told], seconds: float) -> Round:
    served = [one for engine in told for one in engine.served]
    unloaded = [one for engine in told for one in engine.unloaded]
    good = [one for one in served if _within(one)]
    memory = [engine.stats["memory"] for engine in told]
    return Round(
        goodput=sum(len(one.token_ids) for one in good) / seconds,
        missed=1 - len(good) / len(served),
        first_token_s=[_first(one) for one in served],
        between_s=[pause for one in served for pause in _between(one)],
        preemptions=sum(engine.stats["preemptions"] for engine in told),
        recalls=sum(m["recalls"] for m in memory),
        moved_bytes=sum(m["grown_bytes"] + m["given_back_bytes"] for m in memory) + sum(e.copied_bytes for e in told),
        most_bytes=_most(told),
        unloaded_first_s=statistics.median(map(_first, unloaded)),
        unloaded_between_s=statistics.median(pause for one in unloaded for pause in _between(one)),
        outputs=[[one.token_ids for one in engine.served] for engine in told],
    )


def _first(one: ServedRequest) -> float:
    return one.token_at[0] - one.due


def _between(one: ServedRequest) -> list[float]:
    return [after - before for before, after in zip(one.token_at, one.token_at[1:], strict=False)]


def _within(one: ServedRequest) -> bool:
    return _first(one) <= FIRST_TOKEN_S and percentile(_between(one), 0.95) <= BETWEEN_S


def _most(told: list[Told]) -> int:
    """The most KV that the engines had mapped at one time."""
    changes = sorted((at, number, held) for number, engine in enumerate(told) for at, held in engine.pool)
    now, most = [0] * len(told), 0
    for _, number, held in changes:
        now[number] = held
        most = max(most, sum(now))
    return most


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that is not below `share` of them."""
    return sorted(samples)[max(0, -int(-share * len(samples) // 1) - 1)]


def figures(rounds: dict[str, list[Round]]) -> list[Figure]:
    """Ratios within a round, their medians; then each arrangement's own figures side by side."""
    expected = next(iter(rounds.values()))[0].outputs
    differing = sum(
        mine != theirs
        for one in (one for some in rounds.values() for one in some)
        for outputs, wanted in zip(one.outputs, expected, strict=True)
        for mine, theirs in zip(outputs, wanted, strict=True)
    )
    result = [
        _ratio(f"goodput, pagetide / {what}", rounds["pagetide"], rounds[name], target)
        for name, what, target in (("static", "static halves", 1.3), ("oracle", "oracle", 0.92))
        if {"pagetide", name} <= rounds.keys()
    ]
    if "static" in rounds:
        missed = [100 * r.missed for r in rounds["static"]]
        result.append(_median("requests of the static halves that miss the SLO", missed, "%", 30, "higher"))
    result.append(Figure("outputs that differ between arrangements or rounds", float(differing), "", 0))
    first = next(iter(rounds.values()))
    result += [
        _median("unloaded: first token", [1e3 * r.unloaded_first_s for r in first], "ms"),
        _median("unloaded: between tokens", [1e3 * r.unloaded_between_s for r in first], "ms"),
    ]
    for name, some in rounds.items():
        result += _own_figures(name, some)
    return result


def _own_figures(name: str, rounds: list[Round]) -> list[Figure]:
    result = [
        _median(f"{name}: goodput", [r.goodput for r in rounds], "tokens/s"),
        _median("... requests within the SLO", [100 - 100 * r.missed for r in rounds], "%"),
    ]
    for what, field in (("first token", "first_token_s"), ("between tokens", "between_s")):
        for share in (0.5, 0.95, 0.99):
            values = [1e3 * percentile(getattr(r, field), share) for r in rounds]
            result.append(_median(f"... {what}, p{100 * share:g}", values, "ms"))
    return [
        *result,
        _median("... preemptions", [r.preemptions for r in rounds], ""),
        _median("... recalls", [r.recalls for r in rounds], ""),
        _median("... mapped, unmapped and copied", [r.moved_bytes / MIB for r in rounds], "MiB"),
        _median("... most KV of both at a time", [r.most_bytes / MIB for r in rounds], "MiB"),
    ]


def _median(
    name: str, samples: Sequence[float], unit: str, target: float | None = None,
    better: Literal["lower", "higher"] = "lower",
) -> Figure:  # fmt: skip
    return Figure(name, statistics.median(samples), unit, target, better, [round(sample, 4) for sample in samples])


def _ratio(name: str, over: list[Round], under: list[Round], target: float) -> Figure:
    within = [mine.goodput / max(theirs.goodput, 1e-9) for mine, theirs in zip(over, under, strict=True)]
    return _median(name, within, "x", target, "higher")


def arrangements(text: str) -> list[str]:
    """Names of arrangements, with commas between them."""
    names = text.split(",")
    if unknown := [name for name in names if name not in ARRANGEMENTS]:
        raise argparse.ArgumentTypeError(
            f"there is no arrangement {', '.join(unknown)}; there are {', '.join(ARRANGEMENTS)}"
        )
    return names


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    add_data(parser, "the trace", "a synthetic trace")
    parser.add_argument(
        "--only", type=arrangements, default=",".join(ARRANGEMENTS), metavar="NAMES", help="some of %(default)s"
    )
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--seconds", type=above_0, default=20.0, help="in which requests come (default 20, for which the load is set)"
    )
    parser.add_argument(
        "--step-ms", type=above_0, default=STEP_MS, metavar="MS",
        help="what a step takes besides its tokens (default %(default)g, for which load and SLO are set)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    os.environ |= STEADY_HEAP | {"OMP_NUM_THREADS": "1"}
    try:
        arrivals, source = load(args.data, args.seconds, PER_SECOND)
    except ValueError as error:
        parser.error(f"{error}; name another folder by --data, or 'none' for a synthetic trace")
    print(
        f"{len(arrivals[0])} and {len(arrivals[1])} requests in {args.seconds:g} s, from {source}; pools of "
        f"{POOL_BYTES // MIB} MiB; a step takes {args.step_ms:g} ms and {1e6 * TOKEN_S:g} us a token",
        flush=True,
    )
    rounds: dict[str, list[Round]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        for turn in range(len(args.only)):
            name = args.only[(number + turn) % len(args.only)]
            rounds[name].append(run(name, arrivals, args.seconds, args.step_ms / 1e3, args.seed))
            print(f"  round {number + 1}, {name}: {rounds[name][-1].goodput:,.0f} tokens/s", flush=True)
    report("goodput: two engines, one device", figures(rounds), args.seed, args.json)


if __name__ == "__main__":
    main()

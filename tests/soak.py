"""Hours of random load: `make soak`. Random walks of the scheduler in one process, an engine under disturbance in another.

    PYTHONPATH=tests python -m soak [--seconds 3600] [--seed N] [--json FILE] [--walks 5000] [--requests 10000]

At the end a server gets requests drawn from its OpenAPI description (openapi_load.py), however long they take.

The engine, with an elastic pool, a host tier and a lease, serves random batches of all kinds of requests while memory is
recalled, another engine on its device is killed and started again, and functions of its steps raise: once or at every call, in
every second batch. A batch in which a function raised once is served again without, and what is greedy has to come out the
same. Nothing may be left: no live block, no search, no memory above the lease.

The end reports the slope of resident memory besides mapped KV and the host tier (the median of the slopes over the last three
quarters), and fails where a walk or a batch failed, or where memory rose above its value after the first fifty batches by more
than 32 MiB. The seed is printed; the walks that failed are named by seed and variant.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from faults import CAUSE, POINTS, planted
from random_walk import VARIANTS, walk

from benchmarks.load import RandomBatches, RequestBatch, save_text_model
from benchmarks.memory import BOUND_MIB, CAPACITY_BYTES, ENGINE, HEADROOM_BYTES, excess_bytes, outside_kv_bytes, recalls, slope
from pagetide import LLM
from pagetide.common.units import MIB
from pagetide.pressure import PrivateDevice

FIRST = 50  # batches whose end is compared with
REPORT_S = 60.0
WALK_EVENTS = 1_000
VICTIM = """
import sys
from pagetide import LLM, SamplingParams
with LLM("demo", device="cpu", kv_memory={"min": "1MiB", "max": "16MiB"}) as llm:
    while True:
        llm.generate(["the sea"] * 8, SamplingParams(max_new_tokens=200, ignore_eos=True), progress=False)
"""


class Failed(Exception):
    """Something is not as it should be."""


# ---- walks ----------------------------------------------------------------------------------------


def walks(seed: int, most: int, until: float, told: Path) -> None:
    """Random walks of all variants in turn, until there were `most` or the clock says `until`.

    `told` gets a line for each: what failed, or nothing.
    """
    rng = random.Random(seed)
    with told.open("w", buffering=1) as lines:
        for number in range(most):
            if time.time() >= until:
                break
            one, variant, failure = rng.randrange(2**32), VARIANTS[number % len(VARIANTS)], ""
            try:
                walk(one, variant, WALK_EVENTS, check_every=8)
            except BaseException as error:
                failure = f"walk({one}, {variant!r}, {WALK_EVENTS}): {type(error).__name__}: {error}".replace("\n", " ")
                print(failure, flush=True)
            print(failure, file=lines)


# ---- an engine under disturbance --------------------------------------------------------------------


@contextmanager
def killed_again_and_again(device: PrivateDevice, seed: int) -> Iterator[list[int]]:
    """Inside, engines of other processes are on `device`, and none of them ends by itself. The list has how many there were."""
    over, rng, kills = threading.Event(), random.Random(seed), [0]

    def go() -> None:
        while not over.is_set():
            victim = subprocess.Popen([sys.executable, "-c", VICTIM], env=os.environ | device.environ)
            over.wait(rng.uniform(0.0, 40.0))  # from before it has a lease until it is in the middle of its work
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            kills[0] += 1

    thread = threading.Thread(target=go, name="kills")
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


def served(llm: LLM, batch: RequestBatch, rng: random.Random) -> bool:
    """Serve a batch, perhaps with a fault. Returns whether one was raised. Raises Failed."""
    point = rng.choice(list(POINTS.values())) if rng.random() < 0.5 else None
    always = rng.random() < 0.2
    first = 1 + int(rng.expovariate(1 / 20))
    plant = nullcontext() if point is None else planted(point.owner(llm._manager.open()), point.name, first, always)
    with plant as fault:
        outputs = llm.generate(batch.prompts, batch.params, progress=False)
    raised = fault is not None and fault.num_raised > 0
    for output in outputs:
        for completion in output.completions:
            if completion.finish_reason == "error" and not (raised and CAUSE in (completion.error or "")):
                raise Failed(f"{point}: request {output.request_id}: {completion.error}")
            if completion.finish_reason == "aborted":
                raise Failed(f"{point}: request {output.request_id} was aborted")
    if raised and not always:
        again = llm.generate(batch.prompts, batch.params, progress=False)
        for params, mine, theirs in zip(batch.params, outputs, again, strict=True):
            greedy = not params.temperature and params.top_k is None and params.top_p is None and params.min_p is None
            if greedy and mine.finish_reason != "error" and tokens(mine) != tokens(theirs):
                raise Failed(f"{point}, call {first}: {mine.request_id} has other tokens than without: {params}")
    stats = llm.stats()
    if stats["running"] or stats["waiting"] or stats["blocks"]["live"] or llm._manager.delivery.groups:
        raise Failed(f"{point}: something is left: {stats}")
    return raised


def tokens(output: Any) -> list[list[int]]:
    """Of each of its continuations."""
    return [completion.token_ids for completion in output.completions]


def loaded(folder: str, vocab_size: int, seed: int, until: float) -> tuple[dict[str, Any], list[str]]:
    """Serve random batches until the clock says `until`. Returns figures, and what failed."""
    rng, failures = random.Random(seed), []
    outside: list[float] = []
    raised, excess, began = 0, 0, time.time()
    report_at = began
    with ExitStack() as stack:
        device = stack.enter_context(PrivateDevice(CAPACITY_BYTES, HEADROOM_BYTES))
        stack.enter_context(device.here())
        llm = stack.enter_context(LLM(folder, dtype="float32", **ENGINE))
        stack.enter_context(recalls(device, seed))
        kills = stack.enter_context(killed_again_and_again(device, seed))
        batches = RandomBatches(vocab_size, 16, seed)
        while time.time() < until:
            try:
                raised += served(llm, batches.draw(), rng)
            except Exception as error:
                failures.append(f"batch {len(outside)}: {type(error).__name__}: {error}")
                print(failures[-1], flush=True)
            outside.append(outside_kv_bytes(llm) / MIB)
            excess = max(excess, excess_bytes(llm))
            if time.time() >= report_at:
                report_at += REPORT_S
                print(f"{len(outside):7,} batches, {raised:,} with a fault, {outside[-1]:.1f} MiB", flush=True)
        stats = llm.stats()
    gc.collect()
    start, last = outside[min(FIRST, len(outside)) - 1], outside[len(outside) // 4 :]
    risen = max(outside[min(FIRST, len(outside)) - 1 :]) - start
    if risen > BOUND_MIB:
        failures.append(f"memory rose by {risen:.1f} MiB above its value after {FIRST} batches")
    if excess:
        failures.append(f"memory was {excess / MIB:.1f} MiB above the lease")
    return {
        "batches": len(outside),
        "batches with a fault": raised,
        "engines killed": kills[0],
        "recalls": stats["memory"]["recalls"],
        "preemptions": stats["preemptions"],
        "memory after the first batches, MiB": start,
        "memory at the end, MiB": outside[-1],
        "memory above its value after the first batches, at most, MiB": risen,
        "memory above the lease, at most, MiB": excess / MIB,
        "slope of memory, MiB in a thousand batches": 1000 * slope(last),
        "hours": (time.time() - began) / 3600,
    }, failures


def requested(count: int, seed: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Send a server `count` random requests. Returns figures, and what failed."""
    from openapi_load import SERVER, send_requests
    from servers import ServerProcess, wait_until_idle

    headers = {"Authorization": "Bearer sk-operator-1"}
    try:
        with ServerProcess(SERVER, folder / "server.log", PAGETIDE_ADMIN_KEY="sk-operator-1") as server:
            statuses = send_requests(server.url, count, seed, headers)
            wait_until_idle(server.url, headers)
    except AssertionError as error:
        return {}, [f"a server: {error}"]
    return {f"requests answered with {status}": number for status, number in sorted(statuses.items())}, []


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--walks", type=int, default=5_000, help="walks at most")
    parser.add_argument("--requests", type=int, default=10_000, help="to a server; 0 for none")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    print(f"seed {args.seed}, {args.seconds:,.0f} s", flush=True)
    logging.disable(logging.CRITICAL)  # of faults, which are wanted here
    until = time.time() + args.seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "walks.txt"
        walker = context.Process(target=walks, args=(args.seed, args.walks, until, told), daemon=True)
        walker.start()
        vocab_size = save_text_model(Path(folder), 128, 2, args.seed % 1000)
        figures, failures = loaded(folder, vocab_size, args.seed, until)
        walker.join()
        if args.requests:
            answered, misbehaved = requested(args.requests, args.seed, Path(folder))
            figures |= answered
            failures += misbehaved
        ended = told.read_text().splitlines() if told.exists() else []
    failed = [line for line in ended if line]
    if walker.exitcode:
        failed.append(f"the walks ended with status {walker.exitcode}")
    figures |= {f"random walks, of {args.walks:,}": len(ended), "failures": len(failures) + len(failed), "seed": args.seed}
    for name, value in figures.items():
        print(f"  {name:<62} {value:>12,.2f}" if isinstance(value, float) else f"  {name:<62} {value:>12,}")
    for failure in (*failures, *failed):
        print(f"FAILED {failure}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures | {"failed": [*failures, *failed]}, indent=1) + "\n")
    return 1 if failures or failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Resident memory over thousands of random batches on the CPU, compared with the memory plan and the lease.

    python -m benchmarks.memory [--json FILE] [--batches 2000] [--dtype float32|bfloat16] [--hidden 256] [--layers 2]
                                [--most 40] [--first 50] [--seed 0]

The engine has a pool that grows and shrinks (5 to 12 MiB), a host tier, a prefix cache and a lease. The process opens two
engines, one after the other. While the second runs, a thread reserves memory repeatedly, so that the broker recalls some.
Three figures have bounds: how far the memory besides mapped KV and the host tier rises above its value after the first
`--first` batches; at every batch, what the process holds besides the host tier above what its lease grants; and what the
second engine leaves above what the first one left.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, report
from benchmarks.load import CONTEXT, RandomBatches, save_text_model
from pagetide import LLM
from pagetide.allocator.errors import LeaseError
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.reservation import Reservation
from pagetide.common.units import GIB, MIB
from pagetide.pressure import PrivateDevice

POOL = {"min": 5 * MIB, "max": 12 * MIB}
HOST_BYTES = 16 * MIB
CAPACITY_BYTES, HEADROOM_BYTES = 4 * GIB, 64 * MIB
BOUND_MIB = 32.0
ENGINE: dict[str, Any] = {
    "device": "cpu", "kv_memory": POOL, "host_kv_memory": HOST_BYTES, "idle_s": 5.0, "max_seqs": 64,
    "max_model_len": CONTEXT,
}  # fmt: skip


def resident_bytes() -> int:
    """Of this process."""
    return int(psutil.Process().memory_info().rss)


def outside_kv_bytes(llm: LLM) -> int:
    """What the process holds besides mapped KV and the host tier."""
    stats = llm.stats()
    return resident_bytes() - int(stats["kv_bytes"]) - int(stats["host_tier"]["bytes"])


def excess_bytes(llm: LLM) -> int:
    """What the process holds besides the host tier above the engine's grant; 0 while a recall is being served."""
    stats = llm.stats()
    lease = stats["memory"]["lease"]
    if lease["recall_target_bytes"] is not None:
        return 0
    return max(0, resident_bytes() - int(stats["host_tier"]["bytes"]) - int(lease["granted_bytes"]))


@contextmanager
def recalls(device: PrivateDevice, seed: int, pause_s: float = 0.5) -> Iterator[None]:
    """Inside, memory of `device` is reserved and let go again and again, in a thread."""
    over, rng = threading.Event(), Random(seed)
    rules = Rules.of(device.capacity_bytes, device.headroom_bytes)

    def go() -> None:
        while not over.wait(rng.uniform(0, 2 * pause_s)):
            if not (leases := device.leases()):
                continue
            spare = device.capacity_bytes - rules.headroom_bytes - sum(lease.min_bytes for lease in leases)
            wanted = int(spare - rng.random() * (POOL["max"] - POOL["min"]))
            try:
                with Reservation.granted(device.socket, leases[0].device_uuid, wanted, wait_s=2.0):
                    over.wait(rng.uniform(0, 2 * pause_s))
            except LeaseError:  # not to be had in time: the next one
                pass

    thread = threading.Thread(target=go, name="recalls")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def serve(llm: LLM, batches: RandomBatches, count: int) -> Iterator[tuple[int, int]]:
    """(bytes outside KV, bytes above the grant) after each of `count` batches."""
    for _ in range(count):
        batch = batches.draw()
        for output in llm.generate(batch.prompts, batch.params, progress=False):
            if output.finish_reason not in ("length", "stop"):
                raise RuntimeError(f"request {output.request_id}: {output.finish_reason}: {output.completions[0].error}")
        yield outside_kv_bytes(llm), excess_bytes(llm)


def slope(samples: Sequence[float]) -> float:
    """Of the samples, per sample: the median of the slopes between the first and second halves' members (Theil-Sen)."""
    half = len(samples) // 2
    pairs = [(samples[i + half] - samples[i]) / half for i in range(half)]
    return statistics.median(pairs) if pairs else 0.0


def measure(folder: str, vocab_size: int, args: argparse.Namespace) -> list[Figure]:
    """Both engines, one after the other."""
    engine = ENGINE | {"dtype": args.dtype}
    outside: list[float] = []
    excess: list[float] = []
    with PrivateDevice(CAPACITY_BYTES, HEADROOM_BYTES) as device, device.here():
        with LLM(folder, **engine) as llm:
            list(serve(llm, RandomBatches(vocab_size, args.most, args.seed + 1), min(args.first, args.batches)))
        gc.collect()
        first_left = resident_bytes()
        began = time.perf_counter()
        with LLM(folder, **engine) as llm, recalls(device, args.seed):
            batches = RandomBatches(vocab_size, args.most, args.seed)
            for number, (rest, above) in enumerate(serve(llm, batches, args.batches), 1):
                outside.append(rest / MIB)
                excess.append(above / MIB)
                if number in (1, 10) or number % 50 == 0:
                    took_s = time.perf_counter() - began
                    print(f"{number:6,} batches  {rest / MIB:7.1f} MiB  {took_s:5.0f} s", flush=True)
            stats = llm.stats()
        gc.collect()
        second_left = resident_bytes()
    later = outside[min(args.first, len(outside)) - 1 :]
    return [
        Figure("memory above its value after the first batches, at most", max(later) - later[0], "MiB", BOUND_MIB),
        Figure("memory above the grant, at most", max(excess), "MiB", 0.0),
        Figure("left by the second engine above what the first left", (second_left - first_left) / MIB, "MiB", BOUND_MIB),
        Figure("slope, in a thousand batches", 1000 * slope(later), "MiB"),
        Figure("recalls", float(stats["memory"]["recalls"]), "", target=args.batches // 50, better="higher"),
        Figure("preemptions", float(stats["preemptions"]), "", target=args.batches // 50, better="higher"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures, and write them to `--json FILE`."""
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=whole, default=2000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--hidden", type=whole, default=256)
    parser.add_argument("--layers", type=whole, default=2)
    parser.add_argument("--most", type=whole, default=40, help="requests of a batch")
    parser.add_argument("--first", type=whole, default=50, help="batches, the end of which is compared with")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = save_text_model(Path(folder), args.hidden, args.layers, args.seed)
        figures = measure(folder, vocab_size, args)
    report(f"resident memory over {args.batches:,} random batches, {args.dtype}", figures, args.seed, args.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()

"""Sums over the shards of a model on the CPU: shared memory against gloo.

python -m benchmarks.collectives [--json FILE] [--shards 2] [--rows 1 16 256] [--width 896] [--dtype float32] [--calls 200]
                                 [--rounds 7] [--seed 0]

A tensor [rows, width] is what a shard's layer gives for so many tokens. The kinds of groups take turns, round by round. A
sample is the time of `--calls` sums one after the other, divided by their number, as the slowest shard sees it; a figure is the
median over the rounds. Every sum is compared with the sum of what the shards put in.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from benchmarks.processes import Worker
from pagetide import native
from pagetide.engine.collectives.factory import create_store, open_group
from pagetide.engine.collectives.shared_memory_group import create_group_memory

CPU = torch.device("cpu")
TARGET_US = {1: 20.0, 16: 20.0}  # of two shards, by rows


class Inherited:
    """A descriptor as an argument of a new process, which gets the number of its own one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self.fd),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def part_of(rank: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, width]: what a shard puts in. Small whole numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randint(-8, 9, (rows, width), generator=generator).to(dtype)


def serve(
    pipe: Connection, rank: int, size: int, memory_fd: int, store_fd: int, kinds: list[str], dtype: torch.dtype, seed: int
) -> None:  # fmt: skip
    """A shard: for each message (kind, rows, width, calls), the seconds of one sum. Ends with the pipe."""
    torch.set_num_threads(1)
    devices = ["cpu"] * size
    groups = {
        kind: open_group(rank, size, device=CPU, devices=devices, memory_fd=memory_fd, store_fd=store_fd, kind=kind)
        for kind in kinds
    }
    pipe.send("ready")
    while True:
        try:
            kind, rows, width, calls = pipe.recv()
        except EOFError:
            break
        group, mine = groups[kind], part_of(rank, rows, width, dtype, seed)
        expected = sum(part_of(other, rows, width, dtype, seed).float() for other in range(size))
        parts = [mine.clone() for _ in range(calls)]
        group.all_reduce(mine.clone())  # all begin together
        began = time.perf_counter()
        sums = [group.all_reduce(part) for part in parts]
        seconds = (time.perf_counter() - began) / calls
        assert all(torch.equal(total.float(), expected) for total in sums), f"a sum by {kind} is wrong"
        pipe.send(seconds)
    for group in groups.values():
        group.close()


def measure(args: argparse.Namespace, kinds: list[str]) -> dict[tuple[int, str], list[float]]:
    """Microseconds of a sum in each round, by rows and kind."""
    samples: dict[tuple[int, str], list[float]] = {(rows, kind): [] for rows in args.rows for kind in kinds}
    memory_fd, store_fd = create_group_memory(args.shards), create_store()
    try:
        with ExitStack() as stack:
            shared = Inherited(memory_fd), Inherited(store_fd), kinds, getattr(torch, args.dtype), args.seed
            workers = [
                stack.enter_context(Worker(serve, rank, args.shards, *shared, core=rank)) for rank in range(args.shards)
            ]
            for worker in workers:
                worker.receive()
            for _ in range(args.rounds):
                for (rows, kind), found in samples.items():
                    for worker in workers:
                        worker.send((kind, rows, args.width, args.calls))
                    found.append(1e6 * max(worker.receive() for worker in workers))
    finally:
        os.close(memory_fd)
        os.close(store_fd)
    return samples


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--shards", type=whole, default=2)
    parser.add_argument("--rows", type=whole, nargs="+", default=[1, 16, 256], help="tokens of a step")
    parser.add_argument("--width", type=whole, default=896, help="the model's hidden size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--calls", type=whole, default=200, help="sums in one sample")
    parser.add_argument("--rounds", type=whole, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    kinds = ["shared-memory", "gloo"] if native.instructions() else ["gloo"]
    samples = measure(args, kinds)
    figures = []
    for (rows, kind), found in samples.items():
        target = TARGET_US.get(rows) if kind == "shared-memory" and args.shards == 2 else None
        shape = f"[{rows}, {args.width}] {args.dtype}"
        figures.append(Figure(f"{kind}, {shape}", statistics.median(found), "µs", target, "lower", found))
    report(f"collectives: a sum over {args.shards} shards on the CPU", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

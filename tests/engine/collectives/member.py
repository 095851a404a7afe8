"""One process of a group: `member.py KIND RANK SIZE MEMORY STORE SCENARIO SEED`."""

from __future__ import annotations

import hashlib
import sys
import threading

import numpy as np
import torch

from pagetide import native
from pagetide.engine.collectives.factory import open_group
from pagetide.engine.collectives.group import CollectiveAborted, ShardGroup

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def part_of(rng_seed: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rng_seed).normal(size=shape).astype(np.float32)).to(dtype)


def random_ones(group: ShardGroup, seed: int) -> str:
    """A digest of what 60 random collectives give, each compared with the naive result."""
    rng, digest = np.random.default_rng(seed), hashlib.sha256()
    for turn in range(60):
        kind = rng.choice(["sum", "gather", "broadcast", "exchange"])
        dtype = DTYPES[rng.integers(3)]
        rows = int(rng.choice([1, 3, 16]))
        if kind == "sum":
            columns = int(rng.choice([1, 7, 896, 40_000]))
            parts = [part_of((seed, turn, rank), (rows, columns), dtype) for rank in range(group.size)]
            x = parts[group.rank]
            if rng.random() < 0.3:
                x = x.t().contiguous().t()  # not contiguous
            found = group.all_reduce(x.clone(memory_format=torch.preserve_format))
            right = parts[0].float()
            for part in parts[1:]:
                right = right + part.float()
            assert torch.equal(found, right.to(dtype)), (turn, kind)
        elif kind == "gather":
            widths = [int(n) for n in rng.choice([1, 5, 64, 70_000], group.size)]
            parts = [part_of((seed, turn, rank), (rows, widths[rank]), dtype) for rank in range(group.size)]
            everywhere = bool(rng.integers(2))
            found = group.gather(parts[group.rank], widths, everywhere=everywhere)
            right = torch.cat(parts, -1) if everywhere or group.rank == 0 else parts[group.rank]
            assert torch.equal(found, right), (turn, kind)
            continue  # not the same on all shards
        elif kind == "broadcast":
            found = group.broadcast(torch.arange(rows) * 10 + group.rank)
            assert found.tolist() == [10 * i for i in range(rows)], (turn, kind)
        else:
            length = int(rng.choice([0, 1, 1000, 3_000_000]))
            found = torch.tensor([len(one) for one in group.exchange(bytes([group.rank]) * (length + group.rank))])
            assert found.tolist() == [length + rank for rank in range(group.size)], (turn, kind)
        digest.update(found.contiguous().view(torch.uint8).numpy().tobytes())
    assert group.counts()["all_reduce"].calls > 5
    return digest.hexdigest()


def abort(group: ShardGroup) -> str:
    """Two rounds: shard 1 aborts while the others are in a collective; after the reset all sum up."""
    said = []
    for _ in range(2):
        try:
            group.all_reduce(torch.ones(4))
            if group.rank == 1:
                group.abort()
            for _ in range(3):
                group.all_reduce(torch.ones(4))
            said.append("went on")
        except CollectiveAborted:
            said.append("aborted")
        group.reset()
        said.append(str(float(group.all_reduce(torch.full((2,), group.rank + 1.0))[0])))
    return " ".join(said)


def wait(group: ShardGroup) -> str:
    """The first shard waits for the second one, which never comes. Another thread of the process goes on meanwhile."""
    group.all_reduce(torch.ones(1))
    print("ready", flush=True)
    if group.rank == 1:
        threading.Event().wait()
    beats = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.01):
            beats.append(1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        group.all_reduce(torch.ones(1))
        said = "went on"
    except CollectiveAborted:
        said = "stopped"
    done.set()
    thread.join()
    return f"{said} {'alive' if beats else 'without a beat'}"


def main() -> None:
    kind, rank, size, memory, store, scenario, seed = sys.argv[1:]
    native.instructions()
    torch.set_num_threads(1)
    group = open_group(
        int(rank), int(size), device=torch.device("cpu"), devices=["cpu"] * int(size), memory_fd=int(memory),
        store_fd=int(store), kind=kind,
    )  # fmt: skip
    said = {"random": lambda: random_ones(group, int(seed)), "abort": lambda: abort(group), "wait": lambda: wait(group)}
    print(said[scenario](), flush=True)


main()

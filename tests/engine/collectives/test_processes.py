"""Collectives between real processes, in shared memory and by gloo, against sums and columns that are computed here."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_processes import ShardProcesses
from torch import Tensor

from pagetide import native
from pagetide.engine.collectives.group import CollectiveAborted

SLOT_BYTES = 2 << 20
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
needs_kernels = pytest.mark.skipif(native.instructions() is None, reason="there are no native kernels")
MEMORY = pytest.param("shared-memory", marks=needs_kernels)
# Kinds of groups and their sizes. Processes of a size are started once.
SOME = [
    pytest.param("shared-memory", 3, marks=needs_kernels),
    pytest.param("shared-memory", 4, marks=needs_kernels),
    ("gloo", 3),
]
Opener = Callable[[str, int], ShardProcesses]
Case = tuple[list[Any], list[Any]]


@pytest.fixture(scope="module")
def shards() -> Iterator[Opener]:
    """The processes for a kind of group and a size, made once: every test leaves the group in order."""
    made: dict[tuple[str, int], ShardProcesses] = {}

    def get(kind: str, size: int) -> ShardProcesses:
        if (kind, size) not in made:
            made[kind, size] = ShardProcesses(size, kind).__enter__()
        return made[kind, size]

    yield get
    for processes in made.values():
        processes.__exit__(None, None, None)


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """What each shard puts in: numbers of very different sizes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape) for _ in range(size)]
    return [torch.from_numpy(np.asarray(part)).to(dtype) for part in parts]


def summed(parts: list[Tensor]) -> Tensor:
    """By numpy: in the order of ranks, in float32, rounded once."""
    total = parts[0].float().numpy()
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            total = total + part.float().numpy()
    return torch.from_numpy(np.asarray(total)).to(parts[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, type and every bit."""
    flat = a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def of_one(name: str, given: list[Any], results: list[Any], *more: Any) -> Case:
    """One collective: the call of each rank, and what a naive model says that it returns."""
    return [(name, part, *more) for part in given], results


def reduced(parts: list[Tensor]) -> Case:
    return of_one("all_reduce", parts, [summed(parts)] * len(parts))


def gathered(parts: list[Tensor], everywhere: bool = True) -> Case:
    joined, widths = torch.cat(parts, -1), [part.shape[-1] for part in parts]
    results = [joined if everywhere or not rank else part for rank, part in enumerate(parts)]
    return of_one("gather", parts, results, widths, {"everywhere": everywhere})


def broadcast(parts: list[Tensor]) -> Case:
    return of_one("broadcast", parts, [parts[0]] * len(parts))


def exchanged(data: list[bytes]) -> Case:
    return of_one("exchange", data, [data] * len(data))


def agrees(found: Any, expected: Any) -> bool:
    """Whether a call returned what the model says."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and same_bits(found, expected)
    return not isinstance(found, Tensor) and bool(found == expected)


def cases() -> Iterator[Case]:
    """Of three shards: shapes and types at their bounds, and what does not fit in a slot."""
    for dtype in FLOATS:
        for shape in [(16, 896), (3, 7), (1,), (513,), (8,), (9,), (0, 4), ()]:
            yield reduced(parts_of(3, shape, dtype))
        # Infinities, subnormal numbers, ties of the rounding, and what overflows in the type.
        numbers = [float("inf"), -0.0, 6e-8, 1e-40, 1.0, 65504.0, 3e38, 1 + 2**-7, 1 + 2**-10, 9.2e-41, -5.0]
        others = [1.0, -0.0, 6e-8, 1e-40, 2.0**-8, 65504.0, 3e38, 2**-8, 2**-11, 9.2e-41, 5.0]
        yield reduced([torch.tensor(values).to(dtype) for values in (numbers, others, [0.0] * len(numbers))])
    for extra in (-1, 0, 1, 12345):
        yield reduced(parts_of(3, (SLOT_BYTES // 4 + extra,), torch.float32))
    views = [part.t()[1::2, ::3] for part in parts_of(3, (6, 10), torch.float32)]
    assert not views[0].is_contiguous()
    yield from (reduced(views), gathered(views), broadcast(views))
    for before, dtype in [((4,), torch.float32), ((2, 3), torch.bfloat16), ((), torch.bool), ((0,), torch.float64)]:
        given = [torch.randn(*before, width).mul(9).to(dtype) for width in [5, 0, 7]]
        yield from (gathered(given), gathered(given, everywhere=False))
    # A row that does not fit in a slot, and many rows of which only some fit.
    for rows, widths in ((2, [SLOT_BYTES // 4 + 3, 5, 0]), (401, [1000, 3001, 7])):
        yield gathered([torch.arange(rows * width, dtype=torch.float32).view(rows, width) for width in widths])
    for dtype in [torch.int64, torch.int32, torch.bool, torch.float16]:
        for shape in [(5,), (2, 3), (), (0,), (300_001,)]:
            yield broadcast([torch.full(shape, rank + 1).to(dtype) for rank in range(3)])
    for lengths in [(0, 0, 0), (0, 1, 70_000), (3 * SLOT_BYTES + 17, 5, 0)]:
        yield exchanged([random.Random(rank).randbytes(length) for rank, length in enumerate(lengths)])


@pytest.mark.parametrize("kind", [MEMORY, "gloo"])
def test_each_collective_gives_what_a_naive_model_does(shards: Opener, kind: str) -> None:
    group = shards(kind, 3)
    for calls, expected in cases():
        for (found,), want in zip(group.all([[call] for call in calls]), expected, strict=True):
            assert agrees(found, want), (calls[0], found, want)
    for dtype in FLOATS:
        given = [torch.tensor([number], dtype=dtype) for number in (float("nan"), 1.0, 0.0)]
        assert all(total.isnan().all() for total in group.each("all_reduce", given))


@needs_kernels
def test_a_type_that_cannot_be_summed_is_an_error_and_no_more(shards: Opener) -> None:
    group = shards("shared-memory", 3)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        group.each("all_reduce", [torch.ones(3, dtype=torch.int64)] * 3)
    assert [t.tolist() for t in group.each("all_reduce", [torch.ones(2)] * 3)] == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("kind", [MEMORY, "gloo"])
def test_counts(kind: str) -> None:
    with ShardProcesses(2, kind) as group:
        group.each("all_reduce", [torch.ones(6)] * 2)
        group.each("all_reduce", [torch.ones(2, dtype=torch.float16)] * 2)
        group.each("gather", [torch.ones(1, 3), torch.ones(1, 5)], [[3, 5]] * 2)
        group.each("broadcast", [torch.zeros(4, dtype=torch.int64)] * 2)
        group.each("exchange", [b"abc", b"defgh"])
        for rank, counts in enumerate(group.each("counts")):
            found = {name: (count.calls, count.num_bytes) for name, count in counts.items()}
            gathered, exchanged = (12, 3) if rank == 0 else (20, 5)
            assert found == {"all_reduce": (2, 28), "gather": (1, gathered), "broadcast": (1, 32), "exchange": (1, exchanged)}
            assert all(count.seconds > 0 for count in counts.values())


def random_calls(
    size: int, rng: random.Random, count: int, *, waiting: bool = False, most: int = 900
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Calls by rank, and what a naive model says that they return.

    With `waiting`, of those only in which every shard waits for all others: by gloo, one that only sends does not.
    """
    calls: list[list[Any]] = [[] for _ in range(size)]
    expected: list[list[Any]] = [[] for _ in range(size)]
    for _ in range(count):
        dtype, rows = rng.choice(FLOATS), rng.choice([0, 1, 2, 17])
        match rng.choice(["all_reduce", "gather", "broadcast", "exchange"]):
            case "all_reduce":
                every, results = reduced(parts_of(size, (rows, rng.randrange(1, most)), dtype, rng.randrange(1 << 30)))
            case "gather":
                parts = [torch.randn(rows, rng.randrange(40)).to(dtype) for _ in range(size)]
                every, results = gathered(parts, waiting or rng.random() < 0.5)
            case "broadcast":
                every, results = broadcast([torch.randint(1 << 20, (rows, 3)) for _ in range(size)])
            case _:
                every, results = exchanged([rng.randbytes(rng.choice([0, 5, 5000])) for _ in range(size)])
        for rank in range(size):
            calls[rank].append(every[rank])
            expected[rank].append(results[rank])
    return calls, expected


@pytest.mark.parametrize(("kind", "size"), SOME)
def test_random_sequences(shards: Opener, kind: str, size: int) -> None:
    calls, expected = random_calls(size, random.Random(size), 12 if kind == "gloo" else 60)
    found = shards(kind, size).all(calls)
    for rank in range(size):
        assert len(found[rank]) == len(calls[rank])
        for got, want, (name, *_) in zip(found[rank], expected[rank], calls[rank], strict=True):
            assert agrees(got, want), (rank, name, got, want)


@pytest.mark.parametrize(("kind", "size"), SOME)
def test_aborts_between_random_calls(shards: Opener, kind: str, size: int) -> None:
    """One shard aborts in the place of a call; every other one raises in that call, and in none before it.

    So many times without a pause that some shards are long in the reset when another one has not yet seen the abort.
    """
    rng = random.Random(size)
    calls: list[list[Any]] = [[] for _ in range(size)]
    expected: list[list[Any]] = [[] for _ in range(size)]
    for _ in range(8 if kind == "gloo" else 60):
        some, results = random_calls(size, rng, 4, waiting=True, most=20)
        place, failing = rng.randrange(4), rng.randrange(size)
        for rank in range(size):
            if rank == failing:
                some[rank][place:] = [("abort",), ("broadcast", torch.zeros(1))]
            calls[rank] += [*some[rank], ("reset",)]
            expected[rank] += [*results[rank][:place], *([None] if rank == failing else []), CollectiveAborted, None]
    found = shards(kind, size).all(calls)
    for rank in range(size):
        assert len(found[rank]) == len(expected[rank])
        for got, want in zip(found[rank], expected[rank], strict=True):
            assert isinstance(got, want) if want is CollectiveAborted else agrees(got, want), (got, want)


@pytest.mark.parametrize("kind", [MEMORY, "gloo"])
def test_all_may_abort_at_once_and_again(shards: Opener, kind: str) -> None:
    for _ in range(3):
        found = shards(kind, 3).all([[("abort",), ("abort",), ("broadcast", torch.zeros(1))]] * 3)
        assert all(isinstance(results[-1], CollectiveAborted) for results in found)
        found = shards(kind, 3).all([[("reset",), ("exchange", b"x")]] * 3)
        assert all(results[1] == [b"x"] * 3 for results in found)


def test_by_gloo_a_killed_shard_is_an_abort() -> None:
    with ShardProcesses(3, "gloo") as group:
        group.each("all_reduce", [torch.ones(2)] * 3)
        group.begin(0, ("all_reduce", torch.ones(2)))
        group.begin(1, ("all_reduce", torch.ones(2)))
        group.kill(2)
        assert all(isinstance(group.results(rank)[0], CollectiveAborted) for rank in range(2))


@needs_kernels
def test_other_threads_run_while_a_shard_waits(shards: Opener) -> None:
    group = shards("shared-memory", 3)
    before = group.arrived(0)
    group.begin(0, ("answer_beside", torch.ones(1)))
    group.wait_until_arrived(0, before)
    group.pipes[0].send_bytes(b"do you run?")
    assert group.pipes[0].poll(60) and group.pipes[0].recv_bytes() == b"do you run?"
    assert group.arrived(1) < group.arrived(0)  # it was still waiting
    for rank in (1, 2):
        group.begin(rank, ("all_reduce", torch.ones(1)))
    assert [group.results(rank)[0].tolist() for rank in range(3)] == [[3.0]] * 3


@needs_kernels
def test_a_stopped_process_holds_up_the_others_and_no_more(shards: Opener) -> None:
    """A wait that sleeps goes on sleeping until the last shard is there."""
    group = shards("shared-memory", 3)
    before = group.arrived(0)
    os.kill(group.processes[2].pid, signal.SIGSTOP)
    try:
        for rank in range(3):
            group.begin(rank, ("all_reduce", torch.ones(1)))
        for rank in range(2):
            group.wait_until_arrived(rank, before)
        assert not any(pipe.poll(0) for pipe in group.pipes)
    finally:
        os.kill(group.processes[2].pid, signal.SIGCONT)
    assert [group.results(rank)[0].tolist() for rank in range(3)] == [[3.0]] * 3


@pytest.mark.parametrize("kind", [MEMORY, "gloo"])
def test_what_shards_share_has_no_name_in_a_file_system(shards: Opener, kind: str) -> None:
    """So nothing can be left behind, however they end."""
    group = shards(kind, 3)
    group.each("all_reduce", [torch.ones(2)] * 3)
    links = {os.readlink(f"/proc/self/fd/{fd}") for fd in (group.memory_fd, group.store_fd)}
    assert links == {"/memfd:pagetide-collectives (deleted)", "/memfd:pagetide-store (deleted)"}
    for process in group.processes:
        lines = Path(f"/proc/{process.pid}/maps").read_text("utf-8").splitlines()
        mapped = {line.split(maxsplit=5)[-1] for line in lines}
        used = mapped | set(open_files(process.pid))
        assert not [path for path in used if path.startswith(("/dev/shm/", "/tmp/pagetide"))]
        assert ("/memfd:pagetide-collectives (deleted)" in mapped) == (kind == "shared-memory")


def test_gloo_listens_on_the_loopback_interface_only(shards: Opener) -> None:
    group = shards("gloo", 3)
    group.each("broadcast", [torch.zeros(1)] * 3)
    for process in group.processes:
        assert set(listening(process.pid)) == {"0100007F"}  # 127.0.0.1


def open_files(pid: int) -> Iterator[str]:
    """What the descriptors of a process refer to."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(fd)


def listening(pid: int) -> Iterator[str]:
    """The addresses, in hexadecimal, at which a process listens."""
    owned = set(open_files(pid))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text("utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                yield fields[1].split(":")[0]

"""Groups of shards in real processes, which do what a test says: for tests of collectives."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import threading
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from pagetide.engine.collectives.factory import create_store, open_group
from pagetide.engine.collectives.group import CollectiveAborted, ShardGroup
from pagetide.engine.collectives.shared_memory_group import create_group_memory

ANSWER_S = 60.0
LINE = 64  # bytes; line 1 + i of the shared memory has the numbers of shard i's last collectives in two generations

Call = tuple[Any, ...]  # the name of a method of the group, and its arguments; a dict at the end are those by name


class _Inherited:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self.fd),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value)  # unlike a pipe's own way, with the tensors' data


def _serve(pipe: Connection, rank: int, size: int, kind: str, memory_fd: int, store_fd: int) -> None:
    """Do lists of calls, and answer with what `make_calls` returns."""
    torch.set_num_threads(1)
    how = {"devices": ["cpu"] * size, "memory_fd": memory_fd, "store_fd": store_fd, "kind": kind}
    group = open_group(rank, size, device=torch.device("cpu"), **how)
    while True:
        try:
            calls = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        pipe.send_bytes(_pickled(make_calls(group, calls, pipe)))


def make_calls(group: ShardGroup, calls: Sequence[Call], pipe: Connection | None = None) -> list[Any]:
    """What each call returned or raised. After one that was aborted: from the next reset on."""
    results: list[Any] = []
    aborted = False
    for name, *arguments in calls:
        if aborted and name != "reset":
            continue
        aborted = False
        named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        try:
            if name == "answer_beside":  # a thread answers one more message, while this one waits in a collective
                threading.Thread(target=_echo, args=(pipe,)).start()
                results.append(group.all_reduce(*arguments))
            else:
                results.append(getattr(group, name)(*arguments, **named))
        except Exception as error:
            results.append(error)
            aborted = isinstance(error, CollectiveAborted)
    return results


def _echo(pipe: Connection) -> None:
    pipe.send_bytes(pipe.recv_bytes())


class ShardProcesses:
    """`size` processes with a group. A context manager: at its end they are gone."""

    def __init__(self, size: int, kind: str) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pagetide.engine.collectives.torch_group"])
        self.size = size
        self.memory_fd, self.store_fd = create_group_memory(size), create_store()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            shared = _Inherited(self.memory_fd), _Inherited(self.store_fd)
            process = context.Process(target=_serve, args=(theirs, rank, size, kind, *shared), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def begin(self, rank: int, *calls: Call) -> None:
        """Let one shard make `calls`."""
        self.pipes[rank].send_bytes(_pickled(calls))

    def results(self, rank: int) -> list[Any]:
        """What the calls of one shard returned or raised; of those between an abort and a reset, nothing."""
        assert self.pipes[rank].poll(ANSWER_S), f"shard {rank} does not answer"
        return pickle.loads(self.pipes[rank].recv_bytes())  # type: ignore[no-any-return]

    def all(self, by_rank: Sequence[Sequence[Call]]) -> list[list[Any]]:
        """The results of calls that all shards make at the same time, by rank."""
        for rank, calls in enumerate(by_rank):
            self.begin(rank, *calls)
        return [self.results(rank) for rank in range(self.size)]

    def each(self, name: str, *by_rank: Sequence[Any], **named: Any) -> list[Any]:
        """The result of one collective on each shard. `by_rank`: for each argument, its values by rank."""
        calls = [[(name, *(values[rank] for values in by_rank), named)] for rank in range(self.size)]
        results = [found[0] for found in self.all(calls)]
        if error := next((result for result in results if isinstance(result, Exception)), None):
            raise error
        return results

    def wait_until_arrived(self, rank: int, after: int) -> None:
        """Until the shard is in a later collective than number `after`, in shared memory."""
        while True:
            answered = self.pipes[rank].poll(0)  # before the look, as it may arrive and answer between the two
            if self.arrived(rank) > after:
                return
            assert not answered and self.processes[rank].is_alive(), f"shard {rank} never arrived"
            os.sched_yield()

    def arrived(self, rank: int) -> int:
        """The number of the shard's last collective in shared memory."""
        return max(struct.unpack("<QQ", os.pread(self.memory_fd, 16, (1 + rank) * LINE)))

    def kill(self, rank: int) -> None:
        """End one process at once."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def __enter__(self) -> ShardProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        os.close(self.memory_fd)
        os.close(self.store_fd)

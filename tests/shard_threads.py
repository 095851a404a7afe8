"""The shards of a model in the threads of one process: groups over shared lists and barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagetide.engine.collectives.group import CollectiveAborted, CollectiveCount


class _Meeting:
    """What the groups of one model share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.turns: dict[int, dict[int, Any]] = {}  # by number of the collective: what each shard gave
        self.read: dict[int, int] = {}
        self.aborted = False
        self.resetting = 0
        self.generation = 0


class ThreadGroup:
    """One shard's place. See `ShardGroup`."""

    name = "threads"
    captures = True

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self.key = len(_groups)
        _groups.append(self)
        self._meeting = meeting
        self._turn = 0
        self._counts: dict[str, CollectiveCount] = {}

    def _meet(self, kind: str, given: Any) -> list[Any]:
        meeting, turn = self._meeting, (self._meeting.generation, self._turn)
        count = self._counts.setdefault(kind, CollectiveCount())
        count.calls += 1
        if isinstance(given, Tensor):
            count.num_bytes += given.nbytes
        with meeting.changed:
            if meeting.aborted:
                raise CollectiveAborted("another shard has stopped")
            self._turn += 1
            there = meeting.turns.setdefault(turn, {})
            there[self.rank] = kind, given
            meeting.changed.notify_all()
            meeting.changed.wait_for(lambda: len(there) == self.size or meeting.aborted, 60)
            if len(there) < self.size:
                raise CollectiveAborted("another shard has stopped" if meeting.aborted else "another shard never came")
            assert len({kind for kind, _ in there.values()}) == 1, f"the shards do different things: {there}"
            found = [there[rank][1] for rank in range(self.size)]
            meeting.read[turn] = meeting.read.get(turn, 0) + 1
            if meeting.read[turn] == self.size:
                del meeting.turns[turn], meeting.read[turn]
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        all_reduce(x, self.key)
        return x

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        assert x.shape[-1] == widths[self.rank], (x.shape, widths)
        return (
            gather(x.contiguous(), self.key)
            if everywhere or not self.rank
            else (gather(x.contiguous(), self.key), x)[1]
        )

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the shards."""
        parts = self._meet("all_reduce", x.clone())
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        total = parts[0].float() if x.dtype in (torch.float16, torch.bfloat16) else parts[0].clone()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """The columns of all shards."""
        return torch.cat(self._meet("gather", x.clone()), -1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._meet("broadcast", x.clone())[0].clone()

    def exchange(self, data: bytes) -> list[bytes]:
        return self._meet("exchange", data)

    def abort(self) -> None:
        with self._meeting.changed:
            self._meeting.aborted = True
            self._meeting.changed.notify_all()

    def reset(self) -> None:
        meeting = self._meeting
        with meeting.changed:
            generation = meeting.generation
            meeting.resetting += 1
            if meeting.resetting == self.size:
                meeting.resetting, meeting.aborted = 0, False
                meeting.turns.clear()
                meeting.read.clear()
                meeting.generation += 1
                meeting.changed.notify_all()
            elif not meeting.changed.wait_for(lambda: meeting.generation > generation, 60):
                raise RuntimeError("another shard never came to reset")
            self._turn = 0

    def counts(self) -> dict[str, CollectiveCount]:
        return self._counts

    def close(self) -> None:
        pass


_groups: list[ThreadGroup] = []  # by key


# Operators of torch, so that a tape which stands in for CUDA graphs does them again.
@torch.library.custom_op("shard_threads::all_reduce", mutates_args=("x",))
def all_reduce(x: Tensor, key: int) -> None:
    x.copy_(_groups[key].summed(x))


@torch.library.custom_op("shard_threads::gather", mutates_args=())
def gather(x: Tensor, key: int) -> Tensor:
    return _groups[key].gathered(x)


def thread_groups(size: int) -> list[ThreadGroup]:
    """The groups of `size` shards, each for a thread of its own."""
    meeting = _Meeting(size)
    return [ThreadGroup(rank, meeting) for rank in range(size)]


def run_in_threads(functions: Sequence[Callable[[], Any]], groups: Sequence[ThreadGroup] = ()) -> list[Any]:
    """Call each function in a thread of its own. Returns the results; raises the first exception, after all have ended.

    With `groups`, an exception aborts their collectives, so that no thread waits for the one that raised.
    """
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)
            for group in groups:
                group.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, CollectiveAborted)), errors[0])
    return results

"""The outputs that front ends follow: journaled records, and how many of them each front end has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Output:
    """The journaled records of a request, and the front ends that follow it. `left_at`: the last one left it then."""

    records: list[bytes]
    is_complete: bool = False
    left_at: float = 0.0
    followers: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _FrontEnd:
    """A front end: how many records it has of each request that it follows, and which have news."""

    seen_at: float
    positions: dict[int, int] = field(default_factory=dict)
    news: dict[int, None] = field(default_factory=dict)  # ordered
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_reads: int = 0


class Followers:
    """Hands journaled records to the front ends that follow their requests, each record once.

    Outputs that are complete and followed by no front end are dropped: the journal has them.

    Args:
        may_drop: Whether the journal has all that was shown. It has not while it cannot be written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, may_drop: Callable[[], bool] = lambda: True) -> None:
        self._clock = clock
        self._may_drop = may_drop
        self._outputs: dict[int, _Output] = {}
        self._fronts: dict[str, _FrontEnd] = {}
        self._gone: dict[str, _FrontEnd] = {}  # front ends that were forgotten, in order

    def __contains__(self, number: int) -> bool:
        return number in self._outputs

    # -- outputs -----------------------------------------------------------------------------------------------------

    def add(self, number: int, records: Sequence[bytes] = (), is_complete: bool = False) -> None:
        """Begin the output of a request, with its records so far. Does nothing if it is there."""
        self._outputs.setdefault(number, _Output(list(records), is_complete, self._clock()))

    def show(self, number: int, data: bytes, ends: bool) -> None:
        """Append a record that is in the journal. Does nothing for a request that was withdrawn."""
        output = self._outputs.get(number)
        if output is None:
            return
        output.records.append(data)
        output.is_complete = output.is_complete or ends
        for name in output.followers:
            front = self._fronts[name]
            front.news[number] = None
            front.changed.set()
        self._drop_if_done(number)

    def withdraw(self, number: int) -> None:
        """Drop the output of a request that is refused after all."""
        if (output := self._outputs.get(number)) is not None:
            output.is_complete = True
            for name in list(output.followers):
                self.leave(name, [number])
            self._outputs.pop(number, None)

    def _drop_if_done(self, number: int) -> None:
        output = self._outputs.get(number)
        if output is not None and output.is_complete and not output.followers and self._may_drop():
            del self._outputs[number]

    # -- front ends --------------------------------------------------------------------------------------------------

    def _front(self, name: str) -> _FrontEnd:
        front = self._fronts.get(name)
        if front is None:
            front = self._fronts[name] = _FrontEnd(self._clock())
        front.seen_at = self._clock()
        return front

    def follow(self, name: str, number: int, position: int = 0) -> None:
        """Let a front end follow an output that is there, from its record `position` on at the latest."""
        front = self._front(name)
        self._outputs[number].followers.add(name)
        front.positions[number] = min(position, front.positions.get(number, position))
        front.news[number] = None
        front.changed.set()

    def leave(self, name: str, numbers: Iterable[int]) -> None:
        """Let a front end follow these requests no longer."""
        front = self._fronts.get(name)
        for number in numbers:
            if front is not None and front.positions.pop(number, None) is not None and number in self._outputs:
                self._outputs[number].followers.discard(name)
                self._outputs[number].left_at = self._clock()
                self._drop_if_done(number)

    def unread(self, unread_s: float) -> list[int]:
        """Unfinished requests that no front end has followed for `unread_s`."""
        before = self._clock() - unread_s
        outputs = self._outputs.items()
        return [number for number, one in outputs if not (one.followers or one.is_complete) and one.left_at < before]

    async def read(self, name: str, timeout_s: float) -> dict[int, tuple[int, list[bytes]]]:
        """New records by request; waits for some. An output that is complete is followed no longer once it is read.

        A further read of the same front end ends this one with nothing: its answer would go astray.
        """
        front = self._front(name)
        front.num_reads += 1
        this_read = front.num_reads
        front.changed.set()
        if not (found := self._take(name, front)):
            front.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await front.changed.wait()
            if front.num_reads != this_read:
                return {}
            found = self._take(name, front)
        front.seen_at = self._clock()
        return found

    def _take(self, name: str, front: _FrontEnd) -> dict[int, tuple[int, list[bytes]]]:
        found = {}
        numbers, front.news = front.news, {}
        for number in numbers:
            position, output = front.positions.get(number), self._outputs.get(number)
            if position is None or output is None:
                continue
            if len(output.records) > position:
                found[number] = position, output.records[position:]
                front.positions[number] = len(output.records)
            if output.is_complete:
                self.leave(name, [number])
        return found

    def positions(self) -> Mapping[str, int]:
        """Requests that each front end follows."""
        return {name: len(front.positions) for name, front in self._fronts.items()}

    def forget(self, unseen_s: float, keep_s: float) -> None:
        """Forget front ends that have read nothing for `unseen_s`, and after `keep_s` more what they followed."""
        now = self._clock()
        for name in [name for name, front in self._fronts.items() if now - front.seen_at > unseen_s]:
            front = self._fronts[name]
            positions = dict(front.positions)
            self.leave(name, positions)
            del self._fronts[name]
            self._gone[name] = _FrontEnd(front.seen_at, positions)
        for name in [name for name, front in self._gone.items() if now - front.seen_at > unseen_s + keep_s]:
            del self._gone[name]
        for number in [number for number, output in self._outputs.items() if output.is_complete]:
            self._drop_if_done(number)

    def returned(self, name: str) -> Mapping[int, int]:
        """What a front end followed that was forgotten and is there again, and how many records it has. Said once."""
        front = self._gone.pop(name, None)
        return {} if front is None else front.positions

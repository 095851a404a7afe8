"""The processes of a divided model's shards, as the driver sees them: started, spoken to, watched, and ended together.

One thread starts them, reads what they send, and watches: a process that ends, or a heartbeat that stops, is the end of all of
them. What they share has no name in a file system, and so goes with them.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...common.child_process import END_S, ChildProcess
from ...common.frames import ChannelClosed
from ..collectives.factory import create_store
from ..collectives.shared_memory_group import create_group_memory
from ..errors import Attempt, ShardLost, format_error
from ..process.fork import MakerProcess
from .messages import Launch, ShardCall, ShardFailed
from .pulse import LOOK_S, PulseWatch, Sign

log = logging.getLogger(__name__)

SILENT_S = 10.0  # without a heartbeat, after which a shard is given up
MODULE = f"{__package__}.process"

_teams: weakref.WeakSet[ShardTeam] = weakref.WeakSet()


class ShardTeam:
    """`len(devices)` processes. `post` is for one thread at a time; all else is thread-safe.

    Args:
        num_threads: Of each shard on a CPU.
    """

    def __init__(self, devices: Sequence[str], num_threads: int) -> None:
        self.devices = tuple(devices)
        self.lost: ShardLost | None = None
        self._maker = MakerProcess()
        self.is_loaded = False  # set by the owner
        self.on_well: Callable[[], None] = lambda: None  # called while shards are at work, and none hangs
        self._signs = [Sign()] * len(devices)  # the last of each
        self._group_fd = create_group_memory(len(devices))
        self._store_fd = create_store()
        self._num_threads = num_threads
        self._processes: list[ChildProcess] = []
        self._changed = threading.Condition()
        self._answers: dict[int, dict[int, Any]] = {}  # by number of the message, then rank
        self._number = 0
        self._started = self._closing = False
        self._thread = threading.Thread(target=self._watch, name="pagetide-shards", daemon=True)
        _teams.add(self)
        self._thread.start()

    @property
    def size(self) -> int:
        """The number of shards."""
        return len(self.devices)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return tuple(process.pid for process in self._processes)

    def sign(self, rank: int) -> Sign:
        """The last sign of life of a shard; zeros once the team is closed."""
        return Sign() if self._closing else self._signs[rank]

    def to_dict(self) -> list[dict[str, Any]]:
        """The shards as plain data, for `LLM.stats`."""
        return [
            {"rank": rank, "device": device, "pid": self._processes[rank].pid, **self.sign(rank).to_dict()}
            for rank, device in enumerate(self.devices)
        ]

    # ---- messages --------------------------------------------------------------------------------

    def post(self, messages: Sequence[Any]) -> int:
        """Send each shard its message, by rank. Returns the number to `wait` for. Raises ShardLost.

        An error while it sends, of which some shards have got all and others nothing or a part, ends the team.
        """
        self._number += 1
        number = self._number
        with self._changed:
            self._check()
            self._answers[number] = {}
        for rank, message in enumerate(messages):
            try:
                self._processes[rank].channel.send((number, message))
            except ChannelClosed:
                self._wait_until_lost(rank)
            except Exception as error:
                self._lose(f"sending to the shards failed: {type(error).__name__}")
                raise
        return number

    def wait(self, number: int, ranks: Sequence[int]) -> list[Any]:
        """The answers of `ranks` to message `number`. May be called again after an interrupt, until `forget`.

        Raises ShardLost, and the error of a shard that could not load.
        """
        with self._changed:
            answers = self._answers[number]
            while not all(rank in answers for rank in ranks):
                failed = next((answer for answer in answers.values() if isinstance(answer, ShardFailed)), None)
                if failed is not None:
                    raise failed.error
                self._check()
                self._changed.wait()
            found = [answers[rank] for rank in ranks]
        for answer in found:
            if isinstance(answer, ShardFailed):
                raise answer.error
        return found

    def forget(self, number: int) -> None:
        """Drop the answers to message `number`, also those to come."""
        with self._changed:
            self._answers.pop(number, None)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of each shard returns. Raises ShardLost."""
        return self.ask([ShardCall(method, arguments)] * self.size)

    def ask(self, messages: Sequence[Any]) -> list[Any]:
        """Send each shard its message and wait for all answers. Raises as `wait`."""
        number = self.post(messages)
        try:
            return self.wait(number, range(self.size))
        finally:
            self.forget(number)

    def fail(self, why: str) -> ShardLost:
        """End all shards, as one of them can no longer be trusted. Returns the error."""
        self._lose(why)
        return self.lost or ShardLost(why)

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost
        if self._closing:
            raise ShardLost("the engine is closed")

    def _wait_until_lost(self, rank: int) -> None:
        """Raise ShardLost: the channel of a shard is closed, and the watching thread is about to find out why."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or self._closing, END_S)
            self._check()
        raise ShardLost(f"{self._name(rank)} closed its socket")

    # ---- the watching thread ---------------------------------------------------------------------

    def start(self) -> None:
        """Wait until all processes are started. Raises what starting one raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._started or self.lost is not None)
            if not self._started:
                self._check()

    def _watch(self) -> None:
        with Attempt() as attempt:
            self._spawn()
        if attempt.error is not None:
            self._lose(f"a shard could not be started: {format_error(attempt.error)}")
            return
        with self._changed:
            self._started = True
            self._changed.notify_all()
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.socket, selectors.EVENT_READ, rank)
            watch = PulseWatch(self.size, SILENT_S)
            while not self._closing and self.lost is None:
                try:
                    for key, _ in selector.select(LOOK_S):
                        self._receive(key.data)
                    self._look(watch)
                except Exception as error:  # callers wait for this thread
                    log.exception("the shards cannot be watched")
                    self._lose(f"the shards cannot be watched: {type(error).__name__}: {error}")

    def _spawn(self) -> None:
        """Start the processes, from this thread: the kernel kills them when it ends."""
        level = logging.getLogger("pagetide").getEffectiveLevel()
        search_path = tuple(os.path.abspath(place) for place in sys.path)
        shared = (self._group_fd, self._store_fd)
        for rank in range(self.size):
            process = ChildProcess(("-m", MODULE), fds=shared)
            self._processes.append(process)
            process.channel.send((0, Launch(rank, self.devices, *shared, self._num_threads, level, search_path)))
        with self._changed:
            self._answers[0] = {}

    def _receive(self, rank: int) -> None:
        try:
            messages = self._processes[rank].channel.received()
        except ChannelClosed:
            self._lose_ended(rank)
            return
        answers = []
        for message in messages:
            if isinstance(message, Sign):
                self._signs[rank] = message
            else:
                answers.append(message)
        if not answers:
            return
        with self._changed:
            for number, message in answers:
                if number in self._answers:
                    self._answers[number][rank] = message
            self._changed.notify_all()

    def _look(self, watch: PulseWatch) -> None:
        """Give up shards that hang."""
        posted = self._number
        if (found := watch.look(self._signs, posted, self.is_loaded, time.monotonic())) is not None:
            ranks, why = found
            self._lose(f"{' and '.join(map(self._name, ranks))} {why}")
        elif any(sign.done < posted for sign in self._signs):
            self.on_well()

    def _lose_ended(self, rank: int) -> None:
        """Give up: a shard closed its socket. Its process is at its end, or is killed."""
        with self._changed:
            answers = [answer for of in self._answers.values() if (answer := of.get(rank)) is not None]
        said = next((str(answer.error) for answer in answers if isinstance(answer, ShardFailed)), None)
        self._lose(f"{self._name(rank)} {self._processes[rank].ending(said)}")

    def _name(self, rank: int) -> str:
        pid = f", process {self._processes[rank].pid}" if rank < len(self._processes) else ""
        return f"shard {rank} of {self.size} (on {self.devices[rank]}{pid})"

    def _lose(self, why: str) -> None:
        """End all shards: none of them can compute anything without the others."""
        if self._closing or self.lost is not None:
            return
        self._kill()
        with self._changed:
            self.lost = ShardLost(f"{why}; the engine has ended: make a new one")
            self._changed.notify_all()
        log.error("%s", self.lost)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill the shards, and free what they share with the driver. Idempotent. In a fork of the driver it does nothing."""
        if not self._maker.is_current:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(END_S)
        self._kill()
        for process in self._processes:
            process.close()
        os.close(self._group_fd)
        os.close(self._store_fd)
        _teams.discard(self)

    def _kill(self) -> None:
        """Kill all processes and wait for their end, so that their memory is free."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(END_S)


@atexit.register
def _close_all() -> None:
    """End the shards of engines that were not closed."""
    for team in list(_teams):
        team.close()

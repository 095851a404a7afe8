"""Worker processes of a benchmark, each with a pipe."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagetide.allocator import wire
from pagetide.allocator.broker_client import Channel

METHOD = "spawn"  # a fresh interpreter for each process, as a user's program has
END_S = 30.0


class Worker:
    """A process that runs `serve(pipe, *arguments)`. Use as a context manager.

    With `core` it stays on that one of the cores there are, counted round. The process ends when `serve` returns. Leaving the
    context closes the pipe, so `serve` may also wait for EOFError.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, core: int | None = None) -> None:
        context: Any = multiprocessing.get_context(METHOD)
        self._pipe, theirs = context.Pipe()
        cores = sorted(os.sched_getaffinity(0))
        own = cores if core is None else [cores[core % len(cores)]]
        self._process = context.Process(target=_run, args=(serve, theirs, own, dict(os.environ), arguments))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return int(self._process.pid)

    def send(self, message: object) -> None:
        """Send anything that can be pickled."""
        self._pipe.send(message)

    def receive(self) -> Any:
        """The next message of the process. Raises ChildProcessError where the process has ended instead."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(END_S)
            raise ChildProcessError(
                f"a process of the benchmark ended with status {self._process.exitcode}; its own message is above"
            ) from None

    def poll(self, seconds: float) -> bool:
        """Whether a message, or the end of the process, is there within so many seconds."""
        return self._pipe.poll(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()
        if error is None:
            self._process.join(END_S)
        self.kill()

    def kill(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def recalled(
    socket: Path, lease: str, num_bytes: int, held_bytes: Callable[[], int], but_for_bytes: int, deadline_s: float
) -> tuple[float, float]:
    """Order a recall as `vram-monitor recall` does: (when, seconds until so much less is held, but for `but_for_bytes`).

    Raises TimeoutError.
    """
    channel = Channel(socket)
    time.sleep(0.1)  # the broker has greeted, and an engine without steps knows that no caller waits for the next one
    target = held_bytes() - num_bytes + but_for_bytes
    try:
        began = time.perf_counter()
        channel.send(wire.RecallBytesMessage(lease, num_bytes))
        while (held := held_bytes()) > target:
            if time.perf_counter() - began > deadline_s:
                raise TimeoutError(f"{held - target:,} bytes were not back after {deadline_s:g} s")
            time.sleep(0.0001)
        took = time.perf_counter() - began
        channel.wait(time.monotonic() + deadline_s, wire.RecallingMessage)
        return began, took
    finally:
        channel.close()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Inside, so many processes count."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run(
    serve: Callable[..., None], pipe: Connection, cores: list[int], environ: dict[str, str], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environ)  # a process forked from a server has the server's own
    os.sched_setaffinity(0, cores)
    serve(pipe, *arguments)

"""Worker processes of a benchmark, each with a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

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

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        if error is None:
            self._process.join(END_S)
        self._process.kill()
        self._process.join()


def _run(
    serve: Callable[..., None], pipe: Connection, cores: list[int], environ: dict[str, str], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environ)  # a process forked from a server has the server's own
    os.sched_setaffinity(0, cores)
    serve(pipe, *arguments)

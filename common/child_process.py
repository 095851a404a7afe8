"""The one way to start a child process: a fresh interpreter, connected to this process by a pair of sockets.

    ChildProcess(("-m", module))   ◄── frames ──►   parent_channel(), or parent_socket() for an event loop

A fork has locks that stay locked and cannot use CUDA, and `multiprocessing` runs the user's main module again. The child has
a session of its own, so that Ctrl-C at a terminal reaches the parent alone, which ends its children. Its socket is its standard
input, and ends with the parent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from .frames import ChannelClosed, PickleChannel

# For the end of a process that closed its socket or was killed; a driver's call may hold it up
END_S = 5.0
SAID_CHARS = 300  # of a message's quotation
_KEPT_BYTES = 1 << 16  # of what a process said
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A child process. Close it, which ends it. Thread-safe, but for `close`; one thread at a time may receive.

    Args:
        arguments: Of the interpreter: ("-m", module, ...), ("-c", program, ...) or (script, ...).
        captures: Keep its standard output and error for `said`.
        log: A descriptor that takes its standard output and error; default: they are this process's own.
        fds: Descriptors that it inherits, with the same numbers.
        environ: Variables besides those of this process.
        cwd: The folder in which it starts.

    Attributes:
        socket, channel: This process's end of the pair, and messages over it.
    """

    name = "a child"

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        captures: bool = False,
        log: int | None = None,
        fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        """Raises OSError."""
        self._said = tempfile.TemporaryFile() if captures else None  # noqa: SIM115  closed in close()
        output = self._said or log
        self.socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    # Unbuffered, so that what it says last comes last.
                    [sys.executable or "python3", "-P", "-u", *arguments],
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    pass_fds=fds,
                    env=os.environ | (environ or {}),
                    cwd=cwd,
                    start_new_session=True,
                )
        except BaseException:
            self._close_files()
            raise
        self.channel = PickleChannel(self.socket)
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for the signal that ended it; None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """The end of its standard output and error, if they are captured."""
        if self._said is None or self._said.closed:
            return ""
        file = self._said.fileno()  # it shares its position with the child
        return os.pread(file, _KEPT_BYTES, max(0, os.fstat(file).st_size - _KEPT_BYTES)).decode(errors="replace").strip()

    def send(self, message: object) -> None:
        """Send a message. If it has ended, `receive` says so."""
        with suppress(ChannelClosed):
            self.channel.send(message)

    def receive(self) -> Any:
        """Its next message. Raises ChildProcessError, with its last words, if it has ended."""
        try:
            return self.channel.receive()
        except ChannelClosed:
            raise ChildProcessError(f"{self.name} (process {self.pid}) {self.ending()}") from None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its status once it has ended; None if it has not within `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended. Its end may take a while: see `wait`."""
        with suppress(OSError):
            self._process.send_signal(number)

    def ending(self, said: str | None = None) -> str:
        """How it ended, as the end of a sentence, with the last line that it said or with `said`. Waits for its end."""
        status = self.wait(END_S)
        if status is None:
            return "closed its socket"
        how = f"ended with status {status}"
        if status < 0:
            names = {one.value: one.name for one in signal.Signals}
            how = f"was killed by {names.get(-status, f'signal {-status}')}"
        if said is None:
            said = self.said.rpartition("\n")[2][:SAID_CHARS]
        return f"{how}: {said}" if said else how

    def close(self, grace_s: float = 0.0) -> None:
        """Close the socket, and kill the process if it has not ended `grace_s` later. Idempotent."""
        self.socket.close()
        if self.wait(grace_s) is None:
            self.kill()
            self.wait(END_S)  # one that is stuck in a driver is left behind
        self._close_files()

    def _close_files(self) -> None:
        self.socket.close()
        if self._said is not None:
            self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# ---- in the child --------------------------------------------------------------------------------


def parent_socket() -> socket.socket:
    """The child's end of the pair; its standard input is empty from now on. Call it first of all, and once.

    Signals are as a new program has them, whatever the parent and its thread block or ignore; but SIGINT is ignored, since it
    may be sent to the whole process tree, and the parent ends its children.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not below 3: where the parent has no standard streams, libraries write to what has their numbers.
    end = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null > 0:
        os.close(null)
    return end


def parent_channel() -> PickleChannel:
    """As `parent_socket`, with messages. The kernel kills this process when the thread that started it ends."""
    end = parent_socket()
    # Never closed, so that for the parent the connection ends when this process has ended, not as it begins to.
    os.dup(end.fileno())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    gone = select.poll()
    gone.register(end, 0)  # hang-ups only
    if gone.poll(0):
        os._exit(1)
    return PickleChannel(end)

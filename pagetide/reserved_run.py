"""Runs the program of `vram-monitor run` to its end: forwards signals to it and watches over its reservation.

With a terminal the program stays in the foreground: it gets typed signals directly, and signals sent to this process
are forwarded to the program alone. Without one, as under a service manager, it gets its own process group, and signals
are forwarded to the group. In both cases this process ends with the program, with its status.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from .monitor.errors import ConfigInvalid

if TYPE_CHECKING:
    from .allocator.reservation import Reservation

LOOK_S = 0.5  # polling interval, for events without a descriptor

_TYPED = (signal.SIGINT, signal.SIGQUIT)  # signals that a terminal sends to its whole foreground group
_SENT = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class CannotStart(ConfigInvalid):
    """The program cannot be started. `status` follows shells: 127 if there is no such program, else 126."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run_reserved(program: Sequence[str], reservation: Reservation, what: str) -> int:
    """Run `program` and return its exit status, 128 + N for signal N. Main thread only. Raises CannotStart.

    `what` names the reserved amount: "8.00 GiB". The loss of the reservation, and its renewal, are reported on stderr.
    """
    group = not _has_terminal()
    lookout = Lookout(reservation, what, "the program")
    with _forwarding(group) as forward:
        process = _start(program, group)
        forward(process)
        while process.poll() is None:
            _wait(process, reservation)
            lookout.look()
    status = process.returncode
    return status if status >= 0 else 128 - status


def _start(program: Sequence[str], group: bool) -> subprocess.Popen[bytes]:
    name = program[0]
    try:
        return subprocess.Popen(program, process_group=0 if group else None)
    except FileNotFoundError:
        if shutil.which(name) is None:
            raise CannotStart(f"there is no program {name!r}", 127) from None
        raise CannotStart(f"{name!r} cannot be started: the interpreter that its first line names is missing", 126) from None
    except PermissionError:
        why = "it is a directory" if os.path.isdir(name) else "it is not executable, or not for this user (chmod +x?)"
        raise CannotStart(f"{name!r} cannot be started: {why}", 126) from None
    except (OSError, ValueError) as error:
        raise CannotStart(f"{name!r} cannot be started: {getattr(error, 'strerror', None) or error}", 126) from None


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _Forward:
    """Forwards signals to the program; those that come before it has started are kept for it."""

    def __init__(self, group: bool) -> None:
        self._group = group
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: list[int] = []

    def __call__(self, process: subprocess.Popen[bytes]) -> None:
        """Set the started process, and send it the kept signals."""
        self._process = process
        for number in self._kept:
            self.send(number)

    def taken(self, number: int, frame: FrameType | None) -> None:
        """Signal handler that forwards the signal."""
        if self._process is None:
            self._kept.append(number)
        else:
            self.send(number)

    def typed(self, number: int, frame: FrameType | None) -> None:
        """Signal handler for signals that the terminal also sends to the program: does nothing."""

    def send(self, number: int) -> None:
        """Send a signal to the program or its group, unless it has ended."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


@contextlib.contextmanager
def _forwarding(group: bool) -> Iterator[_Forward]:
    """Forward signals inside the context, except ignored ones, as under nohup: the program ignores them too."""
    forward = _Forward(group)
    handlers = dict.fromkeys(_SENT, forward.taken)
    handlers |= dict.fromkeys(_TYPED, forward.taken if group else forward.typed)
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], reservation: Reservation) -> None:
    """Wait until the program has ended, the broker has sent something, or `LOOK_S` has passed."""
    poller = select.poll()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no pidfd before Linux 5.3
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            poller.register(pidfd, select.POLLIN)
        if (fd := reservation.fileno()) is not None:
            poller.register(fd, select.POLLIN)
        poller.poll(LOOK_S * 1000)


class Lookout:
    """Watches over a reservation: reports its loss, its renewal and its end on stderr, once each."""

    def __init__(self, reservation: Reservation, what: str, goes_on: str) -> None:
        """`what` names the reserved amount, `goes_on` what runs without it."""
        self._reservation, self._what, self._goes_on = reservation, what, goes_on
        self._has_ended = False

    def look(self) -> None:
        """Report what has changed since the last look."""
        kept = self._reservation.kept
        self._reservation.poll()
        if self._reservation.ended and not self._has_ended:
            self._has_ended = True
            print(
                f"vram-monitor: {self._what} are reserved no longer: {self._reservation.trouble}", file=sys.stderr, flush=True
            )
        if self._reservation.ended or kept == self._reservation.kept:
            return
        if kept:
            said = f"{self._what} are reserved no longer ({self._reservation.trouble}); {self._goes_on} goes on, and they are"
            print(f"vram-monitor: {said} reserved again once there is a broker", file=sys.stderr, flush=True)
        else:
            print(f"vram-monitor: {self._what} are reserved again", file=sys.stderr, flush=True)

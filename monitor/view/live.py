"""The terminal view of a snapshot: printed once, or live."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import MonitorError
from ..snapshot import Origin, Snapshot
from .keys import ESCAPE_DELAY_S, Keys, keys_of
from .listing import Listing
from .page import render, render_lines, render_live, render_reservations
from .page import render_leases as leases_alone
from .state import Action, ViewState
from .symbols import ASCII, UNICODE, Symbols
from .text import Line

if TYPE_CHECKING:
    from rich.console import Console

_STDIN = 0
# These end or stop the process, which must restore the terminal first. Windows has few of them.
_LEAVING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP") if hasattr(signal, name))


def render_once(snapshot: Snapshot, console: Console, listing: Listing | None = None) -> None:
    """Print the view once, by default with all processes, in the width of `console`; plain text if it is no terminal."""
    page = render(snapshot, width=console.width, symbols=_symbols(console), listing=listing or Listing(), clock=datetime.now())
    console.print(page, end="")


def render_leases(snapshot: Snapshot, console: Console) -> None:
    """Print all leases and reservations, in the width of `console`; plain text if it is no terminal."""
    console.print(leases_alone(snapshot, width=console.width, symbols=_symbols(console)), end="")


def show_reservations(snapshot: Snapshot, console: Console) -> None:
    """Print all reservations, in the width of `console`, or that there is none; plain text if it is no terminal."""
    console.print(render_reservations(snapshot, width=console.width, symbols=_symbols(console)), end="")


def print_lines(lines: Callable[[int, Symbols], list[Line]], console: Console) -> None:
    """Print what `lines` makes for the width of `console`; plain text if it is no terminal."""
    console.print(render_lines(lines, width=console.width, symbols=_symbols(console)), end="")


def run_live(
    read: Callable[[], Snapshot],
    *,
    interval_s: float,
    console: Console,
    listing: Listing | None = None,
    act: Callable[[Action], str] | None = None,
) -> None:
    """Show what `read` returns every `interval_s` seconds, and after a key or a resize, until q or Ctrl-C.

    Must run in the main thread. `listing` says which processes are listed first, and in which order. `act` sends a
    confirmed action to the broker and returns its result; a MonitorError is shown as a refusal. If `console` is no
    terminal or cannot move its cursor (TERM=dumb), prints repeatedly, and only Ctrl-C ends it.

    Restores the terminal when it returns or raises, and while Ctrl-Z stops the process. Raises ValueError for an
    interval that is not above 0, SystemExit for SIGTERM, SIGHUP and SIGQUIT if the caller has no handlers for them, and
    what `read` raises.
    """
    if not interval_s > 0:
        raise ValueError(f"the interval between two drawings must be above 0 seconds, got {interval_s}")
    with suppress(KeyboardInterrupt):
        if console.is_terminal and not console.is_dumb_terminal and hasattr(signal, "SIGWINCH"):
            _Screen(read, interval_s, console, listing or Listing(), act).run()
        else:
            _print_on(read, interval_s, console, listing or Listing())


def _symbols(console: Console) -> Symbols:
    """Unicode, unless the encoding of `console` or its font lacks it."""
    limited = console.options.ascii_only or os.environ.get("TERM") == "linux"
    return ASCII if limited else UNICODE


def _print_on(read: Callable[[], Snapshot], interval_s: float, console: Console, listing: Listing) -> None:
    """Print repeatedly, forever."""
    while True:
        render_once(read(), console, listing)
        time.sleep(interval_s)


class _Screen:
    """The view on the alternate screen."""

    def __init__(
        self,
        read: Callable[[], Snapshot],
        interval_s: float,
        console: Console,
        listing: Listing,
        act: Callable[[Action], str] | None,
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._console = console
        self._symbols = _symbols(console)
        self._view = ViewState(listing)
        self._act = act

    def run(self) -> None:
        """Run until q. A signal that ends or stops the process takes effect after the terminal is restored."""
        while True:
            with (
                _signals_read(signal.SIGWINCH, *_LEAVING) as signals,
                keys_of(_STDIN) as keys,
                self._console.screen(hide_cursor=True),
            ):
                left_by = self._show(signals, keys)
            if left_by is None:
                return
            if left_by != signal.SIGTSTP:
                raise SystemExit(128 + left_by)
            signal.raise_signal(left_by)  # stops here, and continues at SIGCONT

    def _show(self, signals: int, keys: Keys | None) -> int | None:
        """Draw until q or the end of input (returns None), or until one of `_LEAVING` (returns it)."""
        waited_for = [signals] if keys is None else [signals, keys.fd]
        next_read = time.monotonic()
        while True:
            if (now := time.monotonic()) >= next_read:
                snapshot = self._read()
                self._view.can_act = self._act is not None and snapshot.origin is Origin.MONITOR
                next_read = max(next_read + self._interval_s, now)  # a regular beat, without catching up
            self._draw(snapshot, with_keys=keys is not None)
            left_s = max(next_read - time.monotonic(), 0)
            if keys is not None and keys.escape_pending:
                left_s = min(left_s, ESCAPE_DELAY_S)
            ready, _, _ = select.select(waited_for, [], [], left_s)
            if signals in ready and (left_by := next((n for n in os.read(signals, 64) if n in _LEAVING), None)):
                return left_by
            if keys is None:
                continue
            typed = keys.read() if keys.fd in ready else keys.take_escape()
            if typed is None:
                return None
            for key in typed:
                if (action := self._view.press(key, snapshot)) is not None:
                    self._send(action)
                    next_read = time.monotonic()  # shows what it did
            if self._view.leaving:
                return None

    def _send(self, action: Action) -> None:
        """Send an action, and show its result or why it was refused."""
        if self._act is None:
            return
        try:
            self._view.say(self._act(action))
        except MonitorError as error:
            self._view.say(str(error), failed=True)

    def _draw(self, snapshot: Snapshot, *, with_keys: bool) -> None:
        width, height = self._console.size
        page = render_live(
            snapshot, self._view, width=width, height=height, symbols=self._symbols, clock=datetime.now(), keys=with_keys
        )
        if self._view.help_open:
            self._view.help_scroll = page.start
        else:
            self._view.scroll = page.start
        self._view.process_rows = page.rows
        self._console.update_screen(page.lines)


@contextmanager
def _signals_read(*numbers: int) -> Iterator[int]:
    """A descriptor that yields each received signal as a byte.

    Handles those of `numbers` that have the default handler, and restores it at the end.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        for number in taken:
            signal.signal(number, _noted)
        yield reader
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _noted(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte in the pipe suffices, but none is written without a Python handler."""

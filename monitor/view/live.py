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

from rich.segment import Segment

from ..snapshot import Snapshot
from .keys import Keys, keys_of
from .page import render
from .page import render_leases as leases_alone
from .processes import Order
from .symbols import ASCII, UNICODE, Symbols
from .text import DIM, Line

if TYPE_CHECKING:
    from rich.console import Console

_STDIN = 0
_SORT_KEYS = {order.value[0]: order for order in Order}
# These end or stop the process, which must restore the terminal first. Windows has few of them.
_LEAVING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP") if hasattr(signal, name))


def render_once(snapshot: Snapshot, console: Console) -> None:
    """Print the view once, with all processes, in the width of `console`; plain text if it is no terminal."""
    console.print(render(snapshot, width=console.width, symbols=_symbols(console), clock=datetime.now()), end="")


def render_leases(snapshot: Snapshot, console: Console) -> None:
    """Print all leases, in the width of `console`, or that there is none; plain text if it is no terminal."""
    console.print(leases_alone(snapshot, width=console.width, symbols=_symbols(console)), end="")


def run_live(read: Callable[[], Snapshot], *, interval_s: float, console: Console) -> None:
    """Show what `read` returns every `interval_s` seconds, and after a key or a resize, until q or Ctrl-C.

    Must run in the main thread. m, p and u sort the processes by memory, pid and user. If `console` is no terminal or
    cannot move its cursor (TERM=dumb), prints repeatedly, and only Ctrl-C ends it.

    Restores the terminal when it returns or raises, and while Ctrl-Z stops the process. Raises ValueError for an
    interval that is not above 0, SystemExit for SIGTERM, SIGHUP and SIGQUIT if the caller has no handlers for them, and
    what `read` raises.
    """
    if not interval_s > 0:
        raise ValueError(f"the interval between two drawings must be above 0 seconds, got {interval_s}")
    with suppress(KeyboardInterrupt):
        if console.is_terminal and not console.is_dumb_terminal and hasattr(signal, "SIGWINCH"):
            _Screen(read, interval_s, console).run()
        else:
            _print_on(read, interval_s, console)


def _symbols(console: Console) -> Symbols:
    """Unicode, unless the encoding of `console` or its font lacks it."""
    limited = console.options.ascii_only or os.environ.get("TERM") == "linux"
    return ASCII if limited else UNICODE


def _print_on(read: Callable[[], Snapshot], interval_s: float, console: Console) -> None:
    """Print repeatedly, forever."""
    while True:
        render_once(read(), console)
        time.sleep(interval_s)


class _Screen:
    """The view on the alternate screen. Mutable: keys change the order of the processes."""

    def __init__(self, read: Callable[[], Snapshot], interval_s: float, console: Console) -> None:
        self._read = read
        self._interval_s = interval_s
        self._console = console
        self._symbols = _symbols(console)
        self._order = Order.MEMORY
        self._hint: Line = [Segment("q"), Segment(" quit    sort by", DIM)]
        for key, order in _SORT_KEYS.items():
            self._hint += [Segment(f"  {key}"), Segment(f" {order}", DIM)]

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
                next_read = max(next_read + self._interval_s, now)  # a regular beat, without catching up
            self._draw(snapshot, keys)
            ready, _, _ = select.select(waited_for, [], [], max(next_read - time.monotonic(), 0))
            if signals in ready and (left_by := next((n for n in os.read(signals, 64) if n in _LEAVING), None)):
                return left_by
            if keys is not None and keys.fd in ready:
                typed = keys.read()
                if typed is None or "q" in typed.lower():
                    return None
                for key in typed:
                    self._order = _SORT_KEYS.get(key, self._order)

    def _draw(self, snapshot: Snapshot, keys: Keys | None) -> None:
        width, height = self._console.size
        view = render(
            snapshot,
            width=width,
            height=height,
            symbols=self._symbols,
            order=self._order,
            clock=datetime.now(),
            keys=None if keys is None else self._hint,
        )
        self._console.update_screen(view)


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

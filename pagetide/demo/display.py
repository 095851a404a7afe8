"""Displays of a run: a page redrawn on a terminal's alternate screen, plain lines for a pipe, or nothing."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType

from rich.console import Console
from rich.live import Live
from rich.segment import SegmentLines

from ..monitor.view.symbols import ASCII, UNICODE, Symbols
from ..monitor.view.text import Line, crop
from .page import DemoState, demo_line, demo_page

LINE_S = 1.0
PLAIN_WIDTH = 80

# A state, drawn at a time in seconds, in a width, a height and symbols.
Page = Callable[[DemoState, float, int, int, Symbols], list[Line]]


# Takes the newest state of a run, and returns at once.
Show = Callable[[DemoState], None]


@contextmanager
def open_display(first: DemoState, silent: bool) -> Iterator[Show]:
    """The display that suits standard output, showing `first`: a live page only on a terminal that can move its cursor."""
    console = Console()
    if silent:
        yield lambda state: None
    elif sys.stdout.isatty() and not console.is_dumb_terminal:
        with LivePage(first, console) as page:
            yield page.show
    else:
        yield PlainLines(first).show


def print_result(lines: list[str]) -> None:
    """Print `lines` after a display; on a terminal narrower than a line, that is broken at spaces."""
    width = max(shutil.get_terminal_size().columns, 1) if sys.stdout.isatty() else 0
    print("\n".join(part for line in lines for part in (textwrap.wrap(line, width) if len(line) > width > 0 else [line])))


class PlainLines:
    """A line a second, and one whenever something else happens, of at most 80 columns."""

    def __init__(self, first: DemoState) -> None:
        self._now = ""
        self._began = self._next = time.monotonic()
        self.show(first)

    def show(self, state: DemoState) -> None:
        """Print what happens now if that is new; then at most a line a second."""
        if state.now != self._now:
            self._now = state.now
            print(state.now[:PLAIN_WIDTH], flush=True)
        line = demo_line(state, (at := time.monotonic()) - self._began)
        if line and at >= self._next:
            self._next = at + LINE_S
            print(line[:PLAIN_WIDTH].rstrip(), flush=True)


class LivePage:
    """A page on the alternate screen, redrawn ten times a second in the terminal's present size by a thread.

    The terminal is restored when the context ends, and when SIGTERM or SIGHUP ends the process or SIGTSTP stops it. Log
    messages appear afterwards. Use it in the main thread.
    """

    def __init__(self, first: DemoState, console: Console, page: Page = demo_page) -> None:
        limited = console.options.ascii_only or os.environ.get("TERM") == "linux"
        self._symbols = ASCII if limited else UNICODE
        self._console = console
        self._page = page
        self._state = first
        self._began = time.monotonic()
        self.error: Exception | None = None
        self._live = Live(
            console=console, screen=True, refresh_per_second=10, get_renderable=self._draw, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._log = io.StringIO()
        self._after = ExitStack()

    def show(self, state: DemoState) -> None:
        """Draw `state` from the next frame on. Raises the error of an earlier frame."""
        if self.error is not None:
            raise self.error
        self._state = state

    def __enter__(self) -> LivePage:
        with ExitStack() as stack:
            stack.callback(lambda: sys.stderr.write(self._log.getvalue()))
            for log in logging.getLogger().handlers:
                if isinstance(log, logging.StreamHandler) and log.stream is sys.stderr:
                    stack.callback(log.setStream, log.setStream(self._log))
            for number, handler in ((signal.SIGTERM, _exit), (signal.SIGHUP, _exit), (signal.SIGTSTP, self._stop)):
                if signal.getsignal(number) is signal.SIG_DFL:
                    stack.callback(signal.signal, number, signal.signal(number, handler))
            stack.callback(self._live.stop)
            self._live.start()
            self._after = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._after.close()

    def _draw(self) -> SegmentLines:
        """A frame. An error is kept for `show`, as the thread that draws would only end with it."""
        width, height = self._console.size
        lines: list[Line] = []
        try:
            lines = self._page(self._state, time.monotonic() - self._began, width, height, self._symbols)
        except Exception as error:
            self.error = error
        return SegmentLines(fitted(lines, width, height), new_lines=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal, stop until SIGCONT, and draw again."""
        self._live.stop()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._live.start()


def fitted(lines: list[Line], width: int, height: int) -> list[Line]:
    """Exactly `height` lines, each of at most `width` cells."""
    lines = [crop(line, width) for line in lines[:height]]
    return lines + [[] for _ in range(height - len(lines))]


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

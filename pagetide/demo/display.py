"""Displays of a run: a page redrawn on a terminal's alternate screen, plain lines for a pipe, or nothing."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console
from rich.segment import SegmentLines

from ..monitor.view.symbols import ASCII, UNICODE, Symbols
from ..monitor.view.text import Line, crop

FRAME_S = 0.1
_LOOK_S = 0.005  # until the first frame
LINE_S = 1.0
PLAIN_WIDTH = 80

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
# A state, drawn at a time in seconds, in a width, a height and symbols.
Page = Callable[[S, float, int, int, Symbols], list[Line]]


class Display(Protocol[S_contra]):
    """Shows the newest state of a run. A context manager."""

    def show(self, state: S_contra) -> None:
        """Take `state`, which must not change afterwards. Returns at once."""

    def __enter__(self) -> Display[S_contra]: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Drawings(Generic[S]):
    """How to draw a state: as a page, as one line of text, and the sentence that says what happens now."""

    page: Page[S]
    line: Callable[[S, float], str]
    now: Callable[[S], str]


def open_display(first: S, drawings: Drawings[S], silent: bool) -> Display[S]:
    """The display that suits standard output, showing `first`: a live page only on a terminal that can move its cursor."""
    if silent:
        return NoDisplay()
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return LivePage(first, drawings.page, console)
    return PlainLines(first, drawings)


def print_result(lines: list[str]) -> None:
    """Print `lines` after a display; on a terminal narrower than a line, that is broken at spaces."""
    width = max(shutil.get_terminal_size().columns, 1) if sys.stdout.isatty() else 0
    print("\n".join(part for line in lines for part in (textwrap.wrap(line, width) if len(line) > width > 0 else [line])))


class NoDisplay:
    """A display that shows nothing."""

    def show(self, state: object) -> None:
        """Do nothing."""

    def __enter__(self) -> NoDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class PlainLines(Generic[S]):
    """A line a second, and one whenever something else happens, of at most 80 columns."""

    def __init__(self, first: S, drawings: Drawings[S]) -> None:
        self._drawings = drawings
        self._now = ""
        self._began = self._next = time.monotonic()
        self.show(first)

    def show(self, state: S) -> None:
        """Print what happens now if that is new; then at most a line a second."""
        if (now := self._drawings.now(state)) != self._now:
            self._now = now
            print(now[:PLAIN_WIDTH], flush=True)
        line = self._drawings.line(state, (at := time.monotonic()) - self._began)
        if line and at >= self._next:
            self._next = at + LINE_S
            print(line[:PLAIN_WIDTH].rstrip(), flush=True)

    def __enter__(self) -> PlainLines[S]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class LivePage(Generic[S]):
    """A page on the alternate screen, redrawn ten times a second in the terminal's present size by a thread.

    The terminal is restored when the context ends, and when SIGTERM or SIGHUP ends the process or SIGTSTP stops it. Log
    messages appear afterwards. Use it in the main thread.
    """

    def __init__(self, first: S, page: Page[S], console: Console) -> None:
        self._page = page
        self._console = console
        limited = console.options.ascii_only or os.environ.get("TERM") == "linux"
        self._symbols = ASCII if limited else UNICODE
        self._state = first
        self._began = time.monotonic()
        self._lock = threading.RLock()  # held for a frame; a signal's handler takes it too
        self._is_shown = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagetide-demo-page", daemon=True)
        self._error: Exception | None = None
        self._log = io.StringIO()
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._handlers: dict[int, Any] = {}

    def show(self, state: S) -> None:
        """Draw `state` from the next frame on. Raises the error of an earlier frame."""
        if self._error is not None:
            raise self._error
        self._state = state

    def __enter__(self) -> LivePage[S]:
        for number, handler in ((signal.SIGTERM, _exit), (signal.SIGHUP, _exit), (signal.SIGTSTP, self._stop)):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, handler)
        for log in logging.getLogger().handlers:
            if isinstance(log, logging.StreamHandler) and log.stream is sys.stderr:
                self._redirected.append((log, log.setStream(self._log)))
        try:
            self._thread.start()
            self._enter_screen()
        except BaseException:  # an interrupt
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._leave_screen()
        self._thread.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for handler, stream in self._redirected:
            handler.setStream(stream)
        sys.stderr.write(self._log.getvalue())

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._draw()
                self._ended.wait(FRAME_S if self._is_shown else _LOOK_S)
        except Exception as error:
            self._error = error

    def _draw(self) -> None:
        with self._lock:
            if self._is_shown:
                width, height = self._console.size
                page = self._page(self._state, time.monotonic() - self._began, width, height, self._symbols)
                lines = fitted(page, width, height)
                self._console.update_screen(SegmentLines(lines, new_lines=True))

    def _enter_screen(self) -> None:
        with self._lock:
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)
            self._is_shown = True

    def _leave_screen(self) -> None:
        with self._lock:
            self._is_shown = False
            self._console.set_alt_screen(False)
            self._console.show_cursor(True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal, stop until SIGCONT, and draw again."""
        self._leave_screen()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._enter_screen()


def fitted(lines: list[Line], width: int, height: int) -> list[Line]:
    """Exactly `height` lines, each of at most `width` cells."""
    lines = [crop(line, width) for line in lines[:height]]
    return lines + [[] for _ in range(height - len(lines))]


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

"""The server's log on a terminal: a short line for each request, and the address again before it scrolls away."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.cells import cell_len

from ..monitor.view.text import printable
from .guard import AccessEntry

# Served requests that are no work of the models: of the page, its files among them, and of programs that watch the server.
_QUIET_PATHS = ("/", "/page", "/health", "/ready", "/metrics", "/load")
_LONGEST_PATH = 60  # characters
_DEFAULT_SIZE = os.terminal_size((80, 24))
_FORMATTER = logging.Formatter()


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes records as short lines to the terminal `stream`.

    Attributes:
        reminder: Lines that stay in sight: they are written again before others have scrolled them away. Empty: none yet.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.addFilter(lambda record: not _is_quiet(record))
        self.reminder = ""
        self._num_rows = 0  # written since the reminder

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record, and the reminder where it is due."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {_text(record)}"
        size = self._size()
        self._num_rows += _num_rows(text, size.columns)
        if self.reminder and self._num_rows + _num_rows(self.reminder, size.columns) >= size.lines:
            self._num_rows = 0
            text = f"{text}\n{self.reminder}"
        return text

    def remind(self, text: str) -> None:
        """Keep `text` in sight, which has just been written."""
        self.reminder, self._num_rows = text, 0

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self.stream.fileno())
        except OSError:
            return _DEFAULT_SIZE
        return size if size.columns and size.lines else _DEFAULT_SIZE


@contextmanager
def terminal_log(stream: TextIO) -> Iterator[TerminalHandler | None]:
    """Log by a `TerminalHandler` while inside, instead of the root logger's handlers of `stream`. None: it is no terminal."""
    root = logging.getLogger()
    replaced = [one for one in root.handlers if isinstance(one, logging.StreamHandler) and one.stream is stream]
    if not replaced or not stream.isatty():
        yield None
        return
    handler = TerminalHandler(stream)
    for one in replaced:
        root.removeHandler(one)
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        for one in replaced:
            root.addHandler(one)


def _entry(record: logging.LogRecord) -> AccessEntry | None:
    given: Any = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return given if isinstance(given, AccessEntry) else None


def _is_quiet(record: logging.LogRecord) -> bool:
    entry = _entry(record)
    if entry is None or entry.fields["status"] >= 400 or entry.fields["method"] not in ("GET", "HEAD"):
        return False
    path: str = entry.fields["path"]
    return path in _QUIET_PATHS or path.startswith("/page/")


def _text(record: logging.LogRecord) -> str:
    if (entry := _entry(record)) is not None:
        path = printable(entry.fields["path"][: _LONGEST_PATH + 1], ascii_only=False)
        path = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"
        seconds = entry.fields["seconds"]
        num_prompt, num_output = entry.tokens or (0, 0)
        tokens = f", {num_prompt:,} + {num_output:,} tokens" if num_prompt else ""
        return f"{entry.fields['method']} {path} {entry.fields['status']} in {seconds:.{2 if seconds < 10 else 0}f} s{tokens}"
    text = record.getMessage() if record.levelno < logging.WARNING else f"{record.levelname}: {record.getMessage()}"
    return f"{text}\n{_FORMATTER.formatException(record.exc_info)}" if record.exc_info else text


def _num_rows(text: str, columns: int) -> int:
    """Rows of the terminal that a text takes."""
    return sum(max(-(-cell_len(line) // columns), 1) for line in text.split("\n"))

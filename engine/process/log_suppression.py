"""Temporarily suppresses transformers' log lines and progress bars."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Quiet:
    """The suppression that all contexts share: the first one begins it, the last one ends it, in whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._logger = logging.getLogger("transformers")
        self._before: tuple[list[logging.Handler], bool] = ([], True)
        self._bars = (True, True)

    def enter(self, collector: _Collector) -> None:
        """Let `collector` get the lines of all threads."""
        with self._lock:
            if not self._open:
                self._before = self._logger.handlers[:], self._logger.propagate
                self._bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
                self._logger.handlers[:], self._logger.propagate = [], False
                transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            self._open += 1
            self._logger.addHandler(collector)

    def leave(self, collector: _Collector) -> None:
        """Undo `enter`."""
        with self._lock:
            self._open -= 1
            self._logger.removeHandler(collector)
            if self._open:
                return
            self._logger.handlers[:], self._logger.propagate = self._before
            bars, hub_bars = self._bars
            if bars:
                transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
            if hub_bars != (not are_progress_bars_disabled()):
                (enable_progress_bars if hub_bars else disable_progress_bars)()


_quiet = _Quiet()


@contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """A context in which transformers prints nothing. Yields the list that collects its warnings.

    The suppression is process-wide: it also affects other threads.
    """
    collector = _Collector()
    _quiet.enter(collector)
    try:
        yield collector.lines
    finally:
        _quiet.leave(collector)

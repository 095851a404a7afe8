"""Temporarily suppresses transformers' log lines and progress bars."""

from __future__ import annotations

import logging
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


@contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """A context in which transformers prints nothing. Yields the list that collects its warnings.

    The suppression is process-wide: it also affects other threads.
    """
    logger = logging.getLogger("transformers")
    collector = _Collector()
    before = logger.handlers[:], logger.propagate
    bars, hub_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logger.handlers[:], logger.propagate = [collector], False
    if bars:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield collector.lines
    finally:
        logger.handlers[:], logger.propagate = before
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if hub_bars != (not are_progress_bars_disabled()):
            (enable_progress_bars if hub_bars else disable_progress_bars)()

"""A progress bar for terminals and notebooks, with the number of tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

_IN_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


class Bar(tqdm):  # type: ignore[type-arg]  # which it takes in its stubs only
    """tqdm's bar without its monitor thread, which otherwise starts with the first bar and never ends.

    Args:
        count_tokens: The number of tokens generated so far. Called when the bar is drawn.
        disable: None: no bar unless the output is a terminal or a notebook.
        options: tqdm's.
    """

    monitor_interval = 0

    def __init__(self, count_tokens: Callable[[], int], disable: bool | None = None, **options: Any) -> None:
        self._count_tokens, self._began = count_tokens, time.monotonic()
        if disable is None and _IN_NOTEBOOK:  # whose output is not a terminal
            disable = False
        # `miniters`: `update(0)` draws the bar too, if it is due.
        super().__init__(disable=disable, miniters=0, leave=False, **options)

    @property
    def format_dict(self) -> Any:
        """What tqdm draws, with the rate of tokens."""
        seconds = time.monotonic() - self._began
        rate = f"{self._count_tokens() / seconds:,.0f} tokens/s" if seconds > 0 else None
        return {**super().format_dict, "postfix": rate}

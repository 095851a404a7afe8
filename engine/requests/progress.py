"""A progress bar for terminals."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]  # which it takes in its stubs only
    """tqdm's bar without its monitor thread, which otherwise starts with the first bar and never ends."""

    monitor_interval = 0

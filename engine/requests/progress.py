"""A progress bar for those who wait at a terminal."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]  # which it takes in its stubs only
    """tqdm's, without the thread that it otherwise starts with its first bar, and never ends."""

    monitor_interval = 0

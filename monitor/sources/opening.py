"""Opens the source named by a `--source` option."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigInvalid
from . import Source


def open_source(spec: str, *, capacity_bytes: int | None = None, members: Sequence[int] = ()) -> Source:
    """The source that `spec` names; a driver is not loaded before the first scan.

        auto          the GPUs, where there is a driver, and host memory
        nvml          the GPUs
        host          host memory
        replay:FILE   a recording

    With `capacity_bytes`, host memory is a test device of that size, filled by the processes `members`. Raises
    ConfigInvalid: unknown name, a test device without host memory, a recording that cannot be played, a missing
    process.
    """
    kind, separator, file = spec.partition(":")
    if (kind == "replay") != bool(separator) or kind not in ("auto", "nvml", "host", "replay"):
        raise ConfigInvalid(f"unknown source {spec!r}; known are auto, nvml, host and replay:FILE")
    if kind not in ("auto", "host") and (capacity_bytes is not None or members):
        raise ConfigInvalid(f"capacity and members make a test device of host memory; the source {spec} has none, use host")
    if kind == "replay":
        from .replay import ReplaySource

        if not file:
            raise ConfigInvalid("replay: needs the file to play, as in replay:morning.jsonl.gz")
        return ReplaySource(file)
    if kind == "nvml":
        from .nvml import NvmlSource

        return NvmlSource()
    from .host import HostSource

    host = HostSource(capacity_bytes, members)
    if kind == "host":
        return host
    from .combined import CombinedSource
    from .nvml import NvmlSource

    return CombinedSource([NvmlSource(), host])

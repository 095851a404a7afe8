"""Several sources as one: the devices of all available sources, each read by the source that it came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ..errors import ConfigInvalid, DeviceUnreadable, SourceUnavailable
from ..snapshot import DetailReading, DeviceInfo, MemoryReading
from . import Source

log = logging.getLogger(__name__)


class CombinedSource:
    """Combines sources in a fixed order. Unavailable sources are retried at every scan.

    Devices of a source that becomes unavailable stay listed, so that their loss is reported.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        """Takes ownership of the sources: `close` closes them."""
        self._sources = tuple(sources)
        self._devices: list[tuple[DeviceInfo, ...]] = [()] * len(self._sources)  # of the last successful scan
        self._owners: Mapping[str, Source] = {}  # by uuid; replaced as a whole, since other threads read it
        self._unavailable: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """The names of all sources, available or not: "nvml+host"."""
        return "+".join(source.name for source in self._sources)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Name and reason of the sources that were unavailable at the last scan."""
        return self._unavailable

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The devices of all sources. Raises SourceUnavailable, with every reason, if no source is available."""
        unavailable: dict[str, str] = {}
        for position, source in enumerate(self._sources):
            try:
                self._devices[position] = source.scan()
            except SourceUnavailable as error:
                unavailable[source.name] = str(error)
        self._log_unavailable(unavailable)
        if len(unavailable) == len(self._sources):
            raise SourceUnavailable("; ".join(f"{name}: {reason}" for name, reason in unavailable.items()))
        found = list(zip(self._sources, self._devices, strict=True))
        self._owners = {info.uuid: source for source, infos in found for info in infos}
        return tuple(info for _, infos in found for info in infos)

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """Read from the device's source. Raises DeviceUnreadable."""
        return self._owner(device).memory(device)

    def detail(self, device: DeviceInfo) -> DetailReading:
        """Read from the device's source. Raises DeviceUnreadable."""
        return self._owner(device).detail(device)

    def close(self) -> None:
        """Close all sources, even if one raises. Idempotent."""
        with ExitStack() as stack:
            for source in self._sources:
                stack.callback(source.close)

    def _owner(self, device: DeviceInfo) -> Source:
        try:
            return self._owners[device.uuid]
        except KeyError:
            raise DeviceUnreadable(f"none of {self.name} has a device {device.uuid} now", lost=True) from None

    def _log_unavailable(self, unavailable: Mapping[str, str]) -> None:
        """Log the changes."""
        for name, reason in unavailable.items():
            if self._unavailable.get(name) != reason:
                log.info("%s is not available: %s", name, reason)
        for name in self._unavailable.keys() - unavailable.keys():
            log.info("%s is available now", name)
        self._unavailable = unavailable


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
    from .nvml import NvmlSource

    return CombinedSource([NvmlSource(), host])

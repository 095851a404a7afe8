"""The polling loop: asks a source for every device's memory and detail in rounds without drift, and publishes the answers.

    thread "memory"      every interval (20 ms): memory of each device -> trend -> its memory slot of the record
    thread "detail"      every detail interval (1 s): load and processes -> its detail slot
    thread "supervisor"  every other interval: the heartbeat; takes the others over from a device that does not answer
    thread "scan"        every ten seconds, and soon after a device was lost: which devices are there now

A failure of one device is published as its error and counted; the others are asked on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .errors import DeviceUnreadable, NoSuchDevice, SourceUnavailable
from .lanes import Lanes
from .record import RecordWriter
from .snapshot import DetailReading, DeviceDetail, DeviceInfo, DeviceMemory, MemoryReading
from .sources import Source
from .trend import Trend

log = logging.getLogger(__name__)

HISTORY_SAMPLES = 256
BEAT_INTERVALS = 2  # of memory, between two heartbeats: waking costs more than what is done then
TREND_NS = 5_000_000_000  # how far back the trend looks
SCAN_INTERVAL_S = 10.0
SCAN_AGAIN_S = 1.0  # after a device was lost


@dataclass(slots=True, eq=False)
class _Watched:
    """A device and what is remembered of it between polls. Each lane changes its own part; `lock` guards `slot`."""

    info: DeviceInfo
    trend: Trend
    slot: int | None = None  # None: not in the record now
    lock: threading.Lock = field(default_factory=threading.Lock)
    polls: int = 0
    failures: int = 0
    used_bytes: int | None = None
    error: str | None = None
    history: deque[int | None] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES))
    detail_error: str | None = None


class Poller:
    """Asks `source` and writes `writer` until it is stopped. One poller for a record."""

    def __init__(
        self,
        source: Source,
        writer: RecordWriter,
        *,
        interval_s: float = 0.02,
        detail_interval_s: float = 1.0,
        devices: Sequence[str] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`devices` are indices or uuids; none are all. Reads nothing before `start`."""
        self._source = source
        self._writer = writer
        self._devices = tuple(devices)
        self._clock = clock
        self._topology_lock = threading.Lock()
        self._infos: tuple[DeviceInfo, ...] | None = None
        self._known: dict[str, _Watched] = {}  # by uuid, those gone too: their counters never go back
        self._memory = Lanes("memory", self._ask_memory, int(interval_s * 1e9), late=self._tell_late)
        self._detail = Lanes("detail", self._ask_detail, int(detail_interval_s * 1e9), late=lambda _: None)
        self._scan_wanted = threading.Event()
        self._stopping = threading.Event()
        self._source_error: str | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Look which devices there are, then poll in the background. Raises SourceUnavailable, NoSuchDevice."""
        self._watch(select(self._source.scan(), self._devices))
        self._beat()
        for run, name in ((self._supervise, "supervisor"), (self._scan, "scan")):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()

    def change(self, *, interval_s: float, detail_interval_s: float, devices: Sequence[str]) -> None:
        """Go on with other intervals and devices. Raises NoSuchDevice and SourceUnavailable; then nothing changed."""
        infos = select(self._source.scan(), devices)
        self._devices = tuple(devices)
        self._memory.interval_ns, self._detail.interval_ns = int(interval_s * 1e9), int(detail_interval_s * 1e9)
        for watched in tuple(self._known.values()):
            watched.trend = self._new_trend()
        self._watch(infos)

    def stop(self, timeout_s: float = 1.0) -> None:
        """End all threads that are not inside a driver, then the source. The record stays the caller's."""
        self._stopping.set()
        self._scan_wanted.set()
        deadline = time.monotonic() + timeout_s
        ended = [lanes.stop(deadline - time.monotonic()) for lanes in (self._memory, self._detail)]
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            ended.append(not thread.is_alive())
        if all(ended):  # a driver that is inside a call must not be shut down
            self._source.close()

    def _new_trend(self) -> Trend:
        return Trend(max(TREND_NS, 10 * self._memory.interval_ns))  # it needs ten samples to say anything

    def _beat(self) -> None:
        self._writer.beat(self._clock(), BEAT_INTERVALS * self._memory.interval_ns)

    # ---- which devices --------------------------------------------------------------------------

    def _watch(self, infos: Sequence[DeviceInfo]) -> None:
        """Let the record and the lanes have these devices and no others."""
        with self._topology_lock:
            if tuple(infos) != self._infos:
                self._infos = tuple(infos)
                self._place(self._infos)

    def _place(self, infos: tuple[DeviceInfo, ...]) -> None:
        members = [self._known.setdefault(info.uuid, _Watched(info, self._new_trend())) for info in infos]
        for watched in self._known.values():
            with watched.lock:
                watched.slot = None
        self._writer.set_devices(infos)
        for slot, (member, info) in enumerate(zip(members, infos, strict=True)):
            with member.lock:
                member.info, member.slot = info, slot
        self._memory.set_members(members)
        self._detail.set_members(members)

    def _scan(self) -> None:
        while not self._stopping.is_set():
            if self._scan_wanted.wait(SCAN_INTERVAL_S):
                if self._stopping.wait(SCAN_AGAIN_S):  # not in a hurry: what was lost is seldom back at once
                    return
                self._scan_wanted.clear()
            try:
                infos = [info for info in self._source.scan() if not self._devices or _names(info) & set(self._devices)]
                self._watch(infos)
                if self._source_error is not None:
                    log.info("%s is back", self._source.name)
                self._source_error = None
            except SourceUnavailable as error:
                if str(error) != self._source_error:
                    log.warning("%s is not available: %s", self._source.name, error)
                self._source_error = str(error)
            except Exception:
                log.exception("the devices could not be looked for; tried again in %.0f s", SCAN_INTERVAL_S)

    def _supervise(self) -> None:
        while not self._stopping.wait(BEAT_INTERVALS * self._memory.interval_ns / 1e9):
            self._beat()
            self._memory.check()
            self._detail.check()

    # ---- asking ---------------------------------------------------------------------------------

    def _ask_memory(self, watched: _Watched) -> None:
        asked_ns = self._clock()  # not when it answered: how old a slow answer is, nobody knows better
        reading, error = MemoryReading(None, None), None
        try:
            reading = self._source.memory(watched.info)
        except DeviceUnreadable as failure:
            error = str(failure) or "unreadable"
            self._scan_wanted.set()
        except Exception as failure:  # a fault of ours in one source must not blind the others
            error = f"{type(failure).__name__}: {failure}"
            if error != watched.error:
                log.exception("device %s could not be read", watched.info.index)
        total, free = reading.total_bytes, reading.free_bytes
        used = None if total is None or free is None else total - free
        self._tell(watched, error)
        watched.polls += 1
        watched.failures += error is not None
        watched.used_bytes = used
        trend = watched.trend.update(asked_ns, used)
        interval_ns = self._memory.interval_ns
        memory = DeviceMemory(asked_ns, interval_ns, total, free, trend, watched.polls, watched.failures, error)
        with watched.lock:
            if watched.slot is not None:
                self._writer.write_memory(watched.slot, memory)

    def _ask_detail(self, watched: _Watched) -> None:
        asked_ns = self._clock()
        reading, error = DetailReading(), None
        try:
            reading = self._source.detail(watched.info)
        except DeviceUnreadable as failure:
            error = str(failure) or "unreadable"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            if error != watched.detail_error:
                log.exception("the processes of device %s could not be read", watched.info.index)
        watched.detail_error = error
        watched.history.append(watched.used_bytes)
        detail = DeviceDetail(asked_ns, self._detail.interval_ns, reading, tuple(watched.history), error)
        with watched.lock:
            if watched.slot is not None:
                self._writer.write_detail(watched.slot, detail)

    def _tell(self, watched: _Watched, error: str | None) -> None:
        """Log what changed about a device, once."""
        if error == watched.error:
            return
        if error is None:
            log.info("device %s (%s) answers again", watched.info.index, watched.info.uuid)
        else:
            log.warning("device %s (%s) cannot be read: %s", watched.info.index, watched.info.uuid, error)
        watched.error = error

    def _tell_late(self, watched: _Watched) -> None:
        log.warning(
            "device %s (%s) is slow to answer; the other devices are asked without waiting for it",
            watched.info.index, watched.info.uuid,
        )  # fmt: skip


def _names(info: DeviceInfo) -> set[str]:
    return {info.index, info.uuid}


def select(infos: Sequence[DeviceInfo], wanted: Sequence[str]) -> tuple[DeviceInfo, ...]:
    """The devices with these indices or uuids, or all if none are named. Raises NoSuchDevice, naming those there are."""
    there = {name for info in infos for name in _names(info)}
    if missing := [name for name in wanted if name not in there]:
        known = ", ".join(f"{info.index} ({info.name or 'unknown'}, {info.uuid})" for info in infos) or "none"
        raise NoSuchDevice(f"there is no device {', '.join(missing)}; those that exist: {known}")
    return tuple(info for info in infos if not wanted or _names(info) & set(wanted))

"""The polling loop: reads every device's memory and detail from a source at fixed intervals and publishes them.

    thread "memory"      every interval (20 ms): memory of each device -> trend -> its memory slot of the record
    thread "detail"      every detail interval (1 s): load and processes -> its detail slot
    thread "supervisor"  every two intervals, at least once a second: writes the heartbeat; repairs the record's file;
                         moves the other devices to a new thread when one does not answer
    thread "scan"        every ten seconds, and soon after a device was lost: finds the present devices

A failure of one device, or numbers that the record cannot hold, are published as that device's error and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..common.on_error import OnError
from .errors import DeviceUnreadable, MonitorError, NoSuchDevice, RecordError, SourceUnavailable
from .log_throttle import QUIET_NS, LogThrottle
from .poll_workers import PollWorkers
from .record import RecordWriter
from .snapshot import DetailReading, DeviceDetail, DeviceInfo, DeviceMemory, MemoryReading
from .sources import Source
from .trend import Trend

log = logging.getLogger(__name__)

HISTORY_SAMPLES = 256
BEAT_INTERVALS = 2  # memory intervals between two heartbeats: waking a thread costs more than its work
MEND_NS = 200_000_000  # between two looks at the record's file, which cost as much as the rest of a beat
LONGEST_BEAT_S = 1.0  # also bounds how long a truncated file stays, however long the intervals are
TREND_NS = 5_000_000_000  # how far back the trend looks
SCAN_INTERVAL_S = 10.0
SCAN_AGAIN_S = 1.0  # after a device was lost


@dataclass(slots=True, eq=False)
class _Watched:
    """A device and its state between polls. Each worker changes its own part; `lock` guards `slot`."""

    info: DeviceInfo
    trend: Trend
    slot: int | None = None  # None: not in the record now
    lock: threading.Lock = field(default_factory=threading.Lock)
    polls: int = 0
    failures: int = 0
    used_bytes: int | None = None
    memory_throttle: LogThrottle = field(default_factory=LogThrottle)  # why it cannot be read; None: it can
    detail_throttle: LogThrottle = field(default_factory=LogThrottle)
    told_late_ns: int | None = None  # when its slowness was last logged
    history: deque[int | None] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES))


class Poller:
    """Reads `source` and writes `writer` until it is stopped. A record has one poller."""

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
        """`devices` are indices or uuids; empty: all. Reads nothing before `start`."""
        self._source = source
        self._writer = writer
        self._devices = tuple(devices)
        self._clock = clock
        self._topology_lock = threading.Lock()
        self._infos: tuple[DeviceInfo, ...] | None = None
        self._known: dict[str, _Watched] = {}  # by uuid, including removed devices: their counters never decrease
        self._memory = PollWorkers("memory", self._ask_memory, int(interval_s * 1e9), late=self._tell_late)
        self._detail = PollWorkers("detail", self._ask_detail, int(detail_interval_s * 1e9), late=lambda _: None)
        self._scan_wanted = threading.Event()
        self._stopping = threading.Event()
        self._rebeat = threading.Event()  # wakes the supervisor before its interval ends
        self._scan_error: Exception | None = None
        self._record_throttle = LogThrottle()  # what happened to the record's file; None: it is intact
        self._threads: list[threading.Thread] = []

    def start(self, ready: Callable[[], None] = lambda: None) -> None:
        """Find the devices, then poll in the background.

        Calls `ready` when the record has the devices, before the first heartbeat shows readers a live monitor. Raises
        SourceUnavailable, NoSuchDevice, and RecordError for more devices than a record has room for.
        """
        self._watch(self._source.scan(), self._devices)
        ready()
        self._beat()
        for run, name in ((self._supervise, "supervisor"), (self._scan, "scan")):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()

    def change(self, *, interval_s: float, detail_interval_s: float, devices: Sequence[str]) -> None:
        """Change the intervals and devices, at once.

        Raises NoSuchDevice, SourceUnavailable and RecordError; then nothing changed.
        """
        self._watch(self._source.scan(), tuple(devices))
        self._memory.set_interval(int(interval_s * 1e9))
        self._detail.set_interval(int(detail_interval_s * 1e9))
        for watched in tuple(self._known.values()):
            watched.trend = self._new_trend()
        self._rebeat.set()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End all threads that are not inside a driver, then close the source. The record stays open."""
        self._stopping.set()
        self._scan_wanted.set()
        self._rebeat.set()
        deadline = time.monotonic() + timeout_s
        ended = [workers.stop(deadline - time.monotonic()) for workers in (self._memory, self._detail)]
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            ended.append(not thread.is_alive())
        if all(ended):  # a driver must not be shut down during a call
            self._source.close()

    def _new_trend(self) -> Trend:
        return Trend(max(TREND_NS, 10 * self._memory.interval_ns))  # a trend needs ten samples

    def _beat(self) -> None:
        self._writer.beat(self._clock(), BEAT_INTERVALS * self._memory.interval_ns)

    def _mend(self) -> None:
        """Replace the record's file if it is damaged, and log the damage."""
        try:
            harm = self._writer.mend()
            state = None if harm is None else f"the record's file {harm}; it was replaced"
        except RecordError as error:
            state = str(error)
        if self._record_throttle.record(state, self._clock()):
            if state is None:
                log.info("the record's file is intact again")
            else:
                log.warning("%s", state)

    # ---- which devices --------------------------------------------------------------------------

    def _watch(self, found: Sequence[DeviceInfo], wanted: tuple[str, ...]) -> None:
        """Watch the `wanted` devices from now on. Raises NoSuchDevice, RecordError; then nothing changed."""
        with self._topology_lock:
            self._let_have(select(found, wanted))
            self._devices = wanted

    def _watch_found(self, found: Sequence[DeviceInfo]) -> None:
        """Watch those of the wanted devices that are present. Raises RecordError; then nothing changed."""
        with self._topology_lock:
            wanted = set(self._devices)
            self._let_have(tuple(info for info in found if not wanted or _names(info) & wanted))

    def _let_have(self, infos: tuple[DeviceInfo, ...]) -> None:
        """Put exactly these devices into the record and the workers. Raises RecordError."""
        if infos != self._infos:
            self._place(infos)
            self._infos = infos

    def _place(self, infos: tuple[DeviceInfo, ...]) -> None:
        members = [self._known.setdefault(info.uuid, _Watched(info, self._new_trend())) for info in infos]
        before = [(watched, watched.slot) for watched in self._known.values()]
        for watched, _ in before:
            with watched.lock:
                watched.slot = None

        def restore() -> None:
            for watched, slot_before in before:
                with watched.lock:
                    watched.slot = slot_before

        with OnError(restore):  # the record is unchanged then
            self._writer.set_devices(infos)
        for slot, (member, info) in enumerate(zip(members, infos, strict=True)):
            with member.lock:
                member.info, member.slot = info, slot
        self._memory.set_members(members)
        self._detail.set_members(members)

    def _scan(self) -> None:
        while not self._stopping.is_set():
            if self._scan_wanted.wait(SCAN_INTERVAL_S):
                if self._stopping.wait(SCAN_AGAIN_S):  # no hurry: a lost device rarely returns at once
                    return
                self._scan_wanted.clear()
            try:
                self._watch_found(self._source.scan())
                if isinstance(self._scan_error, SourceUnavailable):
                    log.info("%s is back", self._source.name)
                self._scan_error = None
            except Exception as error:
                if not self._stopping.is_set():  # else the record may be closed already
                    self._tell_scan_failed(error)
                self._scan_error = error

    def _tell_scan_failed(self, error: Exception) -> None:
        """Log why the scan failed, unless the last scan failed for the same reason."""
        if self._scan_error is not None and str(error) == str(self._scan_error):
            return
        if isinstance(error, SourceUnavailable):
            log.warning("%s is not available: %s", self._source.name, error)
        elif isinstance(error, RecordError):
            log.warning("the devices changed; still watching the previous ones: %s", error)
        else:
            log.error("looking for devices failed; trying again", exc_info=error)

    def _supervise(self) -> None:
        mended_ns = 0
        while True:
            self._rebeat.wait(min(LONGEST_BEAT_S, BEAT_INTERVALS * self._memory.interval_ns / 1e9))
            self._rebeat.clear()
            if self._stopping.is_set():
                return
            if (now_ns := time.monotonic_ns()) - mended_ns >= MEND_NS:
                mended_ns = now_ns
                self._mend()
            self._beat()
            self._memory.separate_slow()
            self._detail.separate_slow()

    # ---- asking ---------------------------------------------------------------------------------

    def _ask_memory(self, watched: _Watched) -> None:
        asked_ns = self._clock()  # not when it answered: the answer may be as old as the question
        reading, failure = MemoryReading(None, None), None
        try:
            reading = self._source.memory(watched.info)
        except Exception as error:  # a bug in one source must not stop the others
            failure = error
            if isinstance(error, DeviceUnreadable):
                self._scan_wanted.set()
        try:
            self._publish_memory(watched, asked_ns, reading, failure)
        except Exception as error:  # the record cannot hold the numbers, or the trend failed
            failure = error
            self._publish_memory(watched, asked_ns, MemoryReading(None, None), failure)
        if changes := watched.memory_throttle.record(_reason(failure), asked_ns):
            self._log_changes(watched, failure, changes)

    def _publish_memory(self, watched: _Watched, asked_ns: int, reading: MemoryReading, failure: Exception | None) -> None:
        """Raises RecordError for numbers that the record cannot hold; then the poll does not count."""
        total, free = reading.total_bytes, reading.free_bytes
        used = None if total is None or free is None else total - free
        polls, failures = watched.polls + 1, watched.failures + (failure is not None)
        trend = watched.trend.update(asked_ns, used)
        memory = DeviceMemory(asked_ns, self._memory.interval_ns, total, free, trend, polls, failures, _reason(failure))
        with watched.lock:
            if watched.slot is not None:
                self._writer.write_memory(watched.slot, memory)
        watched.polls, watched.failures, watched.used_bytes = polls, failures, used

    def _ask_detail(self, watched: _Watched) -> None:
        asked_ns = self._clock()
        reading, failure = DetailReading(), None
        try:
            reading = self._source.detail(watched.info)
        except Exception as error:
            failure = error
        watched.history.append(watched.used_bytes)
        try:
            self._publish_detail(watched, asked_ns, reading, failure)
        except Exception as error:
            failure = error
            self._publish_detail(watched, asked_ns, DetailReading(), failure)
        # The memory thread logs unreadable devices.
        is_fault = failure is not None and not isinstance(failure, DeviceUnreadable)
        if watched.detail_throttle.record(_reason(failure) if is_fault else None, asked_ns) and is_fault:
            log.error("the processes of device %s could not be read", watched.info.index, exc_info=failure)

    def _publish_detail(self, watched: _Watched, asked_ns: int, reading: DetailReading, failure: Exception | None) -> None:
        """Raises RecordError for numbers that the record cannot hold."""
        detail = DeviceDetail(asked_ns, self._detail.interval_ns, reading, tuple(watched.history), _reason(failure))
        with watched.lock:
            if watched.slot is not None:
                self._writer.write_detail(watched.slot, detail)

    @staticmethod
    def _log_changes(watched: _Watched, failure: Exception | None, changes: int) -> None:
        """Log what changed about a device."""
        index, uuid = watched.info.index, watched.info.uuid
        flapped = f" (it changed {changes} times in the last {QUIET_NS // 10**9} s)" if changes > 1 else ""
        if failure is None:
            log.info("device %s (%s) answers again%s", index, uuid, flapped)
        else:
            fault = None if isinstance(failure, MonitorError) else failure
            log.warning("device %s (%s) cannot be read: %s%s", index, uuid, _reason(failure), flapped, exc_info=fault)

    def _tell_late(self, watched: _Watched) -> None:
        now_ns = self._clock()
        if watched.told_late_ns is not None and now_ns - watched.told_late_ns < QUIET_NS:
            return
        watched.told_late_ns = now_ns
        log.warning(
            "device %s (%s) is slow to answer; the other devices are asked without waiting for it",
            watched.info.index,
            watched.info.uuid,
        )


def _reason(failure: Exception | None) -> str | None:
    """The error text in the record: the message of a MonitorError, else the exception type and message."""
    if failure is None:
        return None
    return str(failure) or "unreadable" if isinstance(failure, MonitorError) else f"{type(failure).__name__}: {failure}"


def _names(info: DeviceInfo) -> set[str]:
    return {info.index, info.uuid}


def select(infos: Sequence[DeviceInfo], wanted: Sequence[str]) -> tuple[DeviceInfo, ...]:
    """The devices with these indices or uuids, or all if none are named. Raises NoSuchDevice."""
    there = {name for info in infos for name in _names(info)}
    if missing := [name for name in wanted if name not in there]:
        known = ", ".join(f"{info.index} ({info.name or 'unknown'}, {info.uuid})" for info in infos) or "none"
        raise NoSuchDevice(f"there is no device {', '.join(missing)}; those that exist: {known}")
    return tuple(info for info in infos if not wanted or _names(info) & set(wanted))

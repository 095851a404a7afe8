"""What watchers of an engine get: frames, the details of a block, and decisions. Called between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..cache.cache_events import BlockBatch, CacheEventLog, PendingEvents
from ..common.recording import RecordingError
from ..frames.details import block_details, decisions_about
from ..frames.recorder import INTERVAL_S, EngineRecorder
from ..frames.source import Frame, FrameSource, MemoryFigures, PoolFacts
from ..monitor.errors import MonitorError
from ..scheduler.outcome import Decision
from ..version import __version__
from .config import EngineConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from .build import Engine  # imports torch

_DEVICE_S = 0.25  # interval of looks into the monitor's record


class EngineWatch:
    """The watched side of one engine. It keeps a frame source for the live feed from the first frame on.

    Attributes:
        frame_s: CPU seconds that the frames have taken so far.
    """

    def __init__(self, engine: Engine) -> None:
        self.frame_s = 0.0
        self._engine = engine
        self._source: FrameSource | None = None

    def frame(self, full: bool) -> Frame:
        """The next frame of the live feed: the difference to the one before, unless `full`."""
        began = time.thread_time()
        if self._source is None:
            self._source = frame_source(self._engine)
        frame = self._source.take(full)
        self.frame_s += time.thread_time() - began
        return frame

    def block(self, block: int) -> dict[str, Any]:
        """The details of a block: see `AsyncLLM.block`; "text" is a list of token ids. Raises RequestRejected."""
        return block_details(self._engine.core.scheduler, block)

    def explain(self, request: str | None) -> list[Decision]:
        """The decisions that are kept, or those that concern a request, by its id or label."""
        return decisions_about(self._engine.core.scheduler, request)

    def cache_events(self) -> PendingEvents:
        """The changes of the set of findable blocks since the last call. Raises ConfigError if no log is kept."""
        return self._events.take()

    def cache_snapshot(self) -> BlockBatch:
        """All findable blocks; `cache_events` goes on from here. Raises ConfigError as it does."""
        self._events.take()
        return self._engine.core.scheduler.cache.index.snapshot()

    @property
    def _events(self) -> CacheEventLog:
        events = self._engine.core.scheduler.cache.index.events
        if events is None:
            raise ConfigError("this engine keeps no log of its prefix cache: make it with kv_events=True")
        return events


def frame_source(engine: Engine, *, text: bool = False, **clocks: Callable[[], float]) -> FrameSource:
    """A source of frames of `engine`. With `text`, token ids are in its frames."""
    plan = engine.plan
    facts = PoolFacts(plan.model, plan.geometry.block_stride, plan.max_model_len)
    clocks.setdefault("clock", engine.core.clock)
    return FrameSource(lambda: engine.core.scheduler, facts, MemoryReader(engine).read, text=text, **clocks)


def open_recorder(engine: Engine, config: EngineConfig) -> EngineRecorder | None:
    """The recorder of `engine`; None if it is not recorded. Raises ConfigError."""
    if config.record is None:
        return None
    header = {
        "model": engine.plan.model,
        "version": __version__,
        "began": round(time.time(), 3),
        "text": config.record_text,
        "interval_s": INTERVAL_S,
    }
    try:
        return EngineRecorder(config.record, frame_source(engine, text=config.record_text), header)
    except RecordingError as error:
        raise ConfigError(f"record: {error}") from error


class MemoryReader:
    """Reads the memory of an engine for frames; the device's only now and then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device: dict[str, Any] | None = None
        self._device_at = -_DEVICE_S

    def read(self) -> MemoryFigures:
        """The memory now."""
        engine = self._engine
        held = {} if engine.core.memory is None else engine.core.memory.to_dict()
        weights, lease = engine.plan.weights_bytes, held.get("lease")
        base = max(weights, held.get("base_bytes", weights))
        content = {
            "weights": weights, "base": base - weights, "kv": engine.arena.mapped_bytes,
            "prepared": held.get("ready_bytes", 0),
            "lease": None if lease is None else {
                "granted": lease["granted_bytes"], "held": lease["held_bytes"], "min": lease["min_bytes"],
                "max": lease["max_bytes"], "recall_target": lease["recall_target_bytes"],
            },
            "device": self._device_now(0 if lease is None else lease["held_bytes"]),
        }  # fmt: skip
        return MemoryFigures(content, held.get("recalls", 0), held.get("recalled_bytes", 0))

    def _device_now(self, held_bytes: int) -> dict[str, Any] | None:
        """The device as the monitor's record says; None without a monitor, or where it says nothing new."""
        sharing, now = self._engine.sharing, self._engine.core.clock()
        if sharing is None:
            return None
        if now >= self._device_at + _DEVICE_S:
            self._device_at, self._device = now, None
            try:
                uuid = sharing.lease.device_uuid
                memory = sharing.watched.memory(uuid)
                (info,) = [info for info in sharing.watched.devices() if info.uuid == uuid]
            except (MonitorError, OSError, ValueError):
                return None
            if not memory.is_stale() and memory.used_bytes is not None:
                self._device = {
                    "name": info.name or info.index,
                    "total": memory.total_bytes,
                    "used": memory.used_bytes,
                    "others": max(0, memory.used_bytes - held_bytes),
                }
        return self._device

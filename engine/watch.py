"""What watchers of an engine get: frames, the details of a block, and decisions. Called between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..allocator.pool_view import NULL_BLOCK, BlockState
from ..cache.cache_events import BlockBatch, CacheEventLog, PendingEvents
from ..common.recording import RecordingError
from ..frames.recorder import INTERVAL_S, EngineRecorder
from ..frames.source import Frame, FrameSource, MemoryFigures, PoolFacts, sequence_in, with_labels
from ..monitor.errors import MonitorError
from ..scheduler.outcome import Decision
from ..scheduler.request import RequestRejected
from ..scheduler.scheduler import Scheduler
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
        if (disk := engine.core.disk) is not None:
            kept = disk.to_dict()
            content["disk"] = {"bytes": kept["bytes"], "written_today": kept["written_today_bytes"]}
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


def block_details(scheduler: Scheduler, block: int) -> dict[str, Any]:
    """The state of `block`, its rows, and what lies in it; "text" holds its token ids. Raises RequestRejected."""
    cache, rows = scheduler.cache, scheduler.rows
    if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < cache.pool.num_blocks:
        raise RequestRejected(f"the pool has the blocks 0 .. {cache.pool.num_blocks - 1:,}; there is no block {block!r:.80}")
    block_state = BlockState(int(cache.pool.states()[block]))
    details: dict[str, Any] = {"state": block_state.name.lower(), "rows": [], "hits": 0, "tokens": None, "text": None}
    if block == NULL_BLOCK:
        return details
    for row in cache.row_tables.rows_with(np.array([block], np.int32)).tolist():
        sequence = sequence_in(scheduler.state, row)
        if sequence is None:
            continue
        position = cache.row_tables.column_of(row, block)
        request = sequence.request
        details["rows"].append({"id": request.request_id, "label": request.label, "row": row, "position": position})
        if position is None:
            details["tokens"] = [0, int(rows.computed[row])]
            continue
        first = position * cache.block_size
        last = min(first + cache.block_size, int(rows.computed[row]))
        details["tokens"] = [first, max(first, last)]
        details["text"] = rows.tokens[row, first:last].tolist()
    found = cache.index.entry_in(block)
    if found is not None:
        first = found.depth * cache.block_size
        details |= {"hits": found.hits, "tokens": [first, first + cache.block_size], "text": found.tokens.tolist()}
    return details


def decisions_about(scheduler: Scheduler, request: str | None) -> list[Decision]:
    """The decisions that are kept, with their numbers and labels; of a `request` those that name its id or label."""
    told = with_labels(scheduler, scheduler.decisions.since(0))
    return told if request is None else [one for one in told if _concerns(one, request)]


def _concerns(decision: Decision, request: str) -> bool:
    names = [decision.get("request_id", ""), *decision.get("passed", ())]
    return decision["label"] == request or any(name.partition(".")[0] == request or name == request for name in names)


def decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """The function that turns token ids into text; None without a tokenizer."""
    return None if tokenizer is None else partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def with_text(details: dict[str, Any], decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """`details` of a block with its tokens as text; None without `decode`."""
    ids = details["text"]
    return {**details, "text": None if ids is None or decode is None else decode(ids)}

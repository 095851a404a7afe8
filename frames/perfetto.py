"""A recording as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: events in the Chrome trace event format.

    process "requests"   a thread per request: slices of what it did, and an instant at its end
    process "engine"     counters: blocks, requests, tokens per second, memory, host tier
    process "scheduler"  an instant for each decision and each recall

Times are those of the frames, so a slice is as exact as the frames are close. The format is described in "Trace Event
Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

Event = dict[str, Any]

_REQUESTS, _ENGINE, _SCHEDULER = 1, 2, 3  # pids
_STATUSES = ("prefilling", "decoding", "paused", "finishing")
_BLOCKS = ("free", "draining", "live", "cached", "in flight")
_RATES = ("computed_tokens", "generated_tokens")


@dataclass(slots=True)
class _Track:
    """A request: its thread, and the slice that is open."""

    tid: int
    state: str
    since: float
    details: dict[str, Any]


class TraceWriter:
    """Turns the frames of one recording into events. `began` (seconds since 1970) is the time 0 of the trace."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._tracks: dict[str, _Track] = {}  # of the requests that have not ended
        self._id_in: dict[int, str] = {}  # by row
        self._num_tracks = 0
        self._last: Mapping[str, Any] | None = None  # the frame before

    def begin(self) -> Iterator[Event]:
        """The names of the processes."""
        for pid, name in ((_REQUESTS, "requests"), (_ENGINE, "engine"), (_SCHEDULER, "scheduler")):
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": -pid}}

    def events(self, frame: Mapping[str, Any]) -> Iterator[Event]:
        """The events of the next frame."""
        last = self._last
        if last is not None and frame["seq"] <= last["seq"]:  # another run of the engine
            yield from self.end()
            last = None
        now = frame["time"]
        if frame["full"]:
            self._id_in = {}
        for row in frame["left"]:
            self._id_in.pop(row, None)
        for row, name, label, num_prompt, limit, priority, arrival, num_cached, *_ in frame["rows"]:
            self._id_in[row] = name
            if name not in self._tracks:
                facts = {"prompt_tokens": num_prompt, "limit_tokens": limit, "priority": priority, "cached_tokens": num_cached}
                yield from self._open(name, label, "waiting", arrival, facts)
        yield from self._waiting(frame, now)
        yield from self._running(frame, now)
        yield from self._ended(frame, now)
        yield from self._counters(frame, last, now)
        yield from self._instants(frame, last, now)
        self._last = frame

    def end(self) -> Iterator[Event]:
        """Close what is open, at the time of the last frame."""
        now = self._began if self._last is None else self._last["time"]
        for track in self._tracks.values():
            yield self._slice(track, now)
        self._tracks, self._id_in, self._last = {}, {}, None

    def _open(self, name: str, label: str, state: str, since: float, details: dict[str, Any]) -> Iterator[Event]:
        self._num_tracks += 1
        self._tracks[name] = _Track(self._num_tracks, state, max(since, self._began), details)
        title = f"{name} {label}".strip()
        yield {"ph": "M", "name": "thread_name", "pid": _REQUESTS, "tid": self._num_tracks, "args": {"name": title}}

    def _turn(self, name: str, state: str, now: float, details: dict[str, Any]) -> Iterator[Event]:
        """The request is in `state`: a slice ends if that is another one than before."""
        track = self._tracks[name]
        if track.state != state:
            if track.since < now:
                yield self._slice(track, now)
            track.state, track.since, track.details = state, now, {}
        track.details.update(details)

    def _slice(self, track: _Track, now: float) -> Event:
        start = min(track.since, now)
        return {
            "ph": "X",
            "name": track.state,
            "cat": "request",
            "pid": _REQUESTS,
            "tid": track.tid,
            "ts": self._us(start),
            "dur": max(0, self._us(now) - self._us(start)),
            "args": track.details,
        }

    def _waiting(self, frame: Mapping[str, Any], now: float) -> Iterator[Event]:
        listed = set()
        for name, label, known, needed, priority, waited_s, preemptions, status in frame["waiting"][1]:
            listed.add(name)
            details = {"known_tokens": known, "needed_blocks": needed, "priority": priority, "preemptions": preemptions}
            state = "preempted" if preemptions and status == "waiting" else status
            if name not in self._tracks:
                yield from self._open(name, label, state, now - waited_s, details)
            yield from self._turn(name, state, now, details)
        seated = set(self._id_in.values())
        for name, track in self._tracks.items():
            # It waits far behind, or has ended.
            if name not in seated and name not in listed and track.state in _STATUSES:
                yield from self._turn(name, "preempted", now, {})

    def _running(self, frame: Mapping[str, Any], now: float) -> Iterator[Event]:
        for row, status, known, computed, blocks, preemptions in frame["running"]:
            details = {
                "row": row,
                "known_tokens": known,
                "computed_tokens": computed,
                "blocks": blocks,
                "preemptions": preemptions,
            }
            yield from self._turn(self._id_in[row], _STATUSES[status], now, details)

    def _ended(self, frame: Mapping[str, Any], now: float) -> Iterator[Event]:
        for name, label, reason, num_generated, error, *_ in frame["ended"]:
            if name not in self._tracks:  # it came and ended between two frames
                yield from self._open(name, label, "between frames", now, {})
            track = self._tracks[name]
            if name not in self._id_in.values():  # else it is still finishing; the slice ends with its row
                del self._tracks[name]
                yield self._slice(track, now)
            else:
                track.details["ended"] = reason
            yield {
                "ph": "i",
                "s": "t",
                "name": f"ended: {reason}",
                "cat": "request",
                "pid": _REQUESTS,
                "tid": track.tid,
                "ts": self._us(now),
                "args": {"generated_tokens": num_generated, "error": error},
            }
        for name in [name for name, track in self._tracks.items() if "ended" in track.details]:
            if name not in self._id_in.values():
                yield self._slice(self._tracks.pop(name), now)

    def _counters(self, frame: Mapping[str, Any], last: Mapping[str, Any] | None, now: float) -> Iterator[Event]:
        memory, host = frame["memory"], frame["host"]
        yield self._counter("blocks", now, dict(zip(_BLOCKS, frame["blocks"], strict=False)))
        yield self._counter("requests", now, {"running": len(frame["running"]), "waiting": frame["waiting"][0]})
        names = ("weights", "base", "kv", "prepared")
        yield self._counter("memory (bytes)", now, {name: memory[name] for name in names if name in memory})
        if memory.get("lease"):
            yield self._counter("lease (bytes)", now, {name: memory["lease"][name] for name in ("granted", "held")})
        if memory.get("device"):
            device = memory["device"]
            own = device["used"] - device["others"]
            yield self._counter("device (bytes)", now, {"this engine": own, "others": device["others"]})
        if host:
            yield self._counter("host tier (blocks)", now, {"used": host[0]})
        if last is not None and now > last["time"]:
            passed = now - last["time"]
            rates = {name: (frame["stats"][name] - last["stats"][name]) / passed for name in _RATES}
            yield self._counter("tokens per second", now, {name: round(rate, 1) for name, rate in rates.items()})

    def _instants(self, frame: Mapping[str, Any], last: Mapping[str, Any] | None, now: float) -> Iterator[Event]:
        known = last is not None
        for decision in frame["decisions"] if known or frame["seq"] == 1 else ():
            if not frame["full"] or frame["seq"] == 1:  # a later full frame repeats the last 64
                name = f"{decision['what']} {decision.get('request_id', '')}".strip()
                yield self._instant(name, "decision", now, decision)
        recalls = frame["stats"]["recalls"] - (last["stats"]["recalls"] if last is not None else 0)
        if known and recalls:
            asked = frame["stats"]["recalled_bytes"] - last["stats"]["recalled_bytes"]  # type: ignore[index]
            yield self._instant("recall", "recall", now, {"recalls": recalls, "bytes": asked})

    def _counter(self, name: str, now: float, values: dict[str, float]) -> Event:
        return {"ph": "C", "name": name, "pid": _ENGINE, "tid": 0, "ts": self._us(now), "args": values}

    def _instant(self, name: str, category: str, now: float, details: Mapping[str, Any]) -> Event:
        return {
            "ph": "i",
            "s": "p",
            "name": name,
            "cat": category,
            "pid": _SCHEDULER,
            "tid": 1,
            "ts": self._us(now),
            "args": dict(details),
        }

    def _us(self, time_s: float) -> int:
        return max(0, round((time_s - self._began) * 1e6))


def write_trace(frames: Iterable[bytes], began: float, header: Mapping[str, Any], out: TextIO) -> int:
    """Write the trace of `frames`, lines of JSON, to `out`. Returns the number of events. Raises OSError."""
    writer, number = TraceWriter(began), 0

    def events() -> Iterator[Event]:
        yield from writer.begin()
        for line in frames:
            yield from writer.events(json.loads(line))
        yield from writer.end()

    out.write('{"displayTimeUnit":"ms","otherData":' + json.dumps({k: str(v) for k, v in header.items()}))
    out.write(',"traceEvents":[')
    for number, event in enumerate(events(), 1):
        out.write((",\n" if number > 1 else "\n") + json.dumps(event))
    out.write("\n]}\n")
    return number

"""The feed of the page: an engine or a fleet is asked for one snapshot for all viewers, and for none while there are none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .choices import json_encode
from .engine_client import EngineClient, EngineUnavailable, RequestFailed
from .errors import ApiError, unavailable
from .models import ServedModel

log = logging.getLogger(__name__)

MOST_VIEWERS = 64
MOST_VIEWERS_OF_A_KEY = 16
MOST_UNSENT_BYTES = 1 << 20  # that wait for a viewer, beside a single larger frame
DEFAULT_RATE, LEAST_RATE, MOST_RATE = 10.0, 1.0, 20.0  # frames a second
COST_SHARE = 0.04  # of a core's time that frames may take; they come less often beyond
COST_WEIGHT = 0.25  # of the newest frame in the mean of the costs
LONGEST_S = 5.0  # between frames, whatever they cost
UNCHANGED_S = 1.0  # between frames that say the same
IDLE_S = 0.25  # between looks at an engine without requests
BEHIND_S = 1.0  # between whole frames for viewers that skipped some
FLEET_S = 0.5  # between looks at a fleet
FLEET_ANSWER_S = 2.0  # a fleet's queue that does not answer within this time is away
MOST_ERROR = 200  # characters of a worker's error, and of the journal's
LOOK_S = 0.25  # between looks at the states of the models
# After which the models' states are said again, so that a viewer can tell silence from a lost connection
ALIVE_S = 5.0


class PageViewer:
    """One listener, and the events that it has not read. Made by `PageFeed.viewer`.

    Args:
        rate: How often a second it gets what has come.
        may_look: Asked before each delivery; the stream ends once it says no.
    """

    def __init__(self, rate: float, may_look: Callable[[], bool]) -> None:
        self.rate = rate
        self.has_skipped = False
        self._may_look = may_look
        self._notices: dict[FollowedEngine | None, bytes] = {}  # the newest events that are no frames; they go first
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._current: set[FollowedEngine] = set()  # engines of which it has all frames since a whole one
        self._changed = asyncio.Event()
        self._is_sending = False
        self._is_closed = False

    @property
    def has_read(self) -> bool:
        """Whether it has taken all that was delivered."""
        return not (self._is_sending or self._frames or self._notices)

    def lacks(self, engine: FollowedEngine) -> bool:
        """Whether only a whole frame of this engine helps it."""
        return engine not in self._current

    def put(self, event: bytes, engine: FollowedEngine | None = None) -> None:
        """Deliver an event that is no frame, of all models or of one, instead of an earlier one that it has not read."""
        self._notices[engine] = event
        self._changed.set()

    def put_frame(self, engine: FollowedEngine, event: bytes, full: bool) -> None:
        """Deliver a frame, unless an earlier one was skipped. If too much waits already, all of that is skipped."""
        if not full and self.lacks(engine):
            return
        if self._frames and self._num_bytes + len(event) > MOST_UNSENT_BYTES:
            self._frames, self._num_bytes, self.has_skipped = [], 0, True
            self._current.clear()
            return
        self._current.add(engine)
        self._frames.append(event)
        self._num_bytes += len(event)
        self._changed.set()

    def forget(self, engine: FollowedEngine) -> None:
        """What is said of this engine begins anew, or is over."""
        self._current.discard(engine)
        self._notices.pop(engine, None)

    def close(self) -> None:
        """End its stream."""
        self._is_closed = True
        self._changed.set()

    async def events(self) -> AsyncIterator[bytes]:
        """What is delivered, joined to as few pieces as it is read in. Ends when it is closed or may look no longer."""
        clock = asyncio.get_running_loop().time
        next_at = 0.0
        while True:
            await self._changed.wait()
            early_s = next_at - clock()
            if early_s > 0.25 / self.rate and not self._is_closed:  # a feed for others that want more frames
                await asyncio.sleep(early_s)
            next_at = clock() + 1 / self.rate
            if self._is_closed or not self._may_look():
                return
            self._changed.clear()
            events = [*self._notices.values(), *self._frames]
            self._notices, self._frames, self._num_bytes = {}, [], 0
            self._is_sending = True
            yield b"".join(events)
            self._is_sending = False


class PageFeed:
    """Sends the models' states, the frames of their engines and the states of their fleets to all viewers.

    Args:
        models: Those of the server, iterated again and again.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = models
        self._engines: dict[ServedModel, FollowedEngine] = {}
        self._viewers: dict[PageViewer, str | None] = {}  # with the name of their key
        self._states = b""
        self._watching: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def viewers(self) -> Iterable[PageViewer]:
        """All that listen."""
        return self._viewers.keys()

    @property
    def rate(self) -> float:
        """Frames a second that the most eager viewer asks for."""
        return max((viewer.rate for viewer in self._viewers), default=DEFAULT_RATE)

    @contextmanager
    def viewer(self, rate: float, key: str | None, may_look: Callable[[], bool]) -> Iterator[PageViewer]:
        """Listen. Raises ApiError if there are too many viewers, or the server is shutting down.

        Args:
            key: The name of the viewer's key; a key may have `MOST_VIEWERS_OF_A_KEY`.
            may_look: See `PageViewer`.
        """
        self._check(rate, key)
        viewer = PageViewer(rate, may_look)
        self._viewers[viewer] = key
        event = self._models_event()
        viewer.put(event)
        if self._watching is None:
            self._states = event
            self._watching = asyncio.create_task(self._watch())
        try:
            yield viewer
        finally:
            self._viewers.pop(viewer, None)
            if not self._viewers:
                self._rest()

    def stop(self) -> None:
        """End all streams, and refuse new ones."""
        self._is_stopped = True
        for viewer in self._viewers:
            viewer.close()
        self._rest()

    def _check(self, rate: float, key: str | None) -> None:
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise ApiError(400, f"rate must be from {LEAST_RATE:g} to {MOST_RATE:g} frames a second, got {rate:g}")
        if self._is_stopped:
            raise unavailable("the server is shutting down")
        if len(self._viewers) >= MOST_VIEWERS:
            raise unavailable(f"{MOST_VIEWERS} viewers are connected, which is the server's limit")
        if key is not None and Counter(self._viewers.values())[key] >= MOST_VIEWERS_OF_A_KEY:
            headers = {"retry-after": f"{BEHIND_S:g}"}
            raise ApiError(
                429, f"the key {key} has {MOST_VIEWERS_OF_A_KEY} viewers already", code="rate_limit_exceeded", headers=headers
            )

    def _rest(self) -> None:
        """Ask no engine any more."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for engine in self._engines.values():
            engine.stop()
        self._engines.clear()

    async def _watch(self) -> None:
        """Follow the models that there are, and tell their states."""
        clock = asyncio.get_running_loop().time
        again_at = clock() + ALIVE_S
        while True:
            models = list(self._models)
            for gone in self._engines.keys() - set(models):
                self._engines.pop(gone).stop()
            for model in models:
                if model not in self._engines:
                    self._engines[model] = FollowedEngine(model, self)
            event = self._models_event()
            if event != self._states or clock() >= again_at:
                self._states, again_at = event, clock() + ALIVE_S
                for viewer in self._viewers:
                    viewer.put(event)
            await asyncio.sleep(LOOK_S)

    def _models_event(self) -> bytes:
        return b"event: models\ndata: " + json_encode([_state(model) for model in self._models]) + b"\n\n"


def _state(model: ServedModel) -> dict[str, Any]:
    """The state of a model, and of one that has left for another one why."""
    left = model.departure is not None and model.state in ("asleep", "unloaded")
    return {"name": model.name, "state": model.state} | ({"unloaded_for": str(model.departure)} if left else {})


class FollowedEngine:
    """Asks the engine of one model for frames, and hands them to the viewers as they are; or its fleet for its state.

    A frame tells what has changed since the one before. Whatever breaks that row makes the next one a whole frame: a new
    engine, a call that fails, a viewer that comes or has skipped some.
    """

    def __init__(self, model: ServedModel, feed: PageFeed) -> None:
        self._model = model
        self._feed = feed
        name = json_encode(model.name)
        self._head = b'event: frame\ndata: {"model":' + name + b',"frame":'
        self._fleet_head = b'event: fleet\ndata: {"model":' + name + b',"fleet":'
        self._engine: EngineClient | None = None
        self._cost_s = 0.0  # of a frame, on the mean
        self._said = b""  # by the last frame that was sent, without its number and time
        self._sent_at = self._whole_at = 0.0
        self._has_failed = False
        self._task = asyncio.create_task(self._follow())

    @property
    def pause_s(self) -> float:
        """Seconds between frames: as the viewers want, or as the cost allows."""
        return max(1 / self._feed.rate, min(self._cost_s / COST_SHARE, LONGEST_S))

    def stop(self) -> None:
        """Ask no more."""
        self._task.cancel()
        self._begin_anew()

    async def _follow(self) -> None:
        while True:
            engine = self._model.process
            if self._model.state != "ready" or engine is None or not engine.is_alive:
                self._engine = None
                await asyncio.sleep(LOOK_S)
                continue
            if engine is not self._engine:  # another one, or one that slept
                self._engine = engine
                self._begin_anew()
            began = time.monotonic()
            if engine.is_durable:  # it has no blocks of its own to be shown
                await self._show_fleet(engine)
                await asyncio.sleep(max(began + FLEET_S - time.monotonic(), 0))
                continue
            try:
                changed = await self._ask(engine)
            except Exception as error:  # of one model: the feed goes on
                self._failed(error)
                await asyncio.sleep(UNCHANGED_S)
                continue
            pause_s = self.pause_s
            await asyncio.sleep(max(began + pause_s - time.monotonic(), 0))
            while not changed and not engine.num_unfinished and time.monotonic() - began < IDLE_S and not self._is_lacked:
                await asyncio.sleep(pause_s)

    async def _ask(self, engine: EngineClient) -> bool:
        """Ask for a frame, and hand it on. Returns whether it tells anything new. Raises what `call` raises."""
        full = self._wants_whole()
        frame, cost_s = await engine.call("frame", full=full)
        began = time.perf_counter()
        said = frame[frame.find(b'"step"') :]  # number and time stand before it
        changed = full or said != self._said
        now = time.monotonic()
        if changed or now - self._sent_at >= UNCHANGED_S:
            self._said, self._sent_at = said, now
            event = b"".join((self._head, frame, b"}\n\n"))
            for viewer in self._feed.viewers:
                viewer.put_frame(self, event, full)
        self._has_failed = False
        cost_s += time.perf_counter() - began
        self._cost_s += COST_WEIGHT * (cost_s - self._cost_s)
        return changed

    async def _show_fleet(self, engine: EngineClient) -> None:
        """Ask a fleet for its state, and hand it on; null if it does not answer."""
        shown = None
        try:
            async with asyncio.timeout(FLEET_ANSWER_S):
                shown = fleet_picture(await engine.call("status"), time.time())
            self._has_failed = False
        except Exception as error:  # of one model: the feed goes on
            self._failed(error, "status")
        event = b"".join((self._fleet_head, json_encode(shown), b"}\n\n"))
        for viewer in self._feed.viewers:
            viewer.put(event, self)

    @property
    def _is_lacked(self) -> bool:
        return any(viewer.lacks(self) for viewer in self._feed.viewers)

    def _wants_whole(self) -> bool:
        """Whether a viewer needs a whole frame now. One that is behind waits until it reads again, and for its turn."""
        lacking = [viewer for viewer in self._feed.viewers if viewer.lacks(self)]
        now = time.monotonic()
        if not any(not viewer.has_skipped or (viewer.has_read and now - self._whole_at >= BEHIND_S) for viewer in lacking):
            return False
        self._whole_at = now
        return True

    def _begin_anew(self) -> None:
        self._said = b""
        for viewer in self._feed.viewers:
            viewer.forget(self)

    def _failed(self, error: Exception, what: str = "frames") -> None:
        """Say so once. The engine may have made the frame, so that the next one has to be whole."""
        passes = isinstance(error, EngineUnavailable | TimeoutError) or (
            isinstance(error, RequestFailed) and error.kind == "unavailable"
        )
        if not self._has_failed and not passes:
            log.error("the engine of %s gives no %s: %s: %s", self._model.name, what, type(error).__name__, error)
        self._has_failed = True
        self._begin_anew()


_OF_QUEUE = (
    "waiting", "running", "accepted", "refused", "ended", "failed", "cancelled", "requeued", "returned", "recorded_tokens",
    "hit_blocks", "prompt_blocks", "workers_lost",
)  # fmt: skip
_OF_WORKER = (
    "name", "state", "node", "epoch", "requests", "sequences", "max_seqs", "preemptions", "assigned", "silent_s", "device",
)  # fmt: skip


def fleet_picture(status: Mapping[str, Any], now: float) -> dict[str, Any]:
    """What viewers see of a fleet's status at `now` (seconds since 1970): nothing but what is named here.

    Workers that are kept and not registered are "starting". `blocks` are those in use, those with nothing but cached prefixes,
    those with nothing, and those that the lease can still become.
    """
    errors = status.get("errors", {})
    registered = [_worker_picture(worker) for worker in status["workers"]]
    known = {worker["name"] for worker in registered}
    queue = {name: status["queue"][name] for name in _OF_QUEUE}
    starting = [{"name": name, "state": "starting"} for name in status.get("kept", ()) if name not in known]
    return {
        "time": round(now, 3),
        "front_ends": sorted(status["front_ends"].items()),
        "queue": queue,
        "journal": {"unwritten": status["journal"]["unwritten"], "fault": _shortened(status["journal"]["fault"])},
        "restarts": status.get("restarts", 0),
        "workers": [{**worker, "error": _shortened(errors.get(worker["name"]))} for worker in (*registered, *starting)],
    }


def _worker_picture(worker: Mapping[str, Any]) -> dict[str, Any]:
    blocks = worker["blocks"]
    usable, free = blocks["usable"], blocks["free"]
    used = min(blocks["live"], max(usable - free, 0))
    shown = {"used": used, "cached": max(usable - free - used, 0), "free": free, "more": max(blocks["limit"] - usable, 0)}
    return {**{name: worker[name] for name in _OF_WORKER}, "blocks": shown}


def _shortened(error: str | None) -> str | None:
    """The first line of an error, not too long."""
    return None if error is None else error.strip().partition("\n")[0][:MOST_ERROR]

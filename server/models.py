"""The models of a server: each is an engine process, loaded at the start or for a request, watched, put to sleep, unloaded."""

from __future__ import annotations

import asyncio
import glob
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from ..common.units import format_bytes
from . import takers
from .config import ModelOptions
from .engine_client import EngineClient, EngineUnavailable, LoadFailed, RemoteEngine, RequestFailed
from .errors import ApiError, unavailable
from .residency import Departure, Resident, RouterRules, Taker, victims
from .response_templates import ResponseTemplate, choose_template, template_named

log = logging.getLogger(__name__)

FIRST_RESTART_S, MOST_RESTART_S = 1.0, 60.0
GOOD_AFTER_S = 60.0  # an engine that lived so long is restarted at once

LOOK_S = 0.02  # between looks for room
FAILED_S = 5.0  # a model that could not be loaded is not tried again for so long
FOREVER_S = 1e9  # a keep_alive beyond is endless
UNUSED_S = 0.005  # until an end is noticed
WEIGHTS = ("*.safetensors", "*.bin")  # of a folder, the first that are there
PART = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")

LATEST = ":latest"  # Ollama's tag of a name without one

State = Literal["unloaded", "loading", "ready", "asleep", "waking", "failed"]
STATES: tuple[State, ...] = ("unloaded", "loading", "ready", "asleep", "waking", "failed")


class ServedModel:
    """One model, its engine process and its state. Make it with `ModelRegistry.add`.

    Attributes:
        level: Of its sleep, 0 unless it sleeps.
        is_missing: It is to serve from the start on, and is not loaded yet, or its engine has ended by itself.
        num_waiting, num_running: Requests that wait until it serves, and that it serves.
        since, last_used: Times of `time.monotonic`: when it came to serve, and when its last request ended.
        expires_at: When it is unloaded if no request comes, by the same clock.
        is_leaving: It is unloaded once it has no requests.
        exchange_s: How long its last loading or waking took.
        weights_bytes: Of its files until it was loaded once.
        comings: Loads ("load") and wakes ("wake"), and their seconds in `coming_s`.
        goings: By their reasons: "memory", "turn" (while it had requests), "keep_alive", "asked", "ended".
        wanted_since: When the first of the requests came that wait for it.
        returns_at: When busy models make way for it, as its requests are suspended; None: they are not.
        holds: It has memory, or has been given room for it.
        departure: When it left the memory for another model last; None: never.
    """

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.is_missing = options.residency.preload
        self.state: State = "loading" if self.is_missing else "unloaded"
        self.level = 0
        self.error: str | None = None
        self.created = int(time.time())
        self.num_restarts = self.num_waiting = self.num_running = 0
        self.process: EngineClient | None = None
        self.changing = asyncio.Lock()  # held while it is loaded, goes to sleep, wakes up or is unloaded: see `change`
        self.num_changing = 0  # that hold it or wait for it
        self.coming: asyncio.Task[None] | None = None  # loads it or wakes it up
        self.timer: asyncio.TimerHandle | None = None  # unloads it
        self.since = self.last_used = self.wanted_since = time.monotonic()
        self.expires_at = math.inf
        self.returns_at: float | None = None
        self.is_leaving = False
        self.exchange_s = 0.0
        self.restart_s = FIRST_RESTART_S
        self.weights_bytes = _written_bytes(options.reference)
        self.comings: Counter[str] = Counter()
        self.coming_s = {"load": 0.0, "wake": 0.0}
        self.goings: Counter[str] = Counter()
        self.holds = False
        self.departure: Departure | None = None

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.options.name

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Load it, let it sleep, wake it up or unload it alone. Does not wait if `num_changing` is 0."""
        self.num_changing += 1
        try:
            async with self.changing:
                yield
        finally:
            self.num_changing -= 1

    @property
    def is_used(self) -> bool:
        """Whether a request runs or waits for it."""
        return bool(self.num_running or self.num_waiting)

    def stays(self) -> None:
        """It is not unloaded for want of requests for now."""
        self.expires_at = math.inf
        if self.timer is not None:
            self.timer.cancel()

    @property
    def engine(self) -> EngineClient:
        """The engine. Raises ApiError while it cannot serve."""
        if self.state == "asleep":
            raise unavailable(f"the model {self.name} is asleep: a request that generates wakes it up, and POST /wake_up")
        if self.process is None or not self.process.is_alive or self.state != "ready":
            state = "not reachable now" if self.state == "ready" else self.state
            raise unavailable(f"the model {self.name} is {state}" + (f": {self.error}" if self.error else ""))
        return self.process

    @property
    def has_engine(self) -> bool:
        """Whether an engine can take requests; a fleet may have no worker now."""
        return self.process is not None and self.process.is_alive and self.process.info.max_seqs > 0

    @property
    def is_settled(self) -> bool:
        """Whether it serves if it is to: one that sleeps or is unloaded does for a request."""
        return not self.is_missing and (self.state != "ready" or self.has_engine)

    @property
    def can_serve(self) -> bool:
        """Whether a request may begin; a fleet that is away refuses it."""
        return self.state == "ready" and self.process is not None and (self.process.is_alive or self.process.is_durable)

    @property
    def response_template(self) -> ResponseTemplate:
        """How the model writes its answers."""
        if self.options.response_format is not None:
            return template_named(self.options.response_format)
        info = None if self.process is None else self.process.info
        if self.options.chat_template is not None:
            return choose_template(self.options.chat_template)
        return choose_template(None if info is None else info.chat_template, "" if info is None else info.response_template)


class _NotWanted(ApiError):
    """All requests left before there was room for their model, which stays as it is."""


class _NoRoomYet(_NotWanted):
    """There is no room without a wait for a model with suspended requests, or for one that is missing and that no request
    waits for: it gives others the turn.
    """


class _MemoryShort(Exception):
    """The device lacks memory for a model now; the message is the engine's."""


class ModelRegistry:
    """The models by name, in the order in which they were named.

    Args:
        start: Makes the client of a model: starts an engine process unless it is given.
        rules: When a model leaves for another one.
        clock: The time, as that of `time.monotonic`; benchmarks have one of their own.
    """

    def __init__(
        self,
        start: Callable[..., Awaitable[EngineClient]] = RemoteEngine.start,
        rules: RouterRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._clock = clock
        self.rules = RouterRules() if rules is None else rules
        self._room = asyncio.Lock()  # held while a model looks for room
        self._turn_at = -math.inf  # when a busy model made way last
        self._turn_of: str | None = None  # the model for which, until it serves
        self._tasks: set[asyncio.Task[None]] = set()
        self._models: dict[str, ServedModel] = {}
        self._leaving: set[ServedModel] = set()  # that are being removed, and may have memory still
        self._processes: set[EngineClient] = set()  # those that may run, of models that are being removed too

    def __iter__(self) -> Any:
        return iter(tuple(self._models.values()))

    @property
    def capacity(self) -> int:
        """Sequences that the loaded models can run at the same time."""
        ready = [model.process for model in self if model.state == "ready" and model.process is not None]
        return sum(process.info.max_seqs for process in ready)

    @property
    def is_ready(self) -> bool:
        """Whether all models serve that are to; others sleep, or are loaded for requests."""
        return bool(self._models) and all(model.is_settled for model in self)

    def get(self, name: str | None) -> ServedModel:
        """The model of this name; without a name the only one. Raises ApiError.

        Ollama's tag `:latest` may be there and may be missing: its clients take names from `/api/tags` to all endpoints.
        """
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise ApiError(400, f"name one of the models: {self._names()}", param="model")
        for one in (name, name.removesuffix(LATEST), name + LATEST):
            if one in self._models:
                return self._models[one]
        message = f"the model {name!r:.200} does not exist; there are {self._names()}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def get_claude(self, name: str) -> ServedModel:
        """As `get`. A name of Anthropic's that no model has means the first model."""
        if name.startswith("claude-") and name not in self._models and self._models:
            return next(iter(self._models.values()))
        return self.get(name)

    def add(self, options: ModelOptions) -> ServedModel:
        """Take a model, and begin to load it if it is preloaded. Raises ApiError if its name is taken."""
        if options.name in self._models:
            raise ApiError(409, f"a model named {options.name!r} is served already: unload it first", param="name")
        model = self._models[options.name] = ServedModel(options)
        model.since = model.last_used = self._clock()
        if options.residency.preload:
            self._come(model)
        return model

    async def loaded(self, model: ServedModel) -> None:
        """Wait until a model that was added is ready.

        Raises ApiError if it is unloaded meanwhile, or if it cannot be loaded: it is forgotten then.
        """
        while model.state == "loading" and self._models.get(model.name) is model:
            await asyncio.sleep(0.01)
        if self._models.get(model.name) is not model or model.state == "unloaded":
            raise ApiError(409, f"the model {model.name} was unloaded before it was ready", param="name")
        if model.state == "failed":
            await self.remove(model.name)
            raise ApiError(400, f"the model {model.name} cannot be loaded: {model.error}", param="model")

    async def remove(self, name: str, drain_s: float = 0.0) -> None:
        """Forget a model, give its requests `drain_s` seconds, and end its engine. Raises ApiError."""
        model = self.get(name)
        del self._models[model.name]
        self._leaving.add(model)
        try:
            await self.unload(model, drain_s)
        finally:
            self._leaving.discard(model)

    @asynccontextmanager
    async def using(self, model: ServedModel, keep_alive_s: float | None = None) -> AsyncIterator[None]:
        """Hold a model for a request, which waits until the model is loaded or awake. Raises ApiError.

        Args:
            keep_alive_s: As of `Residency`, after this request; None: as the model's settings say.
        """
        model.is_leaving = model.is_leaving and keep_alive_s is None
        await self.until_serving(model)
        model.num_running += 1
        model.stays()
        try:
            yield
        finally:
            model.num_running -= 1
            model.last_used = self._clock()
            self._rest(model, keep_alive_s)
            if self.rules.most_bytes is not None:
                self._begin(self._trim(self.rules.most_bytes))

    async def until_serving(self, model: ServedModel) -> None:
        """Wait until a model serves, for `load_timeout_s` at most; load it or wake it up if need be. Raises ApiError."""
        with self._waiting(model):
            try:
                async with asyncio.timeout(self.rules.load_timeout_s):
                    while not model.can_serve:
                        await self._arrival(model)
            except TimeoutError:
                raise self._too_late(model) from None

    @contextmanager
    def _waiting(self, model: ServedModel) -> Iterator[None]:
        """Count one that waits for a model. It may serve by the end, though all have left."""
        if not model.num_waiting:
            model.wanted_since = self._clock()
        model.num_waiting += 1
        try:
            yield
        finally:
            model.num_waiting -= 1
            if not model.is_used:
                self._rest(model, None)

    async def sleep(self, model: ServedModel, drain_s: float | None, level: int = 1) -> None:
        """Let the requests of a model end within `drain_s`, and free all its memory. Idempotent; an unloaded one stays so."""
        drain_s = await self._returned(model, drain_s)
        async with model.change():
            if model.state == "asleep" and (model.returns_at is not None or level > model.level):
                await self._sleeps_on(model, level)
            elif model.state not in ("asleep", "unloaded", "failed"):
                await self._sleeps(model, drain_s, level, "asked")

    async def _returned(self, model: ServedModel, drain_s: float | None) -> float | None:
        """Let a model that has left in a turn return, if it does so within `drain_s`: its requests can end then. Else it
        returns no more. Returns what is left of `drain_s`.
        """
        if model.returns_at is None:
            return drain_s
        until = math.inf if drain_s is None else self._clock() + drain_s
        while model.returns_at is not None and model.is_used and self._clock() < until:
            model.returns_at = min(model.returns_at, self._clock())  # busy models make way
            await asyncio.sleep(LOOK_S)
        if model.returns_at is not None:
            await self._cancel_coming(model)
        return None if drain_s is None else max(until - self._clock(), 0.0)

    async def _cancel_coming(self, model: ServedModel) -> None:
        if model.coming is not None and not model.coming.done():
            model.coming.cancel()
            await asyncio.wait({model.coming})

    async def _sleeps_on(self, model: ServedModel, level: int) -> None:
        """Let a model sleep on at another level, in a change. Requests that were suspended end."""
        assert model.process is not None
        model.returns_at = None
        try:
            await model.process.call("sleep", drain_s=0.0, level=level)
            model.level, model.holds = level, False
        except (RequestFailed, EngineUnavailable) as error:
            log.error("the engine of %s cannot sleep on, and is ended: %s", model.name, error)
            await self._ends(model, 0.0, "asked")

    async def wake_up(self, model: ServedModel) -> None:
        """Load a model again that sleeps or is unloaded, in turn with other changes; it waits for room as long as a request.
        Idempotent. Raises ApiError.
        """
        with ExitStack() as waiting:
            waiting.enter_context(self._waiting(model))
            timer = asyncio.get_running_loop().call_later(self.rules.load_timeout_s, waiting.close)
            try:
                async with model.change():
                    self._check_served(model)
                    if not model.can_serve:
                        await self._bring(model)
            except _NotWanted:
                raise self._too_late(model) from None
            finally:
                timer.cancel()

    async def unload(self, model: ServedModel, drain_s: float = 0.0) -> None:
        """End a model's engine; the next request loads it again. Idempotent."""
        drain_s = await self._returned(model, drain_s) or 0.0
        await self._cancel_coming(model)
        async with model.change():
            await self._ends(model, drain_s, "asked")

    async def release(self, model: ServedModel) -> None:
        """Unload a model as soon as it has no requests."""
        model.is_leaving = model.is_used or model.state not in ("unloaded", "failed")
        await self._expired(model)

    async def stop(self, drain_s: float = 0.0) -> None:
        """End all engines."""
        await asyncio.gather(*(self.remove(model.name, drain_s) for model in self))

    async def kill(self) -> None:
        """End all engines at once, those too that `stop` waits for."""
        await asyncio.gather(*(process.kill() for process in self._processes))

    # -- loading -----------------------------------------------------------------------------------------------------

    def _come(self, model: ServedModel, pause_s: float | None = None) -> asyncio.Task[None]:
        """The task that loads a model or wakes it up. With `pause_s` it begins then, and tries until it succeeds."""
        if model.coming is None or model.coming.done():
            model.coming = self._begin(self._brought(model) if pause_s is None else self._again(model, pause_s))
        return model.coming

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Its waiters may have left: asyncio would print the error then
        task.add_done_callback(lambda one: None if one.cancelled() else one.exception())
        return task

    async def _arrival(self, model: ServedModel) -> None:
        """Wait for the end of a model's loading. Raises ApiError."""
        self._check_served(model)
        if model.state == "ready" and (model.coming is None or model.coming.done()):
            await asyncio.sleep(UNUSED_S)
            return
        if model.state == "failed" and self._clock() - model.since < FAILED_S:
            raise _failed(model)
        coming = self._come(model)
        await asyncio.wait({coming})
        if coming.cancelled():
            raise unavailable(f"the model {model.name} was unloaded, or put to sleep, before it was ready")
        coming.result()

    def _check_served(self, model: ServedModel) -> None:
        """Raise ApiError for a model that was removed."""
        if self._models.get(model.name) is not model:
            raise unavailable(f"the model {model.name} was unloaded")

    def _too_late(self, model: ServedModel) -> ApiError:
        waited_s = self.rules.load_timeout_s
        return unavailable(f"the model {model.name} is {model.state} still after {waited_s:g} s (--load-timeout)")

    async def _brought(self, model: ServedModel) -> None:
        async with model.change():
            if not model.can_serve:
                await self._bring(model)

    async def _again(self, model: ServedModel, pause_s: float) -> None:
        """Load a model again after the end of its engine, until it serves."""
        while not model.can_serve:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RESTART_S)
            try:
                await self._brought(model)
            except _NoRoomYet:
                model.state, pause_s = "loading", LOOK_S
                await self._until_room(model)
            except ApiError as error:
                model.state = "loading"
                log.error("the model %s cannot be loaded again: %s", model.name, error)

    async def _returns(self, model: ServedModel, coming: asyncio.Task[None] | None) -> None:
        """Bring a model back that has left in a turn, for its requests, which fail if it takes too long; or let `coming` do so,
        which has begun for a request that came while it left.
        """
        try:
            async with asyncio.timeout(self.rules.load_timeout_s):
                if coming is not None and not coming.done():
                    with suppress(ApiError, _NotWanted):
                        await coming
                while model.is_used and not model.can_serve:
                    try:
                        await self._until_room(model)
                        if model.is_used:
                            await self._brought(model)
                    except _NoRoomYet:
                        await asyncio.sleep(LOOK_S)
                    except _NotWanted:
                        return
                    except ApiError as error:
                        log.error("%s cannot go on with its requests yet: %s", model.name, error)
                        await asyncio.sleep(FAILED_S)
        except TimeoutError:
            log.error("%s, with requests that go on later, %s", model.name, self._too_late(model))
            async with model.change():
                if not model.can_serve:
                    await self._ends(model, 0.0, "turn")
        finally:
            if not model.is_used:
                model.returns_at = None
                if self._clock() >= model.expires_at:
                    self._begin(self._expired(model))

    async def _until_room(self, model: ServedModel) -> None:
        """Wait until another model falls idle or leaves, or busy ones make way. Others are looking for room meanwhile."""
        first = self._passing(model)
        while (model.is_used or model.is_missing) and not self._is_urgent(model):
            others = self._residents(model)
            if not self._room.locked() and (victims(others, 1, self._clock()) or not first <= self._passing(model)):
                return
            await asyncio.sleep(LOOK_S)

    def _is_urgent(self, model: ServedModel) -> bool:
        """Whether busy models are to make way for one, by the time that its requests have waited.

        They do so no more often than models stay, so that no more than a part of the time goes into exchanges.
        """
        now = self._clock()
        if now < self._turn_at + self._stays_s(model) and self._turn_of != model.name:
            return False
        if model.returns_at is not None and now >= model.returns_at:
            return True
        return bool(model.num_waiting) and now >= model.wanted_since + self.rules.waits_s(model.exchange_s)

    async def _bring(self, model: ServedModel) -> None:
        """Load a model or wake it up, once there is room. `changing` is held. Raises ApiError."""
        try:
            began, how = await self._enters(model)
        except _NotWanted:
            if model.process is not None and not model.process.is_alive:
                model.process, model.state, model.level = None, "unloaded", 0
            self._rest(model, None)
            raise
        except asyncio.CancelledError:
            # An engine that has begun to wake up does so: the next waking finds it awake
            is_asleep = model.process is not None and model.process.is_alive
            model.state, model.holds = "asleep" if is_asleep else "unloaded", is_asleep and model.holds
            raise
        except Exception as error:
            model.holds = False
            if not isinstance(error, _MemoryShort | LoadFailed | EngineUnavailable | OSError):
                log.exception("the loading of %s failed", model.name)
            if model.state == "asleep":  # for want of memory: the next request tries again
                self._rest(model, None)
                raise unavailable(f"the model {model.name} cannot wake up: {error}") from error
            model.error, model.state, model.since = str(error), "failed", self._clock()
            model.stays()
            raise _failed(model) from error
        assert model.process is not None
        now = self._clock()
        model.state, model.level, model.error, model.is_missing, model.returns_at = "ready", 0, None, False, None
        model.weights_bytes = model.process.info.weights_bytes or model.weights_bytes
        model.exchange_s, model.since = now - began, now
        if self._turn_of == model.name:
            self._turn_of = None
        model.last_used = now
        model.comings[how] += 1
        model.coming_s[how] += model.exchange_s
        self._rest(model, None)

    async def _enters(self, model: ServedModel) -> tuple[float, str]:
        """Load a model or wake it up, once there is room, and once more each time that another one has left for it.

        Returns when that began, and "load" or "wake". Raises as `_make_room`, `start` and `_others_leave`.
        """
        async with self._room:  # in the order of the first requests
            await self._make_room(model)
        try:
            return await self._tries(model)
        except _MemoryShort as error:
            short = error
        async with self._room:  # to the end: no other model takes what is given up for this one
            while True:
                await self._others_leave(model, short)
                await self._make_room(model)
                try:
                    return await self._tries(model)
                except _MemoryShort as error:
                    short = error

    async def _tries(self, model: ServedModel) -> tuple[float, str]:
        """Load a model that has been given room, or wake it up. Returns as `_enters`. Raises _MemoryShort, and as `start`."""
        began = self._clock()
        try:
            if model.state == "waking" and await self._wakes(model):
                return began, "wake"
            await self._loads(model)
        except _MemoryShort:
            model.holds = False
            model.state = "asleep" if model.state == "waking" else "loading" if model.is_missing else "unloaded"
            raise
        return began, "load"

    async def _wakes(self, model: ServedModel) -> bool:
        """Wake a model up. False: its engine cannot, and is ended. Raises _MemoryShort: it sleeps on."""
        assert model.process is not None
        try:
            await model.process.call("wake_up")
        except (RequestFailed, EngineUnavailable) as error:
            if isinstance(error, RequestFailed) and error.kind == "memory":
                raise _MemoryShort(str(error)) from error
            log.error("the engine of %s cannot wake up, and is started anew: %s", model.name, error)
            process, model.process = model.process, None
            await process.kill()
            self._processes.discard(process)
            return False
        return True

    async def _loads(self, model: ServedModel) -> None:
        """Start a model's engine. Raises _MemoryShort, and as `start`."""
        model.state = "loading"
        options = model.options
        try:
            process = await self._start(options.reference, dict(options.engine), name=options.name)
        except LoadFailed as error:
            if error.kind == "NotEnoughMemory":
                raise _MemoryShort(str(error)) from error
            raise
        model.process = process
        self._processes.add(process)
        self._begin(self._watch(model, process))

    async def _watch(self, model: ServedModel, process: EngineClient) -> None:
        """Notice the end of an engine that was not asked to end."""
        began = self._clock()
        await process.ended.wait()
        if model.process is not process:
            return
        await process.kill()  # its connection may have broken alone
        self._processes.discard(process)
        if model.process is not process or model.changing.locked():  # what changes it finds it dead
            return
        model.goings["ended"] += 1
        if model.state != "ready" or not model.options.residency.preload:
            log.error("the engine of %s ended unexpectedly; the next request starts it again", model.name)
            model.process, model.state, model.level, model.holds = None, "unloaded", 0, False
            model.stays()
            return
        log.error("the engine of %s ended unexpectedly; restarting it", model.name)
        model.state, model.is_missing, model.num_restarts, model.holds = "loading", True, model.num_restarts + 1, False
        lived_long = self._clock() - began > GOOD_AFTER_S
        model.restart_s = FIRST_RESTART_S if lived_long else min(2 * model.restart_s, MOST_RESTART_S)
        self._come(model, model.restart_s)

    # -- room --------------------------------------------------------------------------------------------------------

    async def _make_room(self, model: ServedModel) -> None:
        """Put others to sleep until a model fits, and count it from then on. `_room` is held. Raises EngineUnavailable, and
        _NotWanted.
        """
        most = self.rules.most_bytes
        while most is not None:
            others = self._residents(model)
            staying = sum(one.weights_bytes for one in self if one is not model and self._stays_for(one, model))
            if model.weights_bytes + staying > most:
                kinds = "pinned and preloaded" if model.is_missing else "pinned"
                raise EngineUnavailable(
                    f"its weights take {format_bytes(model.weights_bytes)}, those of {kinds} models {format_bytes(staying)}, "
                    f"and all may take {format_bytes(most)} (--models-memory): raise it, or pin and preload less"
                )
            excess = sum(one.num_bytes for one in others) + model.weights_bytes - most
            names = self._chosen(model, others, excess)
            if names == []:
                break
            self._check_wanted(model)
            if names:
                await self._put_to_sleep(self._models[names[0]], model.name)
            else:
                await self._look_later(model)
        is_asleep = model.state == "asleep" and model.process is not None and model.process.is_alive
        model.state, model.holds = "waking" if is_asleep else "loading", True

    def _stays_for(self, one: ServedModel, newcomer: ServedModel) -> bool:
        """Whether a model leaves never for a newcomer: pinned ones, and preloaded ones at the start, where all are to serve.

        False while it is loaded, as the bytes of its weights are not known yet.
        """
        residency = one.options.residency
        return one.holds and one.state != "loading" and (residency.pinned or (newcomer.is_missing and residency.preload))

    def _check_wanted(self, model: ServedModel) -> None:
        """Raise _NotWanted if there need not be room for a model any more."""
        if not (model.is_used or model.is_missing):
            raise _NotWanted(503, f"no request waits for the model {model.name} any more")

    async def _look_later(self, model: ServedModel) -> None:
        """Wait until there may be room. Raises _NoRoomYet for a model that lets others look before."""
        gives_way = model.returns_at is not None or model.num_restarts > 0
        if gives_way and not model.num_waiting and not self._is_urgent(model):
            raise _NoRoomYet(503, f"others look for room before {model.name}")
        await asyncio.sleep(LOOK_S)

    async def _others_leave(self, model: ServedModel, short: _MemoryShort) -> None:
        """Put a model to sleep for one that the device lacks memory for, once one may leave, or return once one has left by
        itself. `_room` is held. Raises `short` if none will ever leave, and _NotWanted.
        """
        first = self._passing(model)
        if not first:
            raise short
        while first <= self._passing(model):
            self._check_wanted(model)
            if names := self._chosen(model, self._residents(model), 1):
                await self._put_to_sleep(self._models[names[0]], model.name)
                return
            await self._look_later(model)

    def _chosen(self, model: ServedModel, others: list[Resident], excess_bytes: int) -> list[str] | None:
        """The `victims` for a model: busy ones too, once its requests have waited for so long that they would be late."""
        names = victims(others, excess_bytes, self._clock())
        if names is None and self._is_urgent(model):
            most = max(excess_bytes, model.weights_bytes)  # rather one that is large enough than some small ones
            names = victims(others, most, self._clock(), busy=True) or victims(others, excess_bytes, self._clock(), busy=True)
        return names

    def _passing(self, model: ServedModel) -> set[str]:
        """The other models that hold memory for a time."""
        return {one.name for one in self._residents(model) if not one.pinned}

    async def _trim(self, most_bytes: int) -> None:
        """Put idle models to sleep if all take more than they may: loaded weights may be larger than their files."""
        if self._room.locked():  # a model looks for room
            return
        async with self._room:
            while names := self._too_many(most_bytes):
                await self._put_to_sleep(self._models[names[0]])  # one at a time: requests may come for the others

    async def make_way(self) -> None:
        """Put idle models to sleep, one after the other, while reservations wait for memory of their devices, or requests of
        other engines for KV there. Has no end.
        """
        rests_until = -math.inf
        while True:
            await asyncio.sleep(takers.LOOK_S)
            if self._room.locked() or not victims(self._residents(), 1, self._clock()):
                continue
            try:
                waiting = await asyncio.to_thread(takers.waiting)
                if self._room.locked():  # until a model has room, for which others leave, this answer is old
                    continue
                async with self._room:
                    now = self._clock()
                    if now < rests_until:
                        waiting = {lease: taker for lease, taker in waiting.items() if taker.num_requests is None}
                    idle = [one for one in self._residents() if one.may_leave(now)]
                    found = {one.name: taker for one in idle if (taker := self._taker(one, waiting, now)) is not None}
                    if names := victims([one for one in idle if one.name in found], 1, now):
                        await self._put_to_sleep(self._models[names[0]], found[names[0]].name)
                        rests_until = self._clock() + takers.GRANTED_S
            except Exception:
                log.exception("no model makes way for others now")

    def _taker(self, one: Resident, waiting: Mapping[tuple[str, str], Taker], now: float) -> Taker | None:
        """What a model makes way for, of what waits for memory of its devices. On others, models may have the same name."""
        process = self._models[one.name].process
        found = () if process is None else (waiting[lease] for lease in process.info.leases if lease in waiting)
        return next((taker for taker in found if one.yields_to(taker, now)), None)

    def _too_many(self, most_bytes: int) -> list[str] | None:
        residents = self._residents()
        return victims(residents, sum(one.num_bytes for one in residents) - most_bytes, self._clock())

    def _residents(self, beside: ServedModel | None = None) -> list[Resident]:
        """The models that hold memory, but one. What changes or is removed now does not leave."""
        return [self._resident(one) for one in (*self, *self._leaving) if one is not beside and one.holds]

    def _resident(self, model: ServedModel) -> Resident:
        stays = model.state != "ready" or model.num_changing or model in self._leaving
        return Resident(
            model.name,
            model.weights_bytes,
            model.last_used,
            math.inf if stays else model.since + self._stays_s(model),
            model.num_running + model.num_waiting,
            model.options.residency.pinned,
            model.exchange_s,
            model.expires_at == math.inf,
        )

    def _stays_s(self, model: ServedModel) -> float:
        return self.rules.resident_s(model.exchange_s)

    async def _put_to_sleep(self, model: ServedModel, taker: str | None = None) -> None:
        """Free the memory of a model that nothing changes for `taker`, or because all take too much. Requests of a busy one go
        on when it is back, which is begun here.

        `_room` may be held: this waits for no other change of the model, which may wait for `_room`.
        """
        async with model.change():
            num_suspended, now = model.num_running, self._clock()
            value, idle_s = (None, 0.0) if num_suspended else (self._resident(model).value(now), now - model.last_used)
            model.departure = Departure(
                model.name, time.time(), taker, value, idle_s, model.weights_bytes, now - model.since, num_suspended
            )
            reason = "turn" if num_suspended else "memory"
            model.returns_at = math.inf if num_suspended else None  # another sleep may be asked for meanwhile
            log.info("%s is put to sleep %s", model.name, model.departure)
            try:
                await _to_its_end(self._sleeps_or_ends(model, reason))
            finally:  # `taker` may have been unloaded meanwhile
                if model.returns_at is not None and model.state == "asleep" and self._models.get(model.name) is model:
                    self._turn_at, self._turn_of = self._clock(), taker
                    model.returns_at = min(model.returns_at, self._turn_at + self.rules.return_s)
                    model.coming = self._begin(self._returns(model, model.coming))
                else:
                    model.returns_at = None

    async def _sleeps_or_ends(self, model: ServedModel, reason: str) -> None:
        try:
            await self._sleeps(model, 0.0, 1, reason)
        except (ApiError, RequestFailed, EngineUnavailable) as error:
            log.error("the engine of %s cannot sleep, and is ended: %s", model.name, error)
            await self._ends(model, 0.0, reason)

    async def _sleeps(self, model: ServedModel, drain_s: float | None, level: int, reason: str) -> None:
        """As `sleep`, in a change."""
        engine = model.engine
        model.state, model.level = "asleep", level
        try:
            await engine.call("sleep", drain_s=drain_s, level=level, suspends=reason == "turn")
        except RequestFailed as error:
            if error.is_refusal:
                model.state, model.level = "ready", 0
            raise
        finally:
            model.holds = model.state == "ready"
        model.goings[reason] += 1

    async def _ends(self, model: ServedModel, drain_s: float, reason: str) -> None:
        """As `unload`, in a change."""
        process, model.process = model.process, None
        model.state, model.level, model.is_missing, model.is_leaving, model.returns_at = "unloaded", 0, False, False, None
        model.stays()
        try:
            if process is not None:
                model.goings[reason] += 1
                await process.stop(drain_s)
                self._processes.discard(process)
        finally:
            model.holds = False

    def _rest(self, model: ServedModel, keep_alive_s: float | None) -> None:
        """Unload a loaded model later that has no requests."""
        residency = model.options.residency
        keep_s = residency.keep_alive_s if keep_alive_s is None else keep_alive_s
        keep_s = 0.0 if model.is_leaving else keep_s
        model.stays()
        if model.is_used or residency.pinned or not 0 <= keep_s < FOREVER_S:
            return
        if model.state not in ("ready", "asleep"):
            model.is_leaving = model.is_leaving and model.state not in ("unloaded", "failed")
            return
        model.expires_at = self._clock() + keep_s
        model.timer = asyncio.get_running_loop().call_later(keep_s, lambda: self._begin(self._expired(model)))

    async def _expired(self, model: ServedModel) -> None:
        """Unload a model that loads or serves for no request; one may have come since its timer."""
        if model.is_used or (model.coming is not None and not model.coming.done()):
            return
        async with model.change():
            if not model.is_used and model.state in ("ready", "asleep"):
                await self._ends(model, 0.0, "keep_alive")

    def _names(self) -> str:
        return ", ".join(map(repr, self._models)) or "none"


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the end of `work`, however often that is cancelled meanwhile."""
    working = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    working.result()


def _failed(model: ServedModel) -> ApiError:
    return unavailable(f"the model {model.name} cannot be loaded: {model.error}")


def _written_bytes(reference: str) -> int:
    """Bytes of the weights in a folder, or of a file with its further parts; 0 for what is named otherwise."""
    path = Path(reference)
    try:
        if path.is_file():
            files = [path]
            if (part := PART.search(path.name)) is not None:
                files = list(path.parent.glob(f"{glob.escape(path.name[: part.start()])}-?????{part[1]}"))
        else:
            files = next((found for pattern in WEIGHTS if (found := list(path.glob(pattern)))), [])
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0

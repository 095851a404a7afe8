"""The models of a server: each is an engine process, loaded, watched, restarted when it dies, put to sleep, unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from .config import ModelOptions
from .engine_client import EngineClient, EngineUnavailable, LoadFailed, RemoteEngine, RequestFailed
from .errors import ApiError, unavailable
from .response_templates import ResponseTemplate, choose_template, template_named

log = logging.getLogger(__name__)

FIRST_RESTART_S, MOST_RESTART_S = 1.0, 60.0
GOOD_AFTER_S = 60.0  # an engine that lived so long is restarted at once

LATEST = ":latest"  # Ollama's tag of a name without one

State = Literal["loading", "ready", "asleep", "failed"]


class ServedModel:
    """One model, its engine process and its state. Make it with `ModelRegistry.add`."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.state: State = "loading"
        self.error: str | None = None
        self.created = int(time.time())
        self.num_restarts = 0
        self.process: EngineClient | None = None
        self.changing = asyncio.Lock()  # held while it goes to sleep or wakes up

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.options.name

    @property
    def engine(self) -> EngineClient:
        """The engine. Raises ApiError while it cannot serve."""
        if self.state == "asleep":
            raise unavailable(f"the model {self.name} is asleep: wake it up with POST /wake_up")
        if self.process is None or not self.process.is_alive or self.state != "ready":
            state = "not reachable now" if self.state == "ready" else self.state
            raise unavailable(f"the model {self.name} is {state}" + (f": {self.error}" if self.error else ""))
        return self.process

    @property
    def has_engine(self) -> bool:
        """Whether an engine can take requests; a fleet may have no worker now."""
        return self.process is not None and self.process.is_alive and self.process.info.max_seqs > 0

    @property
    def response_template(self) -> ResponseTemplate:
        """How the model writes its answers."""
        if self.options.response_format is not None:
            return template_named(self.options.response_format)
        info = None if self.process is None else self.process.info
        if self.options.chat_template is not None:
            return choose_template(self.options.chat_template)
        return choose_template(None if info is None else info.chat_template, "" if info is None else info.response_template)


class ModelRegistry:
    """The models by name, in the order in which they were named.

    Args:
        start: Makes the client of a model: starts an engine process unless it is given.
    """

    def __init__(self, start: Callable[..., Awaitable[EngineClient]] = RemoteEngine.start) -> None:
        self._start = start
        self._models: dict[str, ServedModel] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
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
        """Whether all models serve, or sleep."""
        return bool(self._models) and all(model.state in ("ready", "asleep") and model.has_engine for model in self)

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
        """Begin to load a model in the background. Raises ApiError if its name is taken."""
        if options.name in self._models:
            raise ApiError(409, f"a model named {options.name!r} is served already: unload it first", param="name")
        model = self._models[options.name] = ServedModel(options)
        self._watchers[options.name] = asyncio.create_task(self._keep(model))
        return model

    async def loaded(self, model: ServedModel) -> None:
        """Wait until a model that was added is ready.

        Raises ApiError if it is unloaded meanwhile, or if it cannot be loaded: it is forgotten then.
        """
        while model.state == "loading" and self._models.get(model.name) is model:
            await asyncio.sleep(0.01)
        if self._models.get(model.name) is not model:
            raise ApiError(409, f"the model {model.name} was unloaded before it was ready", param="name")
        if model.state == "failed":
            await self.remove(model.name)
            raise ApiError(400, f"the model {model.name} cannot be loaded: {model.error}", param="model")

    async def remove(self, name: str, drain_s: float = 0.0) -> None:
        """Forget a model, give its requests `drain_s` seconds, and end its engine. Raises ApiError."""
        model = self.get(name)
        del self._models[model.name]
        watcher = self._watchers.pop(model.name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        if model.process is not None:
            await model.process.stop(drain_s)
            self._processes.discard(model.process)

    async def sleep(self, model: ServedModel, drain_s: float | None) -> None:
        """Let the requests of a model end within `drain_s`, and free all its memory. Idempotent."""
        async with model.changing:
            if model.state == "asleep":
                return
            engine = model.engine
            model.state = "asleep"
            try:
                await engine.call("sleep", drain_s=drain_s)
            except RequestFailed as error:
                if error.is_refusal:
                    model.state = "ready"
                raise

    async def wake_up(self, model: ServedModel) -> None:
        """Load a model again that sleeps. Idempotent."""
        async with model.changing:
            if model.state == "asleep" and model.process is not None:
                await model.process.call("wake_up")
                model.state = "ready"

    async def stop(self, drain_s: float = 0.0) -> None:
        """End all engines."""
        await asyncio.gather(*(self.remove(model.name, drain_s) for model in self))

    async def kill(self) -> None:
        """End all engines at once, those too that `stop` waits for."""
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def _keep(self, model: ServedModel) -> None:
        """Load a model, and start its engine again whenever it ends."""
        wait_s = FIRST_RESTART_S
        while True:
            began = time.monotonic()
            try:
                await self._load(model)
            except (LoadFailed, EngineUnavailable, OSError) as error:
                model.error = str(error)
                if not model.num_restarts:
                    model.state = "failed"
                    return
                log.error("the model %s cannot be loaded again: %s", model.name, error)
            else:
                assert model.process is not None
                await model.process.ended.wait()
                await model.process.kill()  # its connection may have broken alone
                self._processes.discard(model.process)
                log.error("the engine of %s ended unexpectedly; restarting it", model.name)
            model.state, model.num_restarts = "loading", model.num_restarts + 1
            wait_s = FIRST_RESTART_S if time.monotonic() - began > GOOD_AFTER_S else min(2 * wait_s, MOST_RESTART_S)
            await asyncio.sleep(wait_s)

    async def _load(self, model: ServedModel) -> None:
        options = model.options
        arguments = dict(options.engine)
        model.process = await self._start(options.reference, arguments, name=options.name)
        self._processes.add(model.process)
        model.state, model.error = "ready", None

    def _names(self) -> str:
        return ", ".join(map(repr, self._models)) or "none"

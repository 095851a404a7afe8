"""The request manager behind all APIs: queues requests, runs steps and delivers their tokens.

It belongs to one thread, the engine thread (engine_thread.py), which alone calls it. Outputs go to the request groups they
belong to (delivery.py); inputs come through intake.py: docs/decisions/0023-apis.md.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...allocator.errors import LeaseClosed
from ...common.on_error import OnError
from ...frames.recorder import EngineRecorder
from ...frames.source import Frame
from ...scheduler.request import RequestRejected
from ..config import EngineConfig
from ..errors import EngineClosed
from ..process.fork import MakerProcess
from ..watch import EngineWatch, open_recorder
from .delivery import OutputDelivery
from .handover import Handover
from .inputs import PromptInput, check_cache_salt
from .intake import RequestIntake
from .states import RequestGroup, RequestState

if TYPE_CHECKING:
    from ...scheduler.scheduler import Scheduler
    from ..build import Engine
    from ..executor import KeptModel
    from ..sampling.constraints import Constraints

log = logging.getLogger(__name__)

STARVING_WAIT_S = 0.02
STATS_S = 0.02  # maximum age of the statistics when a step begins, for reads during the step


@dataclass(frozen=True, slots=True, eq=False)
class _Suspended:
    """What goes on in another engine: requests, compiled constraints, and what the bytes of blocks are valid for."""

    scheduler: Scheduler
    constraints: Constraints
    content: object


class RequestManager:
    """One engine and its pending requests. For one thread, but `open`, `intake`, `last_stats` and the checks of the process.

    `kept`: see `build`.

    Raises what `build` raises; nothing stays allocated then.
    """

    def __init__(self, config: EngineConfig, kept: KeptModel | None = None) -> None:
        self._maker = MakerProcess()
        self._config = config
        self._suspended: _Suspended | None = None
        self.engine: Engine | None
        self.recorder: EngineRecorder | None
        self.engine, self.recorder = engine, _ = self.built(kept)
        self.last_frame: Frame | None = None  # of the recording, once the engine has ended
        self.delivery = OutputDelivery()
        self._numbers = itertools.count()
        self.watch: EngineWatch | None = EngineWatch(engine)  # while it is open
        self._stats, self._stats_at = engine.stats(), engine.core.clock()

    def built(self, kept: KeptModel | None) -> tuple[Engine, EngineRecorder | None]:
        """Build an engine, with its recorder if it has one. Raises as the constructor. Any thread may call it."""
        # It imports torch, which takes seconds: what is wrong with a configuration is said before.
        from ..build import build

        engine = build(self._config, kept)
        with OnError(engine.close):
            return engine, open_recorder(engine, self._config)

    def open(self) -> Engine:
        """Return the engine. Raises EngineClosed once it is closed, and in a forked child."""
        self._maker.check()
        if self.engine is None:
            raise EngineClosed("this engine is closed: create a new one")
        return self.engine

    def check_process(self) -> None:
        """Raise EngineClosed in a forked child."""
        self._maker.check()

    @property
    def is_here(self) -> bool:
        """False in a forked child: its parent has the engine."""
        return self._maker.is_current

    def close(self, cause: BaseException | None = None) -> None:
        """End all requests as aborted, or with the error `cause`, and free the engine's memory. Idempotent."""
        engine, self.engine = self.engine, None
        if engine is None:
            self._end_suspended()
            return
        self.watch = None
        try:
            self._end_all(engine, cause)
            self.last_frame = None if self.recorder is None else self.recorder.last()
        finally:
            engine.close()

    @property
    def is_suspended(self) -> bool:
        """Whether the requests, if there are any, wait for `resume`."""
        return self._suspended is not None

    def suspend(self) -> None:
        """Free the engine's memory. No request ends: they go on, with the same tokens, after `resume`. Raises EngineClosed."""
        engine = self.open()
        self.finish_pending_steps()
        self._suspended = _Suspended(engine.suspend(), engine.encoder.constraints, engine.content)
        self.last_frame = None if self.recorder is None else self.recorder.last()
        self.engine = self.watch = None
        try:
            engine.close()
        except Exception:
            log.exception("the engine of suspended requests could not be closed whole")

    def end_recording(self) -> None:
        """Complete the recording of a suspended engine. Not in the engine's thread, for which the recorder may wait."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close(self.last_frame)
        self.last_frame = None  # its source refers to the engine

    def resume(self, engine: Engine, recorder: EngineRecorder | None, first: Callable[[], None]) -> None:
        """Go on in `engine`, which is of the same configuration, after `first`. If one raises, the requests wait on."""
        suspended = self._suspended
        assert suspended is not None and self.engine is None
        engine.encoder.constraints.follow(suspended.constraints)
        keeps = engine.content is not None and engine.content == suspended.content
        self.engine, self.watch, self.recorder = engine, EngineWatch(engine), recorder
        with OnError(self._without_engine):
            first()
            engine.core.scheduler.take_over(suspended.scheduler, keeps=keeps)
        self._suspended = None
        self._refresh_stats(engine)

    def _without_engine(self) -> None:
        self.engine = self.watch = self.recorder = None

    def _end_suspended(self) -> None:
        """End the requests that wait for `resume` as aborted."""
        suspended, self._suspended = self._suspended, None
        if suspended is None:
            return
        groups, now = self.delivery.groups, time.monotonic()
        for request_id, group in list(groups.items()):
            if (end := suspended.scheduler.withdraw(request_id)) is not None:
                group.deliver(request_id, end, now)
        ended = list(dict.fromkeys(groups.values()))
        for group in ended:
            group.end_lost(now)
        groups.clear()
        self.delivery.on_outputs([], ended)

    def _end_all(self, engine: Engine, cause: BaseException | None) -> None:
        """End every request group, even if the engine raises."""
        groups = self.delivery.groups
        if cause is not None:
            for group in dict.fromkeys(groups.values()):
                group.fail(cause)
        try:
            for request_id in list(groups):
                engine.core.abort(request_id, "aborted" if cause is None else "error")
            while engine.core.has_work:
                self._advance(engine)
        finally:
            for group in dict.fromkeys(groups.values()):
                group.end_lost(engine.core.clock())
            groups.clear()

    def stats(self) -> dict[str, Any]:
        """The engine's statistics now."""
        self._stats = self.open().stats()
        return self.last_stats()

    def last_stats(self) -> dict[str, Any]:
        """A copy of the statistics that were collected last. Thread-safe."""
        self.open()
        return copy.deepcopy(self._stats)

    # -- requests in ---------------------------------------------------------------------------------------------

    @property
    def intake(self) -> RequestIntake:
        """Encodes and checks what callers pass in, for `submit`. Raises EngineClosed."""
        return RequestIntake(self.open(), self._numbers)

    def submit(
        self,
        inputs: Sequence[PromptInput],
        priority: int | None,
        cache_salt: str | None,
        streams: bool = False,
        context: Context | None = None,
    ) -> list[RequestGroup]:
        """Queue all prompts, or none if one is rejected. Their constraints are compiled.

        An imported request keeps its own salt, and with `priority` None its own priority. `context` is the caller's, for its
        logits processors.
        """
        check_cache_salt(cache_salt)
        intake = self.intake
        built = [intake.build(index, one, priority, cache_salt, streams, context) for index, one in enumerate(inputs)]
        for group, requests in built:
            for request in requests:
                intake.engine.core.add(request)
            self.delivery.add(group, requests)
        return [group for group, _ in built]

    def export(self, state: RequestState) -> dict[str, Any]:
        """See `RequestHandle.export`."""
        engine = self.open()
        self.finish_pending_steps()
        state.check_exportable()
        group, scheduler = state.group, engine.core.scheduler
        request_ids = group.requests_of(state)
        withdrawn = [end for one in request_ids if (end := scheduler.withdraw(one)) is not None]
        if not withdrawn:
            raise RequestRejected(
                f"request {state.request.request_id} is at its end, which the next step tells: there is nothing left to "
                "hand over"
            )
        self.delivery.remove(request_ids)
        handover = group.hand_over(state, withdrawn, engine.core.clock())
        self.delivery.on_outputs([], [group])
        return handover.to_dict(engine.plan.model, engine.encoder.vocab_size)

    def copies(self, groups: Iterable[RequestGroup]) -> list[Handover | None]:
        """The state of each group of one request, which goes on here; None for others: see `RequestGroup.copy`."""
        engine = self.open()
        self.finish_pending_steps()
        return [group.copy(engine.core.clock()) for group in groups]

    # -- steps and delivery ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do. False once closed."""
        return self.engine is not None and self.engine.core.has_work

    @property
    def has_requests(self) -> bool:
        """Whether requests are here; without them a step only writes to disk what they have left."""
        return self.engine is not None and self.engine.core.scheduler.has_work

    def step(self) -> None:
        """Run one step of the engine and deliver its outputs. If all work waits for the pool to grow, wait for the broker.

        Raises EngineClosed, and ShardLost.
        """
        engine = self.open()
        self._advance(engine)
        if (memory := engine.core.memory) is not None and engine.core.scheduler.starving:
            with suppress(LeaseClosed):
                memory.wait(STARVING_WAIT_S)

    def finish_pending_steps(self) -> None:
        """Complete the pending steps and deliver their outputs."""
        engine = self.open()
        while engine.core.is_ahead:
            self._advance(engine, ahead=False)

    def abort(self, groups: Iterable[RequestGroup]) -> None:
        """Let the unfinished of `groups` end with the next step, or at once while they are suspended: no one waits for them."""
        engine, suspended = self.engine, self._suspended
        for request_id in [one for group in groups if not group.is_finished for one in group.request_ids]:
            if engine is not None:
                engine.core.abort(request_id)
            elif suspended is not None and suspended.scheduler.withdraw(request_id) is not None:
                self.delivery.remove([request_id])

    def _advance(self, engine: Engine, ahead: bool = True) -> None:
        """Run one step and deliver its outputs. Unless `ahead`, launch none behind it. Raises ShardLost."""
        self._refresh_stats(engine)
        outputs = engine.core.step(ahead)
        self.delivery.deliver(engine.core, outputs, self._refresh_stats(engine))
        if (lost := engine.core.lost) is not None and self.engine is engine:
            raise lost

    def _refresh_stats(self, engine: Engine) -> float:
        """Collect the statistics for reads during a step, if they are older than STATS_S. Returns the time."""
        now = engine.core.clock()
        if now - self._stats_at >= STATS_S:
            self._stats_at = now
            try:
                self._stats = engine.stats()
            except Exception:  # readers get the previous statistics
                log.exception("the statistics could not be counted")
        return now

"""The request manager behind all APIs: queues requests, runs steps and delivers their tokens.

A caller that waits for output runs the next step under one lock; with `AsyncLLM`, one thread runs all steps. Outputs go to the
request states they belong to: docs/decisions/0023-doors.md.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ...allocator.errors import LeaseClosed
from ...scheduler.errors import RequestRejected
from ...scheduler.outcome import Finished
from ...scheduler.plan import NO_TOKENS, Candidates, ChunkLogprobs
from ...scheduler.request import Request, SamplingParams
from ..build import Engine, build
from ..config import EngineConfig
from ..errors import EngineClosed, is_interrupt
from ..process.background import BackgroundThread
from ..process.fair_lock import FairLock
from ..process.fork import MakerProcess
from .beams import BeamGroup, BeamRules, BeamSearch, num_candidates
from .handover import Handover
from .inputs import Prompt, PromptInput, checked_priority, conversations, encoded, together
from .outputs import RequestOutput, StreamChunk, refused
from .states import RequestGroup, RequestState

log = logging.getLogger(__name__)

Event = int | ChunkLogprobs | Finished | Candidates  # a step's output for one request; an int is a token

STARVING_WAIT_S = 0.02
KEEPER_WAIT_S = 0.25
KEEPER_BUSY_WAIT_S = 0.06  # while memory work is left: callers' steps do it meanwhile
STEPPING_S = 0.05  # within this time after a caller's step, the next caller's step is expected to do the memory work
STATS_LOOK_S = 0.001  # interval of the attempts to take a briefly held lock
STATS_S = 0.02  # maximum age of the statistics when a step begins, for reads during the step


class RequestManager:
    """One engine and its pending requests. Thread-safe.

    Raises what `build` raises; nothing stays allocated then.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._maker = MakerProcess()
        self.engine: Engine | None = build(config)
        self.lock = FairLock()
        self.paused = False  # no steps, not even for memory work
        self.states: dict[str, RequestState] = {}
        self.searches: dict[str, BeamGroup] = {}  # by the request of each beam
        # Called under the lock after a step, with the request states that have new output.
        self.on_news: Callable[[list[RequestState]], None] | None = None
        # Events of the last step. Empty between steps unless an interrupt stopped their delivery.
        self._undelivered: deque[tuple[str, Event]] = deque()
        self._abandoned: deque[RequestState] = deque()  # of dropped streams; the next step aborts them
        self._numbers = itertools.count()
        self._stepped_at = -math.inf  # end of the last step run for a caller
        self._keeper = BackgroundThread("pagetide-memory", partial(_keep_memory, weakref.ref(self)), KEEPER_WAIT_S)
        self._stats, self._stats_at = self._counted(self.engine), self.engine.core.clock()
        self._keeper.start()

    def open(self) -> Engine:
        """Return the engine. Raises EngineClosed once it is closed, and in a forked child."""
        self._maker.check()
        if self.engine is None:
            raise EngineClosed("this LLM is closed: make a new one")
        return self.engine

    def check_process(self) -> None:
        """Raise EngineClosed in a forked child."""
        self._maker.check()

    @property
    def is_here(self) -> bool:
        """False in a forked child: its parent has the engine."""
        return self._maker.is_current

    def close(self, cause: BaseException | None = None) -> None:
        """End all requests as aborted, or with the error `cause`, and free all memory. Idempotent.

        Raises EngineClosed in a forked child: the engine belongs to its parent.
        """
        with self.lock:
            engine, self.engine = self.engine, None
            if engine is None:
                return
            try:
                self._end_all(engine, cause)
            finally:
                engine.close()
        self._keeper.join()

    def _end_all(self, engine: Engine, cause: BaseException | None) -> None:
        """End every request state, even if the engine raises."""
        if cause is not None:
            for state in self.states.values():
                state.fail(cause)
            for search in self.searches.values():
                search.fail(cause)
        try:
            for request_id in [*self.states, *self.searches]:
                engine.core.abort(request_id, "aborted" if cause is None else "error")
            while engine.core.has_work or self._undelivered:
                self._advance(engine)
        finally:
            self._end_lost(engine, [*self.states.values(), *(t for s in self.searches.values() for t in s.states)])

    def stats(self) -> dict[str, Any]:
        """The engine's statistics. During a step, those from at most STATS_S before the step began."""
        until = time.monotonic() + STATS_S
        while (stats := self.stats_now()) is None and time.monotonic() < until:
            time.sleep(STATS_LOOK_S)
        return stats or self.last_stats()

    def stats_now(self) -> dict[str, Any] | None:
        """As `stats`, without waiting. None while the lock is held for an operation that is usually short."""
        self.open()
        if not self.lock.acquire(blocking=False):
            # `barred` is set while a step runs or a tool holds the engine.
            return None if self.lock.barred is None else self.last_stats()
        try:
            self._stats = self._counted(self.open())
        finally:
            self.lock.release()
        return self.last_stats()

    def last_stats(self) -> dict[str, Any]:
        """A copy of the statistics that were collected last."""
        return copy.deepcopy(self._stats)

    def _counted(self, engine: Engine) -> dict[str, Any]:
        return {**engine.stats(), "threads": {self._keeper.name: self._keeper.to_dict()}}

    # -- requests in ---------------------------------------------------------------------------------------------

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[PromptInput]:
        """Check and encode prompts and parameters as callers pass them in. Raises RequestRejected."""
        engine = self.open()
        return encoded(together(prompts, params), engine.encoder, engine.sampling, engine.eos_token_ids)

    def encode_one(self, prompt: Prompt, params: SamplingParams | None) -> list[PromptInput]:
        """As `encode`, for a single prompt: a list is token ids. Raises RequestRejected."""
        if not isinstance(prompt, str):
            try:
                prompt = list(prompt)
            except Exception as error:  # not an iterable, or one that raises
                raise RequestRejected(f"the prompt cannot be read: {type(error).__name__}: {error}") from error
        return self.encode([prompt], params)

    def handed_over(self, data: Any) -> list[PromptInput]:
        """Parse the data of one or several exported requests (`export`). Raises RequestRejected."""
        engine = self.open()
        many = [data] if isinstance(data, Mapping) else data
        if not isinstance(many, list | tuple) or not many:
            raise RequestRejected(f"give what export gave, or a list of such, got {data!r:.80}")
        each = [Handover.from_dict(one, engine.plan.model, engine.encoder.vocab_size) for one in many]
        prepare = engine.encoder.prepare  # without the engine's EOS ids: their own are among their stop ids
        return [PromptInput(one.prompt, one.prompt_token_ids, one.params, prepare(one.params), one) for one in each]

    def render(self, messages: Any, options: dict[str, Any]) -> list[list[int]]:
        """Apply the tokenizer's chat template to conversations. Returns token ids. Raises RequestRejected."""
        encoder = self.open().encoder
        return [encoder.render(conversation, options) for conversation in conversations(messages)]

    def submit(
        self,
        asked: Sequence[PromptInput],
        priority: int | None,
        cache_salt: str | None,
        streams: bool = False,
    ) -> list[RequestState]:
        """Queue all prompts, or none if one is rejected.

        An imported request keeps its own salt, and with `priority` None its own priority. Constraints are compiled before the
        lock is taken.
        """
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestRejected(f"cache_salt must be a text, or None for none, got {type(cache_salt).__name__}")
        for one in asked:
            one.prepared.compile()
        with self.lock:
            engine = self.open()
            answers: list[tuple[list[Request], RequestGroup]] = []
            for index, (prompt, ids, params, prepared, before) in enumerate(asked):
                salt = cache_salt if before is None else before.cache_salt
                own_priority = before.priority if before is not None and priority is None else priority
                if streams and params.num_started > (params.n or 1):
                    raise RequestRejected(
                        f"best_of {params.best_of} cannot be streamed with n {params.n or 1}: which of them are given is known "
                        "when all have ended; use generate, or leave best_of out"
                    )
                request = Request(
                    request_id=f"r{next(self._numbers)}",
                    prompt_token_ids=ids,
                    sampling=params.resolve(engine.eos_token_ids, prepared.bad_words),
                    priority=checked_priority(own_priority),
                    arrival=engine.core.clock(),
                    cache_salt=None if salt is None else salt.encode("utf-8", "surrogatepass"),
                )
                if before is not None:
                    request = before.request(request)
                engine.core.scheduler.check(request)
                answer = RequestGroup(index, prompt, params, prepared)
                requests = self._requests(engine, request, params)
                answer.states = [
                    RequestState(answer, number, one, engine.encoder.text_stream(ids, prepared.stops), streams)
                    for number, one in enumerate(requests[: params.num_started])
                ]
                if before is not None:
                    for state in answer.states:
                        state.import_request(before)
                answers.append((requests, answer))
            for requests, answer in answers:
                self._queue(engine, requests, answer)
        return [state for _, answer in answers for state in answer.states]

    def _requests(self, engine: Engine, request: Request, params: SamplingParams) -> list[Request]:
        """`request` and its forks: one for each continuation to generate, or for each beam."""
        if (params.num_beams or 1) == 1:
            return request.forked(params.num_started)
        sampling = request.sampling
        count = num_candidates(params.num_beams or 1, len(sampling.stop_token_ids))
        return replace(request, sampling=replace(sampling, num_candidates=count)).forked(params.num_beams or 1)

    def _queue(self, engine: Engine, requests: Sequence[Request], answer: RequestGroup) -> None:
        for request in requests:
            engine.core.add(request)
        if (answer.params.num_beams or 1) == 1:
            self.states.update((state.request.request_id, state) for state in answer.states)
            return
        first = requests[0]
        longest = engine.core.scheduler.limit_of(first) - len(first.prompt_token_ids)
        rules = BeamRules.resolve(answer.params, first.sampling.stop_token_ids, longest)
        names = [request.request_id for request in requests]
        self.searches.update(dict.fromkeys(names, BeamGroup(BeamSearch(rules, names), requests, answer.states)))

    def export(self, state: RequestState) -> dict[str, Any]:
        """See `RequestHandle.export`."""
        with self.lock:
            engine = self.open()
            self.settle(engine)
            _check_exportable(state)
            states, end = self._withdraw(engine, state)
            now = engine.core.clock()
            first, *_ = [one.hand_over(end, now) for one in states]
            if self.on_news is not None:
                self.on_news(states)
            return first.to_dict(engine.plan.model, engine.encoder.vocab_size)

    def _withdraw(self, engine: Engine, state: RequestState) -> tuple[list[RequestState], Finished]:
        """Withdraw a request, or its whole beam search, from the engine. Returns its request states and their end."""
        name, search, names = state.request.request_id, self._search_of(state), self._names(state)
        withdrawn = [end for one in names if (end := engine.core.scheduler.withdraw(one)) is not None]
        if not withdrawn:
            raise RequestRejected(
                f"request {name} is at its end, which the next step tells: there is nothing left to hand over"
            )
        for one in names:
            self.states.pop(one, None)
            self.searches.pop(one, None)
        if search is None:
            return [state], withdrawn[0]
        preemptions, found = sum(end.num_preemptions for end in withdrawn), withdrawn[0].num_cached_tokens
        # Without tokens: an imported beam search starts again from the prompt.
        end = Finished(name, "aborted", NO_TOKENS, preemptions, num_cached_tokens=found)
        return list(search.states), end

    def each(
        self,
        given: Iterator[tuple[Prompt, SamplingParams | None]],
        look_ahead: int,
        priority: int,
        cache_salt: str | None,
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of the prompts taken from `given`, in its order; see `LLM.generate_each`."""
        taken: deque[RequestOutput | list[RequestState]] = deque()
        try:
            while True:
                for prompt, params in itertools.islice(given, look_ahead - len(taken)):
                    taken.append(self._queue_or_refuse(prompt, params, priority, cache_salt))
                if not taken:
                    return
                first = taken[0]
                if isinstance(first, list):
                    for state in first:
                        while state.completion is None:
                            self.step_for(state)
                    first = first[0].answer.output
                taken.popleft()
                yield first
        finally:  # may run in the garbage collector, during a step
            self.forget([state for states in taken if isinstance(states, list) for state in states])

    def _queue_or_refuse(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, cache_salt: str | None
    ) -> RequestOutput | list[RequestState]:
        try:
            return self.submit(self.encode_one(prompt, params), priority, cache_salt)
        except RequestRejected as error:
            return refused(prompt if isinstance(prompt, str) else None, str(error))

    # -- steps and delivery ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do. False once closed."""
        return self.engine is not None and bool(self.engine.core.has_work or self._undelivered or self._abandoned)

    def step(self) -> None:
        """Run one step of the engine and deliver its outputs. Raises EngineClosed."""
        with self.lock:
            engine = self.open()
            self._advance_for_caller(engine)
        self._wait_if_starving(engine)

    def step_for(self, state: RequestState) -> None:
        """Run one step of the engine, unless another thread's step has already finished `state`."""
        with self.lock:
            engine = self.open() if state.completion is None else None
            if engine is None or self._end_lost(engine, [state]):
                return
            self._advance_for_caller(engine)
        self._wait_if_starving(engine)

    def next_chunk(self, states: list[RequestState], interval: int) -> StreamChunk | None:
        """Return a chunk of the first request state that has one ready (`ready_chunk`); else run a step and return None."""
        with self.lock:
            if (chunk := ready_chunk(states, interval)) is not None:
                return chunk
            engine = self.open()
            if self._end_lost(engine, states):
                return None
            self._advance_for_caller(engine)
        self._wait_if_starving(engine)
        return None

    def _end_lost(self, engine: Engine, states: Iterable[RequestState]) -> bool:
        """End `states` with an error if the engine has no work left that could end them. Returns whether it has none.

        An interrupt between a request's end and its delivery causes this. Call it under the lock.
        """
        if self.engine is not None and (engine.core.has_work or self._undelivered or self._abandoned):
            return False
        for state in states:
            if state.completion is None:
                name = state.request.request_id
                self.states.pop(name, None)
                self.searches.pop(name, None)
                what = "the request's end was lost, as a step was interrupted or broke"
                state.end(Finished(name, "error", NO_TOKENS, 0, what), engine.core.clock())
        return True

    def settle(self, engine: Engine) -> None:
        """Complete the pending steps and deliver all their outputs. Call it under the lock."""
        while self._undelivered or engine.core.is_ahead:
            self._advance(engine, ahead=False)

    def drop(self, states: Iterable[RequestState]) -> None:
        """Abort the unfinished of `states`, and run steps until they have ended. For callers that are gone."""
        with self.lock:
            left = [t for t in states if t.completion is None]
            if self.engine is None or not left:
                return
            for state in left:
                self._abort(self.engine, state)
            while any(t.completion is None for t in left) and not self._end_lost(self.engine, left):
                self._advance(self.engine)

    def abandon(self, states: Iterable[RequestState]) -> None:
        """Have the next step abort the unfinished of `states`. Never blocks."""
        self._abandoned.extend(t for t in states if t.completion is None)

    def forget(self, states: list[RequestState]) -> None:
        """Abort the unfinished of `states`: now, or by the next step if the lock is held, perhaps by this very thread."""
        self.abandon(states)
        if self.is_here and self._abandoned and self.lock.acquire(blocking=False):
            try:
                while self.engine is not None and self._abandoned:
                    self._advance(self.engine)
            finally:
                self.lock.release()

    def _advance_for_caller(self, engine: Engine) -> None:
        """Run a step that a caller waits for."""
        try:
            self._advance(engine)
        finally:
            self._stepped_at = engine.core.clock()

    def _keep_stats(self, engine: Engine) -> float:
        """Collect the statistics for reads during a step, if they are older than STATS_S. Returns the time."""
        now = engine.core.clock()
        if now - self._stats_at >= STATS_S:
            self._stats_at = now
            try:
                self._stats = self._counted(engine)
            except Exception:  # readers get the previous statistics
                log.exception("the statistics could not be counted")
        return now

    def _advance(self, engine: Engine, ahead: bool = True) -> None:
        """Run one step and deliver its tokens and ends. After an interrupt the next call delivers the rest instead.

        Unless `ahead`, no next step is launched before this one's results are in (`EngineCore.catch_up`).
        """
        while self._abandoned:
            self._abort(engine, self._abandoned.popleft())
        events = self._undelivered
        if not events:
            self._keep_stats(engine)
            self.lock.barred = threading.get_ident()  # calls from within a step raise: they would deadlock
            try:
                emissions = engine.core.step() if ahead else engine.core.catch_up()
            finally:
                self.lock.barred = None
            events.extend(emissions.scores)  # before their tokens
            events.extend(zip(emissions.request_ids, emissions.tokens, strict=True))
            events.extend((finished.request_id, finished) for finished in emissions.finished)
            events.extend(emissions.candidates)  # after the ends: only for beams that are still running
        now = self._keep_stats(engine)
        news: list[RequestState] = []
        try:
            while events:
                request_id, event = events.popleft()
                if (state := self.states.get(request_id)) is not None:
                    news.append(state)
                    self._deliver(engine, state, event, now)
                elif (search := self.searches.get(request_id)) is not None:
                    news += self._deliver_to_search(engine, search, request_id, event, now)
        finally:
            if self.on_news is not None and news:
                self.on_news(news)

    def _deliver(self, engine: Engine, state: RequestState, event: Event, now: float) -> None:
        """Deliver an event to its request state. If the state raises, its request ends with that error."""
        name = state.request.request_id
        if isinstance(event, Finished):
            del self.states[name]
            state.end(event, now)
            return
        try:
            if isinstance(event, ChunkLogprobs):
                state.score(event)
            elif isinstance(event, int) and (reason := state.push(event, now)) is not None:
                engine.core.abort(name, reason)
        except BaseException as error:
            if is_interrupt(error):
                raise
            log.exception("request %s ends: what a step gave cannot be taken in", name)
            state.fail(error)
            engine.core.abort(name, "error")

    def _search_of(self, state: RequestState) -> BeamGroup | None:
        return next((search for search in self.searches.values() if state in search.states), None)

    def _names(self, state: RequestState) -> list[str]:
        """The requests behind a request state: its own, or the running ones of its beam search."""
        search = self._search_of(state)
        return [state.request.request_id] if search is None else search.running

    def _abort(self, engine: Engine, state: RequestState) -> None:
        """Abort a state's request, or all left of its beam search: even of one that is over, after an interrupt."""
        search = self._search_of(state)
        for name in [state.request.request_id] if search is None else search.left:
            engine.core.abort(name)

    def _deliver_to_search(
        self, engine: Engine, search: BeamGroup, request_id: str, event: Event, now: float
    ) -> Sequence[RequestState]:
        """Deliver an event of a beam to its search and apply the result. Returns the request states with new output."""
        if isinstance(event, Finished):
            del self.searches[request_id]
            for other in search.end(event, now):
                engine.core.abort(other)
            return search.states
        if isinstance(event, Candidates):
            others: list[str] = []
            try:
                moves, others = search.take(request_id, event)
                if moves:
                    engine.core.scheduler.apply_beam_moves(moves, spare=others)
                    others = []
            except BaseException as error:  # the moves may be half applied
                others = search.fail(error)
                if is_interrupt(error):
                    raise
                log.exception("the beams of request %s cannot go on; they end", request_id)
            finally:
                for other in others:
                    engine.core.abort(other, "stop")
        return ()

    def _wait_if_starving(self, engine: Engine) -> None:
        """If all work waits for the pool to grow, wait for the broker before the next step."""
        memory = engine.core.memory
        if memory is not None and engine.core.scheduler.starving:
            with suppress(LeaseClosed):  # the next step raises EngineClosed
                memory.wait(STARVING_WAIT_S)

    def _serve_memory(self) -> float | None:
        """Serve recalls and give back idle memory while no caller runs steps.

        Otherwise the callers' steps do it: libraries keep buffers for each thread that computes.

        Returns the longest wait for the broker, in seconds; None once closed.
        """
        with self.lock:
            if self.engine is None or (memory := self.engine.core.memory) is None:
                return None
            if memory.due and not self.paused:
                if self.engine.core.clock() - self._stepped_at < STEPPING_S:  # a caller's next step does it
                    return KEEPER_BUSY_WAIT_S
                self.settle(self.engine)
                self._advance(self.engine)
                return KEEPER_BUSY_WAIT_S if memory.due else KEEPER_WAIT_S
            return KEEPER_WAIT_S


def _keep_memory(reference: weakref.ref[RequestManager]) -> bool:
    """Do the engine's memory work once, then wait for a lease event. False once it is closed or garbage-collected."""
    manager = reference()
    if manager is None or manager.engine is None or (memory := manager.engine.core.memory) is None:
        return False
    wait_s = manager._serve_memory()
    if wait_s is None:
        return False
    del manager  # during the wait this thread must not keep the engine alive
    try:
        memory.wait(wait_s)
    except LeaseClosed:
        return False
    return True


def ready_chunk(states: list[RequestState], interval: int) -> StreamChunk | None:
    """Take a chunk from the first request state that has one ready; None if none has. Call it under the engine's lock.

    That state moves to the end of `states`, or is removed after its last chunk.
    """
    for i, state in enumerate(states):
        if state.ready(interval):
            del states[i]
            chunk = state.take()
            if chunk.completion is None:
                states.append(state)
            return chunk
    return None


def _check_exportable(state: RequestState) -> None:
    name = state.request.request_id
    if state.completion is not None:
        reason = state.completion.finish_reason
        raise RequestRejected(f"request {name} has ended ({reason!r}): there is nothing left to hand over")
    if state.request.sampling.logits_processors:
        raise RequestRejected(
            f"request {name} has logits_processors, which are code and no plain data: it cannot be handed over, and goes on"
        )

"""The thread that runs an engine's steps, for callers on event loops and for callers that block their threads.

Callers send messages, handled between two steps. Results go to each loop in one call per step.

    caller                 threads for the tokenizer       the engine thread
    begin ───────────────► prompts as token ids ─────────► PendingCalls.arrive; submitted once there is room
                             └► constraints compiled ────►   (in other threads: it may take seconds)
    submit ──────────────────────────────────────────────► submitted at once: the caller has encoded its prompts
    want, cancel, ... ───────────────────────────────────► handled between steps
    result of a waiter ◄── one call per loop and step ──── Outbox.send
                                                             ▲
    "pagetide-memory" waits for the lease ──── serve_memory ─┘

Nothing else touches the engine, so no state of it is locked, and an interrupt of the program (KeyboardInterrupt) is raised
where a caller waits, never in a step.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ...allocator.errors import LeaseClosed
from ...common.units import format_bytes
from ...frames.recorder import INTERVAL_S, EngineRecorder
from ...frames.source import Frame
from ..errors import Attempt, EngineClosed
from ..process.background import BackgroundThread
from ..process.fair_threads import OWNER, FairThreads
from ..watch import EngineWatch
from .inputs import PromptInput
from .intake import RequestIntake
from .manager import RequestManager
from .pending_calls import Outbox, PendingCall, PendingCalls, Waiter, settle

if TYPE_CHECKING:
    from ..build import Engine  # imports torch

log = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0
MEMORY_WAIT_S = 0.25  # for a message of the broker
MEMORY_BUSY_WAIT_S = 0.06  # while memory work is left
STATS_S = 0.02  # that `stats` waits for the end of a step
ENCODE_THREADS = 3  # each caller's prompts in order, and callers in turns
COMPILE_THREADS = 5

_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread(threading.Thread):
    """Runs the steps of `manager` while there is work, and sleeps otherwise. Closes the manager when it ends.

    Public methods are thread-safe. Only `ask`, `stats` and `held_engine` block. `cancel` and `forget` may also be called by the
    garbage collector.

    Args:
        owner: The name of the API, for errors.
        max_waiting: See `AsyncLLM`.
        on_demand: Run steps only while a caller waits for results: requests stand still otherwise.
    """

    def __init__(self, manager: RequestManager, owner: str, max_waiting: int, *, on_demand: bool) -> None:
        from ..process.cpu_threads import own_threads, use_own_threads  # imports torch

        super().__init__(name="pagetide-steps", daemon=True)
        self.ended = self._is_finishing = False
        self.may_wake = False  # another thread may follow it
        self._owner = owner
        self._on_demand = on_demand
        self._failure: BaseException | None = None  # what broke the engine
        self._manager = manager
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # its `put` is reentrant
        self._encoding = FairThreads(ENCODE_THREADS, 1, "pagetide-encode")
        self._compiling = FairThreads(COMPILE_THREADS, COMPILE_THREADS - 1, "pagetide-compile")  # constraints
        self._behind = FairThreads(1, 1, "pagetide-drain")  # waits for earlier work of both
        self._outbox = Outbox()
        self._calls = PendingCalls(manager, max_waiting, self._outbox)
        self._pauses: dict[Waiter, None] = {}  # active pauses, oldest first
        self._hold: _Hold | None = None  # of the caller that has the engine by `held_engine`
        self._ending = False
        self._draining: list[Waiter] = []  # resolved when nothing is in flight
        self._joining: list[Waiter] = []  # resolved when this thread ends
        self._use_threads = partial(use_own_threads, own_threads())
        self._progress = manager.open().core.runner.progress
        self._is_asleep = False  # until the next message
        manager.delivery.on_outputs = self._calls.note_outputs
        self._memory_wait_s = MEMORY_WAIT_S
        self._memory = BackgroundThread("pagetide-memory", self._watch_memory, MEMORY_WAIT_S)
        self.start()
        self._watch_engine()
        _running.add(self)

    def _watch_engine(self) -> None:
        """Start the threads beside this one, which end with the engine."""
        self._memory.start()
        if self._manager.recorder is not None:
            BackgroundThread("pagetide-record", self._record, MEMORY_WAIT_S).start()

    # -- from any thread -----------------------------------------------------------------------------------------

    def begin(self, call: PendingCall, encode: Callable[[RequestIntake], list[PromptInput]]) -> None:
        """Call `encode` on a tokenizer's thread, then queue. Errors resolve the waiter. Raises EngineClosed."""
        owner = OWNER.get()

        def encode_inputs() -> None:
            if call.cancelled:
                return
            inputs = self._result_or_error(lambda: encode(self._manager.intake))
            if isinstance(inputs, BaseException) or all(one.prepared.ready for one in inputs):
                self._inbox.put(partial(self._calls.arrive, call, inputs))
                return
            self._compiling.submit(partial(compile_all, inputs), owner)

        def compile_all(inputs: list[PromptInput]) -> None:
            if not call.cancelled:
                self._inbox.put(partial(self._calls.arrive, call, self._result_or_error(partial(_compiled, inputs))))

        self._submit(self._encoding, encode_inputs)

    def submit(self, call: PendingCall, inputs: list[PromptInput]) -> None:
        """Queue the requests of `call`, with encoded and compiled inputs. An error waits for `want`. Raises EngineClosed."""
        self._send(partial(self._calls.submit, call, inputs))

    def want(self, waiter: Waiter, call: PendingCall) -> None:
        """Resolve `waiter` with the next results of `call`: an empty list if it was cancelled or the thread has ended."""
        self._inbox.put(partial(self._want, waiter, call))
        if self.ended:
            settle(waiter, [])

    def cancel(self, call: PendingCall) -> None:
        """Abort the unfinished requests of `call`. Does nothing in a forked child."""
        call.cancelled = True
        if self._manager.is_here:
            self._inbox.put(partial(self._cancel, call))

    def run_with_engine(self, waiter: Waiter, function: Callable[[Engine], Any]) -> None:
        """Call `function` with the engine between two steps and resolve `waiter` with the result. Raises EngineClosed."""
        self._send(partial(self._run, waiter, lambda: function(self._manager.open())))

    def unpin(self, prompt: PromptInput) -> None:
        """End the pin of `prompt`, if there is one, behind earlier messages. Does nothing once the engine has ended."""
        with suppress(EngineClosed):
            self.run_with_engine(Future(), lambda _: self._manager.intake.unpin(prompt))

    def look(self, waiter: Waiter, function: Callable[[EngineWatch], Any]) -> None:
        """Call `function` with the watched side of the engine between two steps, and resolve `waiter` with the result.

        Raises EngineClosed.
        """

        def look() -> Any:
            self._manager.open()
            assert self._manager.watch is not None
            return function(self._manager.watch)

        self._send(partial(self._run, waiter, look))

    def open(self) -> Engine:
        """The engine. Only parts that do not change may be read. Raises EngineClosed."""
        self._manager.check_process()
        if (engine := self._manager.engine) is None:
            raise self.closed()
        return engine

    @property
    def intake(self) -> RequestIntake:
        """Encodes and checks what callers pass in. Raises EngineClosed."""
        self.open()
        return self._manager.intake

    def stats(self) -> dict[str, Any]:
        """The engine's statistics; during a step, those from a moment before. Blocks up to STATS_S. Raises EngineClosed."""
        if not self.is_inside:
            waiter: Future[Any] = Future()
            self.count(waiter)
            with suppress(TimeoutError):
                counted: dict[str, Any] = result_of(waiter.result(STATS_S))
                return counted
        return self.last_stats()

    def count(self, waiter: Waiter) -> None:
        """Resolve `waiter` with the engine's statistics. Raises EngineClosed."""
        self._send(partial(self._run, waiter, lambda: self._with_threads(self._manager.stats())))

    def last_stats(self) -> dict[str, Any]:
        """The statistics of a moment ago, for a caller that waits no longer than STATS_S. Raises EngineClosed."""
        self.open()
        return self._with_threads(self._manager.last_stats())

    def describe(self) -> str:
        """Device, dtype, size of the pool and requests, for a repr; "closed" for a closed engine."""
        try:
            stats = self.stats()
        except EngineClosed:
            return "closed"
        place, pool = f"device={stats['device']!r}, dtype={stats['dtype']!r}", format_bytes(stats["kv_bytes"])
        return f"{place}, KV pool {pool}, {stats['running']} running, {stats['waiting']} waiting"

    def ask(self, message: Callable[..., None], *arguments: Any) -> Any:
        """Send a message with a waiter and `arguments`, and block this thread until its result. Raises the result if it is an
        error, EngineClosed, and RuntimeError where the engine waits for this very thread.
        """
        self.check_caller()
        waiter: Future[Any] = Future()
        message(waiter, *arguments)
        return result_of(waiter.result())

    def check_caller(self) -> None:
        """Raise RuntimeError where the engine waits for this very thread."""
        if self.is_inside:
            raise RuntimeError(
                "the engine was called from the middle of one of its own calls, such as by a logits processor in a step, or "
                "inside locked_engine(): it would wait for itself"
            )

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread runs a step, or holds the engine."""
        me, hold = threading.get_ident(), self._hold
        return me == self.ident or (hold is not None and me == hold.thread and not hold.released.is_set())

    @contextmanager
    def held_engine(self) -> Iterator[Engine]:
        """Hold the engine between two steps, none pending, for use by the calling thread. Raises EngineClosed."""
        hold = _Hold(threading.get_ident(), threading.Event())
        try:
            yield self.ask(lambda waiter: self._send(partial(self._stand_still, waiter, hold)))
        finally:
            hold.released.set()

    def run_with_encoder(self, waiter: Waiter, function: Callable[[], Any]) -> None:
        """Call `function` on a tokenizer's thread and resolve `waiter` with the result. Raises EngineClosed."""

        def run() -> None:
            result = self._result_or_error(function)
            self._inbox.put(partial(self._outbox.put, waiter, result))

        self._submit(self._encoding, run)

    def pause(self, waiter: Waiter) -> None:
        """Run no steps until `resume`. Resolve `waiter` once none is running. Raises EngineClosed."""
        self._send(partial(self._pause, waiter))

    def resume(self, of: Waiter | None = None) -> None:
        """End the pause of waiter `of`, or the oldest. Steps run again once no pause is left. Raises EngineClosed."""
        self._send(partial(self._resume, of))

    def drain(self, waiter: Waiter) -> None:
        """Refuse new calls. Resolve `waiter` when all earlier calls have ended. Raises EngineClosed."""
        self._after_arrivals(partial(self._drain, waiter))

    def suspend(self, waiter: Waiter) -> None:
        """Free the engine's memory; requests and calls wait for `go_on`. Resolve `waiter` then. Raises EngineClosed.

        What is being tokenized arrives before.
        """
        self._after_arrivals(partial(self._run, waiter, self._suspend))

    def go_on(self, waiter: Waiter, engine: Engine, recorder: EngineRecorder | None, first: Callable[[], None]) -> None:
        """Serve the suspended requests, and others, with `engine`, behind what `first` does with it. Resolve `waiter` then.
        Raises EngineClosed.
        """
        self._memory.join()  # that of the engine before
        self._send(partial(self._run, waiter, partial(self._go_on, engine, recorder, first)))

    def end(self, waiter: Waiter | None = None) -> None:
        """Abort all requests, close the request manager and end the thread. Resolve `waiter` then. Idempotent.

        Raises EngineClosed in a forked child.
        """
        self._manager.check_process()
        self._inbox.put(partial(self._end, waiter))
        if self.ended and waiter is not None:
            settle(waiter, None)

    def forget(self) -> None:
        """As `end`, for the garbage collector: does nothing in a forked child."""
        if self._manager.is_here:
            self.end()

    @property
    def heartbeat(self) -> tuple[int, float]:
        """See `AsyncLLM.heartbeat`."""
        if self.ended:
            raise self.closed()
        rests = self._is_finishing or (self._is_asleep and self._inbox.empty())
        return self._progress.beats, 0.0 if rests else self._progress.allowed_s

    def closed(self) -> EngineClosed:
        """The error for calls after the end. Its cause is the fault that broke the engine, if one did."""
        if self.may_wake:
            return EngineClosed(f"this {self._owner} is asleep: wake it up first (wake_up)")
        why = "is closed" if self._failure is None else f"has ended: {self._failure}"
        error = EngineClosed(f"this {self._owner} {why}: create a new one")
        error.__cause__ = self._failure
        return error

    def _with_threads(self, stats: dict[str, Any]) -> dict[str, Any]:
        return {**stats, "threads": {self._memory.name: self._memory.to_dict()}}

    def _send(self, message: Callable[[], None]) -> None:
        self._manager.check_process()
        self._inbox.put(message)
        if self.ended:  # the message may never be read
            raise self.closed()

    def _after_arrivals(self, message: Callable[[], None]) -> None:
        """Send `message` once all earlier calls have arrived. Raises EngineClosed."""
        earlier = self._encoding.pending

        def behind_all() -> None:
            wait(earlier)
            wait(self._compiling.pending)  # earlier calls are tokenised by now; some may still be compiling
            self._inbox.put(message)

        self._submit(self._behind, behind_all)

    def _submit(self, threads: FairThreads, work: Callable[[], None]) -> None:
        self.open()
        try:
            threads.submit(work)
        except RuntimeError:  # they were shut down meanwhile
            raise self.closed() from self._failure

    def _result_or_error(self, function: Callable[[], Any]) -> Any:
        """Call `function`. Returns its result, or its error, which asyncio would log if set on an abandoned future."""
        with Attempt() as attempt:
            return function()
        return self.closed() if isinstance(attempt.error, EngineClosed) else attempt.error  # `closed` adds the cause

    # -- threads beside it ----------------------------------------------------------------------------------------

    def _watch_memory(self) -> bool:
        """Wait for a message of the broker, or a moment, and let the engine serve its memory. False once it is closed."""
        if (engine := self._manager.engine) is None or (engine.core.memory is None and engine.team is None):
            return False
        try:
            if engine.core.memory is None:
                time.sleep(self._memory_wait_s)
            else:
                engine.core.memory.wait(self._memory_wait_s)
        except LeaseClosed:
            return False
        try:
            self._memory_wait_s = self.ask(self._serve)
        except EngineClosed:
            return False
        return True

    def _record(self) -> bool:
        """Record a frame after the interval. False once the engine is closed, or the recording has ended."""
        recorder = self._manager.recorder
        return recorder is not None and not recorder.stopped.wait(INTERVAL_S) and recorder.turn(self._take_frame)

    def _take_frame(self, make: Callable[[], Frame]) -> Frame | None:
        """The result of `make`, called between two steps; None once the engine is closed."""
        try:
            frame: Frame = self.ask(self.run_with_engine, lambda engine: make())
            return frame
        except EngineClosed:
            return None

    # -- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        with Attempt() as attempt:
            self._use_threads()
            while not self._ending:
                self._progress.begin()
                self._receive()
                self._calls.cancel_lost()
                self._calls.submit_while_room()
                self._send_results()
                if self._may_step:
                    self._manager.step()
                elif not self._ending:
                    self._sleep_until_message()
        if attempt.error is not None:
            log.error("the engine's thread failed; ending all requests", exc_info=attempt.error)
            self._failure = attempt.error
        self._finish()

    def _sleep_until_message(self) -> None:
        self._is_asleep = True
        try:
            message = self._inbox.get()
        finally:
            self._is_asleep = False
        self._progress.begin()
        message()

    @property
    def _may_step(self) -> bool:
        if not (self._manager.has_work and not self._pauses and not self._ending):
            return False
        return not self._on_demand or self._calls.is_awaited or not self._manager.has_requests

    def _receive(self) -> None:
        """Handle the messages received so far."""
        for _ in range(self._inbox.qsize()):  # later messages wait for the next turn
            self._inbox.get()()
            self._progress.beat()

    def _send_results(self) -> None:
        """Resolve the waiters that have results, with one call per loop."""
        self._calls.give_results()
        if self._draining and not (self._calls.num_waiting or self._manager.has_work):
            for waiter in self._draining:
                self._outbox.put(waiter, None)
            self._draining.clear()
        self._outbox.send()

    def _finish(self) -> None:
        """Close the manager and resolve every waiter: with aborted outputs, or with the error that broke the engine."""
        self._is_finishing = True
        with Attempt() as attempt:
            if self._failure is None:
                self._calls.submit_all()  # to be aborted with the rest
            self._manager.close(self._failure)
        if attempt.error is not None:
            log.error("closing the engine failed", exc_info=attempt.error)
            self._failure = self._failure or attempt.error
        # After these, every call that began has arrived.
        self._encoding.shutdown()
        self._compiling.shutdown()
        self._behind.shutdown()
        self._receive()
        self._send_results()
        self.ended = True
        while not self._inbox.empty():
            self._receive()
        self._calls.end(self.closed)
        self._outbox.send()
        if (recorder := self._manager.recorder) is not None:  # its thread may have waited for a frame
            recorder.close(self._manager.last_frame)
            self._manager.recorder = self._manager.last_frame = None  # its source refers to the engine
        self._memory.join()
        for waiter in (*self._draining, *self._joining):
            self._outbox.put(waiter, None)
        self._draining.clear()
        self._outbox.send()

    # -- messages ------------------------------------------------------------------------------------------------

    def _want(self, waiter: Waiter, call: PendingCall) -> None:
        if self.ended:
            self._outbox.put(waiter, [])
        else:
            self._calls.want(waiter, call)

    def _run(self, waiter: Waiter, function: Callable[[], Any]) -> None:
        self._outbox.put(waiter, self._result_or_error(function))

    def _cancel(self, call: PendingCall) -> None:
        self._calls.cancel(call)
        while self._on_demand and self._manager.has_work and not all(group.is_finished for group in call.groups):
            self._manager.step()  # perhaps no caller waits for another one

    def _stand_still(self, waiter: Waiter, hold: _Hold) -> None:
        """Give `waiter` the engine, without a pending step, and do nothing until it is released."""
        if self._manager.engine is None:
            self._outbox.put(waiter, self.closed())
            return
        self._manager.finish_pending_steps()
        self._send_results()
        self._hold = hold
        settle(waiter, self._manager.engine)
        hold.released.wait()
        self._hold = None

    def _serve(self, waiter: Waiter) -> None:
        """Let the engine's thread serve the memory, and resolve `waiter` with the longest wait until the next time."""
        self._send(partial(self._run_and_look, waiter, self._serve_memory))

    def _run_and_look(self, waiter: Waiter, function: Callable[[], Any]) -> None:
        """As `_run`. Raises ShardLost."""
        self._run(waiter, function)
        if (engine := self._manager.engine) is not None and (lost := engine.core.lost) is not None:
            raise lost

    def _serve_memory(self) -> float:
        """Serve recalls and give back idle memory, also while no caller waits for a step. Returns the seconds to wait now."""
        memory = self._manager.open().core.memory
        if memory is None or self._pauses or not memory.due:
            return MEMORY_WAIT_S
        self._manager.finish_pending_steps()
        self._manager.step()
        return MEMORY_BUSY_WAIT_S if memory.due else MEMORY_WAIT_S

    def _pause(self, waiter: Waiter) -> None:
        if self._manager.engine is None:
            self._outbox.put(waiter, self.closed())
            return
        self._pauses[waiter] = None
        self._apply_pauses()
        self._outbox.put(waiter, None)

    def _resume(self, of: Waiter | None) -> None:
        if of is None:
            of = next(iter(self._pauses), None)
        if of in self._pauses:
            del self._pauses[of]
            self._apply_pauses()

    def _apply_pauses(self) -> None:
        if self._pauses and self._manager.engine is not None:
            self._manager.finish_pending_steps()  # leave no pending step on the device

    def _drain(self, waiter: Waiter) -> None:
        self._calls.is_draining = True
        self._pauses.clear()  # paused requests would never end
        self._apply_pauses()
        self._draining.append(waiter)

    def _suspend(self) -> None:
        """Raises EngineClosed."""
        self._calls.submit_all()
        self._is_finishing = True  # it may take as long as closing
        try:
            self._manager.suspend()
        finally:
            self._is_finishing = False

    def _go_on(self, engine: Engine, recorder: EngineRecorder | None, first: Callable[[], None]) -> None:
        self._progress = engine.core.runner.progress
        self._manager.resume(engine, recorder, first)
        self._memory = BackgroundThread("pagetide-memory", self._watch_memory, MEMORY_WAIT_S)
        self.may_wake = False
        self._watch_engine()

    def _end(self, waiter: Waiter | None) -> None:
        self._ending = True
        if waiter is not None:
            self._joining.append(waiter)


def result_of(result: Any) -> Any:
    """The result of a waiter; raises it if it is an error."""
    if isinstance(result, BaseException):
        raise result
    return result


@dataclass(frozen=True, slots=True)
class _Hold:
    """A thread that has the engine until `released`."""

    thread: int
    released: threading.Event


def _compiled(inputs: list[PromptInput]) -> list[PromptInput]:
    """Compile the constraints of `inputs` and return it. Raises RequestRejected."""
    for one in inputs:
        one.prepared.compile()
    return inputs


@atexit.register
def _end_all() -> None:
    """Stop all engine threads at exit: a step that runs while the interpreter shuts down may crash the process."""
    threads = [thread for thread in _running if thread.is_alive()]
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.join(EXIT_WAIT_S)

"""The thread that runs an engine's steps for callers on event loops.

Callers send messages, handled between two steps, so no event loop ever waits for a step or a lock. Results go to each loop in
one call per step.

    caller's loop          a thread for the tokenizer      the engine thread
    begin ───────────────► prompts as token ids ─────────► _arrive, _submit, once there is room
                             └► constraints compiled ────►   (in other threads: it may take seconds)
    want, forget, ask ───────────────────────────────────► handled between steps
    _settle ◄───────────── one call per loop and step ──── _hand_out
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..build import Engine
from ..errors import EngineClosed
from ..process.cpu_threads import own_threads, use_own_threads
from .inputs import PromptInput
from .intake import RequestIntake
from .manager import RequestManager, ready_chunk
from .outputs import RequestOutput, StreamChunk
from .states import RequestGroup, RequestState

log = logging.getLogger(__name__)

Waiter = asyncio.Future[Any]
EXIT_WAIT_S = 10.0
COMPILE_THREADS = 4

_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class PendingCall:
    """One call of a caller. Mutated by the engine thread, except `forgotten`, which the caller sets.

    Args:
        waiter: A future of the caller's loop. Its result is all outputs or, for a stream, at least one chunk, or an error for
            the caller to raise. `EngineThread.want` registers the waiter for a stream's next chunks.
        interval: Minimum tokens of a stream's chunk; None for no stream.
    """

    def __init__(self, waiter: Waiter, priority: int | None, cache_salt: str | None, interval: int | None) -> None:
        self.loop = waiter.get_loop()
        self.waiter: Waiter | None = waiter
        self.priority = priority
        self.cache_salt = cache_salt
        self.interval = interval
        self.inputs: list[PromptInput] = []  # until the call is queued
        self.groups: tuple[RequestGroup, ...] = ()  # of all prompts, once the call is queued
        self.states: list[RequestState] = []  # of a stream: those that have not delivered their last chunk
        self.num_running = 0  # unfinished groups
        self.forgotten = False  # the caller is gone
        self.over = False  # no more results follow

    def collect(self) -> list[RequestOutput] | list[StreamChunk]:
        """Take the results that are ready, perhaps none. Call it under the engine's lock."""
        if self.interval is None:
            if self.num_running:
                return []
            self.over = True
            return [group.output for group in self.groups]
        chunks = []
        while (chunk := ready_chunk(self.states, self.interval)) is not None:
            chunks.append(chunk)
        self.over = not self.states
        return chunks


class EngineThread(threading.Thread):
    """Runs the steps of `manager` while there is work, and sleeps otherwise. Closes the manager when it ends.

    Public methods are thread-safe and never block. `forget` and `end` may also be called by the garbage collector, which may
    interrupt any other code.
    """

    def __init__(self, manager: RequestManager, max_waiting: int) -> None:
        super().__init__(name="pagetide-steps", daemon=True)
        self.ended = False
        self._failure: BaseException | None = None  # what broke the engine
        self._manager = manager
        self._max_waiting = max_waiting
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # its `put` is reentrant
        self._encoding = ThreadPoolExecutor(1, "pagetide-encode")  # one thread: first come, first served
        self._compiling = ThreadPoolExecutor(COMPILE_THREADS, "pagetide-compile")
        # Running compilations of constraints; used by the tokenizer's thread.
        self._compiled: list[Future[None]] = []
        self._arrived: OrderedDict[PendingCall, None] = OrderedDict()  # waiting for room, first come, first served
        self._open: dict[asyncio.AbstractEventLoop, dict[PendingCall, None]] = {}  # calls that are not over
        self._calls: dict[RequestGroup, PendingCall] = {}  # of unfinished groups
        self._ready: dict[PendingCall, None] = {}  # calls that may have results
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Any]]] = {}
        self._pauses: dict[Waiter, None] = {}  # active pauses, oldest first
        self._draining = self._ending = False
        self._drained: list[Waiter] = []  # settled when nothing is in flight
        self._joining: list[Waiter] = []  # settled when this thread ends
        self._num_threads = own_threads()
        # May be called by the memory thread (manager._keep_memory).
        manager.delivery.on_outputs = lambda groups: self._inbox.put(partial(self._note, groups))
        self.start()
        _running.add(self)

    # -- from any thread -----------------------------------------------------------------------------------------

    def begin(self, call: PendingCall, encode: Callable[[RequestIntake], list[PromptInput]]) -> None:
        """Call `encode` on the tokenizer's thread, then queue its inputs. Errors settle the waiter. Raises EngineClosed.

        Constraints are compiled in other threads, so that later calls do not wait for them.
        """

        def encode_inputs() -> None:
            if call.forgotten:
                return
            inputs = self._tried(lambda: encode(self._manager.intake))
            if isinstance(inputs, BaseException) or all(one.prepared.ready for one in inputs):
                self._inbox.put(partial(self._arrive, call, inputs))
                return
            self._compiled = [future for future in self._compiled if not future.done()]
            self._compiled.append(self._compiling.submit(compile_all, inputs))

        def compile_all(inputs: list[PromptInput]) -> None:
            if not call.forgotten:
                self._inbox.put(partial(self._arrive, call, self._tried(partial(_compiled, inputs))))

        self._encode(encode_inputs)

    def want(self, waiter: Waiter, call: PendingCall) -> None:
        """Settle `waiter` with a stream's next chunks: an empty list if it was forgotten or the thread has ended."""
        self._inbox.put(partial(self._want, waiter, call))
        if self.ended and not waiter.done():
            waiter.set_result([])

    def forget(self, call: PendingCall) -> None:
        """Abort the unfinished requests of `call`. Its waiter gets an empty result."""
        call.forgotten = True
        self._inbox.put(partial(self._forget, call))

    def ask(self, waiter: Waiter, question: Callable[[Engine], Any]) -> None:
        """Call `question` with the engine between two steps and settle `waiter` with the result. Raises EngineClosed."""
        self._tell(partial(self._answer, waiter, question))

    def compute(self, waiter: Waiter, question: Callable[[], Any]) -> None:
        """Call `question` on the tokenizer's thread and settle `waiter` with the result. Raises EngineClosed."""

        def answer() -> None:
            value = self._tried(question)
            self._inbox.put(partial(self._settle, waiter, value))

        self._encode(answer)

    def pause(self, waiter: Waiter) -> None:
        """Run no steps until `resume`. Settle `waiter` once none is running. Raises EngineClosed."""
        self._tell(partial(self._pause, waiter))

    def resume(self, of: Waiter | None = None) -> None:
        """End the pause of waiter `of`, or the oldest. Steps run again once no pause is left. Raises EngineClosed."""
        self._tell(partial(self._resume, of))

    def drain(self, waiter: Waiter) -> None:
        """Refuse new calls. Settle `waiter` when all earlier calls have ended. Raises EngineClosed."""

        def behind_all() -> None:
            # Earlier calls are tokenised by now; some may still be compiling.
            wait(self._compiled)
            self._inbox.put(partial(self._drain, waiter))

        self._encode(behind_all)

    def end(self, waiter: Waiter | None = None) -> None:
        """Abort all requests, close the request manager and end the thread. Settle `waiter` then. Idempotent.

        Raises EngineClosed in a forked child.
        """
        self._manager.check_process()
        self._inbox.put(partial(self._end, waiter))
        if self.ended and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def closed(self) -> EngineClosed:
        """The error for calls after the end. Its cause is the fault that broke the engine, if one did."""
        error = EngineClosed("this AsyncLLM is stopped: make a new one")
        error.__cause__ = self._failure
        return error

    def _tell(self, message: Callable[[], None]) -> None:
        self._manager.check_process()
        self._inbox.put(message)
        if self.ended:  # the message may never be read
            raise self.closed()

    def _encode(self, work: Callable[[], None]) -> None:
        self._manager.check_process()
        if self._manager.engine is None:
            raise self.closed()
        try:
            self._encoding.submit(work)
        except RuntimeError:  # it was shut down meanwhile
            raise self.closed() from self._failure

    def _tried(self, question: Callable[[], Any]) -> Any:
        """Call `question`. Returns its result, or its error, which asyncio would log if set on an abandoned future."""
        try:
            return question()
        except EngineClosed:  # `closed` adds the cause
            return self.closed()
        except BaseException as error:
            return error

    # -- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            use_own_threads(self._num_threads)
            while not self._ending:
                self._receive()
                self._let_in()
                self._hand_out()
                if self._may_step:
                    self._step()
                elif not self._ending:
                    self._inbox.get()()  # sleeps until a message arrives
        except BaseException as error:
            log.exception("the engine's thread broke; all requests end")
            self._failure = error
        self._finish()

    @property
    def _may_step(self) -> bool:
        return self._manager.has_work and not self._pauses and not self._ending

    def _step(self) -> None:
        try:
            self._manager.step()
        except Exception:
            raise
        except BaseException:  # such as SystemExit: the next step reports the ended requests (EngineCore.step)
            log.exception("a step was interrupted; its requests end")

    def _receive(self) -> None:
        """Handle the messages received so far."""
        for _ in range(self._inbox.qsize()):  # later messages wait for the next turn
            self._inbox.get()()

    def _let_in(self) -> None:
        """Submit waiting calls while there is room. Calls of closed loops are dropped first."""
        for loop in [loop for loop in self._open if loop.is_closed()]:
            for call in list(self._open[loop]):
                self._forget(call)
        engine = self._manager.engine
        while self._arrived and engine is not None and engine.core.scheduler.num_waiting < self._max_waiting:
            self._submit(self._arrived.popitem(last=False)[0])

    def _hand_out(self) -> None:
        """Settle the waiters that have results, with one call per loop."""
        if self._ready:
            ready, self._ready = self._ready, {}
            with self._manager.lock:
                news = [(call, call.collect()) for call in ready if call.waiter is not None]
            for call, what in news:
                if what:
                    self._give(call, what)
        if self._drained and not (self._arrived or self._manager.has_work):
            for waiter in self._drained:
                self._settle(waiter, None)
            self._drained.clear()
        outbox, self._outbox = self._outbox, {}
        for loop, settled in outbox.items():
            with suppress(RuntimeError):  # closed loop; `_let_in` drops its calls
                loop.call_soon_threadsafe(_settle, settled)

    def _finish(self) -> None:
        """Close the manager and settle every waiter: with aborted outputs, or with the error that broke the engine."""
        try:
            while self._arrived and self._failure is None:
                self._submit(self._arrived.popitem(last=False)[0])  # to be aborted with the rest
            self._manager.close(self._failure)
        except BaseException as trouble:
            log.exception("the engine could not be closed in order")
            self._failure = self._failure or trouble
        # After these two, every call that began has arrived.
        self._encoding.shutdown()
        self._compiling.shutdown()
        self._receive()
        self._hand_out()
        self.ended = True
        while not self._inbox.empty():
            self._receive()
        for call in [call for calls in self._open.values() for call in calls]:
            if call.waiter is not None:
                self._settle(call.waiter, self.closed())
        for waiter in (*self._drained, *self._joining):
            self._settle(waiter, None)
        for held in (self._open, self._calls, self._ready, self._drained):  # readers collect the rest of their streams
            held.clear()
        self._manager.delivery.on_outputs = None
        self._hand_out()

    # -- messages ------------------------------------------------------------------------------------------------

    def _arrive(self, call: PendingCall, inputs: list[PromptInput] | BaseException) -> None:
        if call.forgotten:
            return
        if isinstance(inputs, BaseException):
            self._give(call, inputs)
        elif self._draining:
            self._give(call, EngineClosed("this AsyncLLM is being drained: it takes no more requests"))
        else:
            call.inputs = inputs
            self._open.setdefault(call.loop, {})[call] = None
            self._arrived[call] = None

    def _submit(self, call: PendingCall) -> None:
        inputs, call.inputs = call.inputs, []
        try:
            groups = self._manager.submit(inputs, call.priority, call.cache_salt, streams=call.interval is not None)
        except Exception as error:
            self._give(call, error)
            return
        call.groups = tuple(groups)
        call.states = [state for group in groups for state in group.states]
        call.num_running = len(groups)
        self._calls.update((group, call) for group in groups)

    def _note(self, groups: Iterable[RequestGroup]) -> None:
        """Mark the calls of `groups` as having results. A group may occur several times."""
        for group in groups:
            call = self._calls.get(group)
            if call is None:
                continue
            if group.is_finished:
                del self._calls[group]
                call.num_running -= 1
            if call.interval is not None or not call.num_running:
                self._ready[call] = None

    def _want(self, waiter: Waiter, call: PendingCall) -> None:
        if call.forgotten or self.ended:
            self._settle(waiter, [])
            return
        call.waiter = waiter
        self._ready[call] = None

    def _forget(self, call: PendingCall) -> None:
        call.forgotten = True
        self._arrived.pop(call, None)
        self._manager.abort_later(call.groups)
        for group in call.groups:
            self._calls.pop(group, None)
        self._give(call, [])

    def _give(self, call: PendingCall, what: Any) -> None:
        """Settle the waiter of `call`. A call that is over, was forgotten or gets an error is closed."""
        call.over |= isinstance(what, BaseException)
        waiter, call.waiter = call.waiter, None
        if waiter is not None:
            self._settle(waiter, what)
        if call.over or call.forgotten:
            self._ready.pop(call, None)
            calls = self._open.get(call.loop, {})
            calls.pop(call, None)
            if not calls:
                self._open.pop(call.loop, None)

    def _answer(self, waiter: Waiter, question: Callable[[Engine], Any]) -> None:
        def answer() -> Any:
            with self._manager.lock:
                return question(self._manager.open())

        self._settle(waiter, self._tried(answer))

    def _pause(self, waiter: Waiter) -> None:
        if self._manager.engine is None:
            self._settle(waiter, self.closed())
            return
        self._pauses[waiter] = None
        self._apply_pauses()
        self._settle(waiter, None)

    def _resume(self, of: Waiter | None) -> None:
        if of is None:
            of = next(iter(self._pauses), None)
        if of in self._pauses:
            del self._pauses[of]
            self._apply_pauses()

    def _apply_pauses(self) -> None:
        with self._manager.lock:  # the memory thread may be running a step
            self._manager.paused = bool(self._pauses)
            if self._pauses and self._manager.engine is not None:
                self._manager.settle(self._manager.engine)  # leave no pending step on the device

    def _drain(self, waiter: Waiter) -> None:
        self._draining = True
        self._pauses.clear()  # paused requests would never end
        self._apply_pauses()
        self._drained.append(waiter)

    def _end(self, waiter: Waiter | None) -> None:
        self._ending = True
        if waiter is not None:
            self._joining.append(waiter)

    def _settle(self, waiter: Waiter, what: Any) -> None:
        self._outbox.setdefault(waiter.get_loop(), []).append((waiter, what))


def _compiled(inputs: list[PromptInput]) -> list[PromptInput]:
    """Compile the constraints of `inputs` and return it. Raises RequestRejected."""
    for one in inputs:
        one.prepared.compile()
    return inputs


def _settle(settled: list[tuple[Waiter, Any]]) -> None:
    """Set the results of waiters, on their loop."""
    for waiter, what in settled:
        if not waiter.done():  # cancelled: its caller has sent `forget` or `resume`
            waiter.set_result(what)


@atexit.register
def _end_all() -> None:
    """Stop all engine threads at exit: a step that runs while the interpreter shuts down may crash the process."""
    steppers = [stepper for stepper in _running if stepper.is_alive()]
    for stepper in steppers:
        stepper.end()
    for stepper in steppers:
        stepper.join(EXIT_WAIT_S)

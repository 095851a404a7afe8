"""The thread that runs an engine's steps for callers on event loops.

Callers send messages, handled between two steps. Results go to each loop in one call per step.

    caller's loop          threads for the tokenizer       the engine thread
    begin ───────────────► prompts as token ids ─────────► PendingCalls.arrive; submitted once there is room
                             └► constraints compiled ────►   (in other threads: it may take seconds)
    want, cancel, ... ───────────────────────────────────► handled between steps
    result of a waiter ◄── one call per loop and step ──── Outbox.send
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..errors import EngineClosed, ShardLost
from ..process.fair_threads import OWNER, FairThreads
from ..watch import EngineWatch
from .inputs import PromptInput
from .intake import RequestIntake
from .manager import RequestManager
from .pending_calls import Outbox, PendingCall, PendingCalls, Waiter

if TYPE_CHECKING:
    from ..build import Engine  # imports torch

log = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0
ENCODE_THREADS = 3  # each caller's prompts in order, and callers in turns
COMPILE_THREADS = 5

_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread(threading.Thread):
    """Runs the steps of `manager` while there is work, and sleeps otherwise. Closes the manager when it ends.

    Public methods are thread-safe and never block. `cancel` and `end` may also be called by the garbage collector.
    """

    def __init__(self, manager: RequestManager, max_waiting: int) -> None:
        from ..process.cpu_threads import own_threads, use_own_threads  # imports torch

        super().__init__(name="pagetide-steps", daemon=True)
        self.ended = self._is_finishing = False
        self._failure: BaseException | None = None  # what broke the engine
        self._manager = manager
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # its `put` is reentrant
        self._encoding = FairThreads(ENCODE_THREADS, 1, "pagetide-encode")
        self._compiling = FairThreads(COMPILE_THREADS, COMPILE_THREADS - 1, "pagetide-compile")  # constraints
        self._behind = FairThreads(1, 1, "pagetide-drain")  # waits for earlier work of both
        self._outbox = Outbox()
        self._calls = PendingCalls(manager, max_waiting, self._outbox)
        self._pauses: dict[Waiter, None] = {}  # active pauses, oldest first
        self._ending = False
        self._draining: list[Waiter] = []  # resolved when nothing is in flight
        self._joining: list[Waiter] = []  # resolved when this thread ends
        self._use_threads = partial(use_own_threads, own_threads())
        self._progress = manager.open().core.runner.progress
        self._is_asleep = False  # until the next message
        manager.on_lost = self._lose
        # May be called by the memory thread (manager._keep_memory).
        manager.delivery.on_outputs = lambda *groups: self._inbox.put(partial(self._calls.note_outputs, *groups))
        self.start()
        _running.add(self)

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

    def want(self, waiter: Waiter, call: PendingCall) -> None:
        """Resolve `waiter` with a stream's next chunks: an empty list if it was cancelled or the thread has ended."""
        self._inbox.put(partial(self._want, waiter, call))
        if self.ended and not waiter.done():
            waiter.set_result([])

    def cancel(self, call: PendingCall) -> None:
        """Abort the unfinished requests of `call`."""
        call.cancelled = True
        self._inbox.put(partial(self._calls.cancel, call))

    def run_with_engine(self, waiter: Waiter, function: Callable[[Engine], Any]) -> None:
        """Call `function` with the engine between two steps and resolve `waiter` with the result. Raises EngineClosed."""
        self._send(partial(self._run_with_engine, waiter, function))

    def look(self, waiter: Waiter, function: Callable[[EngineWatch], Any]) -> None:
        """Call `function` with the watched side of the engine between two steps, and resolve `waiter` with the result.

        Raises EngineClosed.
        """
        self._send(partial(self._look, waiter, function))

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

        earlier = self._encoding.pending

        def behind_all() -> None:
            wait(earlier)
            wait(self._compiling.pending)  # earlier calls are tokenised by now; some may still be compiling
            self._inbox.put(partial(self._drain, waiter))

        self._submit(self._behind, behind_all)

    def end(self, waiter: Waiter | None = None) -> None:
        """Abort all requests, close the request manager and end the thread. Resolve `waiter` then. Idempotent.

        Raises EngineClosed in a forked child.
        """
        self._manager.check_process()
        self._inbox.put(partial(self._end, waiter))
        if self.ended and waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def heartbeat(self) -> tuple[int, float]:
        """See `AsyncLLM.heartbeat`."""
        if self.ended:
            raise self.closed()
        rests = self._is_finishing or (self._is_asleep and self._inbox.empty())
        return self._progress.beats, 0.0 if rests else self._progress.allowed_s

    def closed(self) -> EngineClosed:
        """The error for calls after the end. Its cause is the fault that broke the engine, if one did."""
        error = EngineClosed("this AsyncLLM is stopped: create a new one")
        error.__cause__ = self._failure
        return error

    def _send(self, message: Callable[[], None]) -> None:
        self._manager.check_process()
        self._inbox.put(message)
        if self.ended:  # the message may never be read
            raise self.closed()

    def _submit(self, threads: FairThreads, work: Callable[[], None]) -> None:
        self._manager.check_process()
        if self._manager.engine is None:
            raise self.closed()
        try:
            threads.submit(work)
        except RuntimeError:  # they were shut down meanwhile
            raise self.closed() from self._failure

    def _result_or_error(self, function: Callable[[], Any]) -> Any:
        """Call `function`. Returns its result, or its error, which asyncio would log if set on an abandoned future."""
        try:
            return function()
        except EngineClosed:  # `closed` adds the cause
            return self.closed()
        except BaseException as error:
            return error

    # -- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._use_threads()
            while not self._ending:
                self._progress.begin()
                self._receive()
                self._calls.cancel_lost()
                self._calls.submit_while_room()
                self._send_results()
                if self._may_step:
                    self._step()
                elif not self._ending:
                    self._sleep_until_message()
        except BaseException as error:
            log.exception("the engine's thread failed; ending all requests")
            self._failure = error
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
        return self._manager.has_work and not self._pauses and not self._ending

    def _step(self) -> None:
        try:
            self._manager.step()
        except Exception:
            raise
        except BaseException:  # such as SystemExit: the next step reports the ended requests (EngineCore.step)
            log.exception("a step was interrupted; ending its requests")

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
        try:
            if self._failure is None:
                self._calls.submit_all()  # to be aborted with the rest
            self._manager.close(self._failure)
        except BaseException as error:
            log.exception("closing the engine failed")
            self._failure = self._failure or error
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
        for waiter in (*self._draining, *self._joining):
            self._outbox.put(waiter, None)
        self._draining.clear()
        self._manager.delivery.on_outputs = None
        self._send_results()

    # -- messages ------------------------------------------------------------------------------------------------

    def _want(self, waiter: Waiter, call: PendingCall) -> None:
        if self.ended:
            self._outbox.put(waiter, [])
        else:
            self._calls.want(waiter, call)

    def _run_with_engine(self, waiter: Waiter, function: Callable[[Engine], Any]) -> None:
        def run() -> Any:
            with self._manager.lock:
                return function(self._manager.open())

        self._outbox.put(waiter, self._result_or_error(run))

    def _look(self, waiter: Waiter, function: Callable[[EngineWatch], Any]) -> None:
        self._outbox.put(waiter, self._result_or_error(lambda: self._manager.look(function)))

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
        with self._manager.lock:  # the memory thread may be running a step
            self._manager.paused = bool(self._pauses)
            if self._pauses and self._manager.engine is not None:
                self._manager.finish_pending_steps(self._manager.engine)  # leave no pending step on the device

    def _drain(self, waiter: Waiter) -> None:
        self._calls.is_draining = True
        self._pauses.clear()  # paused requests would never end
        self._apply_pauses()
        self._draining.append(waiter)

    def _lose(self, error: ShardLost) -> None:
        """End this thread with `error`. Thread-safe."""

        def broken() -> None:
            raise error

        self._inbox.put(broken)

    def _end(self, waiter: Waiter | None) -> None:
        self._ending = True
        if waiter is not None:
            self._joining.append(waiter)


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

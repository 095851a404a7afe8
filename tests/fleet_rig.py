"""A fleet in one process without Ray: `FleetRig` on the caller's event loop, `FleetThread` on one of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pagetide import AsyncLLM, Fleet
from pagetide.fleet.links import answer_call, result_of
from pagetide.fleet.messages import encode
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.fleet.worker import FleetWorker, model_of

FAR_S = 60.0


class QueueCalls:
    """The target of `answer_call`: the queue's server, whose status is no coroutine."""

    def __init__(self, server: QueueServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def status(self) -> dict[str, Any]:
        return self._server.status()


class EncodedLink:
    """A link to a queue, perhaps on another event loop, that encodes what it carries as the link of Ray does."""

    def __init__(self, server: QueueServer, loop: asyncio.AbstractEventLoop) -> None:
        self._target = QueueCalls(server)
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            work = answer_call(self._target, name, encode(list(arguments)))
            if self._loop is asyncio.get_running_loop():
                answer = self._loop.create_task(work)
            else:
                answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
            return result_of(name, await asyncio.shield(answer))  # the queue goes on when its caller is cancelled

        return call


class FleetRig:
    """A queue and workers around engines that are there. Use it as an async context manager.

    Attributes:
        workers: By name; those that were killed too.
    """

    def __init__(self, folder: Path, model: str, **engines: AsyncLLM) -> None:
        self._folder = folder
        self._model = model
        self._engines = engines
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.workers: dict[str, FleetWorker] = {}
        self.server: QueueServer
        self.link: EncodedLink

    async def __aenter__(self) -> FleetRig:
        self.server = QueueServer(QueueOptions(self._folder / "journal.sqlite"))
        self.server.start()
        self.link = EncodedLink(self.server, asyncio.get_running_loop())
        for name, llm in self._engines.items():
            worker = self.workers[name] = FleetWorker(name, llm, model_of(llm, self._model), self.link)
            self._tasks[name] = asyncio.create_task(worker.run())
        await self.until(lambda: len(self.server.queue.workers) == len(self._engines))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.server.queue.check_invariants()
        await self.server.close()

    def fleet(self) -> Fleet:
        """A Fleet that is connected to it once it is used."""
        return Fleet.of_link(self.link)

    async def kill(self, worker: str) -> None:
        """End a worker amid its requests, as a process that dies."""
        self._tasks[worker].cancel()
        await asyncio.gather(self._tasks[worker], return_exceptions=True)
        self.server.lose(worker, "was killed")

    @property
    def is_empty(self) -> bool:
        """Whether no request is left: in the queue, in the workers and in their engines."""
        return not self.server.queue.entries and not any(worker._tasks for worker in self.workers.values())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(FAR_S):
            while not condition():
                await asyncio.sleep(0.005)


class FleetThread:
    """A `FleetRig` in a thread, for programs without an event loop. Use it as a context manager."""

    def __init__(self, rig: FleetRig) -> None:
        self.rig = rig
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FleetThread:
        self._thread.start()
        self.wait(self.rig.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.rig.__aexit__())
        self.wait(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine on the rig's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(FAR_S)


async def _cancel_others() -> None:
    """End what is left on this loop: calls that await what does not come any more."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

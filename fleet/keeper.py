"""Keeps the workers of a fleet running: starts them, hears of their ends, and starts them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from .messages import StaleEpoch
from .queue_server import QueueServer

log = logging.getLogger(__name__)

FIRST_RESTART_S, MOST_RESTART_S = 0.2, 60.0
GOOD_AFTER_S = 30.0  # a worker that lived so long is restarted at once


class Launcher(Protocol):
    """Starts workers as processes. `RayLauncher` in a fleet."""

    async def start(self, name: str) -> Any:
        """A handle of the worker of this name: of the running one, or of a new one."""

    async def ended(self, handle: Any) -> str:
        """Wait for the end of a worker. Returns the reason: empty if it ended by order."""

    async def kill(self, handle: Any) -> None:
        """End a worker at once."""


class WorkerKeeper:
    """Keeps the named workers running until they are drained. Runs on the queue's event loop.

    The names are in the journal, so that a queue that is restarted finds its workers again.
    """

    def __init__(self, server: QueueServer, launcher: Launcher) -> None:
        self._server = server
        self._launcher = launcher
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._handles: dict[str, Any] = {}
        self._leaving: set[str] = set()
        self._next = 0
        self.errors: dict[str, str] = {}  # why a worker cannot be started
        self.num_restarts = 0

    @property
    def names(self) -> list[str]:
        """The workers that are kept."""
        return list(self._tasks)

    async def begin(self, count: int) -> None:
        """Keep the workers of an earlier start of the queue, or `count` new ones."""
        known = await self._server.writer.fact("workers", tuple[list[str], int])
        names, self._next = known or ([], 0)
        for name in names:
            self._keep(name)
        if known is None:
            await self.add(count)

    async def add(self, count: int) -> list[str]:
        """Start `count` more workers. Returns their names."""
        names = [f"worker-{self._next + i}" for i in range(count)]
        self._next += count
        for name in names:
            self._keep(name)
        await self._store()
        return names

    async def drain(self, name: str) -> None:
        """Let a worker hand over its requests and end; one that is not ready ends at once. Raises StaleEpoch for no worker."""
        if name not in self._tasks:
            raise StaleEpoch(f"there is no worker {name!r:.80}; there are {', '.join(self._tasks) or 'none'}")
        self._leaving.add(name)
        try:
            self._server.drain(name)
        except StaleEpoch:
            if (handle := self._handles.get(name)) is not None:
                await self._launcher.kill(handle)
        await self._store()

    async def stop(self) -> None:
        """End all workers at once."""
        tasks = list(self._tasks.values())
        self._leaving.update(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._launcher.kill(handle) for handle in self._handles.values()), return_exceptions=True)

    async def _store(self) -> None:
        names: Sequence[str] = [name for name in self._tasks if name not in self._leaving]
        await self._server.writer.set_fact("workers", [list(names), self._next])

    def _keep(self, name: str) -> None:
        self._tasks[name] = asyncio.create_task(self._run(name))

    async def _run(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        wait_s = FIRST_RESTART_S
        while name not in self._leaving:
            began = loop.time()
            reason = "cannot be started"
            try:
                handle = self._handles[name] = await self._launcher.start(name)
                reason = await self._launcher.ended(handle)
            except Exception as error:
                reason = f"cannot be started: {error}"
            self._server.lose(name, reason or "has ended")
            if not reason:
                break
            self.errors[name] = reason
            self.num_restarts += 1
            lived_s = loop.time() - began
            wait_s = FIRST_RESTART_S if lived_s > GOOD_AFTER_S else min(2 * wait_s, MOST_RESTART_S)
            log.warning("the worker %s %s; restarting it in %.1f s", name, reason, wait_s)
            await asyncio.sleep(wait_s)
        self._handles.pop(name, None)
        self._tasks.pop(name, None)
        self.errors.pop(name, None)

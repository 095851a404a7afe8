"""Tests that are coroutines: a conftest that imports `pytest_pyfunc_call` runs each in a loop of its own; `in_thread`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

MOST_S = 600.0
FAR_S = 60.0
ENTERED = ("rig", "fleet", "writer")  # fixtures that are asynchronous context managers, and are entered in this order


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine. None: it is none."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(asyncio.wait_for(_within(pyfuncitem), MOST_S))
    return True


async def _within(item: pytest.Function) -> None:
    given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    async with AsyncExitStack() as stack:
        for name in ENTERED:
            if name in item.funcargs:
                given[name] = await stack.enter_async_context(item.funcargs[name])
        await item.obj(**{name: given[name] for name in item._fixtureinfo.argnames})


@contextmanager
def in_thread(rig: Any) -> Iterator[Any]:
    """An asynchronous context manager, entered on an event loop in a thread of its own: for programs without a loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(rig.__aenter__(), loop).result(FAR_S)
    asyncio.run_coroutine_threadsafe(rig.__aexit__(None, None, None), loop).result(FAR_S)
    asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(FAR_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _cancel_others() -> None:
    """End what is left on this loop: calls that await what does not come any more."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

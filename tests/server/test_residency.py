"""Models that come for requests and leave for others: the decision, and the router with made-up engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from page_rig import MadeUpEngine, eventually

from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import LoadFailed
from pagetide.server.errors import ApiError
from pagetide.server.models import ModelRegistry, ServedModel
from pagetide.server.residency import Residency, Resident, RouterRules, victims

ON_DEMAND = Residency(keep_alive_s=-1, pinned=False, preload=False)


def test_the_least_recently_used_leave_and_none_without_need() -> None:
    a, b, c = Resident("a", 10, 1, 0), Resident("b", 20, 2, 0), Resident("c", 40, 3, 5)
    assert victims([c, b, a], 0, 9) == [] and victims([c, b, a], 10, 9) == ["a"]
    assert victims([c, b, a], 15, 9) == ["b"]  # "a" goes for nothing
    assert victims([c, b, a], 35, 9) == ["c"] and victims([c, b, a], 45, 9) == ["a", "c"]
    assert victims([c, b, a], 35, 4) is None  # "c" has its minimum residency
    held = [Resident("a", 10, 1, 0, pinned=True), Resident("b", 20, 2, 0, num_requests=1)]
    assert victims(held, 1, 9) is None
    assert RouterRules().resident_s(0.1) == 1 and RouterRules().resident_s(3) == 12
    assert RouterRules(min_resident_s=0).resident_s(3) == 0


def registry(start: Callable[..., Awaitable[Any]], names: str = "abc", **rules: Any) -> ModelRegistry:
    """A registry of models of 10 bytes each, of which two fit."""
    found = ModelRegistry(start, RouterRules(**({"most_bytes": 25, "min_resident_s": 0.0} | rules)))
    for name in names:
        found.add(ModelOptions(name, "made up", residency=ON_DEMAND)).weights_bytes = 10
    return found


async def test_concurrent_first_requests_load_once_and_the_oldest_leaves() -> None:
    started: list[str] = []

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        started.append(name)
        await asyncio.sleep(0)
        return MadeUpEngine(options)

    models = registry(start)
    a, b, c = models

    async def use(model: Any) -> None:
        async with models.using(model):
            await asyncio.sleep(0)

    await asyncio.gather(*(use(a) for _ in range(50)))
    await use(b)
    async with models.using(a):
        await use(c)
        assert (started, [one.state for one in models]) == (["a", "b", "c"], ["ready", "asleep", "ready"])
        async with models.using(c):
            waiting = asyncio.create_task(use(b))
            await asyncio.sleep(0.05)
            assert b.num_waiting == 1 and b.state == "asleep"  # both others serve
        await waiting
    assert [one.state for one in models] == ["ready", "ready", "asleep"]
    assert b.comings == {"load": 1, "wake": 1} and c.goings == {"memory": 1}
    await models.stop()


async def test_a_failed_loading_is_the_error_of_all_that_wait_and_a_slow_one_ends_in_time() -> None:
    gate = asyncio.Event()

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        await gate.wait()
        raise LoadFailed("CheckpointError", "no weights")

    models = registry(start, "a", load_timeout_s=0.05)
    (a,) = models
    with pytest.raises(ApiError, match=r"still after 0\.05 s") as slow:
        await models.until_serving(a)
    assert slow.value.status == 503 and slow.value.headers["retry-after"]
    models.rules = RouterRules()
    waiting = [asyncio.create_task(models.until_serving(a)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(error) for error in errors} == {"the model a cannot be loaded: no weights"} and a.state == "failed"
    await models.stop()


async def test_keep_alive_memory_that_is_short_and_an_engine_that_ends() -> None:
    short = ["b"]

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        if name in short:
            short.remove(name)
            raise LoadFailed("NotEnoughMemory", "too little")
        return MadeUpEngine(options)

    models = registry(start, "ab", most_bytes=None)
    a, b = models
    async with models.using(a):
        pass
    async with models.using(b, 0.0):
        assert a.state == "asleep" and a.goings == {"memory": 1}
    await eventually(lambda: b.state == "unloaded")
    assert b.goings == {"keep_alive": 1} and models.is_ready
    async with models.using(a):
        assert isinstance(a.process, MadeUpEngine)
        a.process.ended.set()
    await eventually(lambda: a.state == "unloaded")
    async with models.using(a):
        assert a.state == "ready"
    await models.stop()


class SlowSleeper(MadeUpEngine):
    """Falls asleep once `may_sleep` is set."""

    may_sleep = asyncio.Event()

    async def call(self, method: str, **arguments: Any) -> Any:
        if method == "sleep":
            await self.may_sleep.wait()
        return await super().call(method, **arguments)


async def slow_sleeper(reference: str, options: dict[str, Any], name: str) -> Any:
    return SlowSleeper(options)


async def test_a_trim_looks_again_after_each_model_and_waits_for_no_other_change() -> None:
    for meanwhile in ("used", "unloaded"):
        SlowSleeper.may_sleep = asyncio.Event()
        models = registry(slow_sleeper, most_bytes=30)
        a, b, c = models
        for one in models:
            async with models.using(one):
                pass
        for one in models:
            one.weights_bytes = 20
        async with models.using(c):
            pass
        await eventually(lambda a=a: a.state == "asleep")  # and b would be next
        if meanwhile == "unloaded":
            await models.unload(b)
        asyncio.get_running_loop().call_later(0.02, SlowSleeper.may_sleep.set)
        async with asyncio.timeout(30), models.using(b):
            await eventually(lambda a=a: not a.changing.locked())
            await asyncio.sleep(0.01)
            assert (a.state, b.state) == ("asleep", "ready") and b.process is not None and b.process.is_alive
        await models.stop()


async def test_a_request_that_leaves_while_its_model_waits_for_room_changes_nothing() -> None:
    models = registry(slow_sleeper, "ab", most_bytes=15)
    SlowSleeper.may_sleep = asyncio.Event()
    SlowSleeper.may_sleep.set()
    a, b = models
    async with models.using(a):
        for _ in range(2):
            leaving = asyncio.create_task(models.until_serving(b))
            await asyncio.sleep(0.03)
            assert b.num_waiting == 1
            leaving.cancel()
            await eventually(lambda: b.coming is not None and b.coming.done())
            assert (b.state, b.error, b.num_waiting) == ("unloaded", None, 0)
        operator = asyncio.create_task(models.wake_up(b))
        await asyncio.sleep(0.03)
        assert b.num_waiting == 1 and not operator.done()
    await operator
    assert (a.state, b.state) == ("asleep", "ready")
    await models.stop()


async def test_a_keep_alive_ends_no_model_that_has_got_a_request_and_each_that_has_none() -> None:
    models = registry(slow_sleeper, "")
    a = models.add(ModelOptions("a", "made up", residency=Residency(0.0, pinned=False, preload=False)))
    for turns in range(6):
        async with models.using(a):
            pass
        for _ in range(turns):  # around the timer and the unloading
            await asyncio.sleep(0)
        async with models.using(a):
            await asyncio.sleep(0.005)
            assert a.process is not None and a.process.is_alive
    await eventually(lambda: a.state == "unloaded")
    leaving = asyncio.create_task(models.until_serving(a))
    while a.state != "ready":
        await asyncio.sleep(0)
    leaving.cancel()  # in the turn in which the loading ends
    await eventually(lambda: a.state == "unloaded")
    b = models.add(ModelOptions("b", "made up", residency=ON_DEMAND))
    async with models.using(b, 300.0):
        await models.release(b)
        assert b.state == "ready"
    await eventually(lambda: b.state == "unloaded")
    async with models.using(b):
        pass
    assert b.state == "ready" and b.expires_at == math.inf  # by its own settings
    await models.stop()


def test_weights_before_a_model_was_loaded_are_those_of_all_parts_and_of_one_format(tmp_path: Path) -> None:
    for name, size in (("a-00001-of-00002.gguf", 1), ("a-00002-of-00002.gguf", 2), ("b-00001-of-00002.gguf", 4), ("c.gguf", 8)):
        (tmp_path / name).write_bytes(bytes(size))
    for name, size in (("model.safetensors", 16), ("pytorch_model.bin", 32)):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_bytes(bytes(size))
    names = ("a-00001-of-00002.gguf", "c.gguf", "d", "none")
    models = [ServedModel(ModelOptions(name, str(tmp_path / name), residency=ON_DEMAND)) for name in names]
    assert [one.weights_bytes for one in models] == [3, 8, 16, 0]

"""Models that come for requests and leave for others: the decision, and the router with made-up engines."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_rig import INFO, MadeUpEngine, eventually

from pagetide.server import takers
from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import LoadFailed, RequestFailed
from pagetide.server.errors import ApiError
from pagetide.server.models import ModelRegistry, ServedModel
from pagetide.server.residency import Residency, Resident, RouterRules, Taker, victims

ON_DEMAND = Residency(keep_alive_s=-1, pinned=False, preload=False)


def test_the_least_recently_used_leave_and_none_without_need() -> None:
    a, b, c = Resident("a", 10, 1, 0), Resident("b", 20, 2, 0), Resident("c", 40, 3, 5)
    assert victims([c, b, a], 0, 9) == [] and victims([c, b, a], 10, 9) == ["a"]
    assert victims([c, b, a], 15, 9) == ["b"]  # "a" goes for nothing
    assert victims([c, b, a], 35, 9) == ["c"] and victims([c, b, a], 45, 9) == ["a", "c"]
    assert victims([c, b, a], 35, 4) is None  # "c" has its minimum residency
    held = [
        Resident("a", 10, 1, 0, pinned=True),
        Resident("b", 20, 2, 4, num_requests=1),
        Resident("c", 5, 3, 2, num_requests=2),
    ]
    assert victims(held, 1, 9) is None and victims(held, 26, 9, busy=True) is None
    assert victims(held, 1, 9, busy=True) == ["c"] and victims(held, 10, 9, busy=True) == ["b"]
    assert victims([*held, a], 12, 9, busy=True) == ["a", "c"] and victims(held, 1, 3, busy=True) == ["c"]
    assert RouterRules().resident_s(0.1) == 1 and RouterRules().resident_s(3) == 12
    assert RouterRules(min_resident_s=0).resident_s(3) == 0
    assert [RouterRules().waits_s(seconds) for seconds in (0.0, 2.5, 2.6)] == [2.5, 2.5, 30.0]


def test_idle_weights_yield_to_requests_that_lose_more_than_they_save() -> None:
    idle = Resident("a", 10, last_used=5.0, stays_until=0, exchange_s=2.0)
    assert [idle.value(now) for now in (6.0, 9.0)] == [2.0, 0.5] and idle.value(5.0) > 1e3
    assert [idle.yields_to(Taker("b", 1), now) for now in (6.0, 7.0, 7.1)] == [False, False, True]
    assert [idle.yields_to(Taker("b", number), 6.0) for number in (2, 3)] == [False, True]
    kept = replace(idle, is_kept=True)
    assert not kept.yields_to(Taker("b", 99), 99.0)
    assert kept.yields_to(Taker("a reservation"), 5.0) and idle.yields_to(Taker("a reservation"), 5.0)


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


@pytest.mark.parametrize("most_bytes", [15, None])  # the server's own bound, or what the device has
async def test_a_crashed_model_that_finds_no_room_lets_others_look_before_and_comes_back(
    most_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagetide.server.models.FIRST_RESTART_S", 0.01)
    started: list[str] = []

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        started.append(name)
        if any(one.state == "ready" for one in models):
            raise LoadFailed("NotEnoughMemory", "the device is full")
        return MadeUpEngine(options)

    models = registry(start, "ab", most_bytes=most_bytes, patience_s=0.1)
    a, b = models
    preloaded = models.add(ModelOptions("p", "made up", residency=Residency(-1, pinned=False, preload=True)))
    preloaded.weights_bytes, preloaded.restart_s = 10, 0.01
    async with asyncio.timeout(30):
        await models.loaded(preloaded)
        assert preloaded.process is not None
        preloaded.process.ended.set()
        await eventually(lambda: preloaded.num_restarts == 1)
        async with models.using(a):
            await asyncio.sleep(0.3)
            assert (preloaded.state, a.state) == ("loading", "ready")
            assert started.count("p") <= 2, "its engine is not started again and again where there is no room"
            await models.until_serving(b)  # it is busy models that make way for its request
            assert a.state == "asleep"
        await eventually(lambda: preloaded.state == "ready")
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


async def test_preloaded_models_that_exceed_the_memory_together_are_an_error_and_wait_for_none() -> None:
    gate = asyncio.Event()

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        await gate.wait()
        return MadeUpEngine(options)

    for pinned in (True, False):
        models = registry(start, "")
        a, b, c = (models.add(ModelOptions(name, "made up", residency=Residency(-1, pinned, True))) for name in "abc")
        for one in models:
            one.weights_bytes = 10
        await asyncio.sleep(0.05)
        gate.set()
        await eventually(lambda a=a, b=b: a.state == b.state == "ready")
        await eventually(lambda c=c: c.state == "failed")
        assert "10 bytes, those of pinned and preloaded models 20 bytes, and all may take 25 bytes" in str(c.error)
        assert not models.is_ready and c.is_missing
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


async def test_a_model_that_finds_no_memory_waits_for_others_and_a_refused_wake_sleeps_on() -> None:
    free, started = 2, list[str]()

    class Tight(MadeUpEngine):
        async def call(self, method: str, **arguments: Any) -> Any:
            nonlocal free
            if method == "wake_up" and not free:
                raise RequestFailed("memory", "too little")
            free += {"sleep": 1, "wake_up": -1}.get(method, 0)
            return await super().call(method, **arguments)

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        nonlocal free
        if not free:
            raise LoadFailed("NotEnoughMemory", "too little")
        free -= 1
        started.append(name)
        return Tight(options)

    models = registry(start, most_bytes=None)
    a, b, c = models

    async def use(model: Any) -> None:
        async with models.using(model):
            pass

    async with models.using(a), models.using(b):
        loading = asyncio.create_task(use(c))
        await asyncio.sleep(0.05)
        assert (c.num_waiting, c.state, c.holds, free) == (1, "unloaded", False, 0)
    await loading
    left = a if a.state == "asleep" else b
    kept = b if left is a else a
    assert (c.state, kept.state) == ("ready", "ready") and left.departure is not None and left.departure.taker == "c"
    process = left.process
    async with models.using(c), models.using(kept):
        waking = asyncio.create_task(use(left))
        await asyncio.sleep(0.05)
        assert (left.num_waiting, left.state, left.process) == (1, "asleep", process)
    await waking
    assert (left.state, left.process, sorted(started)) == ("ready", process, ["a", "b", "c"])
    for one in models:
        await models.sleep(one, 0.0)
    free = 0  # another program's
    with pytest.raises(ApiError, match="cannot wake up: too little") as refused:
        await models.until_serving(a)
    assert refused.value.status == 503 and a.state == "asleep" and a.error is None
    free = 1
    await use(a)
    await models.stop()


class Suspending(MadeUpEngine):
    """Notes how it falls asleep."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.sleeps: list[bool] = []
        self.wakes = 0
        self.refuses = False

    async def call(self, method: str, **arguments: Any) -> Any:
        if method == "sleep":
            self.sleeps.append(arguments.get("suspends", False))
        elif method == "wake_up":
            if self.refuses:
                raise RequestFailed("memory", "too little")
            self.wakes += 1
        return await super().call(method, **arguments)


async def suspending(reference: str, options: dict[str, Any], name: str) -> Any:
    return Suspending(options)


async def test_a_busy_model_makes_way_in_time_and_returns_when_the_other_is_idle_or_its_requests_have_waited() -> None:
    models = registry(suspending, "abc", patience_s=0.1, return_s=0.3)
    a, b, c = models
    async with models.using(a), models.using(b):
        asked = asyncio.create_task(models.until_serving(c))
        await asyncio.sleep(0.05)
        assert not asked.done() and c.state == "unloaded"
        await asked
        assert (a.state, b.state, a.num_running) == ("asleep", "ready", 1)  # it came first
        assert a.goings == {"turn": 1} and a.departure is not None and "1, go on when it returns" in str(a.departure)
        await eventually(lambda: a.state == "ready")  # c is idle
        assert c.state == "asleep" and c.goings == {"memory": 1}
        async with models.using(c):
            left, stays = (a, b) if a.state == "asleep" else (b, a)
            assert (left.state, stays.state) == ("asleep", "ready")
            since = left.returns_at
            await eventually(lambda: left.state == "ready")
            assert since is not None and models._clock() >= since and left.returns_at is None
            assert sorted(one.state for one in models) == ["asleep", "ready", "ready"]
        await eventually(lambda: all(one.can_serve for one in (a, b)))
    for one in models:
        assert isinstance(one.process, Suspending) and one.process.sleeps.count(True) == one.goings["turn"]
    await models.stop()


async def test_a_suspended_model_whose_requests_leave_or_whose_engine_is_killed_or_refused_holds_up_no_other() -> None:
    for fault in ("left", "left for good", "killed", "refused"):
        models = registry(suspending, "ab", most_bytes=15, patience_s=0.0, return_s=1e6)
        a, b = models
        held, others = models.using(a, 0.0 if fault == "left for good" else None), models.using(b)
        await held.__aenter__()
        asked = asyncio.create_task(others.__aenter__())
        await asyncio.sleep(0)
        if fault == "refused":
            models.rules = replace(models.rules, load_timeout_s=0.05)  # of a's requests alone: b's wait already
        await asked
        assert a.state == "asleep" and isinstance(a.process, Suspending)
        engine = a.process
        if fault in ("left", "left for good"):
            await held.__aexit__(None, None, None)
            await eventually(lambda a=a: a.coming is not None and a.coming.done())
            assert a.returns_at is None, "later requests wait for others to fall idle"
            await eventually(lambda a=a, fault=fault: a.state == ("asleep" if fault == "left" else "unloaded"))
            assert (engine.wakes, b.state) == (0, "ready")
        elif fault == "killed":
            engine.ended.set()
            await held.__aexit__(None, None, None)
            await eventually(lambda a=a: a.coming is not None and a.coming.done())
            assert (b.state, a.is_used) == ("ready", False)
        else:
            engine.refuses = True
        await others.__aexit__(None, None, None)
        if fault == "refused":
            await eventually(lambda a=a: a.state == "unloaded")
            assert a.process is None  # its requests have failed with it
            await held.__aexit__(None, None, None)
        models.rules = replace(models.rules, load_timeout_s=300.0)
        await models.until_serving(a)
        assert a.state == "ready"
        await models.stop()


async def test_a_suspended_model_for_which_idle_ones_are_too_small_leaves_the_loop_to_others() -> None:
    models = registry(suspending, most_bytes=30, patience_s=0.0, return_s=1e5)
    models._clock = itertools.count().__next__  # a second for each look
    a, b, c = models
    a.weights_bytes = b.weights_bytes = 20
    async with models.using(a), models.using(b):
        async with models.using(c):
            pass
        await asyncio.sleep(0.05)
        assert [one.state for one in models] == ["asleep", "ready", "ready"]
    await models.stop()


async def test_what_an_operator_cuts_off_loses_no_request_and_no_memory() -> None:
    """The unloading of a model for which another one is being suspended, and the sleep of a suspended one that wakes up."""

    class Slow(Suspending):
        async def call(self, method: str, **arguments: Any) -> Any:
            if method in gates:
                await gates[method].wait()
            return await super().call(method, **arguments)

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        return Slow(options)

    gates = {"sleep": asyncio.Event(), "wake_up": asyncio.Event()}
    models = registry(start, "ab", most_bytes=15, patience_s=0.0, return_s=0.0)
    a, b = models
    async with models.using(a):
        asked = asyncio.create_task(models.until_serving(b))
        await eventually(lambda: a.state == "asleep")
        unloading = asyncio.create_task(models.unload(b))
        await asyncio.sleep(0)
        gates["sleep"].set()
        await asyncio.gather(unloading, asked, return_exceptions=True)
        await eventually(lambda: a.state == "waking")
        sleeping = asyncio.create_task(models.sleep(a, 0.0))
        await asyncio.sleep(0)
        gates["wake_up"].set()
        await sleeping
        assert (a.state, a.holds) == ("asleep", False)
    assert isinstance(a.process, Slow)
    for level in (2, 1):  # deeper than before, and not so
        await models.sleep(a, 0.0, level)
        assert (a.level, a.process.sleeps) == (2, [True, False, False])
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


async def test_a_sleep_that_fails_is_seen_though_its_taker_has_left_meanwhile() -> None:
    SlowSleeper.may_sleep = asyncio.Event()
    models = registry(slow_sleeper, "ab", most_bytes=15)
    a, b = models
    await models.until_serving(a)
    process = a.process
    assert isinstance(process, SlowSleeper)
    process.error = RequestFailed("invalid", "it does not sleep now")
    taker = asyncio.create_task(models.until_serving(b))
    await eventually(lambda: a.state == "asleep")
    taker.cancel()
    unloading = asyncio.create_task(models.unload(b))
    await asyncio.sleep(0.01)
    SlowSleeper.may_sleep.set()
    await unloading
    assert (a.state, a.holds, process.is_alive) == ("unloaded", False, False)
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


async def test_an_unloading_while_a_model_wakes_up_leaves_no_engine_behind() -> None:
    class SlowToWake(MadeUpEngine):
        async def call(self, method: str, **arguments: Any) -> Any:
            if method == "wake_up":
                await may_wake.wait()
            return await super().call(method, **arguments)

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        engines.append(SlowToWake(options))
        return engines[-1]

    for turns in range(6):
        may_wake, engines = asyncio.Event(), list[SlowToWake]()
        models = registry(start, "a")
        (a,) = models
        await models.until_serving(a)
        await models.sleep(a, 0.0)
        waking = [asyncio.create_task(models.until_serving(a))]
        await eventually(lambda a=a: a.state == "waking")
        waking.append(asyncio.create_task(models.wake_up(a)))
        await asyncio.sleep(0)
        unloading = asyncio.create_task(models.unload(a))
        for _ in range(turns):
            await asyncio.sleep(0)
        waking.append(asyncio.create_task(models.until_serving(a)))
        may_wake.set()
        await asyncio.gather(unloading, *waking, return_exceptions=True)
        await models.unload(a)
        assert [one.is_alive for one in engines] == [False] * len(engines) and not a.holds
        await models.stop()


async def test_a_removed_model_is_not_loaded_again_and_has_its_memory_until_its_requests_have_ended() -> None:
    may_end = asyncio.Event()

    class SlowToEnd(MadeUpEngine):
        async def stop(self, drain_s: float = 0.0) -> None:
            await may_end.wait()
            await super().stop()

        kill = stop

    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        return SlowToEnd(options)

    models = registry(start, "ab", most_bytes=15)
    a, b = models
    await models.until_serving(a)
    removing = asyncio.create_task(models.remove("a", 5.0))
    await asyncio.sleep(0)
    operator = asyncio.create_task(models.wake_up(a))
    waiting = asyncio.create_task(models.until_serving(b))
    await asyncio.sleep(0.05)
    assert (b.state, b.holds, b.num_waiting) == ("unloaded", False, 1)
    may_end.set()
    await removing
    await waiting
    with pytest.raises(ApiError, match="a was unloaded"):
        await operator
    assert b.state == "ready" and a.process is None
    await models.stop()


async def test_a_loading_that_fails_as_no_one_foresaw_is_an_error_and_holds_nothing() -> None:
    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        raise OverflowError("an option cannot be sent")

    models = registry(start, "a")
    (a,) = models
    with pytest.raises(ApiError, match="cannot be loaded: an option cannot be sent"):
        await models.until_serving(a)
    assert (a.state, a.holds) == ("failed", False)
    b = models.add(ModelOptions("b", "made up"))
    async with asyncio.timeout(30):
        with pytest.raises(ApiError, match="b cannot be loaded: an option cannot be sent"):
            await models.loaded(b)
    await models.stop()


async def test_none_leaves_for_a_model_that_no_request_waits_for_any_more() -> None:
    SlowSleeper.may_sleep = asyncio.Event()
    SlowSleeper.may_sleep.set()
    models = registry(slow_sleeper, "ab", most_bytes=15)
    a, b = models
    await models.until_serving(a)
    async with models._room:  # of another model
        leaving = asyncio.create_task(models.until_serving(b))
        await eventually(lambda: b.coming is not None)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await eventually(lambda: b.coming is not None and b.coming.done())
    assert (a.state, b.state, b.num_waiting) == ("ready", "unloaded", 0)
    await models.stop()


async def test_what_waits_for_a_loading_is_told_that_it_was_cut_off() -> None:
    async def start(reference: str, options: dict[str, Any], name: str) -> Any:
        await asyncio.Event().wait()

    models = registry(start, "")
    a = models.add(ModelOptions("a", "made up"))
    loading = asyncio.create_task(models.loaded(a))
    await eventually(lambda: a.holds)
    await models.unload(a)
    with pytest.raises(ApiError, match="a was unloaded before it was ready"):
        await loading
    await models.stop()


async def test_an_operator_waits_for_room_no_longer_than_a_request() -> None:
    models = registry(slow_sleeper, "abc", most_bytes=15, load_timeout_s=0.05)
    SlowSleeper.may_sleep = asyncio.Event()
    SlowSleeper.may_sleep.set()
    a, b, c = models
    async with models.using(a):
        with pytest.raises(ApiError, match=r"b is unloaded still after 0\.05 s"):
            await models.wake_up(b)
        await eventually(lambda: not models._room.locked())
    await models.until_serving(c)
    await models.stop()


async def test_idle_models_make_way_for_kv_and_for_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned ones and those of an endless keep_alive for no KV, and no other one before the first is of use. Leases of the same
    names on another device are another server's.
    """
    told: dict[tuple[str, str], Taker] = {}
    monkeypatch.setattr(takers, "waiting", lambda: dict(told))
    monkeypatch.setattr(takers, "LOOK_S", 0.01)
    models = ModelRegistry(suspending, RouterRules(min_resident_s=0.0))
    an_hour = Residency(3600, False, False)
    ways = {"a": an_hour, "b": an_hour, "c": ON_DEMAND, "d": Residency(-1, True, False)}
    for name, residency in ways.items():
        models.add(ModelOptions(name, "made up", residency=residency)).weights_bytes = 10
    a, *_ = models
    for one in models:
        async with models.using(one):
            assert isinstance(one.process, Suspending)
            one.process.info = msgspec.structs.replace(INFO, leases=((one.name, "card"),))
    making = asyncio.create_task(models.make_way())
    told |= {(name, "other card"): Taker("the reservation there") for name in "abcd"}
    told |= {(name, "card"): Taker("big", 2) for name in "abcd"}
    await eventually(lambda: a.state == "asleep")
    await asyncio.sleep(0.1)
    assert [one.state for one in models] == ["asleep", "ready", "ready", "ready"]
    assert a.departure is not None and (a.departure.victim, a.departure.taker) == ("a", "big")
    assert a.departure.value is not None and "s of waiting a second" in str(a.departure)
    monkeypatch.setattr(takers, "GRANTED_S", 0.0)
    told |= {(name, "card"): Taker("the reservation r") for name in "abcd"}
    await eventually(lambda: [one.state for one in models] == ["asleep", "asleep", "asleep", "ready"])
    making.cancel()
    await models.stop()


class SlowToSuspend(Suspending):
    """Suspends its requests once `may_sleep` is set."""

    may_sleep = asyncio.Event()

    async def call(self, method: str, **arguments: Any) -> Any:
        if arguments.get("suspends"):
            await self.may_sleep.wait()
        return await super().call(method, **arguments)


async def test_a_sleep_that_comes_while_a_model_is_suspended_waits_for_its_requests() -> None:
    async def slow_to_suspend(reference: str, options: dict[str, Any], name: str) -> Any:
        return SlowToSuspend(options)

    for asks in (False, True):
        SlowToSuspend.may_sleep = asyncio.Event()
        models = registry(slow_to_suspend, "ab", most_bytes=15, patience_s=0.0, return_s=1e6)
        a, b = models
        async with models.using(a):
            taker = asyncio.create_task(models.until_serving(b))
            await eventually(lambda a=a: a.state == "asleep")
            another = [asyncio.create_task(models.until_serving(a))] if asks else []  # begins to bring it back
            await asyncio.sleep(0.01)
            asleep = asyncio.create_task(models.sleep(a, None, 2))
            await asyncio.sleep(0.01)
            SlowToSuspend.may_sleep.set()
            await taker
            await eventually(lambda a=a: isinstance(a.process, Suspending) and a.process.wakes == 1)  # to go on
            await asyncio.gather(asleep, *another)
            assert isinstance(a.process, Suspending)
            assert (a.state, a.level, a.process.sleeps, a.returns_at) == ("asleep", 2, [True, False], None)
        await models.stop()


async def test_the_requests_of_a_suspended_model_end_within_the_drain_of_a_sleep() -> None:
    for drain_s in (0.0, 60.0, None):
        models = registry(suspending, "ab", most_bytes=15, patience_s=0.0, return_s=1e6)
        a, b = models
        async with models.using(a), models.using(b):
            assert isinstance(a.process, Suspending) and (a.state, a.process.sleeps) == ("asleep", [True])
            await models.sleep(a, drain_s, 2)  # with a drain it returns at once, though it was to wait for longer
            assert (a.state, a.level, a.process.sleeps, a.returns_at) == ("asleep", 2, [True, False], None)
            assert bool(a.process.wakes) == (drain_s != 0.0)
        await models.until_serving(a)
        await models.stop()

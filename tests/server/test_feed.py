"""The feed of the page over real sockets, with made-up engines that count their calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from page_rig import EventReader, PageServer, eventually, looking

from pagetide.server import feed as feed_module
from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import RequestFailed
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey, ApiKeys, digest_of


async def until_state(reader: EventReader, state: int) -> list[Any]:
    """Frames up to the one that tells of `state`, which is the last."""
    frames = [await reader.frame()]
    while frames[-1]["state"] != state:
        frames.append(await reader.frame())
    return frames


async def test_ten_viewers_cost_one_snapshot_and_see_the_same() -> None:
    async with PageServer() as server, server.client() as client:
        engine = server.engine

        async def look(done: asyncio.Semaphore) -> list[Any]:
            async with looking(client) as reader:
                assert await reader.next("models") == [{"name": "one", "state": "ready"}]
                frames = [await reader.frame()]
                done.release()
                return frames + await until_state(reader, 20)

        began = asyncio.Semaphore(0)
        viewers = [asyncio.create_task(look(began)) for _ in range(10)]
        for _ in viewers:
            await began.acquire()
        for state in range(1, 21):
            engine.state = state
            before = len(engine.calls)
            await eventually(lambda before=before: len(engine.calls) > before)
        found = await asyncio.gather(*viewers)
        assert all(frames[0]["full"] for frames in found)
        numbers = {frame["seq"] for frames in found for frame in frames}
        assert len(engine.calls) <= max(numbers) + 2 and set(engine.calls) == {"frame"}
        assert sum(map(len, found)) >= 10 * 20
        for frames in found:  # each has every change, in order
            assert list(dict.fromkeys(frame["state"] for frame in frames if frame["state"])) == list(range(1, 21))


async def test_nothing_is_asked_while_nobody_looks() -> None:
    async with PageServer(("one", "two")) as server, server.client() as client:
        assert (await client.get("/health")).status_code == 200
        tasks = asyncio.all_tasks()
        assert server.engine.calls == []
        for number in (1, 2):  # and a viewer that comes back begins with a whole frame
            async with looking(client) as reader:
                assert (await reader.frame("two"))["full"] and server.engines["two"][0].arguments[-1]
                assert sum(one["full"] for one in server.engines["two"][0].arguments) == number
            await eventually(lambda: not server.server.page.feed.viewers)
            await eventually(lambda: asyncio.all_tasks() <= tasks)


async def test_what_is_unchanged_is_sent_once_a_second_and_a_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "UNCHANGED_S", 1e9)
    async with PageServer() as server, server.client() as client, looking(client) as reader:
        first = await reader.frame()
        asked = len(server.engine.calls)
        await eventually(lambda: len(server.engine.calls) > asked + 3)  # all unchanged
        server.engine.state = 7
        same, changed = await until_state(reader, 7)  # the first frame that says nothing new is not known to
        assert same["seq"] == first["seq"] + 1 and changed["seq"] > first["seq"] + 3
        monkeypatch.setattr(feed_module, "UNCHANGED_S", 0.0)
        assert [(await reader.frame())["state"] for _ in range(3)] == [None] * 3


async def test_a_slow_viewer_skips_frames_and_then_gets_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "BEHIND_S", 0.0)
    async with PageServer() as server, server.client() as client, looking(client, rate=20) as quick:
        engine = server.engine
        engine.filling = "x" * 300_000
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
        writer.write(b"GET /page/events?rate=20 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await eventually(lambda: len(list(server.server.page.feed.viewers)) == 2)
        slow = list(server.server.page.feed.viewers)[1]
        while not slow.has_skipped:  # its socket is full, and then what waits for it
            engine.state += 1
            assert (await until_state(quick, engine.state))[-1]["state"] == engine.state
        assert slow._num_bytes <= feed_module.MOST_UNSENT_BYTES
        asked = len(engine.arguments)
        engine.state += 1
        await until_state(quick, engine.state)
        assert not any(one["full"] for one in engine.arguments[asked:])  # not while it does not read
        engine.filling = ""
        received = b""
        while f'"full": true, "state": {engine.state}'.encode() not in received[-10_000:]:
            received += await reader.read(1 << 16)
        writer.close()
        await eventually(lambda: len(list(server.server.page.feed.viewers)) == 1)


async def test_engines_that_end_sleep_and_go() -> None:
    states: list[Any] = []
    frames: dict[str, list[Any]] = {"one": [], "two": [], "three": []}

    async def collect(reader: EventReader) -> None:
        while True:
            data = await reader.next()
            if isinstance(data, list):
                states.append({one["name"]: one["state"] for one in data})
            else:
                frames[data["model"]].append(data["frame"])

    async with PageServer(("one", "two")) as server, server.client() as client, looking(client) as reader:
        collecting = asyncio.create_task(collect(reader))
        await eventually(lambda: bool(frames["one"] and frames["two"]))
        assert states[0] == {"one": "ready", "two": "ready"}
        server.engine.ended.set()
        await eventually(lambda: {"one": "loading", "two": "ready"} in states)
        await eventually(lambda: len([frame for frame in frames["one"] if frame["full"]]) == 2)
        assert len(server.engines["one"]) == 2
        two, slept = server.models.get("two"), len(frames["two"])
        await server.models.sleep(two, 0.0)
        await eventually(lambda: {"one": "ready", "two": "asleep"} in states)
        await server.models.wake_up(two)
        await eventually(lambda: any(frame["full"] for frame in frames["two"][slept:]))
        await server.models.remove("two")
        await eventually(lambda: {"one": "ready"} in states)
        server.models.add(ModelOptions("three", "made up"))
        await eventually(lambda: bool(frames["three"]) and states[-1] == {"one": "ready", "three": "ready"})
        assert all(each[0]["full"] for each in frames.values())
        collecting.cancel()


async def test_a_call_that_fails_makes_the_next_frame_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed_module, "UNCHANGED_S", 0.01)
    async with PageServer() as server, server.client() as client, looking(client) as reader:
        assert (await reader.frame())["full"] and not (await reader.frame())["full"]
        server.engine.error = RequestFailed("internal", "planted")
        asked = len(server.engine.calls)
        await eventually(lambda: len(server.engine.calls) > asked + 3)
        server.engine.error = None
        server.engine.state = 5
        (frame,) = [one for one in await until_state(reader, 5) if one["state"] == 5]
        assert frame["full"]
    assert sum("gives no frames: RequestFailed: planted" in one.message for one in caplog.records) == 1


async def test_costly_frames_come_less_often_by_what_the_engine_says() -> None:
    async with PageServer() as server, server.client() as client, looking(client, rate=20) as reader:
        await reader.frame()
        (followed,) = server.server.page.feed._engines.values()
        for cost_s, pause_s in ((0.0, 0.05), (0.0019, 0.05), (0.02, 0.5), (1.0, 5.0)):
            followed._cost_s = cost_s
            assert followed.pause_s == pytest.approx(pause_s)
    async with PageServer() as server, server.client() as client:
        server.engine.cost_s = 1000.0
        async with looking(client, rate=20) as reader:
            await reader.frame()
            (followed,) = server.server.page.feed._engines.values()
            await eventually(lambda: followed.pause_s == feed_module.LONGEST_S)
            assert followed._cost_s == pytest.approx(1000.0 * feed_module.COST_WEIGHT, rel=0.01)


async def test_a_viewer_of_few_frames_gets_them_joined() -> None:
    async with (
        PageServer() as server,
        server.client() as client,
        looking(client, rate=20) as quick,
        looking(client, rate=1) as slow,
    ):
        await asyncio.gather(quick.frame(), slow.frame())
        for state in range(1, 8):
            server.engine.state = state
            await until_state(quick, state)
        frames = await until_state(slow, 7)
        assert [frame["state"] for frame in frames if frame["state"]] == list(range(1, 8))


async def test_viewers_are_bounded_in_all_and_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_VIEWERS", 3)
    monkeypatch.setattr(feed_module, "MOST_VIEWERS_OF_A_KEY", 2)
    keys = ApiKeys([ApiKey(name, digest_of(f"sk-{name}-1234")) for name in ("alice", "bob")])
    async with PageServer(keys=keys) as server:
        alice = server.client(authorization="Bearer sk-alice-1234")
        bob = server.client(authorization="Bearer sk-bob-1234")
        async with alice, bob, looking(alice), looking(alice):
            refused = await alice.get("/page/events")
            assert refused.status_code == 429 and "the key alice has 2 viewers" in refused.text
            async with looking(bob) as third:
                assert third.response.status_code == 200
                assert (await bob.get("/page/events")).status_code == 503
                for rate in ("0", "21", "nan", "x"):
                    assert (await bob.get("/page/events", params={"rate": rate})).status_code == 400
            await eventually(lambda: len(list(server.server.page.feed.viewers)) == 2)
            async with looking(bob) as again:
                assert (await again.frame())["full"]


async def test_a_drain_ends_the_streams_at_once() -> None:
    async with PageServer() as server, server.client() as client, looking(client) as reader:
        await reader.frame()
        server.server.page.feed.stop()
        with pytest.raises(EOFError):
            await reader.to_the_end()
        assert (await client.get("/page/events")).status_code == 503
        with pytest.raises(ApiError), server.server.page.feed.viewer(10.0, None, lambda: True):
            pass

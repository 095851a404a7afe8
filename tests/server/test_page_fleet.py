"""The page of a fleet's front end: what its feed says of the fleet, how often the queue is asked, and what no viewer sees."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from durable_rig import FrontEnd, KeptRequests
from page_pools import MadeUpFleet
from page_rig import FAR_S, eventually, looking

from pagetide.fleet.messages import CacheChanges, FleetModel, NewRequest, Registration, Report, WorkerState
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.server import feed as feed_module
from pagetide.server.engine_client import EngineUnavailable, RequestFailed
from pagetide.server.feed import fleet_picture
from pagetide.server.keys import ApiKey, ApiKeys, digest_of

NOW = 1_795_465_254.1234
MODEL = FleetModel(
    "demo", "/secret/models/demo", "demo", "identity", "float32", "layout", 1024, 256, 16, 1, [0], None, {}, "0"
)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * FAR_S))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a fleet that follow each other at once."""
    monkeypatch.setattr(feed_module, "FLEET_S", 0.01)


def front_end(fleet: MadeUpFleet, keys: ApiKeys | None = None) -> FrontEnd:
    server = FrontEnd(KeptRequests(), keys=keys)
    server.engine.answers["status"] = fleet.status
    return server


# ---- what an event says


def test_a_snapshot_is_what_is_named_and_nothing_else() -> None:
    fleet = MadeUpFleet("demo", workers=2, fronts=1)
    fleet.set_worker("worker-0", blocks={"usable": 200, "limit": 320, "free": 60, "live": 90}, silent_s=3.25)
    fleet.set_worker("worker-1", state="starting")
    fleet.set_worker("worker-2", state="draining", blocks={"usable": 8, "limit": 4, "free": 6, "live": 9})
    fleet.status["errors"] = {"worker-1": "failed: no memory\nTraceback", "worker-2": "has died", "gone": "has died"}
    fleet.status["queue"].update(waiting=5, running=6, requeued=2, failed=5, cancelled=3, hit_blocks=1, prompt_blocks=4)
    fleet.status["journal"].update(unwritten=3, fault="x" * 1000)
    known = {
        "node": "host",
        "preemptions": 1,
        "assigned": 12,
        "device": "cpu",
        "requests": 3,
        "sequences": 4,
        "max_seqs": 8,
    }
    assert fleet_picture(fleet.status, NOW) == {
        "time": 1_795_465_254.123,
        "front_ends": [("host-0-0a1b2c3d", 0)],
        "queue": {
            "waiting": 5, "running": 6, "accepted": 0, "refused": 0, "ended": 0, "failed": 2, "cancelled": 3, "requeued": 2,
            "returned": 0, "recorded_tokens": 0, "hit_blocks": 1, "prompt_blocks": 4, "workers_lost": 0,
        },
        "journal": {"unwritten": 3, "fault": "x" * 200},
        "restarts": 0,
        "workers": [
            {"name": "worker-0", "state": "ready", "epoch": 1, "silent_s": 3.25, "error": None, **known,
             "blocks": {"used": 90, "cached": 50, "free": 60, "more": 120}},
            {"name": "worker-2", "state": "draining", "epoch": 3, "silent_s": 0.05, "error": "has died", **known,
             "blocks": {"used": 2, "cached": 0, "free": 6, "more": 0}},
            {"name": "worker-1", "state": "starting", "error": "failed: no memory"},
        ],
    }  # fmt: skip


def test_a_snapshot_of_a_real_queue_names_no_request(tmp_path: Path) -> None:
    """The queue's own status has what the page takes, and nothing of requests, tenants, texts or files."""

    async def test() -> None:
        clock = iter(range(1000)).__next__
        queue = QueueServer(QueueOptions(tmp_path / "journal.sqlite"), lambda: float(clock()))
        state = WorkerState(100, 130, 40, device="cpu", stats={"blocks": {"live": 12}})
        epoch = await queue.register(Registration("worker-0", MODEL, 8, state, pid=7, node="here"))
        await queue.report(Report("worker-0", epoch, 1, state=state, cache=CacheChanges(stored=[1, 2])))
        handover = {"prompt_token_ids": [7] * 40, "sampling": {"max_new_tokens": 8}, "priority": 0}
        request = NewRequest("req-secret", handover, 2, digests=[1, 2], tenant="tenant-secret", created=1.0)
        assert (await queue.submit("front-1", [request]))[0].number is not None
        picture = fleet_picture(queue.status(), NOW)
        await queue.close()
        (worker,) = picture["workers"]
        shown = {
            name: worker[name] for name in ("name", "state", "node", "requests", "sequences", "max_seqs", "blocks")
        }
        assert shown == {
            "name": "worker-0", "state": "ready", "node": "here", "requests": 1, "sequences": 2, "max_seqs": 8,
            "blocks": {"used": 12, "cached": 48, "free": 40, "more": 30},
        }  # fmt: skip
        assert picture["front_ends"] == [("front-1", 1)]
        assert (picture["queue"]["waiting"], picture["queue"]["running"], picture["queue"]["accepted"]) == (0, 1, 1)
        assert (picture["queue"]["hit_blocks"], picture["queue"]["prompt_blocks"]) == (2, 2)
        assert "secret" not in json.dumps(picture) and str(tmp_path) not in json.dumps(picture)

    run(test)


def test_blocks_in_use_before_a_worker_has_told_its_statistics(tmp_path: Path) -> None:
    async def test() -> None:
        queue = QueueServer(QueueOptions(tmp_path / "journal.sqlite"))
        await queue.register(Registration("worker-0", MODEL, 8, WorkerState(100, 130, 40)))
        picture = fleet_picture(queue.status(), NOW)
        await queue.close()
        assert picture["workers"][0]["blocks"] == {"used": 60, "cached": 0, "free": 40, "more": 30}

    run(test)


# ---- the feed


@pytest.mark.usefixtures("often")
def test_ten_viewers_cost_one_snapshot_and_see_the_same() -> None:
    async def test() -> None:
        fleet = MadeUpFleet("kept")
        async with front_end(fleet) as server:

            async def look(done: asyncio.Semaphore) -> list[Any]:
                async with looking(server.client) as reader:
                    assert await reader.next("models") == [{"name": "kept", "state": "ready"}]
                    found = [await reader.next("fleet")]
                    done.release()
                    while found[-1]["fleet"]["queue"]["waiting"] != 7:
                        found.append(await reader.next("fleet"))
                    return found

            began = asyncio.Semaphore(0)
            viewers = [asyncio.create_task(look(began)) for _ in range(10)]
            for _ in viewers:
                await began.acquire()
            fleet.status["queue"]["waiting"] = 7
            found = await asyncio.gather(*viewers)
            assert set(server.engine.calls) == {"status"}
            seen = {one["fleet"]["time"]: one for each in found for one in each}
            assert len(seen) <= len(server.engine.calls) + 1
            assert all(one == seen[one["fleet"]["time"]] and one["model"] == "kept" for each in found for one in each)
            assert "secret" not in json.dumps(list(seen.values()))

    run(test)


@pytest.mark.usefixtures("often")
def test_nothing_is_asked_without_viewers() -> None:
    async def test() -> None:
        async with front_end(MadeUpFleet("kept")) as server:
            assert (await server.client.get("/health")).status_code == 200
            assert server.engine.calls == []
            for _ in range(2):
                async with looking(server.client) as reader:
                    await reader.next("fleet")
                await eventually(lambda: not server.server.page.feed.viewers)
                asked = len(server.engine.calls)
                assert (await server.client.get("/health")).status_code == 200
                await asyncio.sleep(0)
                assert len(server.engine.calls) == asked

    run(test)


def test_a_fleet_is_asked_about_twice_a_second() -> None:
    async def test() -> None:
        async with front_end(MadeUpFleet("kept")) as server, looking(server.client) as reader:
            times = [(await reader.next("fleet"))["fleet"]["time"] for _ in range(4)]
            assert all(late - early > 0.45 for early, late in itertools.pairwise(times))
            assert len(server.engine.calls) <= 5

    run(test)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (RequestFailed("internal", "planted"), 1),
        (KeyError("a queue of another version"), 1),
        (EngineUnavailable("the queue is being restarted"), 0),
    ],
)
def test_a_fleet_that_does_not_answer_is_said_as_null(
    caplog: pytest.LogCaptureFixture, error: Exception, lines: int
) -> None:
    async def test() -> None:
        fleet = MadeUpFleet("kept")
        async with front_end(fleet) as server, looking(server.client) as reader:
            assert (await reader.next("fleet"))["fleet"]["workers"]
            server.engine.answers["status"] = error
            while (event := await reader.next("fleet"))["fleet"] is not None:
                pass
            assert event == {"model": "kept", "fleet": None}
            assert [await reader.next("fleet") for _ in range(3)] == [event] * 3
            server.engine.answers["status"] = fleet.status
            while (await reader.next("fleet"))["fleet"] is None:
                pass

    run(test)
    assert sum("kept gives no status" in one.message for one in caplog.records) == lines


@pytest.mark.usefixtures("often")
def test_a_fleet_that_hangs_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FLEET_ANSWER_S", 0.01)

    async def hang(method: str, **arguments: Any) -> Any:
        await asyncio.Event().wait()

    async def test() -> None:
        async with front_end(MadeUpFleet("kept")) as server:
            server.engine.call = hang  # type: ignore[method-assign]
            async with looking(server.client) as reader:
                assert await reader.next("fleet") == {"model": "kept", "fleet": None}

    run(test)


def test_only_the_newest_snapshot_waits_for_a_viewer() -> None:
    async def test() -> None:
        async with front_end(MadeUpFleet("kept")) as server:
            with server.server.page.feed.viewer(20.0, None, lambda: True) as viewer:
                await eventually(lambda: len(server.engine.calls) >= 3)  # unread
                read = await anext(viewer.events())
                assert read.count(b"event: models\n") == read.count(b"event: fleet\n") == 1

    run(test)


@pytest.mark.usefixtures("often")
def test_a_fleet_is_seen_with_a_key_of_the_server() -> None:
    keys = ApiKeys([ApiKey("alice", digest_of("sk-alice-1234")), ApiKey("ops", digest_of("sk-ops-123456"), admin=True)])

    async def test() -> None:
        async with front_end(MadeUpFleet("kept"), keys) as server:
            assert (await server.client.get("/page/events")).status_code == 401
            assert server.engine.calls == []
            seen = []
            for key in ("sk-alice-1234", "sk-ops-123456"):
                server.client.headers["Authorization"] = f"Bearer {key}"
                async with looking(server.client) as reader:
                    event = await reader.next("fleet")
                    del event["fleet"]["time"]
                    seen.append(event)
            assert seen[0] == seen[1]

    run(test)


# ---- the metrics page


def test_the_metrics_have_what_a_real_queue_says(tmp_path: Path) -> None:
    async def test() -> None:
        queue = QueueServer(QueueOptions(tmp_path / "journal.sqlite"), lambda: 7.0)
        for name, running in (("worker-0", 2), ("worker-1", 5)):
            state = WorkerState(100, 130, 40, stats=STATS | {"running": running})
            epoch = await queue.register(Registration(name, MODEL, 8, state))
            await queue.report(Report(name, epoch, 1, state=state, cache=CacheChanges(stored=[1, 2, 3])))
        handover = {"prompt_token_ids": [7] * 40, "sampling": {"max_new_tokens": 8}, "priority": 0}
        await queue.submit("front-1", [NewRequest("req-secret", handover, 2, tenant="tenant-secret")])
        status = queue.status()
        await queue.close()
        async with FrontEnd(KeptRequests()) as server:
            server.engine.answers = {name: status[name] for name in ("stats", "fleet_metrics")}
            page = (await server.client.get("/metrics")).text
        lines = page.splitlines()
        for line in (
            'vllm:num_requests_running{engine="worker-0",model_name="kept"} 2.0',
            'vllm:num_requests_running{engine="worker-1",model_name="kept"} 5.0',
            "pagetide_fleet_workers 2.0", "pagetide_fleet_waiting 0.0", "pagetide_fleet_running 1.0",
            "pagetide_fleet_accepted_total 1.0", "pagetide_fleet_requeued_total 0.0", "pagetide_fleet_journal_fault 0.0",
            'pagetide_fleet_worker_cached_blocks{worker="worker-1"} 3.0',
            'pagetide_fleet_worker_silent_s{worker="worker-0"} 0.0',
        ):  # fmt: skip
            assert line in lines, line
        sequences = [line for line in lines if line.startswith("pagetide_fleet_worker_sequences{")]
        assert sorted(line[-3:] for line in sequences) == ["0.0", "2.0"]
        assert "secret" not in page

    run(test)


STATS: dict[str, Any] = {
    "running": 2, "waiting": 1, "waiting_for_others": 0, "preemptions": 0, "generated_tokens": 9, "prompt_tokens": 8,
    "cached_prompt_tokens": 0, "computed_tokens": 17, "recomputed_tokens": 0, "forks": 0, "steps": 3, "block_size": 16,
    "blocks": {"usable": 9, "limit": 9, "mapped": 9, "free": 7, "live": 2, "cached": 0, "in_flight": 0, "draining": 0},
    "extents": {"mapped": 1, "total": 1}, "host_tier": None, "prefix_cache": None, "dtype": "none", "device": "cpu",
    "attention": "none", "weights_bytes": 0, "kv_bytes": 0, "memory": None, "step_tokens": {"up_to": [8], "steps": [1, 2]},
}  # fmt: skip

"""The page of a fleet's front end: what its feed says of the fleet, how often the queue is asked, and what no viewer sees."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from durable_rig import FrontEnd, KeptRequests
from page_pools import MadeUpFleet
from page_rig import ALICE, OPS, eventually, looking, two_keys

from pagetide.fleet.messages import CacheChanges, FleetModel, NewRequest, Registration, Report, WorkerState
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.server import feed as feed_module
from pagetide.server.engine_client import EngineUnavailable, RequestFailed
from pagetide.server.feed import fleet_picture
from pagetide.server.keys import ApiKeys

NOW = 1_795_465_254.1234
MODEL = FleetModel("demo", "/secret/models/demo", "demo", "identity", "float32", "layout", 1024, 256, 16, 1, [0], None, {}, "0")
HANDOVER = {"prompt_token_ids": [7] * 40, "sampling": {"max_new_tokens": 8}, "priority": 0}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a fleet that follow each other at once."""
    monkeypatch.setattr(feed_module, "FLEET_S", 0.01)


def front_end(fleet: MadeUpFleet, keys: ApiKeys | None = None) -> FrontEnd:
    server = FrontEnd(KeptRequests(), keys=keys)
    server.engine.answers["status"] = fleet.status
    return server


def test_a_snapshot_is_what_is_named_and_nothing_else() -> None:
    fleet = MadeUpFleet("demo", workers=2, fronts=1)
    fleet.set_worker("worker-0", blocks={"usable": 200, "limit": 320, "free": 60, "live": 90}, silent_s=3.25)
    fleet.set_worker("worker-1", state="starting")
    fleet.set_worker("worker-2", state="draining", blocks={"usable": 8, "limit": 4, "free": 6, "live": 9})
    fleet.status["errors"] = {"worker-1": "failed: no memory\nTraceback", "worker-2": "has died", "gone": "has died"}
    fleet.status["queue"].update(waiting=5, running=6, requeued=2, failed=5, cancelled=3, hit_blocks=1, prompt_blocks=4)
    fleet.status["journal"].update(unwritten=3, fault="x" * 1000)
    known = {"node": "host", "preemptions": 1, "assigned": 12, "device": "cpu"}
    known |= {"requests": 3, "sequences": 4, "max_seqs": 8}
    assert fleet_picture(fleet.status, NOW) == {
        "time": 1_795_465_254.123,
        "front_ends": [("host-0-0a1b2c3d", 0)],
        "queue": {
            "waiting": 5, "running": 6, "accepted": 0, "refused": 0, "ended": 0, "failed": 5, "cancelled": 3, "requeued": 2,
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


async def status_of_a_real_queue(folder: Path) -> dict[str, Any]:
    """With three workers, of which the last has told no statistics, and a request at the first."""
    queue = QueueServer(QueueOptions(folder / "journal.sqlite"), lambda: 7.0)
    for name, running, cached in (("worker-0", 2, [1, 2]), ("worker-1", 5, [3, 4, 5])):
        state = WorkerState(100, 130, 40, device="cpu", stats=STATS | {"running": running})
        epoch = await queue.register(Registration(name, MODEL, 8, state, pid=7, node="here"))
        await queue.report(Report(name, epoch, 1, state=state, cache=CacheChanges(stored=cached)))
    request = NewRequest("req-secret", HANDOVER, 2, digests=[1, 2], tenant="tenant-secret", created=1.0)
    assert (await queue.submit("front-1", [request]))[0].number is not None
    await queue.register(Registration("worker-2", MODEL, 8, WorkerState(100, 130, 40)))
    status = await queue.status()
    await queue.close()
    return status


async def test_a_snapshot_of_a_real_queue_names_no_request(tmp_path: Path) -> None:
    """The queue's own status has what the page takes, and nothing of requests, tenants, texts or files."""
    picture = fleet_picture(await status_of_a_real_queue(tmp_path), NOW)
    worker, _, without_statistics = picture["workers"]
    assert without_statistics["blocks"] == {"used": 60, "cached": 0, "free": 40, "more": 30}
    shown = {name: worker[name] for name in ("name", "state", "node", "requests", "sequences", "max_seqs", "blocks")}
    assert shown == {
        "name": "worker-0", "state": "ready", "node": "here", "requests": 1, "sequences": 2, "max_seqs": 8,
        "blocks": {"used": 2, "cached": 58, "free": 40, "more": 30},
    }  # fmt: skip
    assert picture["front_ends"] == [("front-1", 1)]
    assert (picture["queue"]["waiting"], picture["queue"]["running"], picture["queue"]["accepted"]) == (0, 1, 1)
    assert (picture["queue"]["hit_blocks"], picture["queue"]["prompt_blocks"]) == (2, 2)
    assert "secret" not in json.dumps(picture) and str(tmp_path) not in json.dumps(picture)


async def test_a_fleet_is_asked_about_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still: after each look comes a pause of half a second, which is over at once here.

    Two viewers cost one look.
    """
    pauses, sleep = [], asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0 if seconds == 0.5 else seconds)

    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=lambda: 7.0, time=time.time))
    monkeypatch.setattr(feed_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))
    async with front_end(MadeUpFleet("kept")) as server, looking(server.client) as reader, looking(server.client) as other:
        for _ in range(4):
            await asyncio.gather(reader.next("fleet"), other.next("fleet"))
        assert len(server.engine.calls) - pauses.count(0.5) in (0, 1)


@pytest.mark.usefixtures("often")
async def test_a_fleet_that_does_not_answer_is_said_as_null(caplog: pytest.LogCaptureFixture) -> None:
    fleet = MadeUpFleet("kept")
    async with front_end(fleet) as server, looking(server.client) as reader:
        errors = EngineUnavailable("no queue"), RequestFailed("internal", "no"), KeyError("old")
        for number, error in enumerate(errors):
            while (await reader.next("fleet"))["fleet"] is None:
                pass
            server.engine.answers["status"] = error
            while (event := await reader.next("fleet"))["fleet"] is not None:
                assert event["fleet"]["workers"]
            assert [await reader.next("fleet") for _ in range(3)] == [{"model": "kept", "fleet": None}] * 3
            server.engine.answers["status"] = fleet.status
            # a queue that is being restarted is not worth a line in the log
            assert sum("kept gives no status" in one.message for one in caplog.records) == number
        while (await reader.next("fleet"))["fleet"] is None:
            pass


@pytest.mark.usefixtures("often")
async def test_a_fleet_that_hangs_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FLEET_ANSWER_S", 0.01)

    async def hang(method: str, **arguments: Any) -> Any:
        await asyncio.Event().wait()

    async with front_end(MadeUpFleet("kept")) as server:
        server.engine.call = hang  # type: ignore[method-assign]
        async with looking(server.client) as reader:
            assert await reader.next("fleet") == {"model": "kept", "fleet": None}


async def test_only_the_newest_snapshot_waits_for_a_viewer() -> None:
    async with front_end(MadeUpFleet("kept")) as server:
        with server.server.page.feed.viewer(20.0, None, lambda: True) as viewer:
            await eventually(lambda: len(server.engine.calls) >= 3)  # unread
            read = await anext(viewer.events())
            assert read.count(b"event: models\n") == read.count(b"event: fleet\n") == 1


@pytest.mark.usefixtures("often")
async def test_a_fleet_is_seen_with_a_key_of_the_server() -> None:
    async with front_end(MadeUpFleet("kept"), two_keys()) as server:
        assert (await server.client.get("/page/events")).status_code == 401
        assert server.engine.calls == []
        seen = []
        for key in (ALICE, OPS):
            server.client.headers.update(key)
            async with looking(server.client) as reader:
                event = await reader.next("fleet")
                del event["fleet"]["time"]
                seen.append(event)
        assert seen[0] == seen[1]


async def test_the_metrics_have_what_a_real_queue_says(tmp_path: Path) -> None:
    status = await status_of_a_real_queue(tmp_path)
    async with FrontEnd(KeptRequests()) as server:
        page = (await server.client.get("/metrics")).text
        assert "pagetide_model_ready" in page and "vllm:num_requests_running" not in page
        server.engine.answers = {name: status[name] for name in ("stats", "fleet_metrics")}
        page = (await server.client.get("/metrics")).text
        server.engine.answers["fleet_metrics"] = RequestFailed("unavailable", "no queue")
        assert "pagetide_fleet" not in (await server.client.get("/metrics")).text
    lines = page.splitlines()
    for line in (
        'vllm:num_requests_running{engine="worker-0",model_name="kept"} 2.0',
        'vllm:num_requests_running{engine="worker-1",model_name="kept"} 5.0',
        'vllm:iteration_tokens_total_count{engine="worker-1",model_name="kept"} 3.0',
        "pagetide_fleet_workers 3.0", "pagetide_fleet_waiting 0.0", "pagetide_fleet_running 1.0",
        "pagetide_fleet_accepted_total 1.0", "pagetide_fleet_requeued_total 0.0", "pagetide_fleet_journal_fault 0.0",
        'pagetide_fleet_worker_cached_blocks{worker="worker-1"} 3.0',
        'pagetide_fleet_worker_silent_s{worker="worker-0"} 0.0',
    ):  # fmt: skip
        assert line in lines, line
    sequences = [line for line in lines if line.startswith("pagetide_fleet_worker_sequences{")]
    assert sorted(line[-3:] for line in sequences) == ["0.0", "0.0", "2.0"]
    assert "secret" not in page


STATS: dict[str, Any] = {
    "running": 2, "waiting": 1, "waiting_for_others": 0, "preemptions": 0, "generated_tokens": 9, "prompt_tokens": 8,
    "cached_prompt_tokens": 0, "computed_tokens": 17, "recomputed_tokens": 0, "forks": 0, "steps": 3, "block_size": 16,
    "blocks": {"usable": 9, "limit": 9, "mapped": 9, "free": 7, "live": 2, "cached": 0, "in_flight": 0, "draining": 0},
    "extents": {"mapped": 1, "total": 1}, "host_tier": None, "prefix_cache": None, "dtype": "none", "device": "cpu",
    "attention": "none", "weights_bytes": 0, "kv_bytes": 0, "memory": None, "step_tokens": {"up_to": [8], "steps": [1, 2]},
}  # fmt: skip

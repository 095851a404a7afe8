"""How a fleet is started and ended, and a queue that hangs, with a stand-in for Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from pagetide.fleet import actors, cluster, watchdog
from pagetide.fleet.cluster import NAMESPACE, RayLink, _use_token
from pagetide.fleet.config import FleetConfig
from pagetide.fleet.errors import FleetError
from pagetide.fleet.links import QueueUnavailable

ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its actors are known by their names. The queue, in `queue`, is one that does not work."""
    ray = Mock()
    ray.get_actor = lambda name, namespace: f"actor {name}"
    ray.queue = ray.remote.return_value.options.return_value.remote.return_value

    async def call(*_: object) -> None:
        raise FleetError("the queue cannot work")

    monkeypatch.setattr(actors, "import_ray", lambda: ray)
    for name in ("connect", "connect_ray", "check_settings"):
        monkeypatch.setattr(actors, name, Mock())
    monkeypatch.setattr(actors, "RayLink", lambda *_: Mock(status=call, stop=call))
    return ray


def test_the_actors_of_this_fleet_alone_are_ended_and_ray_does_not_restart_them(ray: Any) -> None:
    names = [(NAMESPACE, "one/queue"), (NAMESPACE, "one/front-0"), (NAMESPACE, "one-more/queue"), ("theirs", "one/queue")]
    ray.util.list_named_actors.return_value = [{"namespace": space, "name": name} for space, name in names]
    actors.stop_fleet("one", ADDRESS, 0.0)
    ended = [call(f"actor one/{name}", no_restart=True) for name in ("queue", "front-0")]
    assert ray.kill.mock_calls == ended and ray.shutdown.called


def test_a_queue_that_cannot_work_is_ended_for_good(ray: Any) -> None:
    ray.get_actor = Mock(side_effect=ValueError)
    with pytest.raises(FleetError, match="the queue cannot work"):
        actors.start_fleet(FleetConfig("demo", address=ADDRESS, front_ends=0))
    assert ray.kill.mock_calls == [call(ray.queue, no_restart=True)]
    ray.remote.return_value.options.return_value.remote.side_effect = ValueError("the name is taken")
    with pytest.raises(FleetError, match="another process starts the fleet 'fleet' on this cluster now"):
        actors.start_fleet(FleetConfig("demo", address=ADDRESS, front_ends=0))


def test_each_fleet_of_a_process_has_its_own_token_unless_the_user_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that was used before may be inherited, and gone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for named, kept in (("", False), ("/gone/pagetide/other/ray-token", False), ("/of/user/ray-token", True)):
        for fleet in ("one", "two"):
            (tmp_path / "pagetide" / fleet).mkdir(parents=True, exist_ok=True)
            (tmp_path / "pagetide" / fleet / "ray-token").write_text("x")
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", named)
            _use_token(fleet)
            own = str(tmp_path / "pagetide" / fleet / "ray-token")
            assert os.environ["RAY_AUTH_TOKEN_PATH"] == (named if kept else own)


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pagetide").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(FleetError, match=r"the folder .*/pagetide/one of the fleet cannot be written: Not a directory\. If"):
        actors.start_fleet(FleetConfig("demo", name="one"))


async def test_a_queue_that_does_not_answer_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "import_ray", Mock())
    link = RayLink(Mock(**{"call.remote": lambda *_: asyncio.Future()}), answer_s=0.01)
    for waits, text in ((link.read("front"), "read for 0.01 s"), (link.info(0.02), "info for 0.03 s")):
        with pytest.raises(QueueUnavailable, match=f"has not answered {text}"):
            await waits


def test_a_process_without_beats_is_killed_and_one_that_has_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    monkeypatch.setattr(os, "kill", killed := Mock())
    theirs, ours = socket.socketpair()
    with theirs:
        ours.send(b"..")
        assert watchdog.watch(theirs, 77, 0.05) == 1 and killed.mock_calls == [call(77, signal.SIGKILL)]
        ours.close()
        assert watchdog.watch(theirs, 77, 0.05) == 0 and killed.call_count == 1

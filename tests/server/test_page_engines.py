"""The page's data with real engines: frames against what the engine says of itself, text, labels, recordings, a replay."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import ServerProcess

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")

from page_rig import FAR_S, looking  # noqa: E402

from pagetide.scheduler.frames.recording import FrameRecording  # noqa: E402
from pagetide.scheduler.frames.state import FrameState  # noqa: E402
from pagetide.server import replay  # noqa: E402
from pagetide.server.replay import recorded_lines  # noqa: E402

KEYS = {"PAGETIDE_API_KEY": "sk-alice-1234", "PAGETIDE_ADMIN_KEY": "sk-operator-1", "OMP_NUM_THREADS": "1"}
ALICE, OPS = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-1234", "sk-operator-1"))
SERVER = [
    "--model", "demo", "--model", "demo", "--served-model-name", "one", "--served-model-name", "two", "--device", "cpu",
    "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "4",
]  # fmt: skip
STATES = ("free", "draining", "live", "cached", "in_flight")
PROMPT = "It was a dark and stormy night at sea, and the whale that they had hunted for a year was near"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    arguments = [*SERVER, "--record", str(folder / "run.jsonl.gz")]
    with ServerProcess(arguments, folder / "log", **KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def recordings(server: ServerProcess, folder: Path) -> list[Path]:
    """The files of the server's recordings. It has ended, while a viewer looked."""

    async def end() -> None:
        client = httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=FAR_S)
        async with client, looking(client) as reader:
            await reader.frame()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(EOFError):
                await reader.to_the_end()

    asyncio.run(end())
    assert server.process.wait(FAR_S) == 0 and "Traceback" not in server.said
    return [folder / "run.one.jsonl.gz", folder / "run.two.jsonl.gz"]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * FAR_S))


def counts(state: FrameState) -> dict[str, int]:
    """The blocks of each state by the cells."""
    cells = state.cells
    each = {
        "free": cells == 1,
        "draining": cells == 2,
        "cached": cells == 3,
        "in_flight": cells == 4,
        "live": cells >= 16,
    }
    return {name: int(np.count_nonzero(found)) for name, found in each.items()}


async def blocks_of(client: Any, model: str) -> dict[str, int]:
    """The blocks of each state by the metrics."""
    page = (await client.get("/metrics")).text
    found = re.findall(rf'pagetide_kv_blocks{{[^}}]*model_name="{model}"[^}}]*state="(\w+)"}} (\S+)', page)
    return {state: int(float(number)) for state, number in found}


async def complete(client: Any, number: int, **fields: Any) -> None:
    body = {"model": "one", "prompt": f"{number}. {PROMPT}", "max_tokens": 40, "ignore_eos": True, "seed": 1} | fields
    answer = await client.post("/v1/completions", json=body, headers={"x-request-id": f"label-{number}"})
    assert answer.status_code == 200


def test_frames_say_what_the_engine_says_of_itself(server: ServerProcess) -> None:
    async def test() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=FAR_S) as client:
            state, other, labels, widths = FrameState(), FrameState(), set(), set()
            async with looking(client, rate=20) as reader:
                load = asyncio.gather(*(complete(client, number) for number in range(8)))
                while True:
                    data = await reader.next("frame")
                    if data["model"] == "two":
                        other.apply(data["frame"])
                        continue
                    state.apply(data["frame"])
                    assert [counts(state)[name] for name in STATES] == data["frame"]["blocks"][:5]
                    labels |= {row[2] for row in state.rows.values()}
                    widths.add(len(state.rows))
                    ended = load.done() and not data["frame"]["running"]
                    if ended and counts(state) == await blocks_of(client, "one"):
                        break
                await load
            assert labels == {f"label-{number}" for number in range(8)} and max(widths) == 4
            assert counts(state)["cached"] > 0 == counts(other)["cached"] and other.pool["num_blocks"] > 0
            names = {0: "unmapped", 1: "free", 2: "draining", 3: "cached", 4: "in_flight", 5: "null"}
            for block in range(0, len(state.cells), 7):
                details = (await client.get("/page/block", params={"model": "one", "block": block})).json()
                assert details["state"] == names[int(state.cells[block])] and details["text"] is None
            async with looking(client) as reader:  # one that comes later has the same
                again = FrameState()
                again.apply(await reader.frame("one"))
                assert np.array_equal(again.cells, state.cells)

    run(test)


def test_text_is_for_admins(server: ServerProcess) -> None:
    async def test() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=FAR_S) as client:
            await complete(client, 100, model="two")
            state = FrameState()
            async with looking(client) as reader:
                state.apply(await reader.frame("two"))
            texts = {}
            for block in np.flatnonzero(state.cells == 3).tolist():
                asked = {"model": "two", "block": block}
                details = (await client.get("/page/block", params=asked)).json()
                assert details["text"] is None and set(details) == {"state", "rows", "hits", "tokens", "text"}, (
                    "nothing that depends on it"
                )
                full = (await client.get("/page/block", params=asked, headers=OPS)).json()
                texts[full["tokens"][0]] = full.pop("text")
                assert full == {name: value for name, value in details.items() if name != "text"}
            assert "".join(texts[first] for first in sorted(texts)).removeprefix("<|bos|>").startswith(f"100. {PROMPT}")
            assert (await client.get("/page/block?model=two&block=-1")).status_code == 400
            assert (await client.get("/page/block?model=two&block=" + "9" * 30)).status_code == 400
            assert (await client.get("/page/block?block=1")).status_code == 400  # of which model?
            assert (await client.get("/page/explain?model=two&request=label-100")).json() == []

    run(test)


# ---- recordings ---------------------------------------------------------------------------------------------------


def test_each_model_has_its_recording(recordings: list[Path]) -> None:
    for file in recordings:
        with FrameRecording(file) as recording:
            frames = list(recording.frames())
            state = FrameState()
            for frame in frames:
                state.apply(frame.line)
            assert frames[0].full and recording.header["text"] is False
            assert [counts(state)[name] for name in STATES] == state.frame["blocks"][:5]
            said = b"".join(frame.line for frame in frames)
            assert b"whale" not in said and (b"label-3" in said) == ("one" in file.name)


def test_lines_of_a_recording_begin_whole_and_are_bounded(
    recordings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FrameRecording(recordings[0]) as recording:
        frames = list(recording.frames())
        middle = frames[len(frames) // 2].time_s

        def lines(since: float, until: float) -> tuple[list[bytes], Any]:
            *found, end, empty = recorded_lines(recording, since, until).split(b"\n")
            assert empty == b""
            return found, json.loads(end)

        found, end = lines(0.0, math.inf)
        assert found == [frame.line for frame in frames] and end == {"more": False, "until": recording.ended}
        found, end = lines(middle, middle + 0.5)
        wanted = list(recording.frames(middle, middle + 0.5))
        assert wanted[0].full and wanted[0].time_s <= middle
        assert found == [frame.line for frame in wanted] and end == {"more": False, "until": middle + 0.5}
        monkeypatch.setattr(replay, "MOST_FRAMES", 3)
        seen, since = FrameState(), recording.began
        for _ in range(len(frames)):  # in as many pieces as it takes
            found, end = lines(since, math.inf)
            for line in found:
                if json.loads(line)["time"] > since or not seen.pool:
                    seen.apply(line)
            if not end["more"]:
                break
            assert end["until"] > since
            since = end["until"]
        whole = FrameState()
        for frame in frames:
            whole.apply(frame.line)
        assert np.array_equal(seen.cells, whole.cells) and seen.rows == whole.rows and not end["more"]


def replaying(file: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "pagetide", "replay", str(file), "--port", "0", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def test_a_replay_serves_the_recording_to_this_machine(recordings: list[Path]) -> None:
    process = replaying(recordings[0])
    assert process.stdout is not None
    found = re.search(r"serving \S+ at (\S+)", process.stdout.readline())
    assert found is not None
    with FrameRecording(recordings[0]) as recording, httpx.Client(base_url=found[1], timeout=FAR_S) as client:
        info = client.get("/page/info").json()
        assert info["mode"] == "replay" and info["models"] == recording.models and not info["needs_key"]
        assert (info["began"], info["ended"]) == (recording.began, recording.ended)
        frames = client.get("/page/frames", params={"model": info["models"][0], "from": info["began"]})
        assert frames.content == recorded_lines(recording, recording.began, math.inf)
        assert "content-security-policy" in frames.headers
        assert client.get("/page/frames?model=none").status_code == 404
        for wrong in ("from=nan", "until=x", "until=nan"):
            assert client.get(f"/page/frames?{wrong}").status_code == 400
        assert client.get("/page/frames", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/page/frames", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get("/", follow_redirects=False).headers["location"] == "/page/"
        for path in ("/v1/models", "/page/events", "/metrics"):
            assert client.get(path).status_code == 404
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 404
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=FAR_S)
    assert process.returncode == 0 and "Traceback" not in errors


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.example.com"])
def test_a_replay_is_for_this_machine_alone(recordings: list[Path], host: str) -> None:
    process = replaying(recordings[0], "--host", host)
    _, errors = process.communicate(timeout=FAR_S)
    assert process.returncode == 2 and "on this machine alone" in errors

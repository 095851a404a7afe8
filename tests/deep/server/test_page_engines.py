"""The page's data with real engines: frames against what the engine says of itself, text, labels, recordings, a replay."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from frame_state import FrameState
from page_rig import FAR_S, looking
from servers import ServerProcess

from pagetide import cli
from pagetide.common.recording import FrameRecording
from pagetide.server import replay
from pagetide.server.replay import recorded_lines

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
    """The files of the server's recordings. It has answered a last request and ended, while a viewer looked."""

    async def end() -> None:
        client = httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=FAR_S)
        async with client, looking(client) as reader:
            await reader.frame()
            await complete(client, 300)  # that it has ended is in the next frame or the last one
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(EOFError):
                await reader.to_the_end()

    asyncio.run(end())
    assert server.process.wait(FAR_S) == 0 and "Traceback" not in server.said
    return [folder / "run.one.jsonl.gz", folder / "run.two.jsonl.gz"]


def counts(state: FrameState) -> dict[str, int]:
    """The blocks of each state by the cells."""
    cells = state.cells
    each = zip(STATES, (cells == 1, cells == 2, cells >= 16, cells == 3, cells == 4), strict=True)
    return {name: int(np.count_nonzero(found)) for name, found in each}


async def blocks_of(client: Any, model: str) -> dict[str, int]:
    """The blocks of each state by the metrics."""
    page = (await client.get("/metrics")).text
    found = re.findall(rf'pagetide_kv_blocks{{[^}}]*model_name="{model}"[^}}]*state="(\w+)"}} (\S+)', page)
    return {state: int(float(number)) for state, number in found}


async def complete(client: Any, number: int, **fields: Any) -> None:
    body = {"model": "one", "prompt": f"{number}. {PROMPT}", "max_tokens": 40, "ignore_eos": True, "seed": 1} | fields
    answer = await client.post("/v1/completions", json=body, headers={"x-request-id": f"label-{number}"})
    assert answer.status_code == 200


async def test_frames_say_what_the_engine_says_of_itself(server: ServerProcess) -> None:
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


async def test_text_is_for_admins(server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=FAR_S) as client:
        await complete(client, 100, model="two")
        state = FrameState()
        async with looking(client) as reader:
            state.apply(await reader.frame("two"))
        texts = {}
        for block in np.flatnonzero(state.cells == 3).tolist():
            asked = {"model": "two", "block": block}
            details = (await client.get("/page/block", params=asked)).json()
            assert details["text"] is None  # and nothing that depends on it
            assert set(details) == {"state", "rows", "hits", "tokens", "text"}
            full = (await client.get("/page/block", params=asked, headers=OPS)).json()
            texts[full["tokens"][0]] = full.pop("text")
            assert full == {name: value for name, value in details.items() if name != "text"}
        assert "".join(texts[first] for first in sorted(texts)).removeprefix("<|bos|>").startswith(f"100. {PROMPT}")
        assert (await client.get("/page/block?model=two&block=-1")).status_code == 400
        assert (await client.get("/page/block?model=two&block=" + "9" * 30)).status_code == 400
        missing = await client.get("/page/block?model=two&block=99999")
        assert missing.status_code == 400 and "there is no block 99999" in missing.text
        assert (await client.get("/page/block?block=1")).status_code == 400  # of which model?
        assert (await client.get("/page/explain?model=two&request=label-100")).json() == []


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
            assert b"whale" not in said and (b"label-300" in said) == ("one" in file.name)


def test_lines_of_a_recording_begin_whole_and_are_bounded(recordings: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_replay_serves_the_recording_to_this_machine(recordings: list[Path], tmp_path: Path) -> None:
    with (
        ServerProcess([str(recordings[0])], tmp_path / "log", "replay") as server,
        FrameRecording(recordings[0]) as recording,
        httpx.Client(base_url=server.url, timeout=FAR_S) as client,
    ):
        info = client.get("/page/info").json()
        assert info["mode"] == "replay" and info["model"] == recording.header["model"] and not info["needs_key"]
        assert (info["began"], info["ended"]) == (recording.began, recording.ended)
        frames = client.get("/page/frames", params={"from": info["began"]})
        assert frames.content == recorded_lines(recording, recording.began, math.inf)
        assert "content-security-policy" in frames.headers
        for wrong in ("from=nan", "until=x", "until=nan"):
            assert client.get(f"/page/frames?{wrong}").status_code == 400
        for foreign in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert client.get("/page/frames", headers=foreign).status_code == 403
        assert client.get("/", follow_redirects=False).headers["location"] == "/page/"
        for path in ("/v1/models", "/page/events", "/metrics"):
            assert client.get(path).status_code == 404
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 404
        assert server.end(signal.SIGTERM) == 0 and "Traceback" not in server.said


def test_a_replay_is_for_this_machine_alone(recordings: list[Path], capfd: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "127.example.com"):
        assert cli.main(["replay", str(recordings[0]), "--host", host]) == 2, host
        assert "on this machine alone" in capfd.readouterr().err, host

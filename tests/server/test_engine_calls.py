"""The calls by which the server watches an engine process: frames, a block's details, the decisions about a request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pagetide.scheduler.frames.state import FrameState
from pagetide.server.engine_client import Batch, RemoteEngine
from pagetide.server.errors import RequestFailed

OPTIONS = {"kv_memory": "2MiB", "max_seqs": 4, "max_model_len": 128, "share": False}


def test_frames_blocks_and_decisions_of_an_engine_process() -> None:
    async def main() -> None:
        engine = await RemoteEngine.start("demo", OPTIONS)
        try:
            state = FrameState()
            state.apply((await engine.call("frame"))[0])
            assert state.frame["full"] and state.pool["model"] == "demo"
            batch = Batch(engine)
            batch.request_id = "req-abc"
            batch.submit(
                prompt=[1, *range(5, 40)], params={"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0}
            )
            labels, block = set(), 0
            while await batch.read():
                state.apply((await engine.call("frame", full=False))[0])
                labels |= {(entry[1], entry[2]) for entry in state.rows.values()}
                live = np.flatnonzero(state.cells >= 16)
                if len(live):
                    block = int(live[0])
                    found = await engine.call("block", block=block, text=True)
            assert labels == {("r0", "req-abc")}
            assert found["text"] and found["tokens"][1] > found["tokens"][0]
            hidden = await engine.call("block", block=block)
            assert hidden["text"] is None
            state.apply((await engine.call("frame", full=True))[0])
            assert state.frame["full"] and not state.rows
            assert await engine.call("explain", request="req-abc") == []
            assert await engine.call("explain") == []
            with pytest.raises(RequestFailed, match="there is no block 99999"):
                await engine.call("block", block=99999)
        finally:
            await engine.stop()

    asyncio.run(main())


def test_what_was_generated_is_told_at_the_end_and_when_a_request_is_cancelled() -> None:
    async def main() -> None:
        engine = await RemoteEngine.start("demo", OPTIONS)
        try:
            params = {"max_new_tokens": 5, "ignore_eos": True, "n": 1, "best_of": 3}
            for streams, more in ((False, {}), (True, {"n": 3}), (False, {"num_beams": 2, "best_of": None})):
                batch = Batch(engine)
                batch.submit(prompt=[1, 5, 6], params=params | more, streams=streams)
                (end,) = await batch.whole()
                assert batch.generations[0].num_generated == end.num_generated == (10 if "num_beams" in more else 15)
            for streams, more in ((False, {}), (True, {"n": 3}), (False, {"num_beams": 2, "best_of": None})):
                before = (await engine.call("stats"))["computed_tokens"]
                batch = Batch(engine)
                batch.submit(prompt=[1, 5, 6], params=params | more | {"max_new_tokens": 100}, streams=streams)
                while (await engine.call("stats"))["computed_tokens"] < before + 30:
                    await asyncio.sleep(0.01)
                settled = asyncio.Event()
                batch.cancel()
                batch.when_settled(settled.set)
                await asyncio.wait_for(settled.wait(), 60)
                assert 20 < batch.generations[0].num_generated < 300 and batch.generations[0].finished is None
        finally:
            await engine.stop()

    asyncio.run(main())

"""What the client of an engine process says of the tokens that were generated."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pagetide.server.engine_client import Batch, RemoteEngine

OPTIONS = {"kv_memory": "2MiB", "max_seqs": 4, "max_model_len": 128, "share": False}

# An engine process that makes no more steps once a prompt has 30 tokens, until it is cancelled: a file with its label says so.
HOLDING = """
import sys, time
from pathlib import Path
from pagetide.engine.requests.manager import RequestManager
from pagetide.server.engine_process import main

step, abort, cancelled = RequestManager.step, RequestManager.abort, set()

def noted_abort(manager, groups):
    cancelled.update(groups)
    abort(manager, groups)

def held_step(manager):
    long = [one for one in manager.delivery.groups.values() if one.num_generated >= 30 and one not in cancelled]
    if not long:
        step(manager)
        return
    Path(sys.argv[1], long[0].states[0].request.label).touch()
    time.sleep(0.001)

RequestManager.step, RequestManager.abort = held_step, noted_abort
sys.exit(main())
"""


async def test_what_was_generated_is_told_at_the_end_and_when_a_request_is_cancelled(tmp_path: Path) -> None:
    engine = await RemoteEngine.start("demo", OPTIONS, program=("-c", HOLDING, str(tmp_path)))
    try:
        params = {"max_new_tokens": 5, "ignore_eos": True, "n": 1, "best_of": 3}
        kinds = {"plain": (False, {}), "stream": (True, {"n": 3}), "beams": (False, {"num_beams": 2, "best_of": None})}
        for streams, more in kinds.values():
            batch = Batch(engine)
            batch.submit(prompt=[1, 5, 6], params=params | more, streams=streams)
            (end,) = await batch.whole()
            assert batch.generations[0].num_generated == end.num_generated == (10 if "num_beams" in more else 15)
        for kind, (streams, more) in kinds.items():
            batch = Batch(engine)
            batch.request_id = kind
            batch.submit(prompt=[1, 5, 6], params=params | more | {"max_new_tokens": 100}, streams=streams)
            while not (tmp_path / kind).exists():
                await asyncio.sleep(0.01)
            settled = asyncio.Event()
            batch.cancel()
            batch.when_settled(settled.set)
            await asyncio.wait_for(settled.wait(), 60)
            assert 30 <= batch.generations[0].num_generated < 33 and batch.generations[0].finished is None
    finally:
        await engine.stop()


async def test_calls_wait_while_requests_are_suspended_and_a_plain_sleep_ends_these() -> None:
    engine = await RemoteEngine.start("demo", OPTIONS)

    async def begun() -> Batch:
        batch = Batch(engine)
        batch.submit(prompt=[1, 5, 6], params={"max_new_tokens": 100, "ignore_eos": True, "temperature": 0.0}, streams=False)
        await batch.accepted()
        return batch

    try:
        (alone,) = await (await begun()).whole()
        batch = await begun()
        await engine.call("sleep", drain_s=0.0, suspends=True)
        tokenized = asyncio.create_task(engine.call("tokenize", prompt="the tide"))
        read = asyncio.create_task(engine.call("detokenize", tokens=[5, 6]))
        await asyncio.sleep(0.05)
        assert not tokenized.done() and not read.done()
        await engine.call("wake_up")
        assert (await tokenized)["tokens"] and isinstance(await read, str)
        (end,) = await batch.whole()
        assert [piece.token_ids for piece in end.pieces] == [piece.token_ids for piece in alone.pieces]
        batch = await begun()
        await engine.call("sleep", drain_s=0.0, suspends=True)
        await engine.call("sleep", drain_s=0.0, level=2)
        (end,) = await batch.whole()
        assert [piece.finish_reason for piece in end.pieces] == ["aborted"]
        await engine.call("wake_up")
        (end,) = await (await begun()).whole()
        assert [piece.token_ids for piece in end.pieces] == [piece.token_ids for piece in alone.pieces]
    finally:
        await engine.stop()

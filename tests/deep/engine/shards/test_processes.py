"""The processes of a divided engine: processors, faults in the middle of a step, and that nothing is left however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pagetide import LLM, AsyncLLM, SamplingParams
from pagetide.engine.errors import EngineClosed, ShardLost, UnsupportedModel
from pagetide.engine.shards import team
from pagetide.scheduler.request import RequestRejected

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)
PROMPTS = ["the tide is", "a ship", "once upon a time there was a", "in the morning"]
OPTIONS = {"device": "cpu", "kv_memory": "8MiB", "share": False}


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("demo", tensor_parallel_size=2, **OPTIONS) as llm:
        yield llm


def pids_of(llm: LLM) -> list[int]:
    return [shard["pid"] for shard in llm.stats()["shards"]["each"]]


def test_they_give_the_tokens_of_one(two: LLM) -> None:
    """Also beams and constraints, which are drawn by the first shard."""

    def made(llm: LLM) -> list[list[int]]:
        kinds = [{}, {"num_beams": 3}, {"regex": "(aye|nay), captain"}]
        each = [SamplingParams(temperature=0.0, max_new_tokens=12, **kind) for kind in kinds]
        outputs = [output for params in each for output in llm.generate(PROMPTS, params, progress=False)]
        return [list(output.completions[0].token_ids) for output in outputs]

    with LLM("demo", devices=["cpu"], kv_memory="8MiB", share=False) as one:
        assert made(two) == made(one)
        alone, both = one.stats(), two.stats()
    assert alone["shards"] is None, "one device in a list is not divided"
    assert [shard["device"] for shard in both["shards"]["each"]] == ["cpu", "cpu"] and both["shards"]["steps"] > 0
    assert both["weights_bytes"] < 0.6 * alone["weights_bytes"]
    assert both["kv_bytes_per_token"] * 2 == alone["kv_bytes_per_token"]


def gone(pids: list[int]) -> bool:
    """Whether the processes end; waits for them."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    return not alive


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.completions[0].token_ids) for output in llm.generate(PROMPTS, params, progress=False)]


def in_a_step(pid: int, sent: signal.Signals) -> SamplingParams:
    """Parameters of a long request. Its processor, which runs on the first shard, sends a signal in the fifth step."""

    def send(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[-1] - send.first == 4:
            os.kill(pid, sent)
        return scores

    send.first = 3
    return SamplingParams(temperature=0.0, max_new_tokens=900, ignore_eos=True, logits_processors=[send])


def test_processors_run_on_the_first_shard_and_their_errors_end_their_request(two: LLM) -> None:
    kept = 77

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -1e9)
        masked[:, kept] = 0
        return masked

    def bad(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    lock = threading.Lock()

    class Unsendable:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            with lock:
                return scores

    params = [SamplingParams(max_new_tokens=4, logits_processors=[one]) for one in (only, bad)]
    first, second = (output.completions[0] for output in two.generate(PROMPTS[:2], params))
    assert list(first.token_ids) == [kept] * 4
    assert second.finish_reason == "error" and "not today" in second.error
    with pytest.raises(RequestRejected, match="Unsendable cannot be sent to the process that samples"):
        two.generate(PROMPTS[0], SamplingParams(logits_processors=[Unsendable()]))


def test_log_probabilities_come_from_the_first_shard(two: LLM) -> None:
    scored = SamplingParams(temperature=0.0, max_new_tokens=3, logprobs=2, prompt_logprobs=1)
    with LLM("demo", **OPTIONS) as one:
        for ours, theirs in zip(two.generate(PROMPTS, scored), one.generate(PROMPTS, scored), strict=True):
            for a, b in zip(ours.completions[0].logprobs, theirs.completions[0].logprobs, strict=True):
                assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_an_interrupt_ends_the_step_and_the_shards_go_on(two: LLM) -> None:
    before = tokens(two)
    long = SamplingParams(temperature=0.0, max_new_tokens=900, ignore_eos=True)
    # One signal, which comes while the step is awaited.
    params = [in_a_step(os.getpid(), signal.SIGINT), long, long, long]
    with pytest.raises(KeyboardInterrupt):
        two.generate([[5, 6, 7]] * 4, params, progress=False)
    assert tokens(two) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_shard_ends_all_requests_with_one_error_and_leaves_nothing(rank: int) -> None:
    with LLM("demo", tensor_parallel_size=2, **OPTIONS) as llm:
        pids = pids_of(llm)
        params = in_a_step(pids[rank], signal.SIGKILL)
        outputs = [output.completions[0] for output in llm.generate([[5, 6, 7]] * 12, params, progress=False)]
        assert {one.finish_reason for one in outputs} == {"error"}
        (message,) = {one.error for one in outputs}
        assert f"shard {rank} of 2 (on cpu, process {pids[rank]}) was killed by SIGKILL" in message
        with pytest.raises(EngineClosed, match="has ended: shard"):
            llm.generate("x")
        assert gone(pids)


@pytest.mark.parametrize(("stops", "why"), [(False, "hangs: it is at work"), (True, "gave no sign of life for 4 s")])
def test_a_shard_whose_step_does_not_end_is_given_up_and_so_is_one_without_a_heartbeat(
    stops: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "SILENT_S", 4.0)
    never = SamplingParams(max_new_tokens=2, logits_processors=[lambda ids, scores: threading.Event().wait()])
    with LLM("demo", tensor_parallel_size=2, **OPTIONS) as llm:
        pids = pids_of(llm)
        if stops:
            os.kill(pids[1], signal.SIGSTOP)
        error = llm.generate("the tide", never, progress=False)[0].completions[0].error
        assert f"shard {int(stops)} of 2 (on cpu, process {pids[stops]}) {why}" in error, "the other one waits for it"
        assert gone(pids)


async def first_error(llm: AsyncLLM) -> BaseException:
    """What a call raises in the end; some may still get outputs with errors."""
    for _ in range(3000):
        try:
            await llm.generate("x", GREEDY)
        except EngineClosed as error:
            return error
        await asyncio.sleep(0.02)
    raise AssertionError("the engine never closed")


def test_an_idle_async_engine_notices_a_lost_shard_and_ends() -> None:
    async def lose() -> None:
        llm = await asyncio.to_thread(AsyncLLM, "demo", tensor_parallel_size=2, **OPTIONS)
        try:
            pids = [shard["pid"] for shard in (await llm.stats())["shards"]["each"]]
            os.kill(pids[0], signal.SIGKILL)
            assert await asyncio.to_thread(gone, pids)
            error = await first_error(llm)
            assert isinstance(error, EngineClosed) and isinstance(error.__cause__, ShardLost)
        finally:
            await llm.stop()

    asyncio.run(lose())


PROGRAM = """
import os, signal, sys
from pagetide import LLM, SamplingParams
llm = LLM("demo", tensor_parallel_size=2, device="cpu", kv_memory="8MiB", share=False)
print(*[one["pid"] for one in llm.stats()["shards"]["each"]], flush=True)
pid, sent = os.getpid(), int(sys.argv[1])
def send(ids, scores):  # in the middle of a step
    if ids.shape[-1] > 6:
        os.kill(pid, sent)
    return scores
if sent:
    llm.generate([[5, 6, 7]] * 8, SamplingParams(max_new_tokens=900, ignore_eos=True, logits_processors=[send]))
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, 0])
def test_nothing_is_left_when_the_program_ends(sent: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shared = Path("/dev/shm")
    before = set(shared.glob("*"))
    command = [sys.executable, "-P", program, str(int(sent))]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False, timeout=120)
    assert run.returncode == (-sent if sent else 0)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2 and gone(pids)
    assert not set(shared.glob("*")) - before


def test_a_model_that_cannot_be_loaded_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = team.ShardTeam.start
    monkeypatch.setattr(team.ShardTeam, "start", lambda self: (started.append(self), start(self))[1])
    with pytest.raises(UnsupportedModel, match="cannot be divided over 3 shards"):
        LLM("demo", tensor_parallel_size=3, **OPTIONS)
    assert gone(list(started[0].pids))

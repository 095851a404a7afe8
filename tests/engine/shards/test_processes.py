"""A divided engine with its real processes: outputs, faults, and that nothing is left of it, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from pagetide import LLM, AsyncLLM, SamplingParams
from pagetide.engine.config import EngineConfig, ModelSpec
from pagetide.engine.errors import ConfigError, DeviceNotFound, EngineClosed, ShardLost, UnsupportedModel
from pagetide.engine.shards import sharded_engine, team
from pagetide.scheduler.errors import RequestRejected

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)
LONG = SamplingParams(temperature=0.0, max_new_tokens=900, ignore_eos=True)
PROMPTS = ["the tide is", "a ship", "once upon a time there was a", "in the morning"]
OPTIONS = {"device": "cpu", "kv_memory": "8MiB", "share": False}


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("demo", tensor_parallel_size=2, **OPTIONS) as llm:
        yield llm


def pids_of(llm: LLM) -> list[int]:
    return [shard["pid"] for shard in llm.stats()["shards"]["each"]]


def gone(pids: list[int]) -> bool:
    """Whether the processes end; waits for them."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    return not alive


def tokens(llm: LLM, params=GREEDY) -> list[list[int]]:
    return [list(output.completions[0].token_ids) for output in llm.generate(PROMPTS, params, progress=False)]


def test_two_processes_give_the_tokens_of_one(one: LLM, two: LLM) -> None:
    assert tokens(two) == tokens(one)
    shards = two.stats()["shards"]
    assert [shard["device"] for shard in shards["each"]] == ["cpu", "cpu"] and shards["steps"] > 0
    assert two.stats()["weights_bytes"] < 0.6 * one.stats()["weights_bytes"]
    assert two.stats()["kv_bytes_per_token"] * 2 == one.stats()["kv_bytes_per_token"]


def test_beams_constraints_and_log_probabilities_come_from_the_first_shard(one: LLM, two: LLM) -> None:
    beams = SamplingParams(temperature=0.0, num_beams=3, max_new_tokens=8)
    assert tokens(two, beams) == tokens(one, beams)
    choice = SamplingParams(temperature=0.0, regex="(aye|nay), captain", max_new_tokens=30)
    assert two.generate(["do we sail?"], choice)[0].completions[0].text in ("aye, captain", "nay, captain")
    scored = SamplingParams(temperature=0.0, max_new_tokens=3, logprobs=2, prompt_logprobs=1)
    for ours, theirs in zip(two.generate(PROMPTS, scored), one.generate(PROMPTS, scored), strict=True):
        for a, b in zip(ours.completions[0].logprobs, theirs.completions[0].logprobs, strict=True):
            assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-3)


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


def test_an_interrupt_ends_the_step_and_the_shards_go_on(one: LLM, two: LLM) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS * 4, LONG, progress=False)
    timer.join()
    assert tokens(two) == tokens(one)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_shard_ends_all_requests_with_one_error_and_leaves_nothing(rank: int) -> None:
    with LLM("demo", tensor_parallel_size=2, **OPTIONS) as llm:
        pids = pids_of(llm)
        timer = threading.Timer(0.3, lambda: os.kill(pids[rank], signal.SIGKILL))
        timer.start()
        outputs = [output.completions[0] for output in llm.generate(PROMPTS * 3, LONG, progress=False)]
        timer.join()
        assert {one.finish_reason for one in outputs} == {"error"}
        (message,) = {one.error for one in outputs}
        assert f"shard {rank} of 2 (on cpu, process {pids[rank]}) was killed by SIGKILL" in message
        with pytest.raises(EngineClosed, match="has ended: shard"):
            llm.generate("x")
        assert gone(pids)


def test_a_shard_without_a_heartbeat_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_engine, "SILENT_S", 4.0)
    with LLM("demo", tensor_parallel_size=2, **OPTIONS) as llm:
        pids = pids_of(llm)
        os.kill(pids[1], signal.SIGSTOP)
        (output,) = llm.generate("the tide", LONG, progress=False)
        assert (
            "shard 1 of 2" in output.completions[0].error
            and "gave no sign of life for 4 s" in output.completions[0].error
        )
        assert gone(pids)


async def first_error(llm: AsyncLLM) -> BaseException:
    """What a call raises in the end; some may still get outputs with errors."""
    for _ in range(500):
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


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, None])
def test_nothing_is_left_when_the_program_ends(sent: signal.Signals | None, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nfrom pagetide import LLM, SamplingParams\n"
        f"llm = LLM('demo', tensor_parallel_size=2, **{OPTIONS!r})\n"
        "print(*[one['pid'] for one in llm.stats()['shards']['each']], flush=True)\n"
        + ("" if sent is None else "llm.generate(['x'] * 8, SamplingParams(max_new_tokens=900, ignore_eos=True))\n")
    )
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    process = subprocess.Popen(
        [sys.executable, "-P", str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if sent is not None:
        time.sleep(0.2)  # in the middle of its steps
        process.send_signal(sent)
    process.communicate(timeout=60)
    assert gone(pids)
    assert not (set(os.listdir("/dev/shm")) - before if os.path.isdir("/dev/shm") else set())


def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[team.ShardTeam] = []
    start = team.ShardTeam.start
    monkeypatch.setattr(team.ShardTeam, "start", lambda self: (started.append(self), start(self))[1])
    with pytest.raises(UnsupportedModel, match="cannot be divided over 3 shards"):
        LLM("demo", tensor_parallel_size=3, **OPTIONS)
    assert gone(list(started[0].pids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 to"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer"),
        ({"devices": []}, "devices must name 1 to"),
        ({"devices": ["cpu", "cuda:0"]}, "all be CUDA devices or all 'cpu'"),
        ({"devices": ["cuda", "cuda"]}, "must name each device"),
        ({"devices": ["cpu", "cpu"], "tensor_parallel_size": 3}, "tensor_parallel_size is 3, and devices names 2"),
        ({"devices": ["cpu", "cpu"], "device": "cuda"}, "devices or device, not both"),
        ({"devices": ["cuda:0", "cuda:1"], "device": "cuda:0"}, "devices or device, not both"),
        ({"device": "cuda:0", "tensor_parallel_size": 2}, "name them all"),
        ({"devices": 7}, "devices must be a list"),
    ],
)
def test_devices_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="there are as many devices")
def test_devices_that_are_not_there_are_refused_with_what_is() -> None:
    with pytest.raises(DeviceNotFound, match=r"8 shards were asked for on cuda:0, .*torch sees .*device='cpu'"):
        LLM("demo", devices=[f"cuda:{i}" for i in range(8)])


def test_devices_go_before_what_the_models_file_says_and_may_agree_with_device(tmp_path: Path) -> None:
    spec = ModelSpec("m", tmp_path, "a test", device="cuda:0")
    assert EngineConfig.resolve(spec, devices="cpu, cpu").devices == ("cpu", "cpu")
    assert EngineConfig.resolve(spec, devices=["cpu", "cpu"], device="cpu").devices == ("cpu", "cpu")
    assert EngineConfig.resolve(spec, device="cpu", tensor_parallel_size=3).devices == ("cpu",) * 3


def test_one_device_in_a_list_is_not_divided() -> None:
    with LLM("demo", devices=["cpu"], kv_memory="8MiB", share=False) as llm:
        assert llm.stats()["shards"] is None

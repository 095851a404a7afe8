"""Engines of the demo model that share a device through a real `vram-monitor serve`, or find nobody to share with."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from device_users import device_users
from monitors import MonitorProcess, wait_until

from pagetide import LLM, SamplingParams
from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.lease import Lease
from pagetide.allocator.wire import LeaseView
from pagetide.engine import demo_model
from pagetide.engine.errors import EngineClosed, NotEnoughMemory
from pagetide.monitor.record import RecordReader
from pagetide.monitor.runtime_dir import RuntimeDir, own_dir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
MIB = 1 << 20
GREEDY = SamplingParams(max_new_tokens=24, temperature=0)
PROMPTS = [[(7 * i + 3 * k) % 480 + 5 for k in range(60 + 50 * i)] for i in range(8)]
KV = {"min": 8 * MIB, "max": 128 * MIB}  # extents of 4 MiB; the prompts come to need 17 MiB at a time


@functools.cache
def alone() -> list[list[int]]:
    """The tokens of each prompt when nobody presses."""
    with LLM("demo", share=False) as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


def said(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def memory(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = llm.stats()["memory"]
    return found


class Device:
    """A test device under a monitor of its own."""

    def __init__(self, directory: Path, capacity: str) -> None:
        self.monitor = MonitorProcess(directory, "--capacity", capacity)
        self.client = BrokerClient(RuntimeDir(directory).socket, timeout_s=30)

    @property
    def uuid(self) -> str:
        with RecordReader.open(own_dir().record) as reader:
            return reader.devices()[0].uuid

    def lease(self) -> LeaseView:
        (view,) = self.client.leases()
        return view


def settled(lease: LeaseView) -> bool:
    return lease.granted_bytes == max(lease.min_bytes, lease.held_bytes)


def engine(**options: Any) -> LLM:
    return LLM("demo", kv_memory=KV, max_seqs=16, max_step_tokens=512, **{"idle_s": 600.0} | options)


def hoard(llm: LLM) -> None:
    """Let the pool be as large as it may, so that it exceeds what its process' minimum has in reserve."""
    assert llm._manager.engine is not None and llm._manager.engine.core.memory is not None
    core, lease = llm._manager.engine.core, llm._manager.engine.core.memory.lease
    assert lease is not None
    most = memory(llm)["base_bytes"] + KV["max"]
    lease.ask(most, expires_s=600)
    wait_until(lambda: lease.granted_bytes >= most, "the grant")
    with llm.locked_engine():
        core.scheduler.pool.grow(32)
        core.step()
    assert memory(llm)["kv_bytes"] == KV["max"]
    wait_until(lambda: BrokerClient(own_dir().socket).leases()[0].held.get("kv") == KV["max"], "the report to be heard")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Device]:
    """By default larger than any engine needs. This process has its libraries already: its minimum may be smaller."""
    alone()
    monkeypatch.setattr("pagetide.engine.memory.lease_holder.LIBRARIES_BYTES", 32 * MIB)
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", str(tmp_path / "run"))
    made = Device(tmp_path / "run", getattr(request, "param", "64GiB"))
    with made.monitor:
        yield made


def test_a_lease_covers_the_process_and_follows_its_pool(device: Device) -> None:
    with LLM("demo", kv_memory=KV | {"weight": 2.5, "priority": -3}, idle_s=600) as llm:
        wait_until(lambda: device.lease().held.get("kv") == 8 * MIB, "the first report to be heard")
        lease = device.lease()
        assert (lease.pid, lease.weight, lease.priority) == (os.getpid(), 2.5, -3)
        assert lease.granted_bytes >= lease.min_bytes >= lease.held_bytes
        assert said(llm) == alone()
        kv_bytes = memory(llm)["kv_bytes"]
        assert kv_bytes > 8 * MIB
        wait_until(lambda: device.lease().held["kv"] == kv_bytes, "the last report to be heard")
        grown = device.lease()
        assert grown.granted_bytes >= grown.held_bytes == sum(grown.held.values())
        rss = psutil.Process().memory_info().rss
        assert rss <= 1.05 * grown.held_bytes, "what is told is what there is, and a reserve"
    wait_until(lambda: device.client.leases() == (), "the end of the lease")


def test_a_recall_under_decode_is_served_and_changes_no_token(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagetide.engine.memory")
    with engine() as llm:
        assert said(llm) == alone()
        hoard(llm)
        stream = llm.stream(PROMPTS, GREEDY)
        chunks = [next(stream) for _ in range(20)]
        assert llm.stats()["running"] == len(PROMPTS)
        told = device.client.recall(str(os.getpid()), 108 * MIB)
        chunks += stream
        ends = {chunk.index: chunk.output.token_ids for chunk in chunks if chunk.output is not None}
        assert [ends[i] for i in range(len(PROMPTS))] == alone()
        # On a busy machine the grant may have risen again by now, as the ask of `hoard` lasts: then the log says it.
        wait_until(
            lambda: device.lease().granted_bytes <= told.target_bytes or "recall served" in caplog.text,
            "the recall to be served",
        )
        assert memory(llm)["recalls"] >= 1


def test_what_nobody_needs_goes_back_after_a_while(device: Device) -> None:
    with engine(idle_s=0.3) as llm:
        assert said(llm) == alone()
        wait_until(lambda: memory(llm)["kv_bytes"] == 8 * MIB, "the pool to be at its minimum")
        wait_until(lambda: settled(device.lease()), "the grant to be what is held, or the minimum")
        assert said(llm) == alone()


def test_a_daemon_that_is_killed_costs_growth_until_there_is_another(device: Device) -> None:
    with engine() as llm:
        device.monitor.kill()
        wait_until(lambda: not memory(llm)["lease"]["connected"], "the engine to notice")
        held = memory(llm)["kv_bytes"]
        assert said(llm, PROMPTS[:2]) == alone()[:2]
        assert memory(llm)["kv_bytes"] == held and memory(llm)["lost_brokers"] == 1
        outputs: list[list[int]] = []
        working = threading.Thread(target=lambda: outputs.extend(said(llm)))  # more than there is room for at once
        working.start()
        device.monitor.start()
        wait_until(lambda: memory(llm)["lease"]["connected"], "the engine to be back")
        working.join(120)
        assert outputs == alone()

        def grows_again() -> bool:  # once the broker's grace for those who come back is over
            assert said(llm) == alone()
            return bool(memory(llm)["kv_bytes"] > held)

        wait_until(grows_again, "the pool to grow again")


@pytest.mark.parametrize("device", ["6GiB"], indirect=True)
def test_who_loads_is_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs less once it has loaded: to refuse the next one for what it may need would be wrong."""
    # Which leaves less than any process with torch in it holds.
    loading = Lease.register(own_dir().socket, name="loading", device_uuid=device.uuid, min_bytes=5600 * MIB, granule_bytes=MIB)

    def loaded() -> None:
        wait_until(lambda: "waiting for loading" in seen.text, "the engine to wait")
        loading.lower_min(10 * MIB)
        loading.report({"kv": MIB}, 0)
        while not ended.is_set():  # an answer does not count if a grant is on its way
            loading.answer_unmapped(10 * MIB)
            ended.wait(0.05)

    class Seen(logging.Handler):
        text = ""

        def emit(self, record: logging.LogRecord) -> None:
            self.text += record.getMessage()

    seen, ended = Seen(), threading.Event()
    logger = logging.getLogger("pagetide.engine.memory.lease_holder")
    logger.addHandler(seen)
    monkeypatch.setattr(logger, "level", logging.INFO)
    thread = threading.Thread(target=loaded)
    thread.start()
    try:
        with loading, engine() as llm:
            assert said(llm, PROMPTS[:1]) == alone()[:1]
    finally:
        ended.set()
        thread.join()
        logger.removeHandler(seen)
    assert "waiting for loading" in seen.text


def test_what_a_program_holds_besides_takes_nothing_from_the_pool(device: Device) -> None:
    """It is an external process's memory to all engines: no request waits for room that the program itself has taken."""
    with LLM("demo", kv_memory="64MiB", max_seqs=16, max_step_tokens=512, idle_s=600) as llm:
        assert said(llm) == alone()
        before = memory(llm)
        data = np.ones(400 * MIB // 8)
        wait_until(lambda: said(llm, PROMPTS[:1]) and memory(llm)["base_bytes"] > before["base_bytes"], "the measurement")
        assert said(llm) == alone()
        after = memory(llm)
        assert (after["kv_bytes"], after["given_back_bytes"]) == (64 * MIB, 0)
        assert after["lease"]["held_bytes"] <= after["lease"]["max_bytes"]
        del data


def test_a_fork_of_the_process_has_no_lease_and_ends_none(device: Device) -> None:
    with engine() as llm:
        assert said(llm) == alone()
        granted = device.lease().granted_bytes
        if (child := os.fork()) == 0:
            status = 1
            try:
                llm.close()
            except EngineClosed as error:
                status = 0 if "is a fork of it" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0) == (child, 0)
        lease = device.lease()
        assert (lease.pid, lease.state, lease.granted_bytes) == (os.getpid(), "ok", granted)
        assert said(llm) == alone() and memory(llm)["lease"]["connected"]


def test_a_host_tier_goes_first_where_it_lies_in_the_memory_that_is_recalled(device: Device) -> None:
    with LLM("demo", kv_memory=KV, host_kv_memory="64MiB", max_seqs=16, max_step_tokens=512, idle_s=600) as llm:
        assert said(llm) == alone()
        hoard(llm)
        assert llm._manager.engine is not None
        pool = llm._manager.engine.core.runner.host
        assert pool is not None
        with llm.locked_engine():  # something lies there
            pool._populate(np.arange(1, 9, dtype=np.int32))
        assert llm.stats()["host_tier"]["bytes"] > 0
        device.client.recall(str(os.getpid()), 40 * MIB)
        wait_until(lambda: memory(llm)["kv_bytes"] <= 88 * MIB, "the recall to be served")
        assert llm.stats()["host_tier"]["bytes"] == 0
        assert said(llm) == alone()


def test_a_pool_tells_its_bounds_and_a_model_of_any_name_has_a_lease(device: Device, tmp_path: Path) -> None:
    strange = tmp_path / ("m" * 150 + "\u200b")
    strange.symlink_to(Path(demo_model.__file__).parent)
    with LLM(strange, kv_memory=KV, max_seqs=16, max_step_tokens=512) as llm:
        lease = memory(llm)["lease"]
        assert lease["max_bytes"] is not None
        assert lease["max_bytes"] - lease["min_bytes"] >= KV["max"] - KV["min"]
        assert device.lease().name.startswith("mmm")


@pytest.mark.parametrize("device", ["128MiB"], indirect=True)
def test_minimums_beyond_the_device_are_refused_with_the_numbers(device: Device) -> None:
    before = set(threading.enumerate())
    with pytest.raises(NotEnoughMemory) as refused:
        LLM("demo", kv_memory=KV)
    message = str(refused.value)
    assert "128.00 MiB less 8.00 MiB headroom" in message and "with what is promised to others (0" in message
    assert "Lower the min to 120.00 MiB or less" in message
    assert device.client.leases() == () and set(threading.enumerate()) == before


def test_two_plain_engines_share_a_broker_that_one_of_them_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which then is killed, and this one."""
    directory = RuntimeDir(tmp_path / "run")
    expected = alone()
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", str(directory.path))
    with device_users() as start:
        other = start("llm", {"seed": 0, "prompts": 2, "new": 16, "plain": True})
        assert other.read()["lease"]["connected"]
        client = BrokerClient(directory.socket)
        with RecordReader.open(directory.record) as reader:
            monitor = psutil.Process(reader.monitor_pid)
        with LLM("demo") as llm:
            assert memory(llm)["lease"]["connected"]
            assert {view.pid for view in client.leases()} == {other.pid, os.getpid()}
            other.write("burst")
            assert said(llm) == expected
            tally = other.read()
            assert tally["finished"] == tally["requests"] > 0 and tally["failed"] == 0, tally
            other.kill()  # whoever started it; no matter
            wait_until(lambda: [v.pid for v in client.leases()] == [os.getpid()], "the dead one's lease to end")
            assert monitor.is_running()
            assert said(llm) == expected
        wait_until(lambda: not monitor.is_running(), "the monitor to end with its last engine")
        assert not directory.socket.exists()

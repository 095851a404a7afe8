"""The metrics page as a scraper sees it: fetched over a socket, parsed by the client library, compared with the snapshot."""

from __future__ import annotations

import gzip
import http.client
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pagetide import __version__
from pagetide.monitor import metrics_server
from pagetide.monitor.errors import ConfigInvalid, RecordError
from pagetide.monitor.metrics import MAX_PROCESSES, METRICS
from pagetide.monitor.metrics_server import MAX_CONNECTIONS, MetricsServer
from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    LeaseUse,
    ProcessUse,
    Snapshot,
)

GIB = 1 << 30
MS = 1_000_000
NOW = 1_000_000 * MS
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitor.md"

Series = tuple[str, frozenset[tuple[str, str]]]
Page = dict[Series, float]


# ---- snapshots ----------------------------------------------------------------------------------


def memory_of(total: int | None = 80 * GIB, free: int | None = 20 * GIB, **changes: object) -> DeviceMemory:
    memory = DeviceMemory(
        at_ns=NOW - 10 * MS, interval_ns=20 * MS, total_bytes=total, free_bytes=free,
        bytes_per_second=0.0, polls=1, failures=0,
    )  # fmt: skip
    return replace(memory, **changes)  # type: ignore[arg-type]


def device_of(uuid: str = "GPU-a", memory: DeviceMemory | None = None, **reading: object) -> Device:
    return Device(
        DeviceInfo(uuid, "0", DeviceKind.GPU),
        memory or memory_of(),
        DeviceDetail(NOW - 500 * MS, 1000 * MS, DetailReading(**reading)),  # type: ignore[arg-type]
    )


def snapshot_of(*devices: Device, source: str = "nvml+host") -> Snapshot:
    return Snapshot(at_ns=NOW, source=source, monitor_pid=1, started_ns=NOW - 5000 * MS, devices=devices)


def lease_of(engine: str = "chat", pid: int = 100, uuid: str = "GPU-a", **changes: object) -> LeaseUse:
    lease = LeaseUse(
        engine=engine, pid=pid, user="ann", device_uuid=uuid, min_bytes=10 * GIB, max_bytes=None, weight=1.0, priority=0,
        granted_bytes=44 * GIB, held_bytes=40 * GIB, held_by_class={"weights": 15 * GIB, "kv": 22 * GIB, "other": 3 * GIB},
        free_bytes=2 * GIB, asked_bytes=None, state="ok", recall_target_bytes=None, recall_age_seconds=None,
    )  # fmt: skip
    return replace(lease, **changes)  # type: ignore[arg-type]


def rich_snapshot() -> Snapshot:
    """A GPU of which all is known, with a lease of which all is; a MIG instance of which little is known, and a host."""
    gpu = Device(
        DeviceInfo("GPU-a", "0", DeviceKind.GPU, "NVIDIA H200", "00000000:3B:00.0"),
        memory_of(80 * GIB, 20 * GIB, bytes_per_second=2.0 * GIB, polls=250, failures=3),
        DeviceDetail(
            NOW - 500 * MS, 1000 * MS,
            DetailReading(
                0.75, 61.0, 412.5, 700.0,
                (
                    ProcessUse(100, 40 * GIB, user="ann", command="/usr/bin/python3 serve.py --key s3cret", engine="chat"),
                    ProcessUse(200, 8 * GIB),
                    ProcessUse(300, None, user="bob", command="hidden"),
                ),
            ),
        ),
    )  # fmt: skip
    mig = Device(
        DeviceInfo("MIG-b", "1:0", DeviceKind.MIG, parent_uuid="GPU-b"),
        memory_of(10 * GIB, None, bytes_per_second=None, polls=7, failures=7, error="no permission"),
        DeviceDetail(0, 1000 * MS, DetailReading(), error="no permission"),
    )
    host = Device(
        DeviceInfo("HOST-c", "host", DeviceKind.HOST, "host memory"),
        memory_of(64 * GIB, 16 * GIB, at_ns=NOW - 100 * MS, bytes_per_second=-4096.5, polls=50),
        DeviceDetail(NOW - 250 * MS, 1000 * MS, DetailReading(processes=())),
    )
    recalled = lease_of(
        max_bytes=60 * GIB,
        asked_bytes=50 * GIB,
        state="recalling",
        recall_target_bytes=30 * GIB,
        recall_age_seconds=0.25,
    )
    return snapshot_of(gpu, mig, host).with_leases([recalled])


# ---- fetching and parsing -----------------------------------------------------------------------


@dataclass
class RequestGroup:
    """What came back for one request."""

    status: int
    content_type: str
    encoding: str
    text: str


def get(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> RequestGroup:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    encoding = answer.getheader("Content-Encoding", "")
    text = (gzip.decompress(body) if encoding == "gzip" else body).decode()
    return RequestGroup(answer.status, answer.getheader("Content-Type", ""), encoding, text)


def page_of(text: str, parse: Callable[[str], Iterator[object]] = parse_text) -> Page:
    """The page's own series by name and labels, each once. What the client library says of the process is left out."""
    page: Page = {}
    for family in parse(text):
        for sample in family.samples:  # type: ignore[attr-defined]
            series = (sample.name, frozenset(sample.labels.items()))
            assert series not in page, f"{series} is there twice"
            page[series] = sample.value
    return {series: value for series, value in page.items() if not series[0].startswith("process_")}


def series(metric: str, /, **labels: str) -> Series:
    return metric, frozenset(labels.items())


@dataclass
class World:
    """A server over a snapshot that the test may replace."""

    snapshot: Snapshot
    server: MetricsServer

    def page(self) -> Page:
        answer = get(self.server.port)
        assert answer.status == 200
        return page_of(answer.text)


@pytest.fixture
def serve() -> Iterator[Callable[[Snapshot], World]]:
    worlds: list[World] = []

    def start(snapshot: Snapshot) -> World:
        world = World(snapshot, server=None)  # type: ignore[arg-type]
        world.server = MetricsServer(lambda: world.snapshot, 0)
        worlds.append(world)
        return world

    yield start
    for world in worlds:
        world.server.close()


Serve = Callable[[Snapshot], World]


# ---- what stands on the page --------------------------------------------------------------------


def test_the_page_says_exactly_what_the_snapshot_says(serve: Serve) -> None:
    page = serve(rich_snapshot()).page()
    start = page.pop(series("vram_monitor_start_time_seconds"))
    assert start == pytest.approx(time.time() - time.monotonic() + (NOW - 5000 * MS) / 1e9, abs=5)
    gpu, mig, host = {"uuid": "GPU-a"}, {"uuid": "MIG-b"}, {"uuid": "HOST-c"}
    info = {"name": "", "pci_id": "", "parent_uuid": ""}
    chat = {"pid": "100", "engine": "chat", "user": "ann", "command": "python3"}
    external = {"pid": "200", "engine": "", "user": "", "command": ""}
    lease = gpu | {"pid": "100", "engine": "chat"}
    assert page == {
        series("vram_monitor_info", version=__version__, source="nvml+host"): 1,
        series("vram_monitor_last_answer_age_seconds"): 0.01,
        series(
            "vram_device_info",
            **info | gpu | {"index": "0", "kind": "gpu", "name": "NVIDIA H200", "pci_id": "00000000:3B:00.0"},
        ): 1,
        series("vram_device_info", **info | mig | {"index": "1:0", "kind": "mig", "parent_uuid": "GPU-b"}): 1,
        series("vram_device_info", **info | host | {"index": "host", "kind": "host", "name": "host memory"}): 1,
        series("vram_device_up", **gpu): 1,
        series("vram_device_up", **mig): 0,
        series("vram_device_up", **host): 1,
        series("vram_device_utilization_ratio", **gpu): 0.75,
        series("vram_device_temperature_celsius", **gpu): 61,
        series("vram_device_power_watts", **gpu): 412.5,
        series("vram_device_power_limit_watts", **gpu): 700,
        series("vram_memory_total_bytes", **gpu): 80 * GIB,
        series("vram_memory_total_bytes", **mig): 10 * GIB,
        series("vram_memory_total_bytes", **host): 64 * GIB,
        series("vram_memory_used_bytes", **gpu): 60 * GIB,
        series("vram_memory_used_bytes", **host): 48 * GIB,
        series("vram_memory_free_bytes", **gpu): 20 * GIB,
        series("vram_memory_free_bytes", **host): 16 * GIB,
        series("vram_memory_trend_bytes_per_second", **gpu): 2 * GIB,
        series("vram_memory_trend_bytes_per_second", **host): -4096.5,
        series("vram_memory_time_to_exhaustion_seconds", **gpu): 10,
        series("vram_process_used_bytes", **gpu | chat): 40 * GIB,
        series("vram_process_used_bytes", **gpu | external): 8 * GIB,
        series("vram_lease_info", **lease, user="ann"): 1,
        series("vram_lease_min_bytes", **lease): 10 * GIB,
        series("vram_lease_max_bytes", **lease): 60 * GIB,
        series("vram_lease_granted_bytes", **lease): 44 * GIB,
        series("vram_lease_held_bytes", **lease | {"class": "weights"}): 15 * GIB,
        series("vram_lease_held_bytes", **lease | {"class": "kv"}): 22 * GIB,
        series("vram_lease_held_bytes", **lease | {"class": "other"}): 3 * GIB,
        series("vram_lease_free_bytes", **lease): 2 * GIB,
        series("vram_lease_asked_bytes", **lease): 50 * GIB,
        series("vram_lease_recall_target_bytes", **lease): 30 * GIB,
        series("vram_lease_recall_age_seconds", **lease): 0.25,
        series("vram_lease_state", **lease, state="ok"): 0,
        series("vram_lease_state", **lease, state="recalling"): 1,
        series("vram_lease_state", **lease, state="overdue"): 0,
        series("vram_lease_state", **lease, state="reaping"): 0,
        series("vram_memory_age_seconds", **gpu): 0.01,
        series("vram_memory_age_seconds", **mig): 0.01,
        series("vram_memory_age_seconds", **host): 0.1,
        series("vram_memory_stale", **gpu): 0,
        series("vram_memory_stale", **mig): 0,
        series("vram_memory_stale", **host): 1,
        series("vram_detail_up", **gpu): 1,
        series("vram_detail_up", **mig): 0,
        series("vram_detail_up", **host): 1,
        series("vram_detail_age_seconds", **gpu): 0.5,
        series("vram_detail_age_seconds", **host): 0.25,
        series("vram_polls_total", **gpu): 250,
        series("vram_polls_total", **mig): 7,
        series("vram_polls_total", **host): 50,
        series("vram_poll_failures_total", **gpu): 3,
        series("vram_poll_failures_total", **mig): 7,
        series("vram_poll_failures_total", **host): 0,
    }


def test_bytes_are_exact_up_to_every_size_of_memory(serve: Serve) -> None:
    total, free = (1 << 47) - 1, (1 << 40) + 3
    page = serve(snapshot_of(device_of(memory=memory_of(total, free)))).page()
    assert page[series("vram_memory_total_bytes", uuid="GPU-a")] == total
    assert page[series("vram_memory_free_bytes", uuid="GPU-a")] == free
    assert page[series("vram_memory_used_bytes", uuid="GPU-a")] == total - free


def test_what_nobody_knows_is_absent(serve: Serve) -> None:
    unknown = memory_of(None, None, bytes_per_second=None)
    page = serve(snapshot_of(device_of(memory=unknown))).page()
    assert {name for name, labels in page if ("uuid", "GPU-a") in labels} == {
        "vram_device_info",
        "vram_device_up",
        "vram_memory_age_seconds",
        "vram_memory_stale",
        "vram_detail_up",
        "vram_detail_age_seconds",
        "vram_polls_total",
        "vram_poll_failures_total",
    }


def test_a_device_that_never_answered_is_down_and_stale_and_has_no_age(serve: Serve) -> None:
    silent = device_of(memory=memory_of(None, None, at_ns=0, bytes_per_second=None, polls=0))
    page = serve(snapshot_of(replace(silent, detail=replace(silent.detail, at_ns=0)))).page()
    assert {name: value for (name, labels), value in page.items() if labels == frozenset({("uuid", "GPU-a")})} == {
        "vram_device_up": 0,
        "vram_memory_stale": 1,
        "vram_detail_up": 0,
    }
    assert page[series("vram_monitor_last_answer_age_seconds")] == 5  # since the start


def test_without_a_device_the_monitor_still_speaks(serve: Serve) -> None:
    page = serve(snapshot_of(source="host")).page()
    assert {name for name, _ in page} == {
        "vram_monitor_info",
        "vram_monitor_start_time_seconds",
        "vram_monitor_last_answer_age_seconds",
    }
    assert page[series("vram_monitor_last_answer_age_seconds")] == 5


@pytest.mark.parametrize(
    ("free", "trend", "seconds"), [(0, 1.0, 0.0), (GIB, 0.5, 2.0 * GIB), (GIB, 0.0, None), (GIB, -1.0, None)]
)
def test_time_to_exhaustion_is_there_while_use_grows(
    serve: Serve, free: int, trend: float, seconds: float | None
) -> None:
    page = serve(snapshot_of(device_of(memory=memory_of(8 * GIB, free, bytes_per_second=trend)))).page()
    assert page.get(series("vram_memory_time_to_exhaustion_seconds", uuid="GPU-a")) == seconds
    assert page[series("vram_memory_trend_bytes_per_second", uuid="GPU-a")] == trend


def test_the_start_time_does_not_tremble(serve: Serve) -> None:
    world = serve(snapshot_of())
    first = world.page()
    world.snapshot = replace(world.snapshot, at_ns=NOW + 12_345)
    start = series("vram_monitor_start_time_seconds")
    assert world.page()[start] == first[start]


# ---- processes ----------------------------------------------------------------------------------


def pids(page: Page) -> set[str]:
    return {dict(labels)["pid"] for name, labels in page if name == "vram_process_used_bytes"}


def test_a_dead_pid_is_gone_from_the_next_page(serve: Serve) -> None:
    both = (ProcessUse(1, GIB), ProcessUse(2, GIB))
    world = serve(snapshot_of(device_of(processes=both)))
    assert pids(world.page()) == {"1", "2"}
    world.snapshot = snapshot_of(device_of(processes=both[1:]))
    assert pids(world.page()) == {"2"}
    world.snapshot = snapshot_of(device_of(processes=None))
    assert pids(world.page()) == set()


def test_a_process_is_counted_on_each_device_that_it_uses(serve: Serve) -> None:
    use = ProcessUse(7, GIB, user="ann", command="train")
    page = serve(snapshot_of(device_of("GPU-a", processes=(use,)), device_of("GPU-b", processes=(use,)))).page()
    labels = {"pid": "7", "user": "ann", "command": "train", "engine": ""}
    assert page[series("vram_process_used_bytes", uuid="GPU-a", **labels)] == GIB
    assert page[series("vram_process_used_bytes", uuid="GPU-b", **labels)] == GIB


def test_many_processes_are_cut_to_the_engines_and_the_largest(serve: Serve) -> None:
    uses = [ProcessUse(1000 + size, size * 4096) for size in range(1, 3 * MAX_PROCESSES)]
    uses[0] = replace(uses[0], engine="small")
    random.Random(1).shuffle(uses)
    page = serve(snapshot_of(device_of("GPU-a", processes=tuple(uses)), device_of("GPU-b", processes=()))).page()
    largest = {str(1000 + size) for size in range(2 * MAX_PROCESSES + 1, 3 * MAX_PROCESSES)}
    assert pids(page) == largest | {"1001"}
    assert len(pids(page)) == MAX_PROCESSES


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python3 -m vllm --api-key s3cret", "python3"),
        ("/usr/lib/x86/my-server\t--port 1", "my-server"),
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("./run.sh", "run.sh"),
        ("/", ""),
        (" ", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_of_a_command_line_only_the_program_is_told(serve: Serve, command: str | None, shown: str) -> None:
    page = serve(snapshot_of(device_of(processes=(ProcessUse(1, GIB, command=command),)))).page()
    assert series("vram_process_used_bytes", uuid="GPU-a", pid="1", engine="", user="", command=shown) in page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('a"b', 'a"b'),
        ("back\\slash\\n", "back\\slash\\n"),
        ('x"}\u00a01\nvram_polls_total{uuid="evil"}\u00a09\n', 'x"}�1�vram_polls_total{uuid="evil"}�9�'),
        ("a\0b\x1b[31m\x7f", "a�b�[31m�"),
        ("bad\udcff\ud800", "bad��"),
        ("right\u202eleft\u2028", "right�left�"),
        ("潮汐 🌊 é", "潮汐 🌊 é"),
        ("x" * 128, "x" * 128),
        ("x" * 100_000, "x" * 127 + "…"),
        ("{},=# HELP", "{},=# HELP"),
    ],
)
def test_hostile_names_do_not_break_the_page(serve: Serve, text: str, shown: str) -> None:
    """In a name that is given as it is; a command would end at the first blank."""
    hostile = device_of(processes=(ProcessUse(1, GIB, user=text, command=text.replace(" ", ""), engine=text),))
    world = serve(snapshot_of(replace(hostile, info=replace(hostile.info, name=text)), source=text))
    text_answer = get(world.server.port)
    page = page_of(text_answer.text)
    assert page == page_of(get(world.server.port, Accept="application/openmetrics-text").text, parse_openmetrics)
    assert series("vram_monitor_info", version=__version__, source=shown) in page
    (process,) = (dict(labels) for name, labels in page if name == "vram_process_used_bytes")
    assert (process["user"], process["engine"]) == (shown, shown)
    (info,) = (dict(labels) for name, labels in page if name == "vram_device_info")
    assert info["name"] == shown
    assert [labels for name, labels in page if name == "vram_polls_total"] == [frozenset({("uuid", "GPU-a")})]


# ---- leases -------------------------------------------------------------------------------------


def of_lease(page: Page, pid: int) -> dict[str, float]:
    """Metric, with the class or state it is for -> value."""
    return {
        " ".join([name, *(value for label, value in labels if label in ("class", "state"))]): number
        for name, labels in page
        if name.startswith("vram_lease_") and ("pid", str(pid)) in labels
        for number in [page[name, labels]]
    }


def test_of_a_lease_without_limit_wish_or_recall_nothing_is_said_of_these(serve: Serve) -> None:
    page = serve(snapshot_of().with_leases([lease_of(held_bytes=0, held_by_class={}, free_bytes=0)])).page()
    assert of_lease(page, 100) == {
        "vram_lease_info": 1,
        "vram_lease_min_bytes": 10 * GIB,
        "vram_lease_granted_bytes": 44 * GIB,
        "vram_lease_held_bytes weights": 0,
        "vram_lease_held_bytes kv": 0,
        "vram_lease_held_bytes other": 0,
        "vram_lease_free_bytes": 0,
        "vram_lease_state ok": 1,
        "vram_lease_state recalling": 0,
        "vram_lease_state overdue": 0,
        "vram_lease_state reaping": 0,
    }


def test_a_recall_to_nothing_that_has_just_begun_is_there(serve: Serve) -> None:
    lease = lease_of(state="recalling", recall_target_bytes=0, recall_age_seconds=0.0)
    told = of_lease(serve(snapshot_of().with_leases([lease])).page(), 100)
    assert (told["vram_lease_recall_target_bytes"], told["vram_lease_recall_age_seconds"]) == (0, 0)


def test_a_lease_that_ended_is_gone_from_the_next_page(serve: Serve) -> None:
    both = [lease_of(pid=1), lease_of(pid=2)]
    world = serve(snapshot_of().with_leases(both))
    assert of_lease(world.page(), 1) and of_lease(world.page(), 2)
    world.snapshot = snapshot_of().with_leases(both[1:])
    assert not of_lease(world.page(), 1)
    assert of_lease(world.page(), 2)


def test_engines_of_one_name_are_told_apart_by_their_pid_and_device(serve: Serve) -> None:
    leases = [
        lease_of(pid=1, granted_bytes=1),
        lease_of(pid=2, granted_bytes=2),
        lease_of(pid=1, uuid="b", granted_bytes=4),
    ]
    page = serve(snapshot_of().with_leases(leases)).page()
    assert {labels: value for (name, labels), value in page.items() if name == "vram_lease_granted_bytes"} == {
        frozenset({("uuid", uuid), ("pid", pid), ("engine", "chat")}): value
        for uuid, pid, value in (("GPU-a", "1", 1), ("GPU-a", "2", 2), ("b", "1", 4))
    }


def test_leases_of_one_process_and_name_count_together(serve: Serve) -> None:
    """Its former lease is reaped, or it runs a model twice. Prometheus takes each series once."""
    former = lease_of(
        state="reaping", granted_bytes=4 * GIB, held_bytes=3 * GIB, held_by_class={}, free_bytes=0, min_bytes=0
    )
    recalls = [
        lease_of(state="overdue", recall_target_bytes=target * GIB, recall_age_seconds=age)
        for target, age in ((30, 2.5), (20, 0.5))
    ]
    told = of_lease(serve(snapshot_of().with_leases([former, *recalls])).page(), 100)
    assert told == {
        "vram_lease_info": 1,
        "vram_lease_min_bytes": 20 * GIB,
        "vram_lease_granted_bytes": 92 * GIB,
        "vram_lease_held_bytes weights": 30 * GIB,
        "vram_lease_held_bytes kv": 44 * GIB,
        "vram_lease_held_bytes other": 9 * GIB,
        "vram_lease_free_bytes": 4 * GIB,
        "vram_lease_recall_target_bytes": 50 * GIB,
        "vram_lease_recall_age_seconds": 2.5,
        "vram_lease_state ok": 0,
        "vram_lease_state recalling": 0,
        "vram_lease_state overdue": 1,
        "vram_lease_state reaping": 1,
    }


@pytest.mark.parametrize("text", ['a"b\\\n{}=1', "\x1b[31m\u202e", "x" * 1000, "\udcff"])
def test_hostile_engines_do_not_break_the_page(serve: Serve, text: str) -> None:
    """Two whose names look alike once they are neutralised, too."""
    leases = [lease_of(text, held_by_class={text: 5}), lease_of(text + "\x01"), lease_of(text + "\x02")]
    leases = [replace(lease, user=text, state=text) for lease in leases]
    world = serve(snapshot_of().with_leases(leases))
    page = world.page()
    assert page == page_of(get(world.server.port, Accept="application/openmetrics-text").text, parse_openmetrics)
    assert sum(value for (name, _), value in page.items() if name == "vram_lease_granted_bytes") == 3 * 44 * GIB
    assert {dict(labels)["class"] for name, labels in page if name == "vram_lease_held_bytes"} == {
        "weights",
        "kv",
        "other",
    }
    assert {value for (name, _), value in page.items() if name == "vram_lease_state"} == {0}


# ---- counters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_counters_never_go_back_while_devices_fail_vanish_and_return(serve: Serve, seed: int) -> None:
    """A device that returns has an empty place in the record until it answered: no answer yet, and 0 polls."""
    rng = random.Random(seed)
    world = serve(snapshot_of())
    counts = {uuid: [0, 0] for uuid in ("GPU-a", "GPU-b", "GPU-c")}  # polls, failures: what the poller remembers
    there: dict[str, bool] = {}  # and whether it was asked since it is there
    seen: Page = {}
    for _ in range(200):
        uuid = rng.choice(sorted(counts))
        match rng.choice(("poll", "poll", "fail", "come", "go")):
            case "come":
                there.setdefault(uuid, False)
            case "go":
                there.pop(uuid, None)
            case event if uuid in there:
                there[uuid] = True
                counts[uuid][0] += rng.randint(1, 50)
                counts[uuid][1] += event == "fail"
        world.snapshot = snapshot_of(
            *(
                device_of(uuid, memory_of(polls=counts[uuid][0], failures=counts[uuid][1]))
                if asked
                else device_of(uuid, memory_of(None, None, at_ns=0, polls=0))
                for uuid, asked in there.items()
            )
        )
        page = {key: value for key, value in world.page().items() if key[0].endswith("_total")}
        assert all(value >= seen.get(key, 0) for key, value in page.items())
        assert page == {
            series(name, uuid=uuid): counts[uuid][which]
            for which, name in enumerate(("vram_polls_total", "vram_poll_failures_total"))
            for uuid, asked in there.items()
            if asked
        }
        seen |= page
    assert seen


# ---- formats and conventions --------------------------------------------------------------------


def test_openmetrics_is_given_to_who_asks_and_says_the_same(serve: Serve) -> None:
    world = serve(rich_snapshot())
    plain = get(world.server.port)
    asked = get(world.server.port, Accept="application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    assert asked.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert asked.text.endswith("# EOF\n")
    assert page_of(asked.text, parse_openmetrics) == page_of(plain.text)


def test_a_compressed_page_is_the_same_page(serve: Serve) -> None:
    world = serve(rich_snapshot())
    answer = get(world.server.port, **{"Accept-Encoding": "gzip"})
    assert answer.encoding == "gzip"
    assert page_of(answer.text) == world.page()


def test_a_scraper_may_choose_metrics_by_name(serve: Serve) -> None:
    world = serve(rich_snapshot())
    answer = get(world.server.port, "/metrics?name[]=vram_device_up&name[]=vram_polls_total")
    assert {name for name, _ in page_of(answer.text)} == {"vram_device_up", "vram_polls_total"}


def test_names_follow_the_conventions_of_prometheus() -> None:
    units = (
        "_bytes",
        "_seconds",
        "_ratio",
        "_celsius",
        "_watts",
        "_bytes_per_second",
        "_info",
        "_up",
        "_stale",
        "_state",
    )
    for metric in METRICS:
        assert re.fullmatch(r"vram(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total" if metric.type == "counter" else units), metric.name
        assert re.fullmatch(r"[A-Z1-9][^\n]*\.", metric.help), metric.help
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(serve: Serve) -> None:
    text = get(serve(rich_snapshot()).server.port).text
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> (type, labels), from the rows of the table in docs/monitor.md."""
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter) \|([^|]*)\|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    table = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(table) == len(rows), "a metric has two rows"
    return table


@pytest.mark.skipif(sys.platform != "linux", reason="the client library reads process_* from /proc")
def test_the_documented_table_is_the_page(serve: Serve) -> None:
    exported = {
        sample.name: (family.type, frozenset(sample.labels))
        for family in parse_text(get(serve(rich_snapshot()).server.port).text)
        for sample in family.samples
    }
    assert documented() == exported


# ---- serving ------------------------------------------------------------------------------------


def test_every_page_is_of_one_snapshot(serve: Serve) -> None:
    """Scraped by many at a time, while the snapshot changes."""
    uuids = [f"GPU-{number}" for number in range(8)]
    snapshots = [snapshot_of(*(device_of(uuid, memory_of(GIB * 80, mark)) for uuid in uuids)) for mark in range(1, 65)]
    world = serve(snapshots[0])
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for snapshot in snapshots:
                world.snapshot = snapshot

    changer = threading.Thread(target=change)
    changer.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            pages = list(pool.map(lambda _: world.page(), range(80)))
    finally:
        done.set()
        changer.join()
    marks = [{page[series("vram_memory_free_bytes", uuid=uuid)] for uuid in uuids} for page in pages]
    assert [len(mark) for mark in marks] == [1] * 80


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_it_listens_to_this_machine_alone_unless_told_otherwise(serve: Serve) -> None:
    port = serve(snapshot_of()).server.port
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # taken, if the server listened to every address


def test_two_servers_say_each_their_own(serve: Serve) -> None:
    one = serve(snapshot_of(device_of("GPU-one")))
    two = serve(snapshot_of(device_of("GPU-two")))
    assert one.server.port != two.server.port
    assert series("vram_device_up", uuid="GPU-one") in one.page()
    assert series("vram_device_up", uuid="GPU-two") in two.page()
    one.server.close()
    assert series("vram_device_up", uuid="GPU-two") in two.page()


def test_an_ipv6_address_is_served() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = MetricsServer(rich_snapshot, 0, "::1")
    try:
        with socket.create_connection(("::1", server.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert client.makefile("rb").readline() == b"HTTP/1.0 200 OK\r\n"
    finally:
        server.close()


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/metrics/", "/metricsx", "/../metrics"])
def test_there_is_nothing_else(serve: Serve, path: str) -> None:
    answer = get(serve(rich_snapshot()).server.port, path)
    assert answer.status == 404
    assert "the metrics are at /metrics" in answer.text


def test_only_get_is_answered(serve: Serve) -> None:
    assert get(serve(rich_snapshot()).server.port, method="POST").status == 501


def test_a_record_that_cannot_be_read_is_told_to_the_scraper() -> None:
    readable = [False]

    def read() -> Snapshot:
        if readable[0]:
            return rich_snapshot()
        raise RecordError("the record is <damaged>")

    server = MetricsServer(read, 0)
    try:
        answer = get(server.port)
        assert (answer.status, "the record is &lt;damaged&gt;" in answer.text) == (503, True)
        readable[0] = True
        assert get(server.port).status == 200
    finally:
        server.close()


def test_a_fault_of_ours_is_logged_and_the_next_scrape_is_served(caplog: pytest.LogCaptureFixture) -> None:
    faults = [ZeroDivisionError("planted")]

    def read() -> Snapshot:
        if faults:
            raise faults.pop()
        return rich_snapshot()

    server = MetricsServer(read, 0)
    try:
        answer = get(server.port)
        assert (answer.status, "the monitor's log says why" in answer.text) == (500, True)
        assert get(server.port).status == 200
    finally:
        server.close()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert "planted" in str(record.exc_info[1])


def slow_client(port: int) -> socket.socket:
    """A connection whose request has begun, and does not end."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(b"GET /metrics HTTP/1.0\r\nHost:")
    return client


def is_hung_up(client: socket.socket) -> bool:
    """Whether the server hung up, as far as one sees within the client's timeout."""
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def join_all(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_client_that_says_nothing_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.05)
    with slow_client(serve(snapshot_of()).server.port) as client:
        assert is_hung_up(client)


def test_a_client_that_goes_on_saying_little_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of the whole request: the next byte brings no more of it."""
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.5)
    with slow_client(serve(snapshot_of()).server.port) as client:
        client.settimeout(0.02)
        give_up = time.monotonic() + 60
        while not is_hung_up(client):
            assert time.monotonic() < give_up
            try:
                client.sendall(b"x")
            except ConnectionError:
                break


def test_a_client_that_does_not_take_the_answer_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.5)
    world = serve(snapshot_of(*(device_of(f"GPU-{number}") for number in range(2000))))  # more than a socket's buffer
    before = set(threading.enumerate())
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", world.server.port))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(1) in (b"H", b"")  # it answers; or the time was up before, on a machine that has much to do
        join_all(set(threading.enumerate()) - before)


def test_a_connection_too_many_is_closed_and_the_others_are_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 3600.0)
    port = serve(snapshot_of()).server.port
    before = set(threading.enumerate())
    clients = [slow_client(port) for _ in range(MAX_CONNECTIONS)]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as one_too_many:
            assert is_hung_up(one_too_many)
    threads = set(threading.enumerate()) - before
    assert len(threads) == MAX_CONNECTIONS
    for client in clients:
        with client:
            client.sendall(b"\r\n\r\n")
            assert client.makefile("rb").readline() == b"HTTP/1.0 200 OK\r\n"
    join_all(threads)
    assert get(port).status == 200


def test_slow_clients_keep_the_page_from_others_no_longer_than_their_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.5)
    port = serve(snapshot_of()).server.port
    clients = [slow_client(port) for _ in range(4 * MAX_CONNECTIONS)]
    try:
        assert all(is_hung_up(client) for client in clients)
        give_up = time.monotonic() + 60
        while True:  # the last threads may still be on their way out
            try:
                assert get(port).status == 200
                break
            except ConnectionError:
                assert time.monotonic() < give_up
    finally:
        for client in clients:
            client.close()


OUT_OF_DESCRIPTORS = """
import os, resource, socket, threading, time
from pagetide.monitor import metrics_server
from pagetide.monitor.snapshot import Snapshot

tries, tried_ten_times, accept = [], threading.Event(), metrics_server._Server.get_request

def counted(server):
    tries.append(time.monotonic())
    if len(tries) == 10:
        tried_ten_times.set()
    return accept(server)

metrics_server._Server.get_request = counted
server = metrics_server.MetricsServer(lambda: Snapshot(at_ns=1, source="", monitor_pid=1, started_ns=1, devices=()), 0)
client = socket.socket()
client.settimeout(60)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
client.connect(("127.0.0.1", server.port))
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
assert tried_ten_times.wait(60)
assert tries[9] - tries[0] >= 9 * metrics_server._LOOK_UP_S, "it spins"
for descriptor in taken:
    os.close(descriptor)
assert client.recv(15) == b"HTTP/1.0 200 OK"
server.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of descriptors")
def test_without_descriptors_it_pauses_and_serves_when_there_are_some_again() -> None:
    """In a process of its own, which has them all taken."""
    child = subprocess.run(
        [sys.executable, "-P", "-c", OUT_OF_DESCRIPTORS],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")


def test_a_client_that_hangs_up_is_no_event(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())
    reading, hung_up, left = threading.Event(), threading.Event(), threading.Event()

    def read() -> Snapshot:
        if not left.is_set():
            reading.set()
            assert hung_up.wait(60)
            left.set()
        return snapshot_of(*(device_of(f"GPU-{number}") for number in range(2000)))  # more than a socket's buffer

    server = MetricsServer(read, 0)
    try:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a polite end
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert reading.wait(60)
        client.close()
        hung_up.set()
        assert left.wait(60)
        assert get(server.port).status == 200
    finally:
        server.close()
    join_all(set(threading.enumerate()) - before)
    assert caplog.records == []
    assert "Traceback" not in capfd.readouterr().err


# ---- where it may listen, and the end -----------------------------------------------------------


def test_a_port_in_use_is_refused_with_what_to_do(serve: Serve) -> None:
    port = serve(snapshot_of()).server.port
    with pytest.raises(ConfigInvalid, match=rf"port {port} at 127\.0\.0\.1 is in use.*or 0 for a free one"):
        MetricsServer(rich_snapshot, port)


@pytest.mark.parametrize("address", ["192.0.2.1", "fe80::1%no-such-link", "x" * 70, ".."])
def test_an_address_that_is_not_ours_is_refused(address: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"is no address of this machine.*Use 127\.0\.0\.1"):
        MetricsServer(rich_snapshot, 0, address)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigInvalid, match=f"between 0 and 65535, got {port}"):
        MetricsServer(rich_snapshot, port)


def test_a_port_of_roots_is_refused_to_others() -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 823))
    except PermissionError:
        pass
    except OSError as error:
        pytest.skip(f"port 823: {error}")
    else:
        pytest.skip("this user may listen to every port")
    with pytest.raises(ConfigInvalid, match="ports below 1024 are root's"):
        MetricsServer(rich_snapshot, 823)


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_a_refusal_leaves_nothing_open(serve: Serve) -> None:
    port = serve(snapshot_of()).server.port
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with pytest.raises(ConfigInvalid):
            MetricsServer(rich_snapshot, port)
    assert threading.active_count() <= threads  # fewer, if a thread of an earlier test ended meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_close_frees_the_port_at_once_and_may_come_twice() -> None:
    """Also while a client holds a connection open, and right after connections have ended."""
    server = MetricsServer(rich_snapshot, 0)
    port = server.port
    for _ in range(20):
        assert get(port).status == 200
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /met")
            server.close()
            server.close()
            server = MetricsServer(rich_snapshot, port)
            assert server.port == port
    server.close()


def test_a_closed_server_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    server = MetricsServer(rich_snapshot, 0)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["metrics"]
    server.close()
    assert set(threading.enumerate()) - before == set()


def test_close_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow client does not outlive the server, whose clock has stopped."""
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 3600.0)
    before = set(threading.enumerate())
    server = MetricsServer(rich_snapshot, 0)
    with slow_client(server.port) as client, slow_client(server.port) as served:
        served.sendall(b"\r\n\r\n")
        assert served.recv(1) == b"H"  # so the one before it has its thread
        threads = set(threading.enumerate()) - before
        server.close()
        assert is_hung_up(client)
        join_all(threads)


def test_the_client_library_is_loaded_for_the_page_alone() -> None:
    code = "import sys, pagetide.monitor.snapshot; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0

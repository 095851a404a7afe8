"""The metrics page as a scraper sees it, compared with the snapshot; and requests that no scraper sends, by raw sockets."""

from __future__ import annotations

import errno
import gzip
import http.client
import logging
import os
import random
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from monitors import exchanged, wait_until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from snapshots import sample_lease

from pagetide.monitor import metrics_server
from pagetide.monitor.errors import ConfigInvalid, RecordError
from pagetide.monitor.events import UNDELIVERED, EventKind
from pagetide.monitor.log_throttle import QUIET_CAUSE_NS
from pagetide.monitor.metrics import MAX_PROCESSES, METRICS
from pagetide.monitor.metrics_server import MAX_CONNECTIONS, MAX_HEAD_BYTES, MetricsServer
from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    LeaseUse,
    ProcessUse,
    ReservationUse,
    Snapshot,
)
from pagetide.version import __version__

GIB = 1 << 30
MS = 1_000_000
KINDS = [kind.value for kind in EventKind if kind is not EventKind.HOLDS]
NOW = 1_000_000 * MS
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitor.md"

Series = tuple[str, frozenset[tuple[str, str]]]
Page = dict[Series, float]


def memory_of(total: int | None = 80 * GIB, free: int | None = 20 * GIB, **changes: object) -> DeviceMemory:
    memory = DeviceMemory(
        at_ns=NOW - 10 * MS, interval_ns=20 * MS, total_bytes=total, free_bytes=free, bytes_per_second=0.0, polls=1, failures=0
    )
    return replace(memory, **changes)  # type: ignore[arg-type]


def device_of(uuid: str = "GPU-a", memory: DeviceMemory | None = None, **reading: object) -> Device:
    return Device(
        DeviceInfo(uuid, "0", DeviceKind.GPU),
        memory or memory_of(),
        DeviceDetail(NOW - 500 * MS, 1000 * MS, DetailReading(**reading)),  # type: ignore[arg-type]
    )


def snapshot_of(*devices: Device, source: str = "nvml+host") -> Snapshot:
    return Snapshot(at_ns=NOW, source=source, monitor_pid=1, started_ns=NOW - 5000 * MS, devices=devices)


def lease_of(engine: str = "chat", pid: int = 100, **changes: object) -> LeaseUse:
    lease = sample_lease(engine, pid, "GPU-a", 44, held=40, weights=15, kv=22, free=2, minimum=10)
    return replace(lease, **{"user": "ann"} | changes)  # type: ignore[arg-type]


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
                    ProcessUse(
                        100, 40 * GIB, user="ann", command="/usr/bin/python3 serve.py --key s3cret", engine="chat",
                        cgroup=f"/system.slice/docker-{'4f' * 32}.scope", idle_seconds=12.5,
                    ),
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
        max_bytes=60 * GIB, asked_bytes=50 * GIB, state="recalling", recall_target_bytes=30 * GIB, recall_age_seconds=0.25
    )
    counts = {"took": 4, "refused": 2, UNDELIVERED: 1}
    waits = ReservationUse(7, "train", 400, "bob", "GPU-a", "waiting", 2 * GIB, 6 * GIB, 0, 1, 40.5, 60.0)
    return replace(snapshot_of(gpu, mig, host).with_leases([recalled], [waits]), event_counts=counts)


class Answer(NamedTuple):
    status: int
    content_type: str
    encoding: str
    text: str


def get(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> Answer:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    encoding = answer.getheader("Content-Encoding", "")
    text = (gzip.decompress(body) if encoding == "gzip" else body).decode()
    return Answer(answer.status, answer.getheader("Content-Type", ""), encoding, text)


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


class World:
    def __init__(self) -> None:
        self.snapshot = snapshot_of()
        self.server = MetricsServer(lambda: self.snapshot, 0)
        self.port = self.server.port

    def page(self, snapshot: Snapshot) -> Page:
        self.snapshot = snapshot
        answer = get(self.port)
        assert answer.status == 200
        return page_of(answer.text)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.server.close()


def test_the_page_says_exactly_what_the_snapshot_says(world: World) -> None:
    page = world.page(rich_snapshot())
    start = page.pop(series("vram_monitor_start_time_seconds"))
    later = world.page(replace(rich_snapshot(), at_ns=NOW + 12_345))
    assert later[series("vram_monitor_start_time_seconds")] == start, "it does not tremble"
    assert start == pytest.approx(time.time() - time.monotonic() + (NOW - 5000 * MS) / 1e9, abs=5)
    gpu, mig, host = devices = {"uuid": "GPU-a"}, {"uuid": "MIG-b"}, {"uuid": "HOST-c"}
    info = {"name": "", "pci_id": "", "parent_uuid": ""}
    infos = (
        info | gpu | {"index": "0", "kind": "gpu", "name": "NVIDIA H200", "pci_id": "00000000:3B:00.0"},
        info | mig | {"index": "1:0", "kind": "mig", "parent_uuid": "GPU-b"},
        info | host | {"index": "host", "kind": "host", "name": "host memory"},
    )
    by_device = {  # None: not known, and absent
        "vram_device_up": (1, 0, 1),
        "vram_device_utilization_ratio": (0.75, None, None),
        "vram_device_temperature_celsius": (61, None, None),
        "vram_device_power_watts": (412.5, None, None),
        "vram_device_power_limit_watts": (700, None, None),
        "vram_memory_total_bytes": (80 * GIB, 10 * GIB, 64 * GIB),
        "vram_memory_used_bytes": (60 * GIB, None, 48 * GIB),
        "vram_memory_free_bytes": (20 * GIB, None, 16 * GIB),
        "vram_memory_trend_bytes_per_second": (2 * GIB, None, -4096.5),
        "vram_memory_time_to_exhaustion_seconds": (10, None, None),
        "vram_memory_age_seconds": (0.01, 0.01, 0.1),
        "vram_memory_stale": (0, 0, 1),
        "vram_detail_up": (1, 0, 1),
        "vram_detail_age_seconds": (0.5, None, 0.25),
        "vram_polls_total": (250, 7, 50),
        "vram_poll_failures_total": (3, 7, 0),
    }
    lease = gpu | {"pid": "100", "engine": "chat"}
    waits = gpu | {"id": "7", "pid": "400", "name": "train", "user": "bob"}
    reserved = {"held_bytes": 2 * GIB, "wanted_bytes": 6 * GIB, "left_seconds": 60}
    reserved |= {"waiting_seconds": 40.5, "queue_place": 1}
    owners = (("container", "4f" * 6, 40), ("user", "ann", 40))
    amounts = {"min": 10, "max": 60, "granted": 44, "spare": 2, "asked": 50, "recall_target": 30}
    held, states = {"weights": 15, "kv": 22, "other": 3}, ("ok", "loading", "recalling", "overdue", "reaping")
    assert page == {
        series("vram_monitor_info", version=__version__, source="nvml+host"): 1,
        series("vram_monitor_last_answer_age_seconds"): 0.01,
        **{series("vram_device_info", **labels): 1 for labels in infos},
        **{
            series(name, **device): value
            for name, values in by_device.items()
            for device, value in zip(devices, values, strict=True)
            if value is not None
        },
        series("vram_process_used_bytes", **lease, user="ann", command="python3"): 40 * GIB,
        series("vram_process_used_bytes", **gpu, pid="200", engine="", user="", command=""): 8 * GIB,
        series("vram_lease_info", **lease, user="ann"): 1,
        **{series(f"vram_lease_{name}_bytes", **lease): gib * GIB for name, gib in amounts.items()},
        **{series("vram_lease_held_bytes", **lease | {"class": name}): gib * GIB for name, gib in held.items()},
        series("vram_lease_recall_age_seconds", **lease): 0.25,
        series("vram_lease_waiting_requests", **lease): 0,
        **{series("vram_lease_state", **lease, state=state): float(state == "recalling") for state in states},
        **{series(f"vram_reservation_{name}", **waits): value for name, value in reserved.items()},
        series("vram_process_idle_seconds", **gpu, pid="100"): 12.5,
        **{series("vram_owner_used_bytes", **gpu, kind=kind, owner=owner): gib * GIB for kind, owner, gib in owners},
        **{series("vram_events_total", kind=kind): {"took": 4, "refused": 2}.get(kind, 0) for kind in KINDS},
        series("vram_alerts_undelivered_total"): 1,
    }


def of_device(page: Page, uuid: str = "GPU-a") -> dict[str, float]:
    """Metric -> value, of the device itself."""
    return {name: value for (name, labels), value in page.items() if labels == frozenset({("uuid", uuid)})}


def test_what_nobody_knows_or_what_ended_is_absent(world: World) -> None:
    assert pids(world.page(rich_snapshot())) == {"100", "200"}
    unknown = memory_of(None, None, bytes_per_second=None)
    assert of_device(world.page(snapshot_of(device_of(memory=unknown)))).keys() == {
        "vram_device_up", "vram_memory_age_seconds", "vram_memory_stale", "vram_detail_up", "vram_detail_age_seconds",
        "vram_polls_total", "vram_poll_failures_total",
    }  # fmt: skip
    silent = device_of(memory=replace(unknown, at_ns=0, polls=0))
    page = world.page(snapshot_of(replace(silent, detail=replace(silent.detail, at_ns=0))))
    assert of_device(page) == {"vram_device_up": 0, "vram_memory_stale": 1, "vram_detail_up": 0}
    assert page[series("vram_monitor_last_answer_age_seconds")] == 5, "since the start"
    names = (
        "vram_monitor_info", "vram_monitor_start_time_seconds", "vram_monitor_last_answer_age_seconds",
        "vram_events_total", "vram_alerts_undelivered_total",
    )  # fmt: skip
    assert {name for name, _ in world.page(snapshot_of(source="host"))} == set(names)


def test_amounts_are_exact_and_the_time_to_exhaustion_is_there_while_use_grows(world: World) -> None:
    total = (1 << 47) - 1
    for free, trend, seconds in ((0, 1.0, 0.0), ((1 << 40) + 4, 0.5, (2 << 40) + 8), (3, 0.0, None), (GIB, -1.0, None)):
        told = of_device(world.page(snapshot_of(device_of(memory=memory_of(total, free, bytes_per_second=trend)))))
        assert [told[f"vram_memory_{name}_bytes"] for name in ("total", "free", "used")] == [total, free, total - free]
        assert told.get("vram_memory_time_to_exhaustion_seconds") == seconds
        assert told["vram_memory_trend_bytes_per_second"] == trend


def pids(page: Page) -> set[str]:
    return {dict(labels)["pid"] for name, labels in page if name == "vram_process_used_bytes"}


def test_of_a_command_line_only_the_program_is_told_on_each_device(world: World) -> None:
    commands = {
        "python3 -m vllm --api-key s3cret": "python3", "/usr/lib/x86/my-server\t--port 1": "my-server",
        "VLLM::EngineCore": "VLLM::EngineCore", "./run.sh": "run.sh", "/": "", " ": "", "": "", None: "",
    }  # fmt: skip
    uses = tuple(ProcessUse(pid, GIB, command=command) for pid, command in enumerate(commands))
    page = world.page(snapshot_of(device_of("GPU-a", processes=uses), device_of("GPU-b", processes=uses)))
    for uuid in ("GPU-a", "GPU-b"):
        for pid, shown in enumerate(commands.values()):
            labels = {"uuid": uuid, "pid": str(pid), "engine": "", "user": "", "command": shown}
            assert page[series("vram_process_used_bytes", **labels)] == GIB


def test_many_processes_are_cut_to_the_engines_and_the_largest(world: World) -> None:
    uses = [ProcessUse(1000 + size, size * 4096) for size in range(1, 3 * MAX_PROCESSES)]
    uses[0] = replace(uses[0], engine="small")
    random.Random(1).shuffle(uses)
    page = world.page(snapshot_of(device_of("GPU-a", processes=tuple(uses)), device_of("GPU-b", processes=())))
    largest = {str(1000 + size) for size in range(2 * MAX_PROCESSES + 1, 3 * MAX_PROCESSES)}
    assert pids(page) == largest | {"1001"}
    assert len(pids(page)) == MAX_PROCESSES


def test_hostile_names_do_not_break_the_page(world: World) -> None:
    """Also those of engines whose names look alike once they are neutralised."""
    for text, shown in {
        'a"b': 'a"b',
        "back\\slash\\n": "back\\slash\\n",
        'x"}\u00a01\nvram_polls_total{uuid="evil"}\u00a09\n': 'x"}�1�vram_polls_total{uuid="evil"}�9�',
        "a\0b\x1b[31m\x7f": "a�b�[31m�",
        "bad\udcff\ud800": "bad��",
        "right\u202eleft\u2028": "right�left�",
        "潮汐 🌊 é": "潮汐 🌊 é",
        "x" * 128: "x" * 128,
        "x" * 100_000: "x" * 127 + "…",
        "{},=# HELP": "{},=# HELP",
    }.items():
        hostile = device_of(processes=(ProcessUse(1, GIB, user=text, command=text.replace(" ", ""), engine=text),))
        leases = [lease_of(text, held_by_class={text: 5}), lease_of(text + "\x01"), lease_of(text + "\x02")]
        leases = [replace(lease, user=text, state=text) for lease in leases]
        named = replace(hostile, info=replace(hostile.info, name=text))
        page = world.page(snapshot_of(named, source=text))
        (process,) = (dict(labels) for name, labels in page if name == "vram_process_used_bytes")
        assert (process["user"], process["engine"]) == (shown, shown)
        page = world.page(world.snapshot.with_leases(leases))
        assert page == page_of(get(world.port, Accept="application/openmetrics-text").text, parse_openmetrics)
        assert series("vram_monitor_info", version=__version__, source=shown) in page
        (info,) = (dict(labels) for name, labels in page if name == "vram_device_info")
        assert info["name"] == shown
        assert [labels for name, labels in page if name == "vram_polls_total"] == [frozenset({("uuid", "GPU-a")})]
        assert sum(value for (name, _), value in page.items() if name == "vram_lease_granted_bytes") == 3 * 44 * GIB
        classes = {dict(labels)["class"] for name, labels in page if name == "vram_lease_held_bytes"}
        assert classes == {*CLASSES}
        assert {value for (name, _), value in page.items() if name == "vram_lease_state"} == {0}


def of_lease(page: Page, pid: int) -> dict[str, float]:
    """Metric, with the class or state it is for -> value."""
    return {
        " ".join([name, *(value for label, value in labels if label in ("class", "state"))]): number
        for name, labels in page
        if name.startswith("vram_lease_") and ("pid", str(pid)) in labels
        for number in [page[name, labels]]
    }


CLASSES = ("weights", "kv", "other")


def lease_told(states: str, held: tuple[int, int, int], **bytes_: int) -> dict[str, float]:
    """What the page says of a lease in these states, which holds weights, KV and other memory; all in GiB."""
    return {
        "vram_lease_info": 1,
        "vram_lease_waiting_requests": 0,
        **{f"vram_lease_{name}_bytes": gib * GIB for name, gib in bytes_.items()},
        **{f"vram_lease_held_bytes {name}": gib * GIB for name, gib in zip(CLASSES, held, strict=True)},
        **{f"vram_lease_state {name}": name in states for name in ("ok", "loading", "recalling", "overdue", "reaping")},
    }


def test_of_a_lease_without_limit_wish_or_recall_nothing_is_said_of_these(world: World) -> None:
    page = world.page(snapshot_of().with_leases([lease_of(held_bytes=0, held_by_class={}, spare_bytes=0)]))
    assert of_lease(page, 100) == lease_told("ok", (0, 0, 0), min=10, granted=44, spare=0)
    begun = lease_of(state="recalling", recall_target_bytes=0, recall_age_seconds=0.0)
    page = world.page(snapshot_of().with_leases([begun]))
    told = lease_told("recalling", (15, 22, 3), min=10, granted=44, spare=2, recall_target=0)
    assert of_lease(page, 100) == told | {"vram_lease_recall_age_seconds": 0}


def test_leases_of_one_process_and_name_count_together(world: World) -> None:
    """Its former lease is reaped, or it runs a model twice. Prometheus takes each series once."""
    former = lease_of(state="reaping", granted_bytes=4 * GIB, held_bytes=3 * GIB, held_by_class={}, spare_bytes=0, min_bytes=0)
    recalls = [
        lease_of(state="overdue", recall_target_bytes=target * GIB, recall_age_seconds=age)
        for target, age in ((30, 2.5), (20, 0.5))
    ]
    told = lease_told("overdue, reaping", (30, 44, 9), min=20, granted=92, spare=4, recall_target=50)
    page = world.page(snapshot_of().with_leases([former, *recalls]))
    assert of_lease(page, 100) == told | {"vram_lease_recall_age_seconds": 2.5}


def test_a_scraper_chooses_the_format_the_compression_and_the_metrics(world: World) -> None:
    port, page = world.port, world.page(rich_snapshot())
    plain = get(port)
    asked = get(port, Accept="application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert plain.content_type.startswith("text/plain; version=0.0.4") and page_of(plain.text) == page
    assert asked.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert asked.text.endswith("# EOF\n") and page_of(asked.text, parse_openmetrics) == page
    packed = get(port, **{"Accept-Encoding": "gzip"})
    assert packed.encoding == "gzip" and page_of(packed.text) == page
    some = get(port, "/metrics?name[]=vram_device_up&name[]=vram_polls_total")
    assert {name for name, _ in page_of(some.text)} == {"vram_device_up", "vram_polls_total"}
    for path in ("/", "/favicon.ico", "/metrics/", "/metricsx", "/../metrics"):
        answer = get(port, path)
        assert answer.status == 404 and "the metrics are at /metrics" in answer.text
    assert get(port, method="POST").status == 501


@pytest.mark.skipif(sys.platform != "linux", reason="the client library reads process_* from /proc")
def test_the_documented_table_is_the_page_and_follows_the_conventions(world: World) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter) \|([^|]*)\|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    documented = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(documented) == len(rows), "a metric has two rows"
    world.snapshot = rich_snapshot()
    families = list(parse_text(get(world.port).text))
    assert documented == {one.name: (kind.type, frozenset(one.labels)) for kind in families for one in kind.samples}
    units = (
        "bytes", "seconds", "ratio", "celsius", "watts", "bytes_per_second", "info", "up", "stale", "state", "place",
        "requests",
    )  # fmt: skip
    for metric in METRICS:
        assert re.fullmatch(r"vram(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total" if metric.type == "counter" else units), metric.name
        assert re.fullmatch(r"[A-Z1-9][^\n]*\.", metric.help), metric.help
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_page_is_of_one_snapshot() -> None:
    """Scraped by many at a time, while the snapshot changes."""
    uuids, marks = [f"GPU-{number}" for number in range(8)], count(1)

    def read() -> Snapshot:
        mark = next(marks)
        return snapshot_of(*(device_of(uuid, memory_of(GIB * 80, mark)) for uuid in uuids))

    with closing(MetricsServer(read, 0)) as server, ThreadPoolExecutor(8) as pool:
        pages = list(pool.map(lambda _: page_of(get(server.port).text), range(24)))
    told = [{page[series("vram_memory_free_bytes", uuid=uuid)] for uuid in uuids} for page in pages]
    assert sorted(told, key=min) == [{mark} for mark in range(1, 25)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_it_listens_to_this_machine_alone_unless_told_otherwise(world: World) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.2", world.port))  # taken, if the server listened to every address


def test_an_ipv6_address_is_served() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with closing(MetricsServer(rich_snapshot, 0, "::1")) as server, socket.create_connection(("::1", server.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").readline() == b"HTTP/1.0 200 OK\r\n"


def test_the_scraper_is_told_why_there_is_no_page_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    troubles = [RecordError("the record is <damaged>")]

    def read() -> Snapshot:
        if troubles:
            raise troubles.pop()
        return rich_snapshot()

    with closing(MetricsServer(read, 0)) as server:
        refused, served = get(server.port), get(server.port)
    assert (refused.status, served.status) == (503, 200)
    assert "the record is &lt;damaged&gt;" in refused.text and caplog.records == []


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


def test_a_client_that_goes_on_saying_little_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of the whole request: the next byte brings no more of it."""
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.5)
    with slow_client(world.port) as client:
        client.settimeout(0.02)
        give_up = time.monotonic() + 60
        while not is_hung_up(client):
            assert time.monotonic() < give_up
            try:
                client.sendall(b"x")
            except ConnectionError:
                break


def test_a_client_that_does_not_take_the_answer_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.5)
    world.snapshot = snapshot_of(*(device_of(f"GPU-{number}") for number in range(2000)))  # more than a socket's buffer
    before = set(threading.enumerate())
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", world.port))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(1) in (b"H", b"")  # it answers; or the time was up before, on a machine that has much to do
        join_all(set(threading.enumerate()) - before)


def test_a_connection_too_many_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 3600.0)
    port, before = world.port, set(threading.enumerate())
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


def test_without_descriptors_it_pauses_and_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, accept = [], socketserver.TCPServer.get_request

    def out_of_descriptors(server: socketserver.TCPServer) -> object:
        tries.append(time.monotonic())
        if len(tries) <= 10:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the connection stays queued
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", out_of_descriptors)
    assert get(world.port).status == 200
    assert tries[10] - tries[0] >= 10 * metrics_server._LOOK_UP_S, "it spins"


def test_hanging_up_is_no_event(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    before, clients = set(threading.enumerate()), list[socket.socket]()

    def read() -> Snapshot:
        while clients:
            clients.pop().close()  # while its page is made
        return snapshot_of(*(device_of(f"GPU-{number}") for number in range(2000)))  # more than a socket's buffer

    with closing(MetricsServer(read, 0)) as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a polite end
        clients.append(client)
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_until(lambda: not clients)
        assert get(server.port).status == 200
    join_all(set(threading.enumerate()) - before)
    assert caplog.records == []
    assert "Traceback" not in capfd.readouterr().err


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def test_a_place_that_cannot_be_listened_at_is_refused_with_what_to_do_and_leaves_nothing(world: World) -> None:
    port, addresses = world.port, ("192.0.2.1", "fe80::1%no-such-link", "x" * 70, "..")
    places = [
        (port, "127.0.0.1", rf"port {port} at 127\.0\.0\.1 is in use.*or 0 for a free one"),
        *((0, address, r"is no address of this machine.*Use 127\.0\.0\.1") for address in addresses),
        *((number, "127.0.0.1", f"between 0 and 65535, got {number}") for number in (-1, 65536)),
    ]
    threads, descriptors = threading.active_count(), open_descriptors()
    for number, address, said in places:
        with pytest.raises(ConfigInvalid, match=said):
            MetricsServer(rich_snapshot, number, address)
    assert threading.active_count() <= threads  # fewer, if a thread of an earlier test ended meanwhile
    assert open_descriptors() <= descriptors


def test_a_port_of_roots_is_refused_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(server: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(metrics_server._Server, "server_bind", bind)
    with pytest.raises(ConfigInvalid, match="ports below 1024 are root's"):
        MetricsServer(rich_snapshot, 823)


def test_close_frees_the_port_at_once_and_may_come_twice() -> None:
    """Also while a client holds a connection open, and right after connections have ended."""
    server = MetricsServer(rich_snapshot, 0)
    port = server.port
    for _ in range(5):
        assert get(port).status == 200
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /met")
            server.close()
            server.close()
            server = MetricsServer(rich_snapshot, port)
            assert server.port == port
    server.close()


def test_close_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow client does not outlive the server, whose clock has stopped."""
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 3600.0)
    before = set(threading.enumerate())
    server = MetricsServer(rich_snapshot, 0)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["metrics"]
    with slow_client(server.port) as client, slow_client(server.port) as served:
        served.sendall(b"\r\n\r\n")
        assert served.recv(1) == b"H"  # so the one before it has its thread
        threads = set(threading.enumerate()) - before
        server.close()
        assert is_hung_up(client)
        join_all(threads)


GET = b"GET /metrics HTTP/1.1\r\n"
PLAIN, OPEN = b"text/plain", b"application/openmetrics-text"
TEXT = PLAIN + b"; version=0.0.4; charset=utf-8"


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Iterator[MetricsServer]:
    """A server, of whose clients not a word is logged and no thread is left."""
    caplog.set_level(logging.DEBUG)
    before = set(threading.enumerate())
    server = MetricsServer(snapshot_of, 0)
    yield server
    server.close()
    join_all(set(threading.enumerate()) - before)
    assert caplog.records == []


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.0 ") else 0


def test_any_request_line_is_answered(server: MetricsServer) -> None:
    for request_line, status in [
        (b"GET http://[::1/metrics HTTP/1.1", 400), (b"GET http://[nonsense]/metrics HTTP/1.1", 400),
        (b"GET http://[::1]:9776/metrics HTTP/1.1", 200), (b"GET http://a:b:c/metrics HTTP/1.1", 200),
        (b"GET /metrics", 200), (b"POST /metrics", 400), (b"GET \xff\xfe HTTP/1.1", 404),
        (b"GET /metrics?name[]=%ff%00&name[]=up HTTP/1.1", 200), (b"GET /metrics?" + b"&" * 60_000 + b" HTTP/1.1", 200),
        (b"GET /metrics and more HTTP/1.1", 400), (b"GET /metrics HTTP/x.y", 400), (b"GET /metrics HTTP/2.0", 505),
        (b"GET /metrics HTTP/" + b"9" * 5000 + b".1", 400), (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", 414),
        (b"__init__ /metrics HTTP/1.1", 501),
    ]:  # fmt: skip
        assert status_of(exchanged(server.port, request_line + b"\r\n\r\n")) == status, request_line[:80]
        assert status_of(exchanged(server.port, GET + b"\r\n")) == 200


def test_any_accept_header_is_answered(server: MetricsServer) -> None:
    for accept, content_type in [
        # The client library would repeat such versions in its answer
        (OPEN + b";version=2.x", TEXT), (PLAIN + b";version=\xb9.0.0", TEXT), (PLAIN + b";version=" + b"9" * 5000, TEXT),
        (OPEN + b";version=1.0.0\r\n Set-Cookie: a=b", TEXT),
        (OPEN + b";version=2.0.0," + PLAIN + b";version=0.0.4", TEXT),
        (b"text/html;version=x," + OPEN + b";version=1.0.0", OPEN + b"; version=1.0.0"),
        (OPEN + b'; version="1.0.0" ;q=0.5', OPEN + b"; version=1.0.0"),
        (OPEN + b";escaping=\xff", OPEN + b"; version=1.0.0"),
        *((text, TEXT) for text in (b"*/*", b"", b",;=/" * 10_000)),
    ]:  # fmt: skip
        head, _, _ = exchanged(server.port, GET + b"Accept: " + accept + b"\r\n\r\n").partition(b"\r\n\r\n")
        assert status_of(head) == 200 and b"Set-Cookie" not in head, accept[:80]
        assert b"\r\nContent-Type: " + content_type in head


def test_headers_are_bounded_each_and_in_all(server: MetricsServer) -> None:
    """A hundred lines of 64 KiB for each of sixteen connections would be a hundred megabytes."""
    for headers in (b"A: b\r\n" * 200, b"A: " + b"b" * 70_000 + b"\r\n", (b"A: " + b"b" * 1500 + b"\r\n") * 99):
        assert status_of(exchanged(server.port, GET + headers + b"\r\n")) == 431
    largest = GET + b"A: " + b"b" * 65_000 + b"\r\nB: " + b"b" * 60_000 + b"\r\n\r\n"
    assert len(largest) < MAX_HEAD_BYTES
    assert status_of(exchanged(server.port, largest)) == 200
    assert status_of(exchanged(server.port, largest[:-2] + b"C: " + b"b" * 10_000 + b"\r\n\r\n")) == 431


PIECES = [
    b"GET", b" ", b"/metrics", b"HTTP/1.1", b"\r\n", b"\n", b":", b"Accept", PLAIN, OPEN, b";", b"version=", b"1.0", b"x",
    b",", b"[", b"]", b"http://", b"%", b"?name[]=", b"\0", b"\xff", b"q=", b"Host", b"\t", b"escaping=", b'"', b"-", b"9" * 30,
]  # fmt: skip


def test_random_requests_are_answered_and_leave_nothing(server: MetricsServer) -> None:
    rng = random.Random(0)
    usual = GET + b"Accept: " + OPEN + b";version=1.0.0," + PLAIN + b";version=0.0.4;q=0.5\r\nAccept-Encoding: gzip\r\n\r\n"
    for _ in range(150):
        request = b"".join(rng.choices(PIECES, k=rng.randrange(40))) + b"\r\n\r\n"
        exchanged(server.port, request)
        request = bytearray(usual)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(request))
            request[at : at + rng.randrange(3)] = rng.choice([*PIECES, rng.randbytes(1)])
        exchanged(server.port, bytes(request))
    assert status_of(exchanged(server.port, usual)) == 200


def test_faults_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, now_ns = count(1), [10**12]
    monkeypatch.setattr(metrics_server.time, "monotonic_ns", lambda: now_ns[0])

    def read() -> Snapshot:
        if (number := next(faults)) % 2:
            raise ZeroDivisionError(f"planted {number}")
        raise KeyError(f"planted {number}")

    before = set(threading.enumerate())
    with closing(MetricsServer(read, 0)) as server:
        for _ in range(20):
            answer = exchanged(server.port, GET + b"\r\n")
            assert status_of(answer) == 500 and b"see the monitor's log" in answer
        now_ns[0] += QUIET_CAUSE_NS
        assert status_of(exchanged(server.port, GET + b"\r\n")) == 500
    join_all(set(threading.enumerate()) - before)
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    told = [(record.getMessage(), record.exc_info and record.exc_info[0]) for record in caplog.records]
    said = "making the metrics page failed"
    again = f"{said} (10 times since the last message)"
    assert told == [(said, ZeroDivisionError), (said, KeyError), (again, ZeroDivisionError)]

"""Real processes that write and read a record flat out. Every record follows from its counter, so that a torn one shows.

Run as a program it is one such process: `write PATH SEED` until it is killed, `read PATH SECONDS` and report as
JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from monitors import wait_until

from pagetide.monitor.errors import NoSuchDevice, RecordError
from pagetide.monitor.record import RecordReader, RecordWriter
from pagetide.monitor.snapshot import DetailReading, DeviceDetail, DeviceInfo, DeviceKind, DeviceMemory, ProcessUse

INTERVAL_NS = 20_000_000
STEADY = DeviceInfo("GPU-steady", "0", DeviceKind.GPU)
COMING_AND_GOING = tuple(DeviceInfo(f"GPU-{i}", str(i), DeviceKind.GPU, name="x" * 100 * i) for i in range(1, 9))


class Clock:
    """Monotonic nanoseconds that pass when a test says so."""

    def __init__(self, now_ns: int = 10_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def _mixed(counter: int, uuid: str) -> int:
    """64 bits of which each changes with the counter, at little cost: what writes flat out should mostly write."""
    return (counter * 0x9E3779B97F4A7C15 ^ zlib.crc32(uuid.encode()) ^ counter << 40) % 2**64


def memory_of(counter: int, uuid: str) -> DeviceMemory:
    mixed = _mixed(counter, uuid)
    return DeviceMemory(
        mixed >> 2, mixed >> 24, total_bytes=mixed if mixed & 1 else None,
        free_bytes=mixed ^ counter if mixed & 2 else None, bytes_per_second=mixed / 3 if mixed & 4 else None,
        polls=counter, failures=~mixed % 2**64, error="e" * (mixed % 97) if mixed & 8 else None,
    )  # fmt: skip


def detail_of(counter: int, uuid: str) -> DeviceDetail:
    mixed = _mixed(counter, uuid)
    processes = tuple(ProcessUse(i, mixed, command=f"{counter} " * 20) for i in range(mixed % 29))
    history = tuple(range(counter, counter + mixed % 257))
    return DeviceDetail(counter, mixed >> 24, DetailReading(mixed / 2**64, processes=processes), history, error=uuid)


def write(path: str, seed: int) -> None:
    """Write without end; the counters of a device never fall."""
    rng = random.Random(seed)
    with RecordWriter.create(path, source=f"seed {seed}") as writer:
        infos = [STEADY]
        writer.set_devices(infos)
        counter = 0
        while True:
            counter += 1
            writer.beat(time.monotonic_ns(), INTERVAL_NS)
            if counter % 50 == 0:
                infos = [STEADY, *rng.sample(COMING_AND_GOING, rng.randrange(len(COMING_AND_GOING)))]
                rng.shuffle(infos)
                writer.set_devices(infos)
            steady = infos.index(STEADY)
            for _ in range(200):
                counter += 1
                writer.write_memory(steady, memory_of(counter, STEADY.uuid))
            for position, info in enumerate(infos):
                writer.write_memory(position, memory_of(counter, info.uuid))
                writer.write_detail(position, detail_of(counter, info.uuid))


def check_memory(memory: DeviceMemory, uuid: str) -> None:
    if memory.polls:  # 0: a device that has just come
        assert memory == memory_of(memory.polls, uuid)


def check_detail(detail: DeviceDetail, uuid: str) -> None:
    if detail.at_ns:
        assert detail == detail_of(detail.at_ns, uuid)


def opened(path: str) -> RecordReader:
    while True:
        with suppress(RecordError):
            return RecordReader.open(path)


def read(path: str, seconds: float) -> dict[str, Any]:
    """Read for `seconds` and check all; the counts."""
    counts = {"reads": 0, "records": 0, "details": 0, "gone": 0}
    with opened(path) as reader:
        wait_until(reader.devices)
        deadline, last = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            for _ in range(200):
                memory = reader.memory(STEADY.uuid)
                counts["reads"] += 1
                if memory.polls != last:
                    counts["records"] += 1
                    assert memory.polls > last, f"back from {last} to {memory.polls}"
                    check_memory(memory, STEADY.uuid)
                    last = memory.polls
            check_detail(reader.detail(STEADY.uuid), STEADY.uuid)
            for device in reader.snapshot().devices:
                check_memory(device.memory, device.info.uuid)
                check_detail(device.detail, device.info.uuid)
                counts["details"] += 1
            for info in COMING_AND_GOING:
                try:
                    check_memory(reader.memory(info.uuid), info.uuid)
                except NoSuchDevice:
                    counts["gone"] += 1
        return counts | {"retries": reader.retries, "seconds": seconds}


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """One such process, killed in the end."""
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]  # no -P: it imports from this folder
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def read_while_written(path: Path, seed: int, readers: int, seconds: float) -> list[dict[str, Any]]:
    """What `readers` processes counted while one writes flat out. Fails with what one of them said if it failed."""
    found = []
    with ExitStack() as stack:
        writer = stack.enter_context(process("write", path, seed))
        wait_until(lambda: path.exists() or _ended(writer))
        started = [stack.enter_context(process("read", path, seconds)) for _ in range(readers)]
        for reader in started:
            out, err = reader.communicate(timeout=120)
            assert reader.returncode == 0, f"status {reader.returncode}: {err}"
            found.append(json.loads(out))
        assert not _ended(writer)
    return found


def kill_one_while_it_writes(path: Path, reader: RecordReader, rng: random.Random) -> None:
    """Start a writer at `path`, see the reader go over to it, kill it anywhere, and check what it left."""
    with process("write", path, rng.getrandbits(32)) as writer:
        wait_until(lambda: (reader.monitor_pid == writer.pid and reader.is_live()) or _ended(writer))
        wait_until(lambda: reader.memory(STEADY.uuid).polls)
        time.sleep(rng.uniform(0, 0.02))  # to meet it at any instruction
    for device in reader.snapshot().devices:
        check_memory(device.memory, device.info.uuid)
        check_detail(device.detail, device.info.uuid)
    assert reader.memory(STEADY.uuid).polls
    assert not reader.is_live(time.monotonic_ns() + 3 * INTERVAL_NS + 1)


def _ended(writer: subprocess.Popen[str]) -> bool:
    """Fails if the writer, which never ends by itself, has ended."""
    assert writer.poll() is None, writer.communicate()[1]
    return False


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path, seed]:
            write(path, int(seed))
        case ["read", path, seconds]:
            print(json.dumps(read(path, float(seconds))))

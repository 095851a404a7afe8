"""The monitor's CPU time and delay, and a check that no reader sees a torn record.

    python -m benchmarks.monitor [--json FILE] [--starts 7] [--seconds 8] [--seed 0]

The driver is the stand-in of the tests: eight GPUs, which answer a question about memory after 0.1 ms, as a real driver
does, in which the caller sleeps. What a real driver's call takes of the core itself comes on top. Everything above the
driver is real: pynvml, the daemon `vram-monitor serve` as a process of its own, shared memory, readers in other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.arguments import above_0, parser_of, whole
from benchmarks.figures import Figure, median, median_time, percentile, report
from benchmarks.processes import Worker
from pagetide.monitor.record import RecordReader, RecordWriter
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind, DeviceMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from monitors import MonitorProcess, command
from nvml_standin import Gpu, NvmlStandin

GIB = 1 << 30
NUM_DEVICES = 8
DRIVER_LATENCY_US = 100
INTERVAL_MS = 20
STEP_S = 0.005


def standin(folder: Path) -> NvmlStandin:
    """A stand-in for NVML with eight GPUs; a query of a GPU's memory takes 0.1 ms."""
    nvml = NvmlStandin(folder)
    nvml.devices = [
        Gpu(
            f"GPU-{i}", f"00000000:{i + 1:02X}:00.0", "Stand-in H200", total_bytes=141 * GIB, free_bytes=(141 - i) * GIB,
            latencies_us={"nvmlDeviceGetMemoryInfo_v2": DRIVER_LATENCY_US},
        )
        for i in range(NUM_DEVICES)
    ]  # fmt: skip
    return nvml


def start_times(folder: Path, nvml: NvmlStandin, rounds: int) -> list[float]:
    """Seconds from the start of `vram-monitor serve` to the first record that a reader can use."""
    samples = []
    for i in range(rounds):
        directory = folder / f"start{i}"
        began = time.perf_counter()
        process = subprocess.Popen(
            command("serve", "--source", "nvml", "--runtime-dir", directory), env=nvml.env(), stderr=subprocess.DEVNULL
        )
        while not usable(directory / "record"):
            time.sleep(0.001)
        samples.append(time.perf_counter() - began)
        process.terminate()
        process.wait()
    return samples


def usable(record: Path) -> bool:
    """Whether every device of the record was answered for."""
    try:
        with RecordReader.open(record) as reader:
            return reader.is_live() and all(device.memory.at_ns for device in reader.snapshot().devices)
    except Exception:
        return False


def read_times(reader: RecordReader, uuid: str, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of every read, and of those that found news, by a reader that asks for one device and then computes for
    5 ms, as an engine does between two steps.
    """
    every, news = [], []
    last, end = -1, time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        memory = reader.memory(uuid)
        every.append(took := time.perf_counter() - began)
        if memory.polls != last:
            news.append(took)
        last = memory.polls
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            pass
    return every, news


def cpu_shares(pid: int | str, windows: int, seconds: float, wait: Callable[[float], object] = time.sleep) -> list[float]:
    """Per cent of one core that the process' threads took, window by window, in which this one does `wait`."""
    shares = []
    for _ in range(windows):
        before, began = on_core_ns(pid), time.perf_counter()
        wait(seconds)
        shares.append((on_core_ns(pid) - before) / 1e7 / (time.perf_counter() - began))
    return shares


def on_core_ns(pid: int | str) -> int:
    """What the scheduler counts for a process' threads: exact, where the ticks of /proc/PID/stat are samples of 4 to 10 ms."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def as_the_standin(seconds: float) -> None:
    """What the stand-in's waiting is by itself: eight sleeps of 0.1 ms every 20 ms, and no more."""
    usleep = ctypes.CDLL(None).usleep
    began = due = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(NUM_DEVICES):
            usleep(DRIVER_LATENCY_US)
        due += INTERVAL_MS / 1e3
        time.sleep(max(0.0, due - time.perf_counter()))


def reaction_times(nvml: NvmlStandin, reader: RecordReader, rounds: int, rng: random.Random) -> list[float]:
    """Seconds from a change of a device's free memory to a reader that sees it."""
    samples = []
    for i in range(rounds):
        index = rng.randrange(NUM_DEVICES)
        uuid = f"GPU-{index}"
        free = (100 + i % 40) * GIB + i
        time.sleep(rng.uniform(0, 2 * INTERVAL_MS / 1e3))  # at any point of the interval
        nvml.update(str(index), free_bytes=free)
        began = time.perf_counter()
        while reader.memory(uuid).free_bytes != free:
            time.sleep(0.0002)
        samples.append(time.perf_counter() - began)
    return samples


def related(count: int) -> tuple[int, int, float]:
    """(total, free, rate) that belong together: a record that mixes two writes breaks the relation."""
    return count * 1_000_003 + 17, count * 999_983, count * 0.5


def write_flat_out(told: Connection, path: Path, seconds: float) -> None:
    """Write memory records as fast as Python does."""
    with RecordWriter.create(path, source="benchmark") as writer:
        writer.set_devices([DeviceInfo("GPU-0", "0", DeviceKind.GPU)])
        count = 0
        end = time.monotonic() + seconds
        told.send(0)
        while time.monotonic() < end:
            for _ in range(100):
                count += 1
                total, free, rate = related(count)
                # An interval of 1 ns, so that readers look each time.
                writer.write_memory(0, DeviceMemory(time.monotonic_ns(), 1, total, free, rate, count, 0))
        with contextlib.suppress(EOFError):
            told.recv()  # the pipe is closed: readers are done with the file


def read_flat_out(told: Connection, path: Path, seconds: float) -> None:
    """Read as fast as Python does; send (reads, torn, retries)."""
    with RecordReader.open(path) as reader:
        reads = torn = last = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(100):
                memory = reader.memory("GPU-0")
                reads += 1
                seen = (memory.total_bytes, memory.free_bytes, memory.bytes_per_second)
                torn += memory.polls < last or (memory.polls > 0 and seen != related(memory.polls))
                last = memory.polls
        told.send((reads, torn, reader.retries))


def flat_out(folder: Path, seconds: float, num_readers: int) -> tuple[int, int, int]:
    """(reads, torn, retries) of one writer against several readers, each a process."""
    path = folder / "flat-out"
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(Worker(write_flat_out, path, seconds + 2))
        writer.receive()
        readers = [stack.enter_context(Worker(read_flat_out, path, seconds)) for _ in range(num_readers)]
        answers = [reader.receive() for reader in readers]
    reads, torn, retries = (sum(answer[i] for answer in answers) for i in range(3))
    return reads, torn, retries


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--starts", type=whole, default=7, help="of the daemon that are timed (%(default)s)")
    parser.add_argument(
        "--seconds", type=above_0, default=8.0, help="of reads; the rest takes as long in proportion (%(default)g)"
    )
    args = parser.parse_args(argv)
    seconds, reactions = args.seconds, max(1, round(50 * args.seconds))
    rng = random.Random(args.seed)
    figures = []
    with tempfile.TemporaryDirectory() as name, standin(Path(name)) as nvml:
        folder = Path(name)
        figures.append(median_time("start to first record", start_times(folder, nvml, args.starts), "ms", 500))
        monitor = MonitorProcess(folder / "run", "--metrics-port", "0", source="nvml", env=nvml.env())
        with monitor, RecordReader.open(monitor.record) as reader:
            every, news = read_times(reader, "GPU-3", seconds)
            figures.append(median_time("read by an engine between steps of 5 ms", every, "us", 10))
            figures.append(median_time("... those reads that find news", news, "us", None))
            shares = cpu_shares(monitor.pid, 5, 3 * seconds / 8)
            waiting = cpu_shares("self", 5, seconds / 8, as_the_standin)
            figures.append(median("daemon's share of a core, 8 devices at 20 ms", shares, "%", 3))
            figures.append(median("... of it, the stand-in's waiting by itself", waiting, "%"))
            seen = [1e3 * took for took in reaction_times(nvml, reader, reactions, rng)]
            figures.append(Figure("reaction, p99", percentile(seen, 0.99), "ms", INTERVAL_MS + 5, samples=seen))
            resident = psutil.Process(monitor.pid).memory_info().rss / (1 << 20)
            figures.append(Figure("daemon's resident memory", resident, "MiB", 60))
        reads, torn, retries = flat_out(folder, seconds / 2, 4)
        figures.append(Figure(f"torn records, 4 readers against a writer flat out for {seconds / 2:g} s", torn, "", 0))
        figures.append(Figure("... reads", reads, ""))
        figures.append(Figure("... retries", retries, ""))
    report("monitor: cost, reaction, torn records", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

"""The cost of frames and recordings: CPU time of the engine's process for a frame, bytes of a frame, bytes of a recording.

Real schedulers and block bookkeeping over pools without an arena, with requests that come, decode, share prefixes, wait and
end; then a recording of the bundled model. No browser, no HTTP process.

python -m benchmarks.page [--json FILE] [--frames 200] [--minutes 10] [--seconds 30] [--pools 10000 1000000] [--seed 0]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.arguments import above_0, whole
from benchmarks.bookkeeping import BLOCK_SIZE, VOCAB, answer
from benchmarks.figures import Figure, report
from pagetide import LLM, SamplingParams
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.engine.frames.recorder import INTERVAL_S, EngineRecorder
from pagetide.scheduler.frames.recording import FrameRecording
from pagetide.scheduler.frames.source import FrameSource, MemoryFigures, PoolFacts, encode
from pagetide.scheduler.frames.state import FrameState
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Limits, Scheduler

MOST_RECORDING_MB = 20.0  # of ten minutes
MB = 1e6


@dataclass(frozen=True)
class Shape:
    """A pool and its load.

    Attributes:
        rate: Frames a second that a viewer gets.
        most_share: Percent of a core that they may take.
        prompt: Mean tokens; an eighth of the prompts' tokens are common to all.
    """

    rows: int
    prompt: int
    output: int
    rate: float
    most_share: float


SHAPES = {10_000: Shape(256, 400, 250, 10.0, 1.0), 1_000_000: Shape(4096, 3400, 400, 2.0, 5.0)}
STEPS_PER_S = 25.0


class Life:
    """A scheduler under load, with a clock of its own: each step takes 1 / STEPS_PER_S seconds."""

    def __init__(self, num_blocks: int, shape: Shape, seed: int) -> None:
        self.now = 0.0
        self._rng = np.random.default_rng(seed)
        self._shape = shape
        self._number = 0
        most = 2 * (shape.prompt + shape.output)
        self._common = self._tokens(shape.prompt // 8)
        per = next(n for n in range(100, 0, -1) if num_blocks % n == 0)
        cache = CacheManager(
            num_blocks, BLOCK_SIZE, shape.rows, most, blocks_per_extent=per, hasher=PrefixHasher(BLOCK_SIZE)
        )
        self.scheduler = Scheduler(cache, Limits(shape.rows, shape.rows * most, most, forecast=False))
        facts, memory = PoolFacts("benchmark", 1 << 17, most), MemoryFigures({"weights": 1 << 30, "kv": 1 << 30})
        self.source = FrameSource(
            lambda: self.scheduler, facts, lambda: memory, clock=lambda: self.now, wall=lambda: 1.8e9 + self.now
        )
        while self.scheduler.num_running < shape.rows * 3 // 4 and not self.scheduler.stats.preemptions:
            self.step()

    def step(self) -> None:
        """A step; requests come so that an eighth of the rows' number waits."""
        scheduler, rng = self.scheduler, self._rng
        while scheduler.num_waiting < self._shape.rows // 8:
            length = max(1, int(rng.exponential(self._shape.prompt)) % (2 * self._shape.prompt))
            prompt = np.append(self._common, self._tokens(length))
            sampling = Sampling(1 + int(rng.integers(2 * self._shape.output)))
            scheduler.add(
                Request(f"r{self._number}", prompt, sampling, arrival=self.now, label=f"req-{self._number:016x}")
            )
            self._number += 1
        self.now += 1 / STEPS_PER_S
        plan = scheduler.schedule(self.now)
        scheduler.apply(plan, answer(plan, rng))

    def _tokens(self, number: int) -> np.ndarray:
        return self._rng.integers(3, VOCAB, number, dtype=np.int32)


def frame_figures(num_blocks: int, num_frames: int, seed: int) -> Iterator[Figure]:
    """CPU time and bytes of the frames of a pool under load, at the rate of its shape. The last equals a full one."""
    shape = SHAPES.get(num_blocks, SHAPES[10_000])
    life, state = Life(num_blocks, shape, seed), FrameState()
    cpu, took, sizes = [], [], []
    state.apply(encode(life.source.take()))
    for _ in range(num_frames):
        for _ in range(max(1, round(STEPS_PER_S / shape.rate))):
            life.step()
        began, cpu_began = time.perf_counter(), time.thread_time()
        line = encode(life.source.take())
        cpu.append((time.thread_time() - cpu_began) * 1e3)
        took.append((time.perf_counter() - began) * 1e3)
        sizes.append(len(line) / 1e3)
        state.apply(line)
    began = time.thread_time()
    line = encode(life.source.take(full=True))
    full_ms = (time.thread_time() - began) * 1e3
    full = FrameState()
    full.apply(line)
    assert (full.cells == state.cells).all(), "the differences lead elsewhere than a full frame"
    assert full.rows == state.rows, "the differences lead elsewhere than a full frame"
    counts = life.scheduler.cache.pool.counts()
    assert counts.live > num_blocks / 3, f"not much of a load: {counts}"
    mean, name = statistics.fmean(cpu), f"{num_blocks:,} blocks, {life.scheduler.num_running:,} running"
    yield Figure(f"frame of {name}: CPU time, mean", mean, "ms", samples=[round(one, 3) for one in cpu])
    yield Figure(f"frames of {name}: per second, at most", 1e3 / statistics.fmean(took), "1/s", shape.rate, "higher")
    yield Figure(f"{shape.rate:g} frames/s of {name}: share of a core", mean * shape.rate / 10, "%", shape.most_share)
    yield Figure(f"frame of {name}: size, median", statistics.median(sizes), "kB")
    yield Figure(f"full frame of {name}: CPU time", full_ms, "ms")
    yield Figure(f"full frame of {name}: size", len(line) / 1e3, "kB")


def recorded_life(num_blocks: int, minutes: float, folder: Path, seed: int) -> Iterator[Figure]:
    """A recording of so many minutes of a made-up clock under load."""
    life = Life(num_blocks, SHAPES.get(num_blocks, SHAPES[10_000]), seed)
    header = {"model": "benchmark", "version": "0", "began": 1.8e9 + life.now, "text": False, "interval_s": INTERVAL_S}
    path = folder / f"{num_blocks}"
    recorder = EngineRecorder(str(path), life.source, header, most_bytes=1 << 40, clock=lambda: life.now)
    number, until = 0, life.now + minutes * 60
    due, cpu = life.now, 0.0
    while life.now < until:
        life.step()
        if life.now >= due:
            due += INTERVAL_S
            began = time.thread_time()
            recorder.turn(lambda make: make())
            cpu += time.thread_time() - began
            number += 1
    recorder.close()
    name = f"recording of {num_blocks:,} blocks, {life.scheduler.num_running:,} running"
    size = path.stat().st_size / MB
    bound = MOST_RECORDING_MB if num_blocks <= 10_000 else None
    yield Figure(f"{name}: size of 10 minutes", size * 10 / minutes, "MB", bound)
    yield Figure(f"{name}: share of a core", 100 * cpu / (number * INTERVAL_S), "%")
    state = FrameState()
    with FrameRecording(path) as recording:
        for frame in recording.frames():
            state.apply(frame.line)
    full = FrameState()
    full.apply(encode(life.source.take(full=True)))
    last = {tuple(entry[:1]) for entry in state.frame["running"]}
    assert last == {(row,) for row in state.rows}, "the recording contradicts itself"


def recorded_demo(seconds: float, folder: Path, seed: int) -> Iterator[Figure]:
    """A recording of the bundled model under a mixed load, for so many seconds."""
    rng, path = np.random.default_rng(seed), folder / "demo"
    with LLM("demo", kv_memory="32MiB", max_seqs=64, record=path, share=False) as llm:
        until = time.monotonic() + seconds

        def prompts() -> Iterator[list[int]]:
            while time.monotonic() < until:
                yield [1, *rng.integers(3, 4000, int(rng.integers(4, 300))).tolist()]

        params = SamplingParams(max_new_tokens=96, ignore_eos=True, temperature=1.0, seed=seed)
        for _ in llm.generate_each(prompts(), params, look_ahead=96):
            pass
        tokens = llm.stats()["generated_tokens"]
    with FrameRecording(path) as recording:
        frames = list(recording.frames())
        lasted = max(recording.ended - recording.began, 1e-3)
    state = FrameState()
    for frame in frames:
        state.apply(frame.line)
    assert state.frame["stats"]["generated_tokens"] == tokens, "the recording ends before the run"
    assert not state.rows, "the recording ends before the run"
    per_10_min = path.stat().st_size / MB / lasted * 600
    yield Figure("recording of the demo model, 64 running: size of 10 minutes", per_10_min, "MB", MOST_RECORDING_MB)
    yield Figure("recording of the demo model: frames per second", len(frames) / lasted, "1/s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--frames", type=whole, default=200, help="of each pool; a tenth of large ones (%(default)s)")
    parser.add_argument(
        "--minutes", type=above_0, default=10.0, help="of the recordings under a made-up clock (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=above_0, default=30.0, help="of the recording of the demo model (%(default)s)"
    )
    parser.add_argument("--pools", type=whole, nargs="+", default=list(SHAPES), metavar="BLOCKS")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        for num_blocks in args.pools:
            figures += frame_figures(num_blocks, -(-args.frames // (10 if num_blocks > 100_000 else 1)), args.seed)
        figures += recorded_life(args.pools[0], args.minutes, Path(name), args.seed)
        figures += recorded_demo(args.seconds, Path(name), args.seed)
    report("page: frames and recordings", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

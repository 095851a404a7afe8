"""The parts of a run, each in a process of its own: a part that fails or hangs loses only its own figures."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import processes
from benchmarks.figures import Figure

from .report import Item, PartResult, device_of

START_S = 60.0  # in which a process has loaded torch and says what the device is
GRACE_S = 5.0  # beyond a time box, before the process is ended


@dataclass(frozen=True)
class Spec:
    """A part: where it is, its time box on a GPU, and what has to be measured before it in the same run."""

    name: str
    module: str
    box_s: float
    needs: tuple[str, ...] = ()
    function: str = "measure"


SPECS = (  # by value: where the time is short, the last ones are left out
    Spec("bandwidth", "benchmarks.gpu.bandwidth", 25),
    Spec("decode", "benchmarks.gpu.decode", 75, ("bandwidth",)),
    Spec("attention", "benchmarks.gpu.attention", 80, ("bandwidth",)),
    Spec("peer", "benchmarks.gpu.peer", 100, ("bandwidth", "decode")),
    Spec("recall", "benchmarks.gpu.recall", 70, ("bandwidth",)),
    Spec("swap", "benchmarks.gpu.swap", 45, ("bandwidth",)),
    Spec("memory", "benchmarks.gpu.memory", 75),
    Spec("prefill", "benchmarks.gpu.attention", 60, function="measure_prefill"),
)
BY_NAME = {spec.name: spec for spec in SPECS}


def with_needs(names: Iterable[str]) -> list[Spec]:
    """The named parts and those that they need, in the order of `SPECS`. Raises KeyError for a name that is none."""
    wanted: set[str] = set()
    todo = list(names)
    while todo:
        spec = BY_NAME[todo.pop()]
        wanted.add(spec.name)
        todo += [name for name in spec.needs if name not in wanted]
    return [spec for spec in SPECS if spec.name in wanted]


@dataclass(frozen=True)
class PartSettings:
    """What a process is told when it starts. Plain data."""

    device: str
    tiny: bool
    seed: int
    memory_s: float
    attention: str | None = None
    overlap: bool | None = None
    cuda_graphs: bool = True


def items_of(spec: Spec, bench: Any) -> Iterator[Item]:
    """What a part yields, here and now."""
    for item in getattr(importlib.import_module(spec.module), spec.function)(bench):
        if isinstance(item, Figure):
            bench.known[item.name] = item.value
        yield item


def serve(pipe: Connection, setting: PartSettings) -> None:
    """The process: part after part in, items out, then None or what went wrong, and whether the device still works."""
    from .bench import REAL, TINY, Bench
    from .clock import DeviceClock

    bench = Bench(
        DeviceClock(setting.device), TINY if setting.tiny else REAL, setting.seed, setting.memory_s, setting.attention,
        setting.overlap, setting.cuda_graphs,
    )  # fmt: skip
    try:
        pipe.send(device_of(setting.device))
    except Exception as problem:
        pipe.send(f"{type(problem).__name__}: {problem}")
        return
    while True:
        try:
            spec, box_s, bench.known = pipe.recv()
        except EOFError:
            return
        bench.ends_at = time.monotonic() + box_s
        error = None
        try:
            for item in items_of(spec, bench):
                pipe.send(item)
        except Exception as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        pipe.send((error, error is None or _works(bench)))


def _works(bench: Any) -> bool:
    try:
        bench.clean()
        bench.clock.synchronize()
    except Exception:
        return False
    return True


class PartRunner:
    """Runs parts one after the other, in a process that is started anew when it broke. Use as a context manager."""

    def __init__(self, setting: PartSettings) -> None:
        self._setting = setting
        self._process: Any = None
        self._pipe: Connection | None = None
        self.device: dict[str, Any] = {}

    def run(self, spec: Spec, box_s: float, known: dict[str, float]) -> Iterator[PartResult]:
        """The part as it grows: what there is after each item, and at its end. It raises nothing of its own."""
        part = PartResult(spec.name, [], self.device, self._setting.seed)
        began = time.monotonic()
        try:
            if self._pipe is None:
                self._start()
            part.device = self.device
            assert self._pipe is not None
            self._pipe.send((spec, box_s, known))
            deadline = time.monotonic() + box_s + GRACE_S
            while True:
                if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"it took longer than its {box_s:.0f} s")
                message = self._pipe.recv()
                part.took_s = time.monotonic() - began
                if isinstance(message, tuple):
                    part.error, works = message
                    if not works:
                        self.close()
                    break
                part.items.append(message)
                yield part
        except (TimeoutError, EOFError, OSError) as problem:
            self.close()
            what = "its process ended" if isinstance(problem, EOFError) else str(problem)
            part.error, part.took_s = what, time.monotonic() - began
        yield part

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(processes.METHOD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._setting))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_S):
            raise TimeoutError(f"the measuring process was not ready after {START_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise OSError(f"the device {self._setting.device} does not work here: {answer}")
        self.device = answer

    def close(self) -> None:
        """End the process. Idempotent."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> PartRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""An engine in a process of its own that serves a trace of requests on a private device, and then compares its outputs.

`python -m pagetide.demo.engine_process` is that process; `TraceEngineProcess` is its other side. Messages are lines of JSON:

    job          ──►   what to serve, and on which bounds (EngineJob)
                 ◄──   minimum_bytes: what the process holds at least on a device, known once torch and model are loaded
    environ      ──►   the variables that put the engine on the device
                 ◄──   ready
    began        ──►   the monotonic time of the trace's begin
                 ◄──   progress, ten times a second; then served
    compare      ──►
                 ◄──   progress, ten times a second; then the result: figures, and how many outputs and tokens differ from
                       those of an engine with room for all. The process ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..common.units import MIB
from .prompts import passages
from .results import changed_tokens

PROGRESS_S = 0.1
END_S = 5.0
COMPARED = {"min": 16 * MIB, "max": 512 * MIB}  # KV bytes of the engine with room for all
ONE_CORE = {"OMP_NUM_THREADS": "1"}
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}  # large tensors go back when freed (glibc)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, and its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The requests of an engine and the bounds of its pool."""

    arrivals: Sequence[Arrival]
    seed: int
    kv_min_bytes: int
    kv_max_bytes: int
    max_step_tokens: int = 512
    max_seqs: int = 128
    idle_s: float = 0.5


class TraceEngineProcess:
    """A running engine process. Call `close` at the end, which kills it."""

    def __init__(self, name: str, job: EngineJob) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagetide.demo.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env=os.environ | ONE_CORE | STEADY_HEAP,
        )
        self.pid = self._process.pid
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"pagetide-demo-{name}", daemon=True).start()
        self.tell(asdict(job))

    def tell(self, message: object) -> None:
        """Send a message. A process that has ended is noticed by the next `hear` or `poll`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")

    def poll(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call. Raises ChildProcessError if the process has ended."""
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._checked(self._messages.get_nowait()))
        return messages

    def hear(self) -> dict[str, Any]:
        """The next message that is no progress. Raises ChildProcessError if the process has ended."""
        while "progress" in (message := self._checked(self._messages.get())):
            pass
        return message

    def close(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # half a line, of a process that was killed
            for line in self._process.stdout:
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def _checked(self, message: dict[str, Any] | None) -> dict[str, Any]:
        if message is not None:
            return message
        self._messages.put(None)  # for later calls
        status = self._process.wait(END_S)
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        cause = f": {said[-1]}" if said else ""
        raise ChildProcessError(f"{self.name} (process {self.pid}) has ended with status {status}{cause}")


# ---- in the process ------------------------------------------------------------------------------


def main() -> None:
    """Serve one job, as the module docstring says."""
    from ..api.sampling_params import SamplingParams
    from ..engine.llm import LLM

    fields = json.loads(sys.stdin.readline())
    fields["arrivals"] = [Arrival(**one) for one in fields["arrivals"]]
    job = EngineJob(**fields)
    common: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_seqs": job.max_seqs,
        "max_step_tokens": job.max_step_tokens,
    }
    two_tokens = SamplingParams(max_new_tokens=2)
    with LLM("demo", **common, kv_memory={"min": job.kv_min_bytes, "max": COMPARED["max"]}, share=False) as llm:
        prompts = trace_prompts(llm, job.arrivals, job.seed)
        params = [
            SamplingParams(max_new_tokens=one.output_tokens, temperature=0.8, seed=job.seed + i, ignore_eos=True)
            for i, one in enumerate(job.arrivals)
        ]
        llm.generate(max(prompts, key=len), two_tokens, progress=False)
        minimum = llm.stats()["memory"]["base_bytes"] + job.kv_min_bytes
    _send({"minimum_bytes": minimum})
    os.environ.update(json.loads(sys.stdin.readline()))
    bounds = {"min": job.kv_min_bytes, "max": job.kv_max_bytes}
    with LLM("demo", **common, kv_memory=bounds, idle_s=job.idle_s) as llm:
        llm.generate(prompts[0], two_tokens, progress=False)
        _send({"ready": True})
        began = float(sys.stdin.readline())
        outputs, told = serve_trace(llm, job.arrivals, prompts, params, began, _send)
        told["memory"] = llm.stats()["memory"]
    _send({"served": True})
    sys.stdin.readline()  # the other engines are done too
    with LLM("demo", **common, kv_memory=COMPARED, share=False) as llm:
        unpressured = serve_all(llm, prompts, params, _send)
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(outputs, unpressured, strict=True)]
    told["failed"] = sum(output.finish_reason not in ("stop", "length") for output in [*outputs, *unpressured])
    told["equal"] = sum(ours == theirs for ours, theirs in pairs)
    told["changed_tokens"] = changed_tokens([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    _send(told)
    sys.stdin.readline()


def _send(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def trace_prompts(llm: Any, arrivals: Sequence[Arrival], seed: int) -> list[list[int]]:
    """Pieces of the held-out text, as long as the arrivals say."""
    tokens = [token for passage in passages() for token in llm.tokenize(passage)]
    rng = random.Random(seed)
    starts = [rng.randrange(len(tokens) - arrival.prompt_tokens) for arrival in arrivals]
    return [tokens[at : at + arrival.prompt_tokens] for at, arrival in zip(starts, arrivals, strict=True)]


def serve_trace(
    llm: Any,
    arrivals: Sequence[Arrival],
    prompts: list[list[int]],
    params: list[Any],
    began: float,
    send: Callable[[Mapping[str, Any]], None],
) -> tuple[list[Any], dict[str, Any]]:
    """Serve each request as it comes, and `send` progress. Returns the outputs, and recalls (second, bytes) and the like."""
    due, open_streams = deque(range(len(arrivals))), dict[int, Any]()
    outputs, recalls = dict[int, Any](), list[tuple[float, int]]()
    seen, next_s = 0, 0.0
    while due or open_streams:
        now = time.monotonic() - began
        while due and arrivals[due[0]].at_s <= now:
            open_streams[due[0]] = llm.stream(prompts[due[0]], params[due[0]])
            due.popleft()
        if open_streams:
            oldest = next(iter(open_streams))
            # Reading one stream runs a step, which advances all requests.
            chunk = next(open_streams[oldest])
            if chunk.output is not None:
                outputs[oldest] = chunk.output
                del open_streams[oldest]
        else:
            time.sleep(min(0.02, max(0.0, arrivals[due[0]].at_s - now)))
        if (now := time.monotonic() - began) >= next_s:
            next_s = now + PROGRESS_S
            stats = llm.stats()
            if stats["memory"]["recalls"] > seen:
                seen = stats["memory"]["recalls"]
                recalls.append((now, stats["memory"]["recalled_bytes"]))
            counts = {name: stats[name] for name in ("running", "waiting", "preemptions")}
            send({"progress": {**counts, "done": len(outputs), "recalls": seen}})
    done = [outputs[i] for i in range(len(arrivals))]
    stats = llm.stats()
    return done, {
        "requests": len(done),
        "seconds": time.monotonic() - began,
        "arrivals": [arrival.at_s for arrival in arrivals],
        "recalls": recalls,
        "preemptions": stats["preemptions"],
        "tokens": sum(len(output.token_ids) for output in done),
        "first_token_s": sorted(output.timings.first_token_s or 0.0 for output in done),
    }


def serve_all(llm: Any, prompts: list[list[int]], params: list[Any], send: Callable[[Mapping[str, Any]], None]) -> list[Any]:
    """Serve all requests at once, and `send` progress. Returns the outputs."""
    outputs, next_s = dict[int, Any](), 0.0
    for chunk in llm.stream(prompts, params):
        if chunk.output is not None:
            outputs[chunk.index] = chunk.output
        if (now := time.monotonic()) >= next_s:
            next_s = now + PROGRESS_S
            stats = llm.stats()
            send({"progress": {"running": stats["running"], "waiting": stats["waiting"], "done": len(outputs)}})
    send({"progress": {"running": 0, "waiting": 0, "done": len(outputs)}})
    return [outputs[i] for i in range(len(prompts))]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # its other side reports these
        main()

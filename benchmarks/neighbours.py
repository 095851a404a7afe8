"""Tokens per second on the CPU: on a quiet machine, beside a busy process, and with two engines.

    python -m benchmarks.neighbours [--json FILE] [--rounds 3] [--seconds 5] [--hidden 512] [--layers 8] [--prompts 16]
                                    [--new-tokens 64] [--settle 1] [--seed 0]

A random Llama (hidden 512, 8 layers) in float32, 16 ragged prompts of 64 to 256 tokens again and again, greedy. Two kinds of
engine take turns: "adapting" ones, as they are by default, and "fixed" ones, which keep all threads of torch's default
(OMP_NUM_THREADS is set). The busy process counts in Python. Each engine is a process of its own. On more than two cores there
are as many busy processes as half of the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import above_0, from_0, whole
from benchmarks.cpu_workload import prompts, save_model
from benchmarks.figures import Figure, report
from benchmarks.processes import Worker

KINDS = ("adapting", "fixed")


def serve(pipe: Any, folder: str, inputs: list[list[int]], new_tokens: int, settle_s: float) -> None:
    """An engine in its process: for each number of seconds that comes it sends tokens a second."""
    from pagetide import LLM, SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=0)
    with LLM(folder, dtype="float32", device="cpu", kv_memory="256MiB", share=False, max_seqs=len(inputs)) as llm:
        llm.generate(inputs[:2], params, progress=False)
        pipe.send("ready")
        while (seconds := _received(pipe)) is not None:
            _speed(llm, inputs, params, settle_s)
            pipe.send(_speed(llm, inputs, params, seconds))


def _speed(llm: Any, inputs: list[list[int]], params: Any, seconds: float) -> float:
    """Tokens a second of all requests that begin within `seconds`, until the last has ended."""
    began = time.perf_counter()
    again = _again_and_again(inputs, began + seconds)
    count = sum(len(output.token_ids) for output in llm.generate_each(again, params, look_ahead=len(inputs)))
    return count / (time.perf_counter() - began)


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _again_and_again(inputs: list[list[int]], until: float) -> Iterator[list[int]]:
    while time.perf_counter() < until:
        yield from inputs


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Inside, so many processes count."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(workers: list[Worker], seconds: float) -> float:
    """Tokens a second of all of them together."""
    for worker in workers:
        worker.send(seconds)
    return sum(worker.receive() for worker in workers)


def measure(folder: str, args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Tokens a second by kind and situation, of each round."""
    cores = os.cpu_count() or 1
    inputs = prompts(args.prompts, args.seed)
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        pairs: dict[str, list[Worker]] = {}
        for kind in KINDS:
            variables = {"OMP_NUM_THREADS": str(cores)} if kind == "fixed" else {}
            os.environ.update(variables)
            pairs[kind] = [
                stack.enter_context(Worker(serve, folder, inputs, args.new_tokens, args.settle)) for _ in range(2)
            ]
            for worker in pairs[kind]:
                worker.receive()
            for name in variables:
                del os.environ[name]
        for _ in range(args.rounds):
            for kind, pair in pairs.items():
                found.setdefault((kind, "quiet"), []).append(measured(pair[:1], args.seconds))
                with busy(max(1, cores // 2)):
                    found.setdefault((kind, "busy"), []).append(measured(pair[:1], args.seconds))
                found.setdefault((kind, "two"), []).append(measured(pair, args.seconds))
    return found


def figures(found: dict[tuple[str, str], list[float]]) -> list[Figure]:
    """Ratios within a round, their medians; then tokens a second."""
    quiet = found["adapting", "quiet"]
    together = [two / one for two, one in zip(found["adapting", "two"], quiet, strict=True)]
    beside = [now / before for now, before in zip(found["adapting", "busy"], found["fixed", "busy"], strict=True)]
    alone = [now / before for now, before in zip(quiet, found["fixed", "quiet"], strict=True)]
    result = [
        Figure("two engines together / one alone", statistics.median(together), "", 0.85, "higher", together),
        Figure("beside a busy process, adapting / fixed", statistics.median(beside), "", None, "higher", beside),
        Figure("quiet, adapting / fixed", statistics.median(alone), "", None, "higher", alone),
    ]
    names = {"quiet": "quiet", "busy": "beside a busy process", "two": "two engines together"}
    for (kind, situation), samples in found.items():
        name = f"{names[situation]}, {kind}"
        result.append(Figure(name, statistics.median(samples), "tokens/s", None, "higher", samples))
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures, and write them to `--json FILE`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--seconds", type=above_0, default=5.0)
    parser.add_argument("--settle", type=from_0, default=1.0, help="seconds in which an engine sees its neighbours")
    parser.add_argument("--hidden", type=whole, default=512)
    parser.add_argument("--layers", type=whole, default=8)
    parser.add_argument("--prompts", type=whole, default=16)
    parser.add_argument("--new-tokens", type=whole, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.hidden, args.layers, args.seed)
        found = measure(folder, args)
    report("tokens a second on the CPU, with neighbours", figures(found), args.seed, args.json)


if __name__ == "__main__":
    main()

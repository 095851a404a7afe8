"""pagetide and other engines on the same models and prompts, taking turns."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Figure, median
from benchmarks.load import agreement, prompts
from benchmarks.peers.protocol import PeerProcess
from benchmarks.processes import busy

OURS = "pagetide"
KV_BYTES, KV_TOKENS = 2**30, 16384


@dataclass(frozen=True)
class PeerWorkload:
    """A model, a type of weights and a number of prompts."""

    name: str
    model: str
    dtype: str
    count: int
    first_token: bool = False


WORKLOADS = (
    PeerWorkload("512 x 8 float32 x 16", "llama", "float32", 16),
    PeerWorkload("512 x 8 bfloat16 x 16", "llama", "bfloat16", 16),
    PeerWorkload("512 x 8 float32 x 1", "llama", "float32", 1),
    PeerWorkload("0.39 B bfloat16 x 16", "qwen2", "bfloat16", 16),
    PeerWorkload("512 x 8 bfloat16 first token", "llama", "bfloat16", 1, first_token=True),
    PeerWorkload("0.39 B bfloat16 first token", "qwen2", "bfloat16", 1, first_token=True),
    PeerWorkload("0.16 B states float32 x 16", "qwen3.5", "float32", 16),
    *(
        PeerWorkload(f"{size} B {dtype} x {count}", f"qwen3-{size}b", dtype, count)
        for size in ("0.6", "1.7")
        for dtype in ("int8", "int4")
        for count in (1, 4, 16)
    ),
)
LEAST = MOST_FIRST_TOKEN = 1.0  # of the ratio to the better of the others


@dataclass
class PeerRuns:
    """Seconds of each round and the tokens of the last, by engine; cores that others used, or the host took, in each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)


def engines(folder: Path) -> dict[str, Any]:
    """Python and module of each engine, pagetide first. Raises FileNotFoundError where `benchmarks.peers.make` has not run."""
    file = folder / "engines.json"
    if not file.exists():
        raise FileNotFoundError(f"there is no {file}; make it: python -m benchmarks.peers.make {folder}")
    return {OURS: {"python": sys.executable, "module": "benchmarks.peers.pagetide_server"}, **json.loads(file.read_text())}


def run(folder: Path, work: PeerWorkload, inputs: list[list[int]], new_tokens: int, rounds: int, num_busy: int) -> PeerRuns:
    """Every engine once to warm up, then in turns. Raises RuntimeError when an output has another length."""
    runs = PeerRuns()
    with ExitStack() as stack:
        peers = {}
        for name, engine in engines(folder).items():
            peers[name] = stack.enter_context(PeerProcess(engine["python"], engine["module"]))
            settings = peers[name].request(
                op="load", model=str(folder / "models" / work.model), dtype=work.dtype,
                threads=len(os.sched_getaffinity(0)), max_seqs=work.count, kv_bytes=KV_BYTES, kv_tokens=KV_TOKENS,
            )  # fmt: skip
            print(f"{work.name}: {name} {settings}", flush=True)
            peers[name].request(op="run", prompts=inputs, new_tokens=new_tokens)
        stack.enter_context(busy(num_busy))
        for _ in range(rounds):
            began, before = time.perf_counter(), other_seconds(list(peers.values()))
            for name, peer in peers.items():
                answer = peer.request(op="run", prompts=inputs, new_tokens=new_tokens)
                if any(len(tokens) != new_tokens for tokens in answer["tokens"]):
                    raise RuntimeError(f"{name} gave {[len(t) for t in answer['tokens']]} tokens instead of {new_tokens} each")
                runs.seconds.setdefault(name, []).append(answer["seconds"])
                runs.tokens[name] = answer["tokens"]
            runs.others.append((other_seconds(list(peers.values())) - before) / (time.perf_counter() - began))
    return runs


def other_seconds(peers: list[PeerProcess]) -> float:
    """CPU seconds since the start of the machine that were not the peers', with those that the host took ("steal")."""
    cores = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    used = (psutil.Process(peer.pid).cpu_times() for peer in peers)
    return sum(getattr(cores, name, 0.0) for name in names) - sum(each.user + each.system for each in used)


def figures(work: PeerWorkload, runs: PeerRuns, num_tokens: int) -> list[Figure]:
    """Speed of each engine, our ratio to the better of the others within a round, and how far the tokens agree."""
    ours = runs.seconds[OURS]
    others = {name: seconds for name, seconds in runs.seconds.items() if name != OURS}
    better = list(map(min, zip(*others.values(), strict=True)))
    speeds = []
    for name, seconds in runs.seconds.items():
        if work.first_token:
            speeds.append(median(f"{work.name} {name}", seconds, "s"))
        else:
            rates = [num_tokens / each for each in seconds]
            speeds.append(median(f"{work.name} {name}", rates, "tokens/s", None, "higher"))
    label = f"{work.name} pagetide / better of the others"
    if work.first_token:
        ratio = median(label, [a / b for a, b in zip(ours, better, strict=True)], "x", MOST_FIRST_TOKEN)
    else:
        ratio = median(label, [b / a for a, b in zip(ours, better, strict=True)], "x", LEAST, "higher")
    same = [
        Figure(f"{work.name} same tokens as {name}", agreement(runs.tokens[OURS], runs.tokens[name]), "share", better="higher")
        for name in others
    ]
    return [*speeds, ratio, *same, median(f"{work.name} cores that others used", runs.others, "cores")]


def compare(
    folder: Path, only: str, count: int, new_tokens: int, long_prompt: int, rounds: int, num_busy: int, seed: int
) -> list[Figure]:
    """The figures of the workloads that the regular expression `only` finds by name.

    `count` replaces 16 prompts; a first token's prompt has `long_prompt` tokens.
    """
    found: list[Figure] = []
    for work in (one for one in WORKLOADS if re.search(only, one.name)):
        if work.first_token:
            pieces = prompts(long_prompt // 64 + 1, seed)
            inputs, tokens = [[token for piece in pieces for token in piece][:long_prompt]], 1
        else:
            inputs, tokens = prompts(min(work.count, count), seed), new_tokens
        runs = run(folder, work, inputs, tokens, rounds, num_busy)
        new = figures(work, runs, tokens * len(inputs))
        found += new
        for figure in new:
            print(f"  {figure.name}: {figure.value:.2f} {figure.unit}", flush=True)
    return found

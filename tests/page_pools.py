"""A server for the page without engines: real frames of made-up pools, which are random but repeatable, over real HTTP.

    python tests/page_pools.py --port 8123 --blocks 10000

`MadeUpFleet` is a fleet in the same way.

The page itself is the one in server/page.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parents[1] / "server" / "page"
UNMAPPED, FREE, DRAINING, CACHED, IN_FLIGHT, NULL, FIRST_ROW, SHARED = 0, 1, 2, 3, 4, 5, 16, 0x8000
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
STEP_S = 0.1
COUNTERS = (
    "computed_tokens", "generated_tokens", "recomputed_tokens", "preemptions", "prompt_tokens", "cached_prompt_tokens",
    "demoted_blocks", "promoted_blocks", "moved_blocks", "forks", "recalls", "recalled_bytes",
)  # fmt: skip
QUEUE_COUNTERS = (
    "accepted", "refused", "ended", "failed", "cancelled", "requeued", "returned", "assigned", "recorded_tokens",
    "hit_blocks", "prompt_blocks", "workers_lost",
)  # fmt: skip
RUN = np.dtype([("first", "<u4"), ("length", "<u2"), ("value", "<u2")])


def encode_runs(before: npt.NDArray[np.uint16], after: npt.NDArray[np.uint16]) -> str:
    """The cells of `after` that differ from `before` as runs."""
    at = np.flatnonzero(before != after)
    if not len(at):
        return ""
    values = after[at]
    new = np.ones(len(at), np.bool_)
    new[1:] = (np.diff(at) != 1) | (values[1:] != values[:-1])
    starts = np.flatnonzero(new)
    lengths = np.diff(np.append(starts, len(at)))
    runs: list[tuple[int, int, int]] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for offset in range(0, length, 65536):
            runs.append((int(at[start]) + offset, min(65536, length - offset) - 1, int(values[start])))
    return base64.b64encode(np.array(runs, RUN).tobytes()).decode()


@dataclass
class Job:
    """A request of the simulation."""

    id: str
    label: str
    prompt: int
    limit: int
    arrival: float
    prefix: int = -1  # which of the common beginnings it has
    known: int = 0
    computed: int = 0
    cached: int = 0  # tokens that it found at its first admission
    preemptions: int = 0
    row: int = -1
    table: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[float, str]:
        return self.arrival, self.id


class Simulation:
    """One model's pool under random load, step by step.

    Args:
        load: Requests that run or wait at once.
        lengths: Of prompts and outputs, in tokens.
        name_of: The id and label of the n-th request.
    """

    def __init__(
        self, name: str, num_blocks: int = 10_000, per_extent: int = 64, *, seed: int = 0, mapped: float = 0.7, load: int = 24,
        rows: int = 16, lengths: tuple[int, int] = (400, 500), block_bytes: int = 131_072,
        name_of: Callable[[int], tuple[str, str]] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.per_extent, self.block_bytes, self.load, self.lengths = (
            name,
            per_extent,
            block_bytes,
            load,
            lengths,
        )
        self.random = random.Random(seed)
        self.num_extents = -(-num_blocks // per_extent)
        self.state = np.zeros(num_blocks, np.uint16)
        for extent in range(max(1, int(self.num_extents * mapped))):
            self.state[extent * per_extent : (extent + 1) * per_extent] = FREE
        self.state[0] = NULL
        self.name_of = name_of or (lambda n: (f"req-{n:04d}", f"cmpl-{(n * 2654435761) % 2**32:08x}" if n % 3 else ""))
        self.free_rows = list(range(rows - 1, -1, -1))
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.prefixes: dict[int, list[int]] = {}  # blocks of common beginnings
        self.ended: list[list[Any]] = []
        self.decisions: list[dict[str, Any]] = []
        self.stats = dict.fromkeys(COUNTERS, 0)
        self.num_jobs = self.step_number = 0
        self.now = 1_795_465_254.0
        self.recall_target: int | None = None
        self.in_flight: list[tuple[int, int]] = []  # step at which it ends, block
        self.others = 3 << 30
        self.order: list[int] = []
        self.pool = {
            "num_blocks": num_blocks, "blocks_per_extent": per_extent, "block_size": 16, "block_bytes": block_bytes,
            "model": name, "max_model_len": 16384,
        }  # fmt: skip

    # ---- the pool

    @property
    def mapped_extents(self) -> list[int]:
        firsts = self.state[:: self.per_extent]
        lasts = self.state[self.per_extent - 1 :: self.per_extent]
        return [extent for extent in range(len(lasts)) if firsts[extent] != UNMAPPED or lasts[extent] != UNMAPPED]

    def held(self) -> npt.NDArray[np.int64]:
        """How many tables hold each block."""
        tables = [job.table for job in self.running]
        flat = np.concatenate([np.array(table, np.int64) for table in tables if table] or [np.zeros(0, np.int64)])
        return np.bincount(flat, minlength=len(self.state))

    def take(self, wanted: int) -> list[int] | None:
        free = np.flatnonzero(self.state == FREE)
        if len(free) < wanted:
            cached = np.flatnonzero(self.state == CACHED)
            evicted = cached[: wanted - len(free)]
            if len(free) + len(evicted) < wanted:
                return None
            self.state[evicted] = FREE
            gone = set(evicted.tolist())
            self.prefixes = {key: blocks for key, blocks in self.prefixes.items() if not gone & set(blocks)}
            self.decide({"what": "give up", "since_step": self.step_number, "demoted": 0, "evicted": len(evicted),
                         "swap_s": 0.0, "compute_s": 0.0021, "chance_new": 0.1, "chance_found": 0.6})  # fmt: skip
            free = np.flatnonzero(self.state == FREE)
        start = self.random.choice([0, 0, 0, self.random.randrange(max(1, len(free) - wanted + 1))])
        chosen = free[start : start + wanted]
        self.state[chosen] = FIRST_ROW  # held; `cells` says by which row
        return [int(block) for block in chosen]

    def release(self, job: Job, keeps: bool) -> None:
        counts = self.held()
        for block in job.table:
            if counts[block] == 1:
                self.state[block] = CACHED if keeps else FREE
        job.table = []
        self.free_rows.append(job.row)
        job.row = -1
        self.running.remove(job)

    def decide(self, decision: dict[str, Any]) -> None:
        last = self.decisions[-1] if self.decisions else None
        entry = {"step": self.step_number, "n": len(self.decisions), "label": "", **decision}
        if last and last["what"] == "give up" == entry["what"]:
            last |= {
                "evicted": last["evicted"] + entry["evicted"],
                "step": self.step_number,
                "changed": self.step_number,
            }
            return
        self.decisions.append(entry | {"changed": self.step_number})

    # ---- a step

    def step(self) -> None:
        """The next step of the engine, a tenth of a second later."""
        self.step_number += 1
        self.now += STEP_S
        self.others = int(max(1 << 30, self.others + self.random.gauss(0, 12 << 20)))
        self.state[[block for at, block in self.in_flight if at <= self.step_number]] = FREE
        self.in_flight = [(at, block) for at, block in self.in_flight if at > self.step_number]
        missing = self.load - len(self.running) - len(self.waiting)
        for _ in range(missing):
            if self.random.random() < 0.5:
                self.arrive()
        self.shrink()
        self.admit()
        for job in list(self.running):
            if job.row >= 0:
                self.advance(job)

    def arrive(self) -> None:
        request_id, label = self.name_of(self.num_jobs)
        self.num_jobs += 1
        prompt = max(4, int(self.random.lognormvariate(0, 0.6) * self.lengths[0]))
        limit = prompt + max(8, int(self.random.lognormvariate(0, 0.7) * self.lengths[1]))
        prefix = self.random.randrange(4) if self.random.random() < 0.5 else -1
        self.waiting.append(Job(request_id, label, prompt, limit, self.now, prefix, known=prompt))

    def admit(self) -> None:
        while self.waiting and self.free_rows:
            job = self.waiting[0]
            found = [b for b in self.prefixes.get(job.prefix, []) if self.state[b] in (CACHED, FIRST_ROW)][
                : job.known // 32
            ]
            needed = -(-job.known // 16) - len(found)
            room = int(np.count_nonzero((self.state == FREE) | (self.state == CACHED)))
            blocks = self.take(needed) if needed <= room - len(found) - 8 else None
            if blocks is None:
                usable = int(np.count_nonzero(self.state > DRAINING))
                peak = usable * 1.08 if needed <= room else None
                if not any(d["what"] == "wait" and d["request_id"] == job.id for d in self.decisions[-20:]):
                    self.decide({"what": "wait", "request_id": job.id, "label": job.label, "needed": needed, "room": room,
                                 "usable": usable, "expected": peak, "margin": 4.0, "in_steps": 14})  # fmt: skip
                return
            self.waiting.pop(0)
            for block in found:
                self.state[block] = FIRST_ROW
            job.table, job.row, job.computed = found + blocks, self.free_rows.pop(), len(found) * 16
            if job.preemptions:
                had = job.known - 1
                self.decide(
                    {"what": "return", "request_id": job.id, "label": job.label, "had": had, "found": job.computed}
                )
            else:
                self.stats["prompt_tokens"] += job.prompt
                job.cached = job.computed
                self.stats["cached_prompt_tokens"] += job.cached
            self.running.append(job)
            if job.prefix >= 0 and job.prefix not in self.prefixes:
                self.prefixes[job.prefix] = job.table[: job.known // 32]

    def advance(self, job: Job) -> None:
        if job.computed < job.known - 1:
            made = min(self.lengths[0] // 4 + 16, job.known - job.computed)
        else:
            made = self.random.choice([1, 2, 3])
            self.stats["generated_tokens"] += made
        job.computed += made
        self.stats["computed_tokens"] += made
        if job.computed >= job.known:
            job.known = min(job.limit, job.computed + 1)
        if job.computed >= job.limit - 1:
            reason = self.random.choice(["stop", "length"])
            self.ended.append([job.id, job.label, reason, job.known - job.prompt, None])
            return self.release(job, keeps=self.random.random() < 0.7)
        while len(job.table) * 16 < job.known:
            blocks = self.take(1)
            if blocks is None:
                victim = max(self.running, key=lambda one: one.key)
                self.preempt(victim)
                if victim is job:
                    return
                continue
            job.table += blocks

    def preempt(self, job: Job) -> None:
        won = len(job.table)
        told = {
            "priority": 0,
            "blocks_won": won,
            "tokens": job.computed,
            "swap_s": None,
            "compute_s": job.computed * 0.0004,
        }
        self.decide({"what": "preempt", "request_id": job.id, "label": job.label, "chosen": "compute", **told})
        self.stats["preemptions"] += 1
        job.preemptions += 1
        self.release(job, keeps=False)
        job.computed = 0
        self.waiting.insert(0, job)

    def recall(self, share: float) -> None:
        """The lease shrinks to this share of what it holds; extents drain over the next steps."""
        mapped = self.mapped_extents
        self.order = mapped[max(1, int(len(mapped) * share)) :][::-1]
        self.recall_target = (len(mapped) - len(self.order)) * self.per_extent * self.block_bytes
        self.drain()

    def grow(self, extents: int) -> None:
        """So many extents more."""
        mapped = set(self.mapped_extents)
        for extent in [one for one in range(self.num_extents) if one not in mapped][:extents]:
            self.state[extent * self.per_extent : (extent + 1) * self.per_extent] = FREE

    def drain(self) -> None:
        for extent in self.order[:8]:
            part = self.state[extent * self.per_extent : (extent + 1) * self.per_extent]
            part[(part == FREE) | (part == CACHED)] = DRAINING

    def shrink(self) -> None:
        """Move blocks out of the next draining extents, and unmap those that are empty."""
        if not self.order:
            if self.recall_target is not None:
                self.stats["recalls"] += 1
            self.recall_target = None
            return
        for extent in self.order[:2]:
            part = slice(extent * self.per_extent, (extent + 1) * self.per_extent)
            used = np.flatnonzero(self.state[part] == FIRST_ROW) + part.start
            for job in self.running if len(used) else []:
                for at, block in enumerate(job.table):
                    if part.start <= block < part.stop and (moved := self.take(1)):
                        self.in_flight.append((self.step_number + 6, moved[0]))
                        self.stats["moved_blocks"] += 1
                        job.table[at] = moved[0]
            left = set(range(part.start, part.stop)) & {block for job in self.running for block in job.table}
            if left:
                self.preempt(max(self.running, key=lambda one: one.key))
                return
            self.in_flight = [(at, block) for at, block in self.in_flight if not part.start <= block < part.stop]
            self.state[part] = UNMAPPED
            self.stats["recalled_bytes"] += self.per_extent * self.block_bytes
            self.order.remove(extent)
        self.drain()

    # ---- what a viewer sees

    def cells(self) -> npt.NDArray[np.uint16]:
        """The cells as the page shows them."""
        cells = self.state.copy()
        busy = [block for _, block in self.in_flight]
        for job in sorted(self.running, key=lambda one: one.key, reverse=True):
            cells[job.table] = FIRST_ROW + job.row
        cells[self.held() > 1] |= SHARED
        loose = [block for block in busy if cells[block] < FIRST_ROW]
        cells[loose] = IN_FLIGHT
        return cells

    def memory(self) -> dict[str, Any]:
        kv = len(self.mapped_extents) * self.per_extent * self.block_bytes
        most = self.num_extents * self.per_extent * self.block_bytes
        beside = (290 << 20) + (42 << 20)
        target = None if self.recall_target is None else beside + self.recall_target
        return {
            "weights": 290 << 20, "base": 42 << 20, "kv": kv, "prepared": 0,
            "lease": {
                "granted": beside + kv, "held": beside + kv, "min": beside + most // 5, "max": beside + most,
                "recall_target": target,
            },
            "device": {"name": "Test device", "total": 16 << 30, "used": self.others + kv, "others": self.others},
        }  # fmt: skip


class Frames:
    """The frames of a simulation for one viewer."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.seq = 0
        self.before = np.zeros(len(simulation.state), np.uint16)
        self.rows: dict[int, str] = {}
        self.num_ended = len(simulation.ended)
        self.seen_step = -1

    def new(self) -> list[dict[str, Any]]:
        """The next frame; the first one is full."""
        return [self.frame(full=self.seq == 0)]

    def frame(self, full: bool) -> dict[str, Any]:
        """The next frame."""
        pool, cells = self.simulation, self.simulation.cells()
        if full:
            self.before, self.rows, self.seen_step = np.zeros(len(cells), np.uint16), {}, -1
        rows = {job.row: job for job in pool.running}
        left = [row for row, request_id in self.rows.items() if row not in rows or rows[row].id != request_id]
        new = [job for row, job in rows.items() if self.rows.get(row) != job.id]
        counts = [int(np.count_nonzero(cells == state)) for state in (FREE, DRAINING, CACHED, IN_FLIGHT)]
        live = int(np.count_nonzero(cells >= FIRST_ROW))
        mapped = len(pool.mapped_extents) * pool.per_extent - 1
        frame: dict[str, Any] = {
            "v": 1, "seq": self.seq, "time": round(pool.now, 3), "step": pool.step_number, "full": full,
            "cells": encode_runs(self.before, cells),
            "blocks": [counts[0], counts[1], live, counts[2], counts[3], mapped, mapped],
            "rows": [[job.row, job.id, job.label, job.prompt, job.limit, 0, job.arrival, job.cached] for job in new],
            "left": left,
            "running": [[job.row, int(job.computed >= job.prompt), job.known, job.computed, len(job.table), job.preemptions]
                        for job in pool.running],
            "waiting": [len(pool.waiting), [
                [job.id, job.label, job.known, -(-job.known // 16), 0, round(pool.now - job.arrival, 1), job.preemptions,
                 "waiting"] for job in pool.waiting[:200]]],
            "ended": pool.ended[self.num_ended:],
            "decisions": [d for d in pool.decisions[-64:] if d["changed"] > self.seen_step],
            "stats": dict(pool.stats), "host": None, "memory": pool.memory(),
        }  # fmt: skip
        if full:
            frame["pool"] = pool.pool
        self.before, self.rows = cells, {row: job.id for row, job in rows.items()}
        self.num_ended, self.seen_step = len(pool.ended), pool.step_number
        self.seq += 1
        return frame


class Pushed:
    """Frames that a test makes itself, the first one full: they go to the viewers in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frames: list[dict[str, Any] | None] = []

    def step(self) -> None:
        """Nothing happens by itself."""


class PushedFrames:
    """The frames of a `Pushed` for one viewer."""

    def __init__(self, pushed: Pushed) -> None:
        self._pushed, self._next = pushed, 0

    def new(self) -> list[dict[str, Any] | None]:
        """Those that came since."""
        found = self._pushed.frames[self._next :]
        self._next += len(found)
        return found


class MadeUpFleet(Pushed):
    """The status of a fleet, as its queue gives it; tests change it, and push what the server makes of it.

    Attributes:
        status: See pagetide/fleet/status.py.
    """

    def __init__(self, name: str, workers: int = 3, fronts: int = 2) -> None:
        super().__init__(name)
        names = [f"worker-{number}" for number in range(workers)]
        counters = dict.fromkeys(QUEUE_COUNTERS, 0)
        self.status: dict[str, Any] = {
            "model": name, "workers": [self.worker(one) for one in names], "queue": {"waiting": 0, "running": 0, **counters},
            "journal": {"path": "/secret/journal.sqlite", "commits": 7, "unwritten": 0, "fault": None},
            "front_ends": {f"host-{number}-0a1b2c3d": 0 for number in range(fronts)},
            "kept": names, "errors": {}, "restarts": 0,
            "stats": {"workers": {one: {"secret": 1} for one in names}}, "fleet_metrics": {"secret": {}},
        }  # fmt: skip

    def worker(self, name: str, **changes: Any) -> dict[str, Any]:
        """A worker's state."""
        blocks = {"usable": 200, "limit": 250, "free": 60, "live": 90}
        return {
            "name": name, "state": "ready", "node": "host", "pid": 4711, "epoch": 1 + int(name.rpartition("-")[2]),
            "requests": 3, "sequences": 4, "max_seqs": 8, "blocks": blocks, "cached_blocks": 95, "preemptions": 1,
            "assigned": 12, "silent_s": 0.05, "device": "cpu", **changes,
        }  # fmt: skip

    def set_worker(self, name: str, **changes: Any) -> None:
        """Register a worker, or change one; `state="starting"` takes it away."""
        others = [one for one in self.status["workers"] if one["name"] != name]
        known = [one for one in self.status["workers"] if one["name"] == name]
        state = {**(known[0] if known else self.worker(name)), **changes}
        self.status["workers"] = others if state["state"] == "starting" else [*others, state]
        if name not in self.status["kept"]:
            self.status["kept"] = [*self.status["kept"], name]


class PageRig:
    """The server. Use it as a context manager; `url` is its address.

    Args:
        pause_s: Between two steps; None: `step` makes them.
        key: The API key that is asked for.
        recording: Frames by model: the server is a replay of them.
        answer: The text of the prompt box's requests, in tokens.
        hold: The requests of the prompt box never end.
    """

    def __init__(
        self, simulations: Sequence[Simulation | Pushed], *, pause_s: float | None = None, key: str | None = None,
        port: int = 0, recording: dict[str, list[dict[str, Any]]] | None = None,
        answer: Sequence[str] = ("Call", " me", " Ishmael", "."), hold: bool = False,
    ) -> None:  # fmt: skip
        self.simulations = {one.name: one for one in simulations}
        self.pause_s, self.key, self.recording, self.answer, self.hold = pause_s, key, recording, answer, hold
        self.states = {one.name: "ready" for one in simulations}
        self.refusal: tuple[int, str] | None = None  # status and message of the answers to GET
        self.num_refused = 0
        self.damage: list[str] = []  # lines before the frames of a recording
        self.bodies: list[tuple[str, dict[str, Any], str]] = []  # path, body, x-request-id
        self.changed = threading.Condition()
        self.version = self.told = 0
        self.ending = False
        self.http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/page/"

    def __enter__(self) -> PageRig:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        if self.pause_s is not None:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        self.http.shutdown()
        self.http.server_close()

    def _run(self) -> None:
        while not self.ending:
            self.step()
            time.sleep(self.pause_s or 0)

    def step(self, count: int = 1, act: Callable[[], None] | None = None) -> None:
        """Steps of every model, then one frame for each viewer; `act` is called before, under the lock."""
        with self.changed:
            if act is not None:
                act()
            for _ in range(count):
                for simulation in self.simulations.values():
                    simulation.step()
            self.version += 1
            self.changed.notify_all()

    def tell(self, **states: str) -> None:
        """Say the states of all models to all viewers, after these changes. Models that are not ready send no frames."""
        with self.changed:
            self.states |= states
            self.told += 1
            self.changed.notify_all()

    def push(self, model: Pushed, frame: dict[str, Any] | None) -> None:
        """Send a frame of this model to all viewers, or a snapshot of this fleet."""
        with self.changed:
            model.frames.append(frame)
            self.version += 1
            self.changed.notify_all()

    def wait_for_request(self) -> tuple[str, dict[str, Any], str]:
        """The first request of the prompt box: its path, its body, its x-request-id."""
        with self.changed:
            self.changed.wait_for(lambda: self.bodies)
            return self.bodies[0]

    def held(self, events: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The first of `events`, and no end before the server's."""
        yield next(events)
        with self.changed:
            self.changed.wait_for(lambda: self.ending)

    def events(self) -> Iterator[tuple[str, Any]]:
        """What one viewer gets, until the server ends."""
        sources = {name: viewer_of(one) for name, one in self.simulations.items()}
        seen = told = -1
        while True:
            with self.changed:
                self.changed.wait_for(lambda seen=(seen, told): (self.version, self.told) != seen or self.ending, 1.0)
                if self.ending:
                    return
                is_told, seen, told = told == self.told, self.version, self.told
                states = [{"name": name, "state": state} for name, state in self.states.items()]
                ready = [(name, source) for name, source in sources.items() if self.states[name] == "ready"]
                frames = [(name, frame) for name, source in ready for frame in source.new()]
            if not is_told:
                yield "models", states
            for name, frame in frames:
                kind = "fleet" if isinstance(self.simulations[name], MadeUpFleet) else "frame"
                yield kind, {"model": name, kind: frame}


def viewer_of(simulation: Simulation | Pushed) -> Frames | PushedFrames:
    """The frames of one viewer."""
    return PushedFrames(simulation) if isinstance(simulation, Pushed) else Frames(simulation)


def record(simulations: Sequence[Simulation], steps: int, full_every: int = 50) -> dict[str, list[dict[str, Any]]]:
    """The frames of so many steps, as a recording has them."""
    sources = {one.name: Frames(one) for one in simulations}
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in simulations}
    for number in range(steps):
        for one in simulations:
            one.step()
            found[one.name].append(sources[one.name].frame(number % full_every == 0))
    return found


def _handler(rig: PageRig) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def reply(self, status: int, content: bytes, media: str = "application/json", **headers: str) -> None:
            self.send_response(status)
            given = {"content-type": media, "content-length": str(len(content)), "content-security-policy": POLICY}
            for name, value in (given | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def json(self, status: int, data: object, **headers: str) -> None:
            self.reply(status, json.dumps(data).encode(), **headers)

        def signed_in(self) -> bool:
            return rig.key is None or "pagetide_session=open" in self.headers.get("cookie", "")

        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            if path == "/page/info":
                return self.info()
            file = FOLDER / (path.removeprefix("/page/") or "index.html")
            if path.startswith("/page/") and file.is_file():
                return self.reply(200, file.read_bytes(), TYPES[file.suffix])
            if not self.signed_in():
                return self.json(401, {"error": {"message": "there is no API key"}})
            if rig.refusal is not None:
                rig.num_refused += 1
                return self.json(rig.refusal[0], {"error": {"message": rig.refusal[1]}})
            model = rig.simulations.get(query.get("model", [""])[0])
            if path == "/page/events":
                return self.stream(rig.events())
            if path == "/page/frames" and rig.recording is not None:
                return self.frames(query)
            if path == "/page/block" and isinstance(model, Simulation):
                return self.json(200, block_details(model, int(query["block"][0])))
            if path == "/page/explain" and isinstance(model, Simulation):
                return self.json(
                    200, [d for d in model.decisions if query["request"][0] in (d.get("request_id"), d["label"])]
                )
            self.json(404, {"error": {"message": f"there is no {path}"}})

        def info(self) -> None:
            has_key = rig.key is not None
            is_in = has_key and self.signed_in()
            info: dict[str, Any] = {"mode": "live", "needs_key": has_key, "has_keys": has_key, "signed_in": is_in}
            info |= {"admin": is_in, "version": "0.1.0"}
            if rig.recording is not None:
                times = [frame["time"] for frames in rig.recording.values() for frame in frames]
                info |= {"mode": "replay", "began": min(times), "ended": max(times), "models": list(rig.recording)}
            self.json(200, info)

        def frames(self, query: dict[str, list[str]]) -> None:
            assert rig.recording is not None
            frames = rig.recording[query["model"][0]]
            begin, until = float(query["from"][0]), float(query["until"][0])
            first = max((at for at, one in enumerate(frames) if one["full"] and one["time"] <= begin), default=0)
            chosen = [one for one in frames[first:] if one["time"] <= until]
            lines = [*rig.damage, *(json.dumps(one) for one in chosen), json.dumps({"more": False, "until": until})]
            self.reply(200, "\n".join(lines).encode(), "application/x-ndjson")

        def stream(self, events: Iterator[tuple[str, Any]]) -> None:
            self.send_response(200)
            for name, value in (
                ("content-type", "text/event-stream"),
                ("connection", "close"),
                ("cache-control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            try:
                for kind, data in events:
                    head = "" if kind == "message" else f"event: {kind}\n"
                    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
                    self.wfile.write(f"{head}data: {text}\n\n".encode())
                    self.wfile.flush()
            except OSError:
                pass  # the page left

        def do_POST(self) -> None:
            path = urlsplit(self.path).path
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            if path == "/page/session":
                if self.headers.get("authorization") != f"Bearer {rig.key}":
                    return self.json(401, {"error": {"message": "the API key is wrong"}})
                cookie = "pagetide_session=open; HttpOnly; SameSite=Strict; Path=/; Max-Age=3600"
                return self.json(200, {"admin": True}, set_cookie=cookie)
            if not self.signed_in():
                return self.json(401, {"error": {"message": "there is no API key"}})
            body = json.loads(content)
            with rig.changed:
                rig.bodies.append((path, body, self.headers.get("x-request-id", "")))
                rig.changed.notify_all()
            events = answer_events(rig.answer, path.endswith("/chat/completions"))
            self.stream(rig.held(events) if rig.hold else events)

    return Handler


def answer_events(tokens: Sequence[str], chat: bool) -> Iterator[tuple[str, Any]]:
    """The events of a completion with these tokens, each with log-probabilities."""
    for number, token in enumerate(tokens):
        reason = "stop" if number == len(tokens) - 1 else None
        if chat:
            top = [{"token": token, "logprob": -0.25}, {"token": " other", "logprob": -1.5}]
            scores: Any = {"content": [{"token": token, "logprob": -0.25, "top_logprobs": top}]}
            choice: dict[str, Any] = {"delta": {"content": token}}
        else:
            tops = [{token: -0.25, " other": -1.5}]
            scores = {"tokens": [token], "token_logprobs": [-0.25], "top_logprobs": tops, "text_offset": [0]}
            choice = {"text": token}
        yield "message", {"choices": [{"index": 0, "logprobs": scores, "finish_reason": reason, **choice}]}
    usage = {"prompt_tokens": 2, "completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": 0}}
    yield "message", {"choices": [], "usage": usage}
    yield "message", "[DONE]"


def block_details(model: Simulation, block: int) -> dict[str, Any]:
    """What is known of a block, with its text, as an admin gets it."""
    rows = [
        {"row": job.row, "id": job.id, "label": job.label, "position": job.table.index(block)}
        for job in model.running if block in job.table
    ]  # fmt: skip
    names = {UNMAPPED: "unmapped", FREE: "free", DRAINING: "draining", CACHED: "cached", NULL: "null"}
    first = rows[0]["position"] * 16 if rows else 0
    text = "<img src=x onerror=alert(1)> the sea was calm, and the ship"
    known = {"hits": 2, "tokens": [first, first + 16], "text": text}
    if not rows:
        known = {"hits": 0, "tokens": None, "text": None}
    return {"state": "live" if rows else names.get(int(model.state[block]), "in flight"), "rows": rows, **known}


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--key")
    parser.add_argument("--replay", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()
    models = [
        Simulation(f"model-{number}" if number else "demo", args.blocks, seed=number) for number in range(args.models)
    ]
    recording = record(models, args.replay) if args.replay else None
    for model in models:
        for _ in range(300):
            model.step()
    with PageRig(models, pause_s=0.1, key=args.key, port=args.port, recording=recording) as rig:
        print(rig.url, flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()

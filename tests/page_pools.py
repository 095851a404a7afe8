"""A server for the page without engines: real frames of made-up pools, which are random but repeatable, over real HTTP.

    python tests/page_pools.py --port 8123 --blocks 10000

`MadeUpFleet` is a fleet in the same way.

The page itself is the one in server/static.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from cell_oracle import naive_cells, seated

from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.pool_view import BlockState
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.frames.source import (
    MOST_WAITING,
    Frame,
    FrameSource,
    MemoryFigures,
    PoolFacts,
    encode,
    first_waiting,
    with_labels,
)
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.request import Sequence as Served
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

FOLDER = Path(__file__).resolve().parents[1] / "server" / "static"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
STEP_S = 0.1
BEGAN = 1_795_465_254.0
BLOCK_BYTES = 131_072
VOCAB = 997
TEXT = "<img src=x onerror=alert(1)> the sea was calm, and the ship"
QUEUE_COUNTERS = (
    "accepted", "refused", "ended", "failed", "cancelled", "requeued", "returned", "assigned", "recorded_tokens",
    "hit_blocks", "prompt_blocks", "workers_lost",
)  # fmt: skip


class Simulation:
    """A real scheduler and its cache under random load, step by step; in place of a model's tokens come random ones.

    Args:
        load: Requests that run or wait at once.
        lengths: Of prompts and outputs, in tokens.
        name_of: The id and label of the n-th request.
    """

    def __init__(
        self, name: str, num_blocks: int = 10_000, per_extent: int = 64, *, seed: int = 0, mapped: float = 0.7, load: int = 24,
        rows: int = 16, lengths: tuple[int, int] = (400, 500), forecast: bool = True,
        name_of: Callable[[int], tuple[str, str]] | None = None,
    ) -> None:  # fmt: skip
        num_blocks += -num_blocks % per_extent
        self.name, self.load, self.lengths = name, load, lengths
        self.name_of = name_of or (lambda n: (f"req-{n:04d}", f"cmpl-{(n * 2654435761) % 2**32:08x}" if n % 3 else ""))
        self.random = np.random.default_rng(seed)
        self.longest = min(8 * num_blocks, 4 * sum(lengths))
        self.beginnings = self.random.integers(0, VOCAB, (4, self.longest), np.int32)  # some prompts begin alike
        extents = range(max(1, int(num_blocks / per_extent * mapped)))
        pool = BlockAllocator(num_blocks, blocks_per_extent=per_extent, mapped=extents)
        cache = CacheManager(RowTables(pool, 16, rows, self.longest), PrefixHasher(16, b"seed"))
        limits = Limits(rows, rows * lengths[0], self.longest, lengths[0] // 4 + 16, forecast)
        self.scheduler = Scheduler(cache, limits, SwapCost(1, 16))
        self.num_requests = self.recalls = 0

    @property
    def step_number(self) -> int:
        return self.scheduler.stats.steps

    @property
    def now(self) -> float:
        return self.step_number * STEP_S

    @property
    def running(self) -> list[Served]:
        """Those with a row, by row."""
        return [sequence for _, sequence in sorted(seated(self.scheduler).items())]

    @property
    def waiting(self) -> list[Served]:
        return first_waiting(self.scheduler.state, MOST_WAITING)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Those that are kept."""
        return with_labels(self.scheduler, self.scheduler.decisions.since(0))

    def cells(self) -> list[int]:
        """The cells as the page shows them, by an oracle."""
        return naive_cells(self.scheduler)

    def blocks_of(self, sequence: Served) -> list[int]:
        table = self.scheduler.cache.tables[0]
        return table.blocks[0, sequence.row, : int(table.lengths[sequence.row])].tolist()

    def step(self) -> None:
        """The next step of the engine, a tenth of a second later."""
        self.finish(self.begin())

    def begin(self) -> Plan:
        """Plan the next step."""
        missing = self.load - self.scheduler.num_running - self.scheduler.num_waiting
        for _ in range(int(np.count_nonzero(self.random.random(max(0, missing)) < 0.5))):
            self.arrive()
        return self.scheduler.schedule(self.now)

    def finish(self, plan: Plan) -> None:
        counts = plan.samples.astype(np.int32)
        tokens = self.random.integers(0, VOCAB, counts.sum(), np.int32)
        done = {"mapped": plan.resize.map, "unmapped": plan.resize.unmap}
        self.scheduler.apply(plan, Result(plan.step_id, counts, tokens, **done))

    def arrive(self) -> None:
        name, label = self.name_of(self.num_requests)
        self.num_requests += 1
        length, new = (self.random.lognormal(0, 0.6, 2) * self.lengths).astype(int).tolist()
        prompt = self.random.integers(0, VOCAB, min(max(4, length), self.longest // 2), np.int32)
        if self.random.random() < 0.5:
            alike = len(prompt) // 2
            prompt[:alike] = self.random.choice(self.beginnings)[:alike]
        self.scheduler.add(Request(name, prompt, Sampling(max(8, new)), arrival=self.now, label=label))

    def recall(self, share: float) -> None:
        """The lease shrinks to this share of what it holds."""
        pool = self.scheduler.pool
        extents = int(pool.num_extents * (1 - share))
        pool.make_idle(extents)
        pool.give_back(extents)
        self.recalls += 1

    def block(self, block: int) -> dict[str, Any]:
        """What is known of a block, as an admin gets it."""
        rows = [
            {"row": one.row, "id": one.request.request_id, "label": one.request.label, "position": blocks.index(block)}
            for one in self.running
            if block in (blocks := self.blocks_of(one))
        ]
        first = rows[0]["position"] * 16 if rows else 0
        known = {"hits": 2, "tokens": [first, first + 16], "text": TEXT} if rows else dict.fromkeys(("tokens", "text"))
        state = BlockState(int(self.scheduler.cache.pool.states()[block]))
        return {"state": state.name.lower(), "rows": rows, "hits": 0, **known}

    def memory(self) -> dict[str, Any]:
        """As a frame has it."""
        pool = self.scheduler.cache.pool
        extent = pool.blocks_per_extent * BLOCK_BYTES
        kv, most = len(pool.mapped_extents) * extent, pool.num_blocks * BLOCK_BYTES
        weights, base, others = 290 << 20, 42 << 20, 3 << 30
        beside = weights + base
        lease = {"granted": beside + kv, "held": beside + kv, "min": beside + most // 5, "max": beside + most}
        return {
            "weights": weights, "base": base, "kv": kv, "prepared": 0, "lease": lease | {"recall_target": None},
            "device": {"name": "Test device", "total": 16 << 30, "used": others + kv, "others": others},
        }  # fmt: skip

    def frames(self) -> FrameSource:
        """The frames of a viewer, the first one full."""
        facts = PoolFacts(self.name, BLOCK_BYTES, self.longest)
        return FrameSource(
            lambda: self.scheduler, facts, lambda: MemoryFigures(self.memory(), self.recalls), clock=lambda: self.now,
            wall=lambda: BEGAN + self.now,
        )  # fmt: skip


class PushedFrames:
    """The snapshots of a fleet for one viewer."""

    def __init__(self, fleet: MadeUpFleet) -> None:
        self._fleet, self._next = fleet, 0

    def new(self) -> list[dict[str, Any] | None]:
        """Those that came since."""
        found = self._fleet.frames[self._next :]
        self._next += len(found)
        return found


class MadeUpFleet:
    """The status of a fleet, as its queue gives it; tests change it, and push what the server makes of it.

    Attributes:
        status: See pagetide/fleet/status.py.
    """

    def __init__(self, name: str, workers: int = 3, fronts: int = 2) -> None:
        self.name = name
        self.frames: list[dict[str, Any] | None] = []
        names = [f"worker-{number}" for number in range(workers)]
        counters = dict.fromkeys(QUEUE_COUNTERS, 0)
        self.status: dict[str, Any] = {
            "model": name, "workers": [self.worker(one) for one in names], "queue": {"waiting": 0, "running": 0, **counters},
            "journal": {"path": "/secret/journal.sqlite", "commits": 7, "unwritten": 0, "fault": None},
            "front_ends": {f"host-{number}-0a1b2c3d": 0 for number in range(fronts)},
            "kept": names, "errors": {}, "restarts": 0,
            "stats": {"workers": {one: {"secret": 1} for one in names}}, "fleet_metrics": {"secret": {}},
        }  # fmt: skip

    def step(self) -> None:
        """Nothing happens by itself."""

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
        key: The API key that is asked for.
        recording: Frames: the server is a replay of them.
        answer: The text of the prompt box's requests, in tokens.
        hold: The requests of the prompt box never end.
    """

    def __init__(
        self, simulations: Sequence[Simulation | MadeUpFleet], *, key: str | None = None, port: int = 0,
        recording: list[dict[str, Any]] | None = None,
        answer: Sequence[str] = ("Call", " me", " Ishmael", "."), hold: bool = False,
    ) -> None:  # fmt: skip
        self.simulations = {one.name: one for one in simulations}
        self.key, self.recording, self.answer, self.hold = key, recording, answer, hold
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
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        self.http.shutdown()
        self.http.server_close()

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

    def push(self, model: MadeUpFleet, frame: dict[str, Any] | None) -> None:
        """Send a snapshot of this fleet to all viewers."""
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


class Frames:
    """The frames of a simulation for one viewer."""

    def __init__(self, simulation: Simulation) -> None:
        self._source = simulation.frames()

    def new(self) -> list[dict[str, Any]]:
        """The next one."""
        return [plain(self._source.take())]


def plain(frame: Frame) -> dict[str, Any]:
    """As it arrives."""
    return dict(json.loads(encode(frame)))


def viewer_of(simulation: Simulation | MadeUpFleet) -> Frames | PushedFrames:
    """The frames of one viewer."""
    return PushedFrames(simulation) if isinstance(simulation, MadeUpFleet) else Frames(simulation)


def record(simulation: Simulation, steps: int, full_every: int = 50) -> list[dict[str, Any]]:
    """The frames of so many steps, as a recording has them."""
    source, found = simulation.frames(), []
    for number in range(steps):
        simulation.step()
        found.append(plain(source.take(number % full_every == 0)))
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
                return self.json(200, model.block(int(query["block"][0])))
            if path == "/page/explain" and isinstance(model, Simulation):
                asked = query["request"][0]
                return self.json(200, [d for d in model.decisions if asked in (d.get("request_id"), d["label"])])
            self.json(404, {"error": {"message": f"there is no {path}"}})

        def info(self) -> None:
            has_key = rig.key is not None
            is_in = has_key and self.signed_in()
            info: dict[str, Any] = {"mode": "live", "needs_key": has_key, "has_keys": has_key, "signed_in": is_in}
            info |= {"admin": is_in, "version": "0.1.0"}
            if rig.recording is not None:
                began, ended = rig.recording[0]["time"], rig.recording[-1]["time"]
                info |= {"mode": "replay", "began": began, "ended": ended, "model": rig.recording[0]["pool"]["model"]}
            self.json(200, info)

        def frames(self, query: dict[str, list[str]]) -> None:
            assert rig.recording is not None
            frames = rig.recording
            begin, until = float(query["from"][0]), float(query["until"][0])
            first = max((at for at, one in enumerate(frames) if one["full"] and one["time"] <= begin), default=0)
            chosen = [one for one in frames[first:] if one["time"] <= until]
            lines = [*rig.damage, *(json.dumps(one) for one in chosen), json.dumps({"more": False, "until": until})]
            self.reply(200, "\n".join(lines).encode(), "application/x-ndjson")

        def stream(self, events: Iterator[tuple[str, Any]]) -> None:
            self.send_response(200)
            given = {"content-type": "text/event-stream", "connection": "close", "cache-control": "no-store"}
            for name, value in given.items():
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
            if path == "/page/model":
                asked = parse_qs(urlsplit(self.path).query)
                state = {"load": "loading", "sleep": "asleep", "wake": "waking", "stop": "unloaded"}[asked["action"][0]]
                if state == "loading":
                    return self.json(503, {"error": {"message": "no weights"}})
                rig.tell(**{asked["model"][0]: state})
                return self.json(200, {"state": state})
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


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--blocks", type=int, default=10_000)
    args = parser.parse_args()
    pool = Simulation("demo", args.blocks)
    for _ in range(300):
        pool.step()
    with PageRig([pool], port=args.port) as rig:
        print(rig.url, flush=True)
        while True:
            rig.step()
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()

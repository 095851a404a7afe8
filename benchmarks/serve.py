"""The cost of the HTTP server: CPU time of its process for a request and for a streamed token, and throughput with an engine.

    python -m benchmarks.serve [--json FILE] [--streams 1,64,256] [--tokens 400] [--requests 400] [--step-ms 10] [--seed 0]
        [--hidden 1536] [--layers 13] [--rounds 3]

The engine is a stand-in process (`stand_ins.py`) that gives each running request a token every step. The clients are
sockets in a process of their own. A server that falls behind sends several tokens in an event: the figure "tokens an event"
tells.

Throughput is that of a random float32 model, 0.4 B parameters by default, on the CPU: 8 streams through the server, and by
`AsyncLLM` in this process, in turn. The share is that of the medians.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn

from benchmarks.arguments import above_0, parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import save_text_model
from benchmarks.processes import Worker
from pagetide import AsyncLLM, SamplingParams
from pagetide.server.app import AppOptions, Server, make_app
from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import RemoteEngine
from pagetide.server.keys import ApiKeys
from pagetide.server.models import ModelRegistry

TOKEN = b"tide "


def post(body: dict[str, Any], *headers: str) -> bytes:
    """A request for a completion."""
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


def read_answers(port: int, connections: int, tokens: int, requests: int) -> tuple[int, int]:
    """Send requests of `tokens` streamed tokens, with 0 of one token in one answer, and read them: (tokens, events)."""
    data = post({"model": "stand-in", "prompt": "x", "max_tokens": max(tokens, 1), "stream": tokens > 0})
    end = b"data: [DONE]" if tokens else b'"usage"'
    selector = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    num_tokens = num_events = answers = 0
    sent = min(connections, requests)
    for _ in range(sent):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
    while answers < requests:
        for key, _ in selector.select():
            connection = key.fileobj  # type: ignore[assignment]
            read = connection.recv(1 << 16)
            if not read:
                raise ConnectionError("the server closed a connection")
            num_tokens += read.count(TOKEN)
            num_events += read.count(b'"text":"')
            tails[connection] = (tails[connection] + read)[-200:]
            if end in tails[connection]:
                tails[connection] = b""
                answers += 1
                if sent < requests:
                    connection.sendall(data)
                    sent += 1
    return num_tokens, num_events


def serve_clients(pipe: Connection, *arguments: int) -> None:
    """The process of the clients: says that it has started, then what was read."""
    pipe.send("started")
    pipe.send(read_answers(*arguments))


TARGET_SHARE = 0.95  # tokens/s through the server, of those of AsyncLLM
ENGINE_STREAMS, ENGINE_TOKENS = 8, 32
TARGET_US = {64: 60.0}  # a streamed token, by the number of streams
START_S = 120.0
HERE = Path(__file__).parent


class MeasuredServer:
    """The real application on a free port. The server is this process.

    Args:
        model: What to serve.
        step_s: The step of a stand-in for the engine; None starts a real one.
    """

    def __init__(self, model: ModelOptions, step_s: float | None = None) -> None:
        self._model = model
        program = (str(HERE / "stand_ins.py"), str(step_s))
        self._models = ModelRegistry(RemoteEngine.start if step_s is None else partial(RemoteEngine.start, program=program))
        app = make_app(Server(self._models, ApiKeys(), AppOptions(max_queue=1 << 20)))
        config = uvicorn.Config(
            app, port=0, log_config=None, access_log=False, lifespan="off", server_header=False, date_header=False
        )
        self._http = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> MeasuredServer:
        logging.getLogger("pagetide.access").setLevel(logging.WARNING)
        self._models.add(self._model)
        self._serving = asyncio.create_task(self._http.serve())
        async with asyncio.timeout(START_S):
            while not (self._http.started and self._models.is_ready):
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.should_exit = True
        assert self._serving is not None
        await self._serving
        await self._models.stop()

    @property
    def port(self) -> int:
        """The port of the server."""
        port: int = self._http.servers[0].sockets[0].getsockname()[1]
        return port

    async def measure(self, streams: int, tokens: int, requests: int) -> tuple[float, int, int]:
        """Serve `requests` requests of `tokens` tokens over `streams` connections; with `tokens` 0 they do not stream.

        Returns the µs of CPU time of this process, and the tokens and events that the client read.
        """
        client = await asyncio.to_thread(Worker, serve_clients, self.port, streams, tokens, requests)
        with client:
            await asyncio.to_thread(client.receive)  # it has started
            began = time.process_time()
            count, events = await asyncio.to_thread(client.receive)
            return 1e6 * (time.process_time() - began), count, events


async def measured(each: Sequence[int], tokens: int, requests: int, step_s: float) -> list[Figure]:
    """The figures."""
    figures = []
    async with MeasuredServer(ModelOptions("stand-in", "stand-in"), step_s) as server:
        await server.measure(4, 8, 4)  # warms up
        for streams in each:
            took_us, count, events = await server.measure(streams, tokens, streams)
            figures += [
                Figure(f"CPU for a streamed token, {streams} streams", took_us / count, "us", TARGET_US.get(streams)),
                Figure(f"tokens an event, {streams} streams", count / events, "tokens"),
            ]
        took_us, _, _ = await server.measure(8, 0, requests)
        figures.append(Figure("CPU for a request of one token", took_us / requests, "us"))
    return figures


async def share_of_engine(hidden: int, layers: int, rounds: int, seed: int) -> list[Figure]:
    """Tokens/s through the server and by `AsyncLLM`."""
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "kv_memory": "64MiB", "share": False, "prefix_caching": False
    }  # fmt: skip
    prompts = [[5 + number] * 16 for number in range(ENGINE_STREAMS)]
    params = SamplingParams(max_new_tokens=ENGINE_TOKENS, temperature=0, ignore_eos=True)
    direct, served = [], []
    count = ENGINE_STREAMS * ENGINE_TOKENS
    with TemporaryDirectory() as folder:
        save_text_model(Path(folder), hidden, layers, seed)
        llm = AsyncLLM(folder, **options)

        async def by_engine(prompt: list[int]) -> None:
            async for _ in llm.stream([prompt], params):
                pass

        async with MeasuredServer(ModelOptions("random", folder, options)) as server:
            for number in range(rounds + 1):
                began = time.perf_counter()
                await asyncio.gather(*map(by_engine, prompts))
                middle = time.perf_counter()
                await asyncio.gather(*(_by_server(server.port, prompt) for prompt in prompts))
                if number:  # the first warms up
                    direct.append(count / (middle - began))
                    served.append(count / (time.perf_counter() - middle))
        await llm.stop()
    share = statistics.median(served) / statistics.median(direct)
    return [
        median("tokens/s by AsyncLLM", direct, "tokens/s", None, "higher"),
        median("tokens/s through the server", served, "tokens/s", None, "higher"),
        Figure("throughput of the server, of AsyncLLM's", share, "x", TARGET_SHARE, "higher", [share]),
    ]


async def _by_server(port: int, prompt: list[int]) -> None:
    """Stream one completion to its end."""
    body = {"prompt": prompt, "max_tokens": ENGINE_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(body, "Connection: close"))
    answer = await reader.read()
    writer.close()
    if b"data: [DONE]" not in answer or b'"error"' in answer:
        raise RuntimeError(f"the server did not serve a stream: {answer[:500]!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--streams", default="1,64,256", help="at the same time, separated by commas")
    parser.add_argument("--tokens", type=whole, default=400, help="of each stream")
    parser.add_argument("--requests", type=whole, default=400, help="that do not stream")
    parser.add_argument("--step-ms", type=above_0, default=10.0, help="of the stand-in engine")
    parser.add_argument("--hidden", type=whole, default=1536, help="of the random model")
    parser.add_argument("--layers", type=whole, default=13, help="of the random model")
    args = parser.parse_args(argv)
    each = [whole(text) for text in args.streams.split(",")]
    gc.freeze()  # as a server does: one collection of the benchmark's own libraries costs as much as all requests
    figures = asyncio.run(measured(each, args.tokens, args.requests, args.step_ms / 1000))
    figures += asyncio.run(share_of_engine(args.hidden, args.layers, args.rounds, args.seed))
    report("Server", figures, args.seed, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

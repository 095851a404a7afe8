"""Three models in turn: `pagetide serve --models-dir` beside llama-cpp-python's server behind a swapping proxy."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.figures import Figure, median
from benchmarks.peers.compare import OURS, engines
from benchmarks.peers.protocol import END_S, ROOT

MODELS = ("a", "b", "c")
PROMPT_TOKENS, LAST_TOKEN = 64, 8000
START_S = 300.0
LOOK_S = 0.01  # between looks whether a server answers
MOST_RATIO = 0.3

Command = Callable[[str, int], list[str]]  # of a server, by its model and its port


class PeerServer:
    """A server process on a free port; returns once `path` answers. Use it as a context manager."""

    def __init__(self, command: Callable[[int], list[str]], path: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(command(port), env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while not self._answers(path):
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__(None, None, None)
                raise RuntimeError(f"a server does not answer: {' '.join(command(port))}")
            time.sleep(LOOK_S)

    def _answers(self, path: str) -> bool:
        with suppress(URLError, ConnectionError), urlopen(self.url + path, timeout=START_S) as answer:
            return bool(answer.status == 200)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SwappingProxy:
    """A stand-in for llama-swap: one server at a time, that of the model which the last request named. A request for another
    model ends that server, starts the next one, and is forwarded once it answers. Use it as a context manager.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._model = ""
        self._server: PeerServer | None = None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                answer = proxy.forward(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def forward(self, body: bytes) -> bytes:
        """The answer to a completion."""
        model = json.loads(body)["model"]
        with self._lock:
            if self._server is None or self._model != model:
                self._end()
                self._server, self._model = PeerServer(lambda port: self._command(model, port), "/v1/models"), model
            return ask(self._server.url, body)

    def _end(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._end()


def ask(url: str, body: bytes) -> bytes:
    """The answer to a completion."""
    request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urlopen(request, timeout=START_S) as answer:
        return bytes(answer.read())


def first_token_s(url: str, model: str, prompt: str | list[int]) -> float:
    """Seconds to the answer of one token. Raises RuntimeError where the prompt had another length."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}).encode()
    began = time.perf_counter()
    answer = json.loads(ask(url, body))
    seconds = time.perf_counter() - began
    if (num := answer["usage"]["prompt_tokens"]) != PROMPT_TOKENS:
        raise RuntimeError(f"{model} counted {num} tokens of a prompt of {PROMPT_TOKENS}")
    return seconds


def compare(folder: Path, rounds: int, seed: int) -> list[Figure]:
    """The figures; `folder` is that of `benchmarks.peers.make`."""
    models, python, threads = folder / "models" / "in-turn", engines(folder)["llama_cpp"]["python"], os.sched_getaffinity(0)
    one = (models / MODELS[0] / "model.safetensors").stat().st_size

    def ours(port: int) -> list[str]:
        return [
            sys.executable, "-m", "pagetide", "serve", "--models-dir", str(models), "--models-memory", str(3 * one // 2),
            "--min-resident-s", "0", "--device", "cpu", "--dtype", "bfloat16", "--kv-memory", "64MiB", "--max-seqs", "1",
            "--no-share", "--port", str(port),
        ]  # fmt: skip

    def theirs(model: str, port: int) -> list[str]:
        return [
            python, "-m", "llama_cpp.server", "--model", str(models / model / "bfloat16.gguf"), "--port", str(port),
            "--n_ctx", "512", "--n_threads", str(len(threads)), "--n_threads_batch", str(len(threads)),
            "--logits_all", "False", "--verbose", "False",
        ]  # fmt: skip

    rng, seconds = random.Random(seed), defaultdict[str, list[float]](list)
    with PeerServer(ours, "/health") as server, SwappingProxy(theirs) as proxy:
        for number in range(rounds + 1):
            for model in MODELS:
                ids = [[rng.randrange(1, LAST_TOKEN) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
                texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_TOKENS)) for _ in range(2)]
                for name, url, prompts in ((OURS, server.url, ids), ("llama_cpp", proxy.url, texts)):
                    switched, warm = (first_token_s(url, model, prompt) for prompt in prompts)
                    if number:  # the first round loads ours, and fills the page cache
                        seconds[name].append(switched)
                        seconds[f"{name} warm"].append(warm)
    ratios = [a / b for a, b in zip(seconds[OURS], seconds["llama_cpp"], strict=True)]
    return [
        median("first token after a switch, pagetide / llama-cpp-python's server", ratios, "x", MOST_RATIO),
        median("first token after a switch, pagetide", seconds[OURS], "s"),
        median("first token after a switch, llama-cpp-python's server", seconds["llama_cpp"], "s"),
        median("first token without a switch, pagetide", seconds[f"{OURS} warm"], "s"),
        median("first token without a switch, llama-cpp-python's server", seconds["llama_cpp warm"], "s"),
    ]

"""Runs the server: `pagetide serve`. Listens first, loads the models meanwhile, and drains at SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from .app import AppOptions, Server, make_app
from .config import LOOPBACK, ServeConfig
from .connection import SWITCH_S
from .guard import GuardRules
from .http_protocol import BoundedHttpProtocol
from .keys import ApiKeys, read_keys
from .models import ModelRegistry
from .terminal import TerminalHandler, terminal_log

log = logging.getLogger(__name__)

Value = TypeVar("Value")

KEEP_ALIVE_S = 75
BACKLOG = 2048
_PORT_ADVICE = {
    errno.EADDRINUSE: "the port is in use: choose another with --port (--port 0 picks a free one)",
    errno.EACCES: "this user may not use the port: choose one from 1024 up with --port",
    errno.EADDRNOTAVAIL: "this machine does not have the address: choose another with --host",
}
# After Ctrl-C running requests have so long, and engines until this time: a person waits for the end.
INTERRUPT_DRAIN_S, INTERRUPT_END_S = 4.0, 7.0
ANSWER_S = 2.0  # requests that a shutdown fails have so long for their answers
# A hard limit may be a thousand times that, and programs that close them one by one take minutes.
MOST_OPEN_FILES = 1 << 20


class CannotServe(Exception):
    """The server cannot start; the message says why and what to do."""


def serve(config: ServeConfig) -> int:
    """Serve until a signal. Returns the exit status: 0, or 1 if a model could not be loaded.

    Raises CannotServe, and KeysInvalid.
    """
    keys = read_keys(config.api_key_file, os.environ)
    if not config.is_loopback and not keys.has_users:
        raise CannotServe(
            f"{config.host} is reachable from other machines, and there is no API key: set PAGETIDE_API_KEY or "
            "--api-key-file, or listen on 127.0.0.1"
        )
    models = tuple(
        one if one.chat_template is None else replace(one, chat_template=read_template(Path(one.chat_template)))
        for one in config.models
    )
    raise_open_files()
    listening = listen(config)
    config = replace(config, models=models, port=listening.getsockname()[1])
    return run_event_loop(serve_on(config, keys, listening))


def run_event_loop(main: Coroutine[Any, Any, Value]) -> Value:
    """Run `main` to its end on a new event loop: uvloop's if that is installed. Returns its result."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    # Collections would look at all objects of the libraries, and hold up all streams meanwhile
    gc.freeze()
    run: Callable[[Coroutine[Any, Any, Value]], Value] = asyncio.run
    with suppress(ImportError):  # on Windows
        import uvloop

        run = uvloop.run
    return run(main)


def listen(config: ServeConfig) -> socket.socket:
    """The listening socket. Raises CannotServe."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        advice = _PORT_ADVICE.get(error.errno or 0, "choose another --host or --port")
        said = f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; {advice}"
        raise CannotServe(said) from error
    return listening


async def serve_on(
    config: ServeConfig,
    keys: ApiKeys,
    listening: socket.socket,
    models: ModelRegistry | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve `config.models` on a listening socket. Returns the exit status as `serve`.

    Args:
        models: The registry that starts them; None: each in an engine process.
        stop: Begins the drain when it is set, on an event loop that gets no signals; None: SIGTERM and SIGINT do.
    """
    restricted = config.is_loopback or config.allowed_host
    names = [*LOOPBACK, config.host, *config.allowed_host] if restricted else []
    hosts = tuple(dict.fromkeys(name.lower() for name in names))
    rules = GuardRules(hosts, config.cors_origin, not config.open_metrics, config.max_body)
    options = AppOptions(config.max_queue, config.ignore_unknown_fields, rules)
    models = ModelRegistry(rules=config.router_rules) if models is None else models
    server = Server(models, keys, options)
    http = HttpServer(
        make_app(server),
        ssl_certfile=config.ssl_certfile and str(config.ssl_certfile),
        ssl_keyfile=config.ssl_keyfile,
        proxy_headers=bool(config.forwarded_allow_ips),
        forwarded_allow_ips=list(config.forwarded_allow_ips),
    )
    logging.getLogger("pagetide.access").setLevel(logging.INFO if config.access_log else logging.WARNING)
    drainer = _Drainer(server, http, config.drain_timeout)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT) if stop is None else ():
        loop.add_signal_handler(number, drainer.signalled, number)
    stopping = None if stop is None else asyncio.create_task(drainer.after(stop))
    for one in config.recorded_models:
        models.add(one)
    with terminal_log(sys.stderr) as terminal:
        loading = asyncio.create_task(_load(server, http, config, keys.has_users, terminal))
        making_way = asyncio.create_task(models.make_way())
        await http.serve(sockets=[listening])
        waiting = [task for task in (loading, making_way, stopping) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await drainer.end_engines()
    return int(loading.done() and not loading.cancelled() and loading.result() is False)


async def _load(
    server: Server, http: uvicorn.Server, config: ServeConfig, wants_key: bool, terminal: TerminalHandler | None
) -> bool:
    """Wait until all models are ready and say so. Returns False, and ends the server, if one cannot be loaded."""
    names = ", ".join(model.name for model in config.models)
    at_once = ", ".join(model.name for model in config.models if model.residency.preload)
    if at_once:
        print(f"loading {at_once}: requests wait until the line that begins with ready", file=sys.stderr)
    while not server.models.is_ready:
        for model in server.models:
            if model.state == "failed" and model.is_missing:
                print(f"pagetide: the model {model.name} cannot be loaded: {model.error}", file=sys.stderr)
                http.should_exit = True
                return False
        await asyncio.sleep(0.02)
    name = config.models[0].name
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Where is the whale?"}], "max_tokens": 40})
    key = '-H "Authorization: Bearer $KEY" ' if wants_key else ""
    ready = (
        f"ready: serving {names} at {config.url}\n"
        f"  curl {config.url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    )
    print(ready, flush=True)
    if terminal is not None:
        terminal.remind(ready)
    notify("READY=1")
    return True


class HttpServer(uvicorn.Server):
    """A server that leaves signals, logs and headers to the application; `options` are uvicorn's."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=BoundedHttpProtocol, log_config=None, access_log=False, lifespan="off", server_header=False,
                date_header=False, ws="none", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1, **options,
            )
        )  # fmt: skip

    def capture_signals(self):  # type: ignore[no-untyped-def]
        from contextlib import nullcontext

        return nullcontext()


class _Drainer:
    """The first signal refuses new requests and waits for the running ones; the second ends at once.

    After Ctrl-C all waits are short, whatever `timeout_s` says.
    """

    def __init__(self, server: Server, http: uvicorn.Server, timeout_s: float) -> None:
        self._server = server
        self._http = http
        self._timeout_s = timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._ends_at = math.inf  # by the event loop's clock: engines that have not ended then are killed
        self._at_once = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None

    async def after(self, stop: asyncio.Event) -> None:
        """Begin the drain when `stop` is set."""
        await stop.wait()
        self.signalled()

    def signalled(self, number: int = signal.SIGTERM) -> None:
        """Handle SIGTERM or SIGINT."""
        if self._draining is not None:
            self._at_once.set()
            self._killing = asyncio.create_task(self._server.models.kill())  # requests fail with 503
            self._server.detach()
            self._http.should_exit = self._http.force_exit = True
            return
        self._server.admission.draining = True
        self._server.page.feed.stop()
        notify("STOPPING=1")
        if number == signal.SIGINT:
            self._timeout_s = min(self._timeout_s, INTERRUPT_DRAIN_S)
            self._ends_at = asyncio.get_running_loop().time() + INTERRUPT_END_S
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        left = self._server.admission.num_requests
        names = ", ".join(model.name for model in self._server.models)
        running = f"for {left} requests, {self._timeout_s:g} s at most, and then " if left else ""
        waits = f"pagetide: stopping: waiting {running}for the engines of {names} to exit"
        with suppress(OSError):  # a full disk under the log must not keep the server from ending
            print(f"{waits}; Ctrl-C or another signal ends at once", file=sys.stderr, flush=True)
        await self._until_idle(self._timeout_s)
        try:
            if self._server.durable_batches:
                self._server.detach()
                await self._until_idle(ANSWER_S)
            if self._server.admission.num_requests:
                await self.end_engines()  # what is left fails with 503
            await self._until_idle(ANSWER_S)
        finally:
            self._http.should_exit = True

    async def end_engines(self) -> None:
        """End all engines, by force once a second signal or the end of the time after Ctrl-C has come."""
        models = self._server.models
        stopping, at_once = asyncio.create_task(models.stop()), asyncio.create_task(self._at_once.wait())
        left_s = self._ends_at - asyncio.get_running_loop().time()
        timeout_s = None if left_s == math.inf else max(left_s, 0.0)
        await asyncio.wait({stopping, at_once}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not stopping.done():
            await models.kill()
        await stopping

    async def _until_idle(self, timeout_s: float) -> None:
        """Wait until all requests have ended, or for `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._server.admission.num_requests:
                    await asyncio.sleep(0.02)


def raise_open_files() -> None:
    """Allow this process and its engines as many open files, hence connections, as they may allow themselves."""
    with suppress(ImportError, OSError, ValueError):  # where there is no such limit, or it cannot be raised
        import resource

        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < MOST_OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MOST_OPEN_FILES), most))


def notify(state: str) -> None:
    """Tell systemd (Type=notify) of a change; does nothing elsewhere."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + address[1:] if address.startswith("@") else address)
        sender.sendall(state.encode())


def read_template(file: Path) -> str:
    """The chat template in a file. Raises CannotServe."""
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotServe(f"the chat template {file} cannot be read: {error}") from error

"""A front end of a fleet: the HTTP server without an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..server.config import ServeConfig
from ..server.keys import read_keys
from ..server.models import ModelOptions, ModelRegistry
from ..server.run import CannotServe, listen, raise_open_files, run_event_loop, serve_on
from .client import FleetClient
from .cluster import RayLink, connect
from .config import FleetConfig
from .links import QueueLink


def registry_of(link: QueueLink) -> ModelRegistry:
    """A registry of models that the fleet behind `link` serves."""

    async def start(reference: str, options: Mapping[str, Any], *, name: str | None = None) -> FleetClient:
        return await FleetClient.start(link, name)

    return ModelRegistry(start)


def serve_front(config: FleetConfig, number: int) -> int:
    """Serve the fleet's `number`-th front end in a thread without signals, until the process ends."""
    settings = {**config.server, "host": config.host, "port": config.port + number if config.port else 0}
    serve_config = ServeConfig.resolve(settings, {}, None, [ModelOptions(config.model, config.model)])
    return serve_fleet(serve_config, config.address, config.name, signals=False)


def serve_fleet(config: ServeConfig, address: str, fleet: str, signals: bool = True) -> int:
    """Serve a fleet over HTTP. Raises FleetError and CannotServe."""
    keys = read_keys(config.api_key_file, os.environ)
    if not config.is_loopback and not keys.has_users:
        raise CannotServe(
            f"{config.host} is reachable from other machines, and there is no API key: set PAGETIDE_API_KEY or an "
            "api_key_file, or listen on 127.0.0.1"
        )
    link = RayLink(connect(address, fleet))
    raise_open_files()
    listening = listen(config)
    config = replace(config, port=listening.getsockname()[1])

    async def run() -> int:
        stop = None if signals else asyncio.Event()
        return await serve_on(config, keys, listening, registry_of(link), stop)

    return run_event_loop(run())

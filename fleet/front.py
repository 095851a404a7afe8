"""A front end of a fleet: the HTTP server without an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..server.config import ModelOptions, ServeConfig
from ..server.keys import ApiKeys, read_keys
from ..server.models import ModelRegistry
from ..server.run import CannotServe, listen, raise_open_files, read_template, run_event_loop, serve_on
from .cluster import RayLink, connect
from .config import FleetConfig
from .links import QueueLink

if TYPE_CHECKING:
    from .client import FleetClient


def registry_of(link: QueueLink) -> ModelRegistry:
    """A registry of models that the fleet behind `link` serves."""

    async def start(reference: str, options: Mapping[str, Any], *, name: str | None = None) -> FleetClient:
        from .client import FleetClient  # imports torch: settings are checked before

        return await FleetClient.start(link, name)

    return ModelRegistry(start)


def front_config(config: FleetConfig, number: int) -> ServeConfig:
    """The server's settings of the fleet's `number`-th front end. Raises ServeConfigInvalid."""
    settings = {**config.server, "host": config.host, "port": config.port + number if config.port else 0}
    return ServeConfig.resolve(settings, {}, None, [ModelOptions(config.model, config.model)])


def check_front(config: FleetConfig, number: int) -> None:
    """Raise the error that this front end would meet at its start on this machine: of settings, keys, files, its port."""
    settings = front_config(config, number)
    _keys_of(settings)
    _with_template(settings)
    listen(settings).close()


def serve_front(config: FleetConfig, number: int) -> int:
    """Serve the fleet's `number`-th front end in a thread without signals, until the process ends."""
    settings = _with_template(front_config(config, number))
    return serve_fleet(settings, config.address, config.name, signals=False)


def _with_template(config: ServeConfig) -> ServeConfig:
    """The settings with the chat template itself instead of the name of its file. Raises CannotServe."""
    models = tuple(
        one if one.chat_template is None else replace(one, chat_template=read_template(Path(one.chat_template)))
        for one in config.models
    )
    return replace(config, models=models)


def _keys_of(config: ServeConfig) -> ApiKeys:
    """The API keys. Raises KeysInvalid, and CannotServe if others can reach the server and there are none."""
    keys = read_keys(config.api_key_file, os.environ)
    if not config.is_loopback and not keys.has_users:
        raise CannotServe(
            f"{config.host} is reachable from other machines, and there is no API key: set PAGETIDE_API_KEY or an "
            "api_key_file, or listen on 127.0.0.1"
        )
    return keys


def serve_fleet(config: ServeConfig, address: str, fleet: str, signals: bool = True) -> int:
    """Serve a fleet over HTTP. Raises FleetError and CannotServe."""
    keys = _keys_of(config)
    link = RayLink(connect(address, fleet))
    raise_open_files()
    listening = listen(config)
    config = replace(config, port=listening.getsockname()[1])

    async def run() -> int:
        stop = None if signals else asyncio.Event()
        return await serve_on(config, keys, listening, registry_of(link), stop)

    return run_event_loop(run())

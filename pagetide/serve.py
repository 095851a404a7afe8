"""`pagetide serve`: an OpenAI-compatible server for one or several models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server.models import ModelOptions

_LIBRARIES = ("fastapi", "uvicorn")
_HTTP_OPTIONS = (
    "host", "port", "api_key_file", "chat_template", "tool_call_parser", "cors_origin", "allowed_host",
    "forwarded_allow_ips", "max_queue", "drain_timeout", "max_body", "ignore_unknown_fields", "open_metrics", "access_log",
    "ssl_certfile", "ssl_keyfile", "record", "record_text", "served_model_name",
)  # fmt: skip


def add_parser(
    commands: Any,
    add_engine: Callable[[argparse.ArgumentParser], argparse._ArgumentGroup],
    add_serving: Callable[[argparse._ArgumentGroup], None],
    engine_arguments: Callable[[argparse.Namespace], dict[str, Any]],
) -> argparse.ArgumentParser:
    """Add the subcommand `serve` to `commands`.

    Args:
        add_engine, add_serving: Add the engine's options.
        engine_arguments: The arguments of `LLM` among the parsed options.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run an OpenAI-compatible server",
        description="Serve models over HTTP with OpenAI's API. Every option can also be set by the variable PAGETIDE_<OPTION> "
        "or in the configuration file. A flag overrides the variable, the variable the file; in the file, a model's entry "
        "overrides the top.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="name, folder, or hub id in the local cache")
    parser.add_argument(
        "--model",
        dest="more_models",
        action="append",
        default=[],
        metavar="MODEL",
        help="another way to name a model; repeatable",
    )
    parser.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="name of the model in requests; repeat for each model"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings in YAML (variable: PAGETIDE_SERVE_CONFIG; PAGETIDE_CONFIG names a models file)",
    )
    add_fleet(parser, "serve a running fleet instead of a model")
    http = parser.add_argument_group("server")
    http.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    http.add_argument("--port", type=int, metavar="N", help="port to listen on; 0 picks a free one (default 8000)")
    http.add_argument("--api-key-file", metavar="FILE", help="YAML file with API keys and their limits")
    http.add_argument(
        "--max-queue",
        type=int,
        metavar="N",
        help="maximum number of waiting sequences; beyond it requests get 429 (default 256)",
    )
    http.add_argument(
        "--drain-timeout", type=float, metavar="SECONDS", help="how long running requests may finish after SIGTERM (default 30)"
    )
    http.add_argument("--chat-template", metavar="FILE", help="chat template to use instead of the models' own")
    http.add_argument(
        "--tool-call-parser", metavar="FORMAT", help="hermes, llama3, mistral or none (default: detected from the template)"
    )
    http.add_argument(
        "--cors-origin", action="append", metavar="URL", help="origin of web pages that may call; * allows all; repeatable"
    )
    http.add_argument("--allowed-host", action="append", metavar="NAME", help="accepted Host header; repeatable")
    http.add_argument(
        "--forwarded-allow-ips",
        metavar="LIST",
        help="trusted proxies and networks for X-Forwarded-For, separated by commas; * trusts all (default: none)",
    )
    http.add_argument("--max-body", type=int, metavar="BYTES", help="maximum size of a request body (default 8 MiB)")
    http.add_argument("--ignore-unknown-fields", action="store_const", const=True, help="accept unknown fields in requests")
    http.add_argument("--open-metrics", action="store_const", const=True, help="serve /metrics without an API key")
    http.add_argument("--no-access-log", dest="access_log", action="store_const", const=False, help="do not log requests")
    http.add_argument("--record", metavar="FILE", help="record the cache's activity for `pagetide replay`")
    http.add_argument("--record-text", action="store_const", const=True, help="also record prompts and outputs")
    http.add_argument("--ssl-certfile", metavar="FILE", help="TLS certificate chain")
    http.add_argument("--ssl-keyfile", metavar="FILE", help="TLS private key")
    add_serving(add_engine(parser))
    parser.set_defaults(run=lambda args: _serve(args, engine_arguments(args)))
    return parser


def add_fleet(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options that name a running fleet. `text` is what the command does with it."""
    fleet = parser.add_argument_group("fleet")
    where = "address of its Ray cluster, or local for this machine"
    fleet.add_argument("--fleet", metavar="ADDRESS", help=f"{text} ({where})")
    fleet.add_argument("--fleet-name", default="fleet", metavar="NAME", help="name of the fleet (default fleet)")


def check_libraries(command: str) -> None:
    """Raise ValueError if the libraries of the server are missing."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        from .common.error_text import install_command

        raise ValueError(f"{command} needs {', '.join(missing)}, which are not installed: {install_command('server')}")


def _serve(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    check_libraries("pagetide serve")
    from .server.config import ServeConfig
    from .server.models import ModelOptions
    from .server.run import CannotServe, serve

    models = [ModelOptions(reference, reference) for reference in [*args.models, *args.more_models]]
    given = {name: getattr(args, name) for name in _HTTP_OPTIONS}
    file = args.config or (Path(named) if (named := os.environ.get("PAGETIDE_SERVE_CONFIG", "").strip()) else None)
    try:
        if args.fleet is not None:
            return _serve_fleet(args, given, file, models, engine)
        config = ServeConfig.resolve(given, os.environ, file, models, engine)
        check_engines(config.recorded_models)
        return serve(config)
    except CannotServe as error:
        print(f"pagetide: {error}", file=sys.stderr)
        return 2


def check_engines(models: Sequence[ModelOptions]) -> None:
    """Raise ValueError for a missing model and for invalid engine settings, before a process is started for it.

    Loads no torch. What is wrong with the model's content shows when it is loaded.
    """
    from .engine.config import EngineConfig
    from .engine.errors import EngineError
    from .engine.loading.model_config import check_length, written_length

    for one in models:
        try:
            config = EngineConfig.resolve(one.reference, **one.engine)
            if config.max_model_len is not None:
                check_length(config.max_model_len, written_length(config.model.path / "config.json"), config.model.name)
        except EngineError as error:
            raise ValueError(f"the model {one.name} cannot be loaded: {error}") from error


def _serve_fleet(
    args: argparse.Namespace, given: dict[str, Any], file: Path | None, models: Sequence[ModelOptions], engine: dict[str, Any]
) -> int:
    """Serve a running fleet. Raises ValueError for settings of engines, FleetError and CannotServe."""
    from .fleet.front import serve_fleet
    from .fleet.sync import model_of_fleet
    from .server.config import ServeConfig
    from .server.models import ModelOptions
    from .server.run import read_template

    if models or _names_models(file):
        raise ValueError("--fleet serves the fleet's model: leave out MODEL, --model, PAGETIDE_MODEL and models:")
    model = model_of_fleet(args.fleet, args.fleet_name)
    own = ModelOptions(model.reference, model.reference)
    config = ServeConfig.resolve(given, os.environ, file, [own], engine)
    (own,) = config.recorded_models
    if own.engine:
        raise ValueError(f"the fleet's workers have their own engine settings: leave out {', '.join(own.engine)}")
    if own.chat_template is not None:
        own = replace(own, chat_template=read_template(Path(own.chat_template)))
    return serve_fleet(replace(config, models=(own,)), args.fleet, args.fleet_name)


def _names_models(file: Path | None) -> bool:
    """Whether the environment or the configuration file names models. Raises ValueError for a file that cannot be read."""
    from .common.yaml_file import read_yaml

    _, data = (None, None) if file is None else read_yaml(file)
    in_file = isinstance(data, Mapping) and any(data.get(name) for name in ("model", "models"))
    return in_file or bool(os.environ.get("PAGETIDE_MODEL", "").strip())

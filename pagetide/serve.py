"""`pagetide serve`: an OpenAI-compatible server for one or several models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server.config import ModelOptions

_LIBRARIES = ("fastapi", "uvicorn")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `serve` to `commands`."""
    from .common.settings import add_flags, settings_of
    from .server.config import ENGINE_SETTINGS, ModelNames, ServeConfig

    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run an OpenAI-compatible server",
        description="Serve models over HTTP with OpenAI's API. Every option can also be set by the variable PAGETIDE_<OPTION> "
        "or in the configuration file. A flag overrides the variable, the variable the file; in the file, a model's entry "
        "overrides the top.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="name, folder, GGUF file, or hub id in the local cache")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings in YAML (variable: PAGETIDE_SERVE_CONFIG; PAGETIDE_CONFIG names a models file)",
    )
    add_fleet(parser, "serve a running fleet instead of a model")
    add_flags(parser, settings_of(ModelNames))
    add_flags(parser.add_argument_group("server"), settings_of(ServeConfig))
    add_flags(parser.add_argument_group("engine"), ENGINE_SETTINGS)
    parser.set_defaults(run=_serve)
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


def _serve(args: argparse.Namespace) -> int:
    check_libraries("pagetide serve")
    from .common.settings import of_flags
    from .server.config import EVERY, ModelOptions, ServeConfig
    from .server.run import CannotServe, serve

    given = {name: one.value for name, one in of_flags(args, EVERY).items()}
    models = [ModelOptions(reference, reference) for reference in [*args.models, *given.pop("model", ())]]
    file = args.config or (Path(named) if (named := os.environ.get("PAGETIDE_SERVE_CONFIG", "").strip()) else None)
    try:
        if args.fleet is not None:
            return _serve_fleet(args, given, file, models)
        config = ServeConfig.resolve(given, os.environ, file, models)
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
    from .engine.loading.gguf.models import written_config
    from .engine.loading.model_config import check_length, written_length

    for one in models:
        if not one.residency.preload:  # a broken one is an error of its requests
            continue
        try:
            config = EngineConfig.resolve(one.reference, **one.engine)
            if config.max_model_len is not None:
                written = written_config(config.model.config_file)
                check_length(config.max_model_len, written_length(written), config.model.name)
        except EngineError as error:
            raise ValueError(f"the model {one.name} cannot be loaded: {error}") from error


def _serve_fleet(args: argparse.Namespace, given: dict[str, Any], file: Path | None, models: Sequence[ModelOptions]) -> int:
    """Serve a running fleet. Raises ValueError for settings of engines, FleetError and CannotServe."""
    from .fleet.front import serve_fleet
    from .fleet.sync import model_of_fleet
    from .server.config import ModelOptions, ServeConfig
    from .server.run import read_template

    if models or _names_models(file):
        raise ValueError("--fleet serves the fleet's model: leave out MODEL, --model, PAGETIDE_MODEL and models:")
    model = model_of_fleet(args.fleet, args.fleet_name)
    own = ModelOptions(model.reference, model.reference)
    config = ServeConfig.resolve(given, os.environ, file, [own])
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

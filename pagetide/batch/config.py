"""The configuration of `pagetide run`: a YAML file and flags, which override it, checked and frozen into one tree.

    model: demo                 a name, a folder or a hub id
    seed: 0                     with a line's number it gives the line its seed
    input: {path, format}       or just the path
    output: {path, prompt, token_ids}
    engine: {...}               the arguments of `LLM` by their names
    sampling: {...}             the fields of `SamplingParams` by their names

Every field is also a flag. Paths in the file are relative to the file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..api.sampling_params import SamplingParams
from ..common.settings import (
    Given,
    Settings,
    Sourced,
    add_flags,
    checked,
    choice,
    described,
    entries,
    integer,
    located,
    of_file,
    of_flags,
    readable,
    setting,
    settings_of,
    switch,
    text,
)
from ..engine.config import EngineArguments, EngineConfig, ModelSpec, Scope
from ..engine.errors import ConfigError

MOST_SEED = 2**32 - 1  # the other half of a line's 64-bit seed is its number
STDIN = "-"


@dataclass(frozen=True, slots=True)
class InputOptions:
    """The input. `format` is "text" (one prompt a line), "jsonl", "openai" (batch), or "auto" (by name and content)."""

    # fmt: off
    path: str = field(metadata=described(
        text(), "prompts: a .txt file with one per line, a .jsonl file, or - for standard input with --input-format",
        flags=["--input"],
    ))
    format: str = setting(
        "auto", choice("auto", "text", "jsonl", "openai"), "auto (from name and content), text, jsonl or openai",
        flags=["--input-format"],
    )
    # fmt: on


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output, and what its records include: the prompt as given, the ids of generated tokens."""

    # fmt: off
    path: str = field(metadata=described(text(), "output file: one JSON object per line, in input order", flags=["--output"]))
    prompt: bool = setting(True, switch(), "repeat the prompt in its record", flags=["--output-prompt"])
    token_ids: bool = setting(False, switch(), "include the ids of generated tokens", flags=["--output-token-ids"])
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of one run. `engine` holds the arguments of `LLM` that were given."""

    # fmt: off
    model: str = field(metadata=described(
        text(), "a name (see `pagetide models`), a folder, a GGUF file, or a hub id in the local cache",
        flags=["--model", "--model-name"],
    ))
    seed: int = setting(0, integer(0, MOST_SEED), "base seed; line L gets the seed value x 2^32 + L")
    # fmt: on
    input: InputOptions
    output: OutputOptions
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)


# By section; "" is the top level. A line's seed follows from the run's.
SECTIONS: dict[str, Settings] = {
    "": settings_of(RunConfig),
    "input": settings_of(InputOptions),
    "output": settings_of(OutputOptions),
    "engine": settings_of(EngineArguments, Scope.MODEL),
    "sampling": {name: one for name, one in settings_of(SamplingParams).items() if name != "seed"},
}
_SHORT = ("input", "output")  # a string in place of the section is its path


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, and a flag for every setting. No flag has a default: omitted ones are left to the file."""
    parser.add_argument("--config", metavar="FILE", help="settings in YAML; flags override them")
    for section, settings in SECTIONS.items():
        add_flags(parser.add_argument_group(section or "run"), settings)


def read_config(args: argparse.Namespace, model: str | None = None) -> RunConfig:
    """Build the run's configuration from the flags of `add_run_flags` and the file they may name. Does not look up the model.

    Args:
        model: That of a fleet, unless flags or file name one.

    Raises ConfigError for an unknown key, an invalid value, or a missing one; the message names it with its line or flag.
    """
    given: dict[str, Given] = {key: {} for key in SECTIONS} if args.config is None else _of_file(Path(args.config))
    given = {section: given[section] | of_flags(args, settings) for section, settings in SECTIONS.items()}
    if model is not None:
        given[""] = {"model": Sourced(model, "--fleet"), **given[""]}
    top, source, output = (
        _checked(cls, given[section]) for section, cls in (("", RunConfig), ("input", InputOptions), ("output", OutputOptions))
    )
    for name, values, key in (("model", top, "model"), ("input", source, "path"), ("output", output, "path")):
        if key not in values:
            raise ConfigError(f"no {name} given: set `{name}:` in the file, or use --{name}")
    engine = {name: one.value for name, one in given["engine"].items()}
    unnamed = ModelSpec("", Path(), "")  # the model's own defaults are checked when it is loaded
    located(given["engine"], lambda: EngineConfig.resolve(unnamed, **engine), ConfigError)
    sampling = {name: one.value for name, one in given["sampling"].items()}
    return RunConfig(
        **top,
        input=InputOptions(**source),
        output=OutputOptions(**output),
        engine=engine,
        sampling=located(given["sampling"], lambda: SamplingParams(**sampling), ConfigError),
    )


def _checked(cls: Any, given: Given) -> dict[str, Any]:
    values = {name: one.value for name, one in given.items()}
    return located(given, lambda: checked(cls, values, ConfigError), ConfigError)


# -- the file ----------------------------------------------------------------------------------------------------------


def _of_file(file: Path) -> dict[str, Given]:
    """The settings of a file by section. Raises ConfigError."""
    top = of_file(file, ConfigError)
    known = (*SECTIONS[""], *filter(None, SECTIONS))
    found: dict[str, Given] = {section: {} for section in SECTIONS}
    for key, one in top.items():
        if key not in known:
            raise _unknown(one.where, key, "", known)
        if key in SECTIONS[""]:
            found[""][key] = one
        elif isinstance(one.node, yaml.MappingNode):
            found[key] = entries(file, one, ConfigError)
            for inner, (_, where, _) in found[key].items():
                if inner not in SECTIONS[key]:
                    raise _unknown(where, inner, key, SECTIONS[key])
        elif key in _SHORT:
            found[key] = {"path": one}
        elif one.value is not None:
            wanted = f"map some of {', '.join(SECTIONS[key])} to values"
            raise ConfigError(f"{one.where}: {key} must {wanted}, got {one.value!r:.80}")
    found = {section: readable(own, {} if section == "sampling" else SECTIONS[section]) for section, own in found.items()}
    for section, key in (("", "model"), ("input", "path"), ("output", "path")):
        if key in found[section]:
            path = _from_folder(file, section, found[section][key].value)
            found[section][key] = found[section][key]._replace(value=path)
    return found


def _unknown(where: str, key: str, section: str, known: Iterable[str]) -> ConfigError:
    here = f"under `{section}`" if section else "at the top level"
    elsewhere = [f"under `{other}`" if other else "at the top level" for other in SECTIONS if key in SECTIONS[other]]
    if elsewhere:
        return ConfigError(f"{where}: {key!r} does not belong {here} but {' or '.join(elsewhere)}")
    everywhere = {name: other for other in reversed(SECTIONS) for name in SECTIONS[other]}
    near = difflib.get_close_matches(key, known := list(known), n=1)
    if near:
        meant = f"did you mean {near[0]}?"
    elif others := difflib.get_close_matches(key, everywhere, n=1):
        other = everywhere[others[0]]
        meant = f"did you mean {others[0]}, {f'under `{other}`' if other else 'at the top level'}?"
    else:
        meant = f"known are {', '.join(known)}"
    return ConfigError(f"{where}: unknown key {key!r} {here}; {meant}")


def _from_folder(file: Path, section: str, value: Any) -> Any:
    """Resolve a file's paths relative to its folder; the model's only if it starts with ./ or ../ and so cannot be a name."""
    if not isinstance(value, str) or value == STDIN or (not section and not value.startswith(("./", "../"))):
        return value
    return str(file.absolute().parent / os.path.expanduser(value))


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """The settings that determine the records' contents, by name; plain data.

    It excludes how the work is done (memory, batch sizes, which of several GPUs): a run may resume with other values.
    """
    engine = config.engine
    settings = {
        "model": config.model,
        "seed": config.seed,
        "engine.device": engine.get("device", "auto").partition(":")[0],
        "engine.dtype": engine.get("dtype", "auto"),
        "engine.max_model_len": engine.get("max_model_len"),
        "output.prompt": config.output.prompt,
        "output.token_ids": config.output.token_ids,
    }
    for f in fields(SamplingParams):
        if (value := getattr(config.sampling, f.name)) != f.default:
            settings[f"sampling.{f.name}"] = value
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain

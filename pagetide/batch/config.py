"""The configuration of `pagetide run`: a YAML file and flags, which override it, checked and frozen into one tree.

    model: demo                 a name, a folder or a hub id
    seed: 0                     with a line's number it gives the line its seed
    input: {path, format}       or just the path
    output: {path, prompt, token_ids}
    engine: {...}               the arguments of `LLM` by their names
    sampling: {...}             the fields of `SamplingParams` by their names

Every field is also a flag. Fields of `engine` and `sampling` have their own names, `--input` and `--output` are the
paths, and other fields of these sections are prefixed with the section (`--input-format`). Paths in the file are
relative to the file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..api.sampling_params import SamplingParams
from ..common.yaml_file import InvalidYaml, parse_yaml, read_yaml
from ..engine.attention.backends import NAMES as ATTENTION
from ..engine.config import EngineConfig, ModelSpec
from ..engine.errors import ConfigError
from ..flags import flags_of

FORMATS = ("auto", "text", "jsonl", "openai")
MOST_SEED = 2**32 - 1  # the other half of a line's 64-bit seed is its number
STDIN = "-"


@dataclass(frozen=True, slots=True)
class InputOptions:
    """The input. `format` is "text" (one prompt a line), "jsonl", "openai" (batch), or "auto" (by name and content)."""

    path: str
    format: str = "auto"


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output, and what its records include: the prompt as given, the ids of generated tokens."""

    path: str
    prompt: bool = True
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The arguments of `LLM` besides the model, by their names. None: the default of `LLM`."""

    device: str | None = None
    devices: str | list[str] | None = None
    tensor_parallel_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    kv_memory: int | str | Mapping[str, Any] | None = None
    prefix_cache_memory: int | str | None = None
    host_kv_memory: int | str | None = None
    block_size: int | str | None = None
    max_seqs: int | None = None
    max_step_tokens: int | None = None
    max_model_len: int | None = None
    max_chunk_tokens: int | None = None
    prefix_caching: bool | None = None
    idle_s: float | None = None
    share: bool | None = None
    trust_remote_code: bool | None = None
    attention: str | None = None
    overlap: bool | None = None
    cuda_graphs: bool | None = None
    self_check: bool | None = None
    record: str | None = None
    record_text: bool | None = None

    def arguments(self) -> dict[str, Any]:
        """The given arguments, for `LLM`."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of one run."""

    model: str
    input: InputOptions
    output: OutputOptions
    seed: int = 0
    engine: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)


class SourcedValue(NamedTuple):
    """A value and its source: "run.yaml:12" or "--temperature"."""

    value: Any
    where: str


Settings = dict[tuple[str, str], SourcedValue]  # by section ("" is the top level) and key

# Not settings of a run: a line's seed follows from the run's, kept tokens from its tools; objects cannot be written to a file.
_NOT_SAMPLING = ("seed", "logits_processors", "kept_special_tokens")
KEYS: dict[str, tuple[str, ...]] = {
    "": ("model", "seed"),
    "input": tuple(f.name for f in fields(InputOptions)),
    "output": tuple(f.name for f in fields(OutputOptions)),
    "engine": tuple(f.name for f in fields(EngineOptions)),
    "sampling": tuple(f.name for f in fields(SamplingParams) if f.name not in _NOT_SAMPLING),
}
_SHORT = ("input", "output")  # a string in place of the section is its path
_SWITCHES = (
    "prompt", "token_ids", "prefix_caching", "share", "overlap", "cuda_graphs", "self_check", "record_text",
    "trust_remote_code", "ignore_eos", "add_special_tokens", "skip_special_tokens",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "bad_words")  # repeatable flags
_TEXTS = (
    "model", "path", "format", "device", "devices", "dtype", "quantization", "kv_cache_dtype", "kv_memory",
    "prefix_cache_memory", "host_kv_memory", "stop", "bad_words", "json_schema", "regex", "grammar", "attention", "record",
)  # fmt: skip
_TITLES = {
    "": "run",
    "input": "input",
    "output": "output",
    "engine": "engine",
    "sampling": "sampling: fields of SamplingParams (defaults from the model's generation config)",
}
_HELP = {
    "model": "a name (see `pagetide models`), a folder, or a hub id in the local cache",
    "seed": "base seed; line L gets the seed value x 2^32 + L (default 0)",
    "input.path": "prompts: a .txt file with one per line, a .jsonl file, or - for standard input (needs --input-format)",
    "input.format": "auto (from name and content), text, jsonl or openai",
    "output.path": "output file: one JSON object per line, in input order",
    "output.prompt": "repeat the prompt in its record (default: yes)",
    "output.token_ids": "include the ids of generated tokens (default: no)",
    "block_size": "tokens per block, or auto",
    "max_seqs": "maximum number of running sequences (default 256)",
    "max_step_tokens": "maximum tokens per step (default 2048)",
    "max_model_len": "maximum total tokens of prompt and output",
    "max_chunk_tokens": "maximum tokens of one prompt per step (default: only the step's limit)",
    "prefix_caching": "reuse common prefixes of prompts (default: yes)",
    "idle_s": "idle time in seconds after which unneeded memory is returned (default 10)",
    "share": "hold a lease, and share memory with other engines (default: yes)",
    "overlap": "launch the next decode step before the previous step's tokens reach the host (default: on CUDA)",
    "cuda_graphs": "replay decode steps from CUDA graphs, on CUDA (default: yes)",
    "self_check": "on CUDA, test the device, and disable parts of the engine that fail (default: yes)",
    "trust_remote_code": "run Python code that comes with the model's files (default: no)",
    "kv_memory": "a size, e.g. 2GiB, or bounds: min=1GiB,max=4GiB,weight=2,priority=0 (default: see `pagetide plan`)",
    "prefix_cache_memory": "maximum memory of cached blocks that no request uses, e.g. 2GiB, or 0 (default: no limit)",
    "host_kv_memory": "host memory for swapped-out blocks, e.g. 8GiB (default: none)",
    "device": "cpu, cuda or cuda:1 (default: cuda if available)",
    "devices": "divide the model over these devices, e.g. cuda:0,cuda:1",
    "tensor_parallel_size": "divide the model over this many devices; sizes are then per device",
    "dtype": "float32, bfloat16 or float16 (default: the checkpoint's)",
    "quantization": "int8 or int4 weights, CPU only (default: not quantized)",
    "kv_cache_dtype": "int8 or fp8: one byte per element of K and V (default: the model's dtype)",
    "attention": f"{', '.join(ATTENTION)} (default: the fastest available)",
    "stop": "stop before this string; repeatable",
    "stop_token_ids": "stop at this token id; repeatable",
    "bad_words": "string that must not be generated; repeatable",
    "record": "record the cache's activity in this file, for `pagetide replay`",
    "record_text": "also record token ids of prompts and outputs (default: no)",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, and a flag for every field. No flag has a default: omitted ones are left to the file."""
    parser.add_argument("--config", metavar="FILE", help="settings in YAML; flags override them")
    for section, keys in KEYS.items():
        group = parser.add_argument_group(_TITLES[section])
        for key in keys:
            _add_flag(group, section, key)


def _add_flag(group: argparse._ArgumentGroup, section: str, key: str) -> None:
    names, dest = flags_of(_flag(section, key)), _dest(section, key)
    help_text = _HELP.get(f"{section}.{key}") or _HELP.get(key)
    if key in _SWITCHES:
        group.add_argument(*names, dest=dest, action=argparse.BooleanOptionalAction, help=help_text)
        return
    kind = str if key in _TEXTS else _plain
    action = "append" if key in _LISTS else "store"
    group.add_argument(*names, dest=dest, action=action, type=kind, metavar="TEXT" if kind is str else "VALUE", help=help_text)


def _flag(section: str, key: str) -> str:
    if section in _SHORT:
        key = section if key == "path" else f"{section}_{key}"
    return f"--{key.replace('_', '-')}"


def _dest(section: str, key: str) -> str:
    return f"{section}.{key}"


def _plain(text: str) -> Any:
    """Parse a flag's value: a number in any notation, else YAML."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        return parse_yaml(text)
    except InvalidYaml as error:
        raise argparse.ArgumentTypeError(f"cannot be read as YAML: {text!r:.80}") from error


def read_config(args: argparse.Namespace, model: str | None = None) -> RunConfig:
    """Build the run's configuration from the flags of `add_flags` and the file they may name. Does not look up the model.

    Args:
        model: That of a fleet, unless flags or file name one.

    Raises:
        ConfigError: An unknown key, an invalid value, or a missing one; the message names it with its line or flag.
        OSError: The file cannot be read.
    """
    settings: Settings = _of_file(Path(args.config)) if args.config is not None else {}
    for section, keys in KEYS.items():
        for key in keys:
            if (value := getattr(args, _dest(section, key))) is not None:
                settings[section, key] = SourcedValue(value, _flag(section, key))
    if model is not None and settings.get(("", "model"), SourcedValue(None, "")).value is None:
        settings["", "model"] = SourcedValue(model, "--fleet")
    return _build({place: setting for place, setting in settings.items() if setting.value is not None})


def _build(settings: Settings) -> RunConfig:
    for (section, key), setting in settings.items():
        _check(section, key, setting)
    for place in (("", "model"), ("input", "path"), ("output", "path")):
        if place not in settings:
            name = place[0] or place[1]
            raise ConfigError(f"no {name} given: set `{name}:` in the file, or use --{name}")
    of = {section: {key: setting.value for (own, key), setting in settings.items() if own == section} for section in KEYS}
    engine = EngineOptions(**of["engine"])
    sampling = _in_place(settings, "sampling", lambda: SamplingParams(**of["sampling"]))
    unnamed = ModelSpec("", Path(), "")  # the model's own defaults are checked when it is loaded
    _in_place(settings, "engine", lambda: EngineConfig.resolve(unnamed, **engine.arguments()))
    return RunConfig(
        **of[""], input=InputOptions(**of["input"]), output=OutputOptions(**of["output"]), engine=engine, sampling=sampling
    )


def _check(section: str, key: str, setting: SourcedValue) -> None:
    """Check the fields that neither `LLM` nor SamplingParams checks."""
    value, where = setting
    if section in ("engine", "sampling"):
        return
    if key in ("prompt", "token_ids"):
        fits, wanted = isinstance(value, bool), "true or false"
    elif key == "seed":
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SEED
        wanted = f"an integer from 0 to {MOST_SEED:,}"
    elif key == "format":
        fits, wanted = value in FORMATS, f"one of {', '.join(FORMATS)}"
    else:
        fits, wanted = isinstance(value, str) and value != "", "a text"
    if not fits:
        name = f"{section}.{key}" if section else key
        raise ConfigError(f"{where}: {name} must be {wanted}, got {value!r:.80}")


def _in_place(settings: Settings, section: str, make: Any) -> Any:
    """Call `make`, and add the source to its errors, which name the field they are about."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        names = re.findall(r"[a-z_]+", str(error))
        place = next(((section, name) for name in names if (section, name) in settings), None)
        if place is None:
            raise ConfigError(f"{section}: {error}") from error
        raise ConfigError(f"{settings[place].where}: {error}") from error


# -- the file ----------------------------------------------------------------------------------------------------------


def _of_file(file: Path) -> Settings:
    try:
        document, content = read_yaml(file)
    except InvalidYaml as error:
        raise ConfigError(str(error)) from error
    if content is None:
        return {}
    if not isinstance(document, yaml.MappingNode):
        raise ConfigError(f"{file}: must hold `key: value` lines, got {type(content).__name__}")
    settings: Settings = {}
    top = (*KEYS[""], *filter(None, KEYS))
    for key, where, node in _entries(file, document):
        value = content[key]
        if key not in top:
            raise _unknown(where, key, "", top)
        if key in KEYS[""]:
            settings["", key] = SourcedValue(value, where)
        elif isinstance(node, yaml.MappingNode):
            for inner, place, _ in _entries(file, node):
                if inner not in KEYS[key]:
                    raise _unknown(place, inner, key, KEYS[key])
                settings[key, inner] = SourcedValue(value[inner], place)
        elif key in _SHORT:
            settings[key, "path"] = SourcedValue(value, where)
        elif value is not None:
            raise ConfigError(f"{where}: {key} must map some of {', '.join(KEYS[key])} to values, got {value!r:.80}")
    return {place: _from_folder(file, place, setting) for place, setting in settings.items()}


def _entries(file: Path, mapping: yaml.MappingNode) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield (key, its place, its value's node). Raises ConfigError for keys that are no text."""
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{file}:{line}: a key must be text, got {key.value!r:.80}")
        yield key.value, f"{file}:{line}", value


def _unknown(where: str, key: str, section: str, known: tuple[str, ...]) -> ConfigError:
    here = f"under `{section}`" if section else "at the top level"
    elsewhere = [f"under `{other}`" if other else "at the top level" for other in KEYS if key in KEYS[other]]
    if elsewhere:
        return ConfigError(f"{where}: {key!r} does not belong {here} but {' or '.join(elsewhere)}")
    everywhere = {name: other for other in reversed(KEYS) for name in KEYS[other]}
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        meant = f"did you mean {near[0]}?"
    elif others := difflib.get_close_matches(key, everywhere, n=1):
        other = everywhere[others[0]]
        meant = f"did you mean {others[0]}, {f'under `{other}`' if other else 'at the top level'}?"
    else:
        meant = f"known are {', '.join(known)}"
    return ConfigError(f"{where}: unknown key {key!r} {here}; {meant}")


def _from_folder(file: Path, place: tuple[str, str], setting: SourcedValue) -> SourcedValue:
    """Resolve a file's paths relative to its folder; the model's only if it starts with ./ or ../ and so cannot be a name."""
    value = setting.value
    if not isinstance(value, str) or not value:
        return setting
    is_path = place in (("input", "path"), ("output", "path")) and value != STDIN
    if is_path or (place == ("", "model") and value.startswith(("./", "../"))):
        return setting._replace(value=str(file.absolute().parent / os.path.expanduser(value)))
    return setting


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """The settings that determine the records' contents, by name; plain data.

    It excludes how the work is done (memory, batch sizes, which of several GPUs): a run may resume with other values.
    """
    device = (config.engine.device or "auto").partition(":")[0]
    settings = {
        "model": config.model,
        "seed": config.seed,
        "engine.device": device,
        "engine.dtype": config.engine.dtype or "auto",
        "engine.max_model_len": config.engine.max_model_len,
        "output.prompt": config.output.prompt,
        "output.token_ids": config.output.token_ids,
    }
    for f in fields(SamplingParams):
        if (value := getattr(config.sampling, f.name)) != f.default:
            settings[f"sampling.{f.name}"] = value
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain

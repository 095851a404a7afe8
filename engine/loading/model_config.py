"""Checks of a model's files before transformers reads them: kinds, sizes, links; counts in its JSON, names of code on the hub.

transformers builds lists of the lengths in `config.json` before it compares them with the weights, and downloads kernels that
the file names.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...cache.geometry import MOST_LAYERS
from ...common.checked_file import InvalidFile, open_checked, read_checked
from ...common.units import format_bytes
from ..errors import CheckpointError, ConfigError, UnsupportedModel

MOST_JSON_BYTES = 16 << 20  # of a configuration; real ones have some kilobytes
MOST_INDEX_BYTES = 256 << 20  # of an index of shards
_MOST_TEMPLATE_BYTES = 4 << 20
_MOST_FILE_BYTES = 512 << 20  # of other files; large vocabularies have 30 MiB
# What transformers reads of a folder besides weights.
_READ = re.compile(
    r".*config\.json|.*token.*|.*vocab.*|.*\.model(\..*)?|.*\.index\.json|.*\.jinja|chat_template.*|merges\.txt|tekken\.json"
)
_REPOSITORY = re.compile(r"models--.+")  # its folder in the hub's cache
MOST_LABELS = 100_000  # transformers makes a dictionary of them
MOST_EXPERTS = 65_536

# Counts by name suffix, at any depth. Numbers inside lists count too: GPT-Neo's `attention_types`.
_COUNTS = (
    (re.compile(r"(?:^|_)(?:layers?|attention_types)$"), MOST_LAYERS),
    (re.compile(r"(?:^|_)labels$"), MOST_LABELS),
    (re.compile(r"(?:^|_)experts$"), MOST_EXPERTS),
    (re.compile(r"(?:size|dim|heads)$"), 1 << 28),
    (re.compile(r"(?:positions|embeddings|n_ctx|seq_len|length)$"), 1 << 40),
)
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
)
_ROPE = re.compile(r"rope_(?:parameters|scaling)")
_ROPE_NUMBERS = (
    "factor", "original_max_position_embeddings", "attention_factor", "rope_theta", "partial_rotary_factor", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow",
)  # fmt: skip
_ROPE_LISTS = ("short_factor", "long_factor")
_SIZE = re.compile(r"(?:size|dim|heads)$")
_IMPLEMENTATION = re.compile(r"_?(?:attn|experts)_implementation(?:_internal)?")


def check_files(folder: Path) -> None:
    """Raises CheckpointError if a file that transformers reads of `folder`, besides weights, is not a regular file of a usual
    size within it, or is JSON with a byte-order mark. In the hub's cache, files are links to the blobs of their repository or
    of the cache.
    """
    real = folder.resolve()
    inside = [real, *(one.parent / "blobs" for one in real.parents if one.name == "snapshots")]
    inside += [one.parent / "blobs" for one in real.parents if _REPOSITORY.fullmatch(one.name)]
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if not _READ.fullmatch(file.name) or file.is_dir():
            continue
        target = file.resolve()
        if not any(target.is_relative_to(one) for one in inside):
            raise CheckpointError(
                f"{file} is a link to {target}, outside of its folder, and is not read: copy the file there, or remove the link"
            )
        most = _MOST_TEMPLATE_BYTES if file.suffix == ".jinja" else _MOST_FILE_BYTES
        try:
            if target.exists():
                with open_checked(file, "models") as opened:
                    size = os.fstat(opened.fileno()).st_size
                    if file.suffix == ".json" and opened.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                        raise CheckpointError(
                            f"{file} begins with a byte-order mark, which transformers cannot read: remove it"
                        )
                if size > most:
                    raise InvalidFile(f"{file}: {format_bytes(size)}, and {format_bytes(most)} are the most")
        except (InvalidFile, OSError) as error:
            raise CheckpointError(f"{error}; fetch or save it again") from error


def read_json(file: Path, most_bytes: int | None = None) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        raw = read_checked(file, most_bytes or MOST_JSON_BYTES, "models")
    except (InvalidFile, OSError) as error:
        raise CheckpointError(f"{error}; fetch or save it again") from error
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; fetch or save it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(content).__name__}; fetch or save it again")
    return content


def written_length(written: Mapping[str, Any]) -> int | None:
    """Maximum tokens of a sequence by the content of `config.json` alone, without transformers.

    None where it takes the loaded configuration to tell, as with scaled rotary embeddings.
    """
    text = written.get("text_config", written)
    limit = text.get("max_position_embeddings") if isinstance(text, dict) else None
    is_scaled = any(key == "factor" for key, _ in _fields(written))
    return limit if isinstance(limit, int) and limit > 1 and not is_scaled else None


def context_length(text: Any, rope: Mapping[str, Any], file: Path) -> int | None:
    """The most tokens of a sequence by a text configuration and its `rope_parameters`, or None without a limit.

    Sliding windows are no limit. It is the smallest limit in the configuration, extended by rotary scaling as in transformers:

    - yarn: the longer of that and `original_max_position_embeddings * factor`;
    - linear: times `factor` (positions are divided by it), unless set per layer type (gemma3), where the limit includes it;
    - dynamic, longrope: the *unscaled* length. Beyond it their frequencies depend on the longest sequence of the batch, so
      a neighbour would change a request's tokens, and cached keys would no longer match;
    - all others (llama3, ...): the limit includes it.

    Raises CheckpointError naming `file`.
    """
    limits = [value for key in _CONTEXT_KEYS if isinstance(value := getattr(text, key, None), int) and value > 0]
    if not limits:
        return None
    limit = min(limits)
    factor = _above_zero(file, rope, "factor", 1.0)
    original = _above_zero(file, rope, "original_max_position_embeddings", limit)
    match rope.get("rope_type"):
        case "yarn":
            return max(limit, int(original * factor))
        case "linear":
            return int(limit * factor)
        case "longrope":
            return min(limit, int(original))
        case _:
            return limit


def _above_zero(file: Path, rope: Mapping[str, Any], key: str, default: float) -> float:
    """A positive number of the rotary scaling; `default` if missing."""
    value = rope.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{file}: the rope parameter {key} must be a number above 0, got {value!r:.80}; correct it")
    return value


def check_length(asked: int, limit: int | None, name: str) -> None:
    """Raises ConfigError if `max_model_len` exceeds the model's positions."""
    if limit is not None and asked > limit:
        raise ConfigError(f"max_model_len {asked:,} is beyond the {limit:,} positions of {name}; ask for {limit:,} or less")


def layer_configs(text_config: Any) -> list[Any]:
    """A text configuration as its layers see it: itself, unless layers differ. Attributes that do cannot be read from it."""
    return list(text_config.per_layer_config) if getattr(text_config, "is_heterogeneous", False) else [text_config]


def experts_per_token(text_config: Any) -> int:
    """Of a mixture's experts, how many a token is routed to; 0 if the configuration names no number."""
    given = (getattr(text_config, name, None) for name in ("num_experts_per_tok", "top_k_experts"))  # the second: Gemma 4
    return next((one for one in given if isinstance(one, int) and one > 0), 0)


def linear_shapes(text_config: Any) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of such a model, each once: the output head, and those of unlike layers.

    Query and output projections of the same shape both count, since they may differ in their bias.
    """
    hidden = int(getattr(text_config, "hidden_size", 0) or 0)
    shapes = {("head", hidden, int(text_config.vocab_size))}
    for layer in layer_configs(text_config):
        heads = int(getattr(layer, "num_attention_heads", 0) or 1)
        head_dim = int(getattr(layer, "head_dim", None) or hidden // heads)
        kv_heads = int(getattr(layer, "num_key_value_heads", None) or heads)
        inner = getattr(layer, "intermediate_size", None) or 4 * hidden
        shapes |= {("in", hidden, width * head_dim) for width in (heads, kv_heads)} | {("out", heads * head_dim, hidden)}
        for width in inner if isinstance(inner, (list, tuple)) else [inner]:
            shapes |= {("in", hidden, width), ("out", width, hidden)}
    return [(inputs, outputs) for _, inputs, outputs in shapes]


def check_counts(file: Path, written: dict[str, Any]) -> None:
    """Raises CheckpointError if `config.json` has a `model_type` that is not text, a non-finite size, or a count beyond any
    model's.
    """
    kind = written.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise CheckpointError(f"{file}: model_type must be a text, got {kind!r:.80}; fetch or save it again")
    for key, value in _fields(written):
        if _SIZE.search(key) and not all(map(math.isfinite, _numbers(value))):
            raise CheckpointError(f"{file}: {key} must be finite, got {value!r:.80}; fetch or save it again")
        for pattern, most in _COUNTS:
            if pattern.search(key) and any(number > most for number in _numbers(value)):
                raise CheckpointError(f"{file}: {key} must be at most {most:,}, got {value!r:.80}; fetch or save it again")


def check_rope(file: Path, written: dict[str, Any]) -> None:
    """Raises CheckpointError if a number of rotary embeddings is not above 0, or lists of factors differ in length."""
    for key, rope in _fields(written):
        if not _ROPE.fullmatch(key):
            continue
        for name, value in _fields(rope):
            numbers = value if name in _ROPE_LISTS and isinstance(value, list) else [value]
            if name in _ROPE_LISTS + _ROPE_NUMBERS and value is not None and not all(map(_is_above_zero, numbers)):
                kind = "a list of numbers above 0" if name in _ROPE_LISTS else "a number above 0"
                raise CheckpointError(
                    f"{file}: the rope parameter {name} must be {kind}, got {value!r:.80}; fetch or save it again"
                )
        lengths = {name: len(value) for name, value in _fields(rope) if name in _ROPE_LISTS and isinstance(value, list)}
        if len(set(lengths.values())) > 1 or 1 in lengths.values():  # torch takes one number for all
            raise CheckpointError(
                f"{file}: short_factor and long_factor must have a number for each pair of dimensions, got {lengths}; "
                "fetch or save it again"
            )


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def check_implementations(file: Path, written: dict[str, Any]) -> None:
    """Raises UnsupportedModel if `config.json` names a hub kernel for attention or experts."""
    for key, value in _fields(written):
        if _IMPLEMENTATION.fullmatch(key) and (named := _hub_code(value)) is not None:
            raise UnsupportedModel(
                f"{file}: {key} names {named!r:.80}, which is code on the hub, and pagetide never downloads code; remove the "
                "field, which has no effect here: the engine brings its own attention"
            )


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of all objects in `content`, outer ones first."""
    todo: list[Any] = [content]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from value.items()
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


def _leaves(value: Any) -> Iterator[Any]:
    """All values in `value` that are neither lists nor objects."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list | dict):
            todo.extend(one.values() if isinstance(one, dict) else one)
        else:
            yield one


def _numbers(value: Any) -> Iterator[float]:
    return (one for one in _leaves(value) if isinstance(one, int | float) and not isinstance(one, bool))


def _hub_code(value: Any) -> str | None:
    """The first repository name in `value`, a text or a mapping by part of the model. Such names contain a slash."""
    return next((one for one in _leaves(value) if isinstance(one, str) and "/" in one), None)

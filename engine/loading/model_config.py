"""Checks of a model's JSON files before transformers reads them: sizes, counts, and names of code on the hub.

transformers builds lists of the lengths in `config.json` before it compares them with the weights, and downloads kernels that
the file names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...cache.geometry import MOST_LAYERS
from ..errors import CheckpointError, UnsupportedModel

MOST_JSON_BYTES = 16 << 20  # of a configuration; real ones have some kilobytes
MOST_LABELS = 100_000  # transformers makes a dictionary of them
MOST_EXPERTS = 65_536

# Counts by name suffix, at any depth. Numbers inside lists count too: GPT-Neo's `attention_types`.
_COUNTS = (
    (re.compile(r"(?:^|_)(?:layers?|attention_types)$"), MOST_LAYERS),
    (re.compile(r"(?:^|_)labels$"), MOST_LABELS),
    (re.compile(r"(?:^|_)experts$"), MOST_EXPERTS),
)
_SIZE = re.compile(r"(?:size|dim|heads)$")
_IMPLEMENTATION = re.compile(r"_?(?:attn|experts)_implementation(?:_internal)?")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    with file.open("rb") as opened:
        raw = opened.read(MOST_JSON_BYTES + 1)
    if len(raw) > MOST_JSON_BYTES:
        raise CheckpointError(f"{file} has more than {MOST_JSON_BYTES >> 20} MiB; fetch or save it again")
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; fetch or save it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(content).__name__}; fetch or save it again")
    return content


def layer_configs(text_config: Any) -> list[Any]:
    """A text configuration as its layers see it: itself, unless layers differ. Attributes that do cannot be read from it."""
    return list(text_config.per_layer_config) if getattr(text_config, "is_heterogeneous", False) else [text_config]


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
                raise CheckpointError(
                    f"{file}: {key} must be at most {most:,}, got {value!r:.80}; fetch or save it again"
                )


def check_implementations(file: Path, written: dict[str, Any]) -> None:
    """Raises UnsupportedModel if `config.json` names a hub kernel for attention or experts."""
    for key, value in _fields(written):
        if _IMPLEMENTATION.fullmatch(key) and (named := _hub_code(value)) is not None:
            raise UnsupportedModel(
                f"{file}: {key} names {named!r:.80}, which is code on the hub, and pagetide never downloads code; remove the "
                "field, which has no effect here: the engine brings its own attention"
            )


def _fields(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
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

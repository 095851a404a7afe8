"""A model's JSON files as they are written: read within bounds, and refused where transformers would follow them too far.

transformers makes lists and loops of the counts in `config.json` before anything can be compared with the weights, and lets the
file name code that is to be fetched. Both are looked at here first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..cache.geometry import MOST_LAYERS
from .errors import CheckpointError, UnsupportedModel

MOST_JSON_BYTES = 16 << 20  # of a configuration; those of real models have some kilobytes
MOST_LABELS = 100_000  # transformers makes a dictionary of them
MOST_EXPERTS = 65_536

# Counts by the ends of their names, at any depth. Numbers inside of lists count too: GPT-Neo's `attention_types`.
_COUNTS = (
    (re.compile(r"(?:^|_)(?:layers?|attention_types)$"), MOST_LAYERS),
    (re.compile(r"(?:^|_)labels$"), MOST_LABELS),
    (re.compile(r"(?:^|_)experts$"), MOST_EXPERTS),
)
_SIZE = re.compile(r"(?:size|dim|heads)$")
_IMPLEMENTATION = re.compile(r"_?(?:attn|experts)_implementation(?:_internal)?")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises CheckpointError."""
    with file.open("rb") as opened:
        raw = opened.read(MOST_JSON_BYTES + 1)
    if len(raw) > MOST_JSON_BYTES:
        raise CheckpointError(f"{file} has more than {MOST_JSON_BYTES >> 20} MiB; fetch or save it again")
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; fetch or save it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got a {type(content).__name__}; fetch or save it again")
    return content


def check_config(file: Path, written: dict[str, Any]) -> None:
    """Look at the content of `config.json` before transformers does.

    Raises:
        CheckpointError: `model_type` is no text, a size is no finite number, or a count is beyond what any model has.
        UnsupportedModel: it names code of the hub that is to attend, or to compute experts.
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
        if _IMPLEMENTATION.fullmatch(key) and (named := _hub_code(value)) is not None:
            raise UnsupportedModel(
                f"{file}: {key} names {named!r:.80}, which is code to be fetched from the hub, and nothing is ever downloaded; "
                "take the field out: attention is pagetide's own here, whatever it says"
            )


def _fields(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of all objects within, the outer ones first."""
    todo: list[Any] = [content]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from value.items()
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


def _leaves(value: Any) -> Iterator[Any]:
    """What is no list and no object, of all within `value`; lists and objects are looked through."""
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
    """The first repository that is named, by itself or for a part of the model: names of the hub have a slash."""
    return next((one for one in _leaves(value) if isinstance(one, str) and "/" in one), None)

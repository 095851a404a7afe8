"""Reads YAML settings, such as a models file, with size limits and the line numbers of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .checked_file import InvalidFile, read_checked

MOST_BYTES = 1 << 20
MOST_VALUES = 100_000  # aliases expanded: a few lines of nested aliases can stand for billions of values
_MARKS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")  # keys `<<` and `=`, which have no value of their own


class InvalidYaml(ValueError):
    """Invalid YAML, or too large. The message begins with the file, and the line if known."""


def read_yaml(file: Path) -> tuple[yaml.Node | None, Any]:
    """The document of a file as a tree of nodes with line numbers, and as plain values. (None, None) for an empty file.

    Raises:
        InvalidYaml: not a regular file, larger than MOST_BYTES, invalid YAML, a key twice, or more than MOST_VALUES values.
        OSError: the file cannot be read.
    """
    try:
        raw = read_checked(file, MOST_BYTES, "settings")
    except InvalidFile as error:
        raise InvalidYaml(str(error)) from error
    try:
        return _parse(raw.decode("utf-8-sig"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, a date that is none
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise InvalidYaml(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def parse_yaml(text: str) -> Any:
    """The plain values of a text. Raises InvalidYaml as `read_yaml` does."""
    try:
        return _parse(text)[1]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidYaml(f"{text!r:.80}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _count(node, {})
        return node, loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """The number of values in a node, including itself and expanded aliases. Raises YAMLError for a key that stands twice."""
    known = counted.get(id(node))
    if known is not None:
        if not known:
            raise _problem("an alias stands within what it repeats", node)
        return known
    counted[id(node)] = 0  # being counted
    total = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    if not isinstance(node, yaml.ScalarNode):
        for item in node.value:
            total += sum(_count(part, counted) for part in item) if isinstance(item, tuple) else _count(item, counted)
            if total > MOST_VALUES:
                raise _problem(f"it stands for more than {MOST_VALUES:,} values, as aliases repeat one another", node)
    counted[id(node)] = total
    return total


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise YAMLError for a key that stands twice, also as `01` beside `1`: YAML's loader would drop the first one."""
    seen: dict[object, yaml.ScalarNode] = {}
    constructor = yaml.constructor.SafeConstructor()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            value = (key.tag, key.value) if key.tag in _MARKS else constructor.construct_object(key)
            if (first := seen.setdefault(value, key)) is not key:
                same = "" if first.value == key.value else f" (as {first.value!r:.80})"
                raise _problem(f"{key.value!r:.80} appears twice, first in line {first.start_mark.line + 1}{same}", key)


def _problem(what: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)

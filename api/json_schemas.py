"""Writes JSON schemas so that llguidance reads them as the standard says: formats, `oneOf` and bounds of numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote

# The formats that llguidance checks. The standard says of all others that they assert nothing.
FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")
_NOTES: dict[str, type | tuple[type, ...]] = {
    "title": str, "description": str, "$comment": str, "examples": list, "default": (str, int, float, list, type(None)),
}  # fmt: skip
# Bounds of the work for one `oneOf` and for one schema: what is beyond them is left to the library, which refuses it.
_MOST_BRANCHES, _MOST_NAMES, _MOST_VALUES = 64, 16, 64
_MOST_UNIONS = 64
_MOST_REFERENCES, _LONGEST_REFERENCE = 4, 256  # that lead from one to the next, and their characters
_NUMBERS = ("number", "integer")
_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: _NUMBERS,
    float: _NUMBERS,
    str: ("string",),
    type(None): ("null",),
}
_Kind: TypeAlias = tuple[frozenset[str], frozenset[tuple[bool, Any]] | None]
_WHITESPACE = r"( |\n[ \t]{0,20})"  # of JSON, bounded as in llama.cpp: weak models never stop
_ABOVE = 1e-9  # how far above an exclusive bound its replacement lies


def readable(schema: Any) -> Any:
    """An equivalent schema that llguidance reads correctly; it refuses what is left of `oneOf`.

    - An unknown `format` is left out, and so are texts for readers, examples and defaults: they would count towards limits.
    - `oneOf` whose branches exclude each other, as the branches of a discriminated union do, becomes `anyOf`.
    - `$id` of draft 7 that names a place (`#name`) becomes `$anchor`. `$dynamicRef` becomes `$ref`, which means the same unless
      its anchor is in the schema several times.
    - An exclusive bound that is an integer moves by 1e-9 inwards, where the other bound is less than 1 away: llguidance 1.9
      would accept the bound itself.
    """
    anchors = Counter(_dynamic_anchors(schema))
    return _schema(schema, schema, itertools.count(), {name for name, count in anchors.items() if count > 1})


def json_options(schema: Any) -> dict[str, str] | None:
    """llguidance's options for a schema without its own, under `x-guidance`."""
    own = not isinstance(schema, dict) or "x-guidance" in schema
    return None if own else {"whitespace_pattern": _WHITESPACE}


def _schema(schema: Any, root: Any, unions: Iterator[int], dynamic: set[str]) -> Any:
    """`schema` rewritten. References are looked for in `root`; `unions` counts what was tried; `dynamic` anchors remain."""
    if isinstance(schema, list):
        return [_schema(each, root, unions, dynamic) for each in schema]
    if not isinstance(schema, dict):
        return schema
    root = schema if _names_place(schema.get("$id", "#")) is None else root
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if isinstance(value, _NOTES.get(key, ())):
            continue
        if key in _DATA:
            found[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[key] = {name: _schema(each, root, unions, dynamic) for name, each in value.items()}
        elif key == "$id" and (place := _names_place(value)) is not None:
            found |= {"$anchor": place} if place else {}
        elif key in ("$dynamicRef", "$dynamicAnchor") and isinstance(value, str):
            is_dynamic = value.rpartition("#")[2] in dynamic
            found[key if is_dynamic else key.replace("dynamicR", "r").replace("dynamicA", "a")] = value
        elif key == "format" and isinstance(value, str) and value not in FORMATS:
            pass
        elif key == "oneOf" and "anyOf" not in schema and next(unions) < _MOST_UNIONS and _exclude_each_other(value, root):
            found["anyOf"] = _schema(value, root, unions, dynamic)
        else:
            found[key] = _schema(value, root, unions, dynamic)
    return found | _bounds(schema)


def _names_place(uri: Any) -> str | None:
    """The name of a place within its schema that an `$id` of draft 7 gives, if it is no URI of a schema."""
    return uri[1:] if isinstance(uri, str) and uri.startswith("#") else None


def _dynamic_anchors(schema: Any) -> Iterator[str]:
    """The values of `$dynamicAnchor` at any depth."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += each.values()
            if isinstance(name := each.get("$dynamicAnchor"), str):
                yield name
        elif isinstance(each, list):
            left += each


def _bounds(schema: Mapping[str, Any]) -> dict[str, float]:
    """The exclusive bounds to write instead of the schema's own."""
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    lows = [value for value in (schema.get("minimum"), low) if _is_number(value)]
    highs = [value for value in (schema.get("maximum"), high) if _is_number(value)]
    try:
        near = bool(lows and highs) and 0 < min(highs) - max(lows) < 1
    except OverflowError:  # of numbers beyond a float
        near = False
    if not near:
        return {}
    found = {}
    for name, bound, sign in (("exclusiveMinimum", low, 1), ("exclusiveMaximum", high, -1)):
        if _is_number(bound) and float(bound).is_integer():
            found[name] = bound + sign * max(_ABOVE, 4 * math.ulp(bound))
    return found


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exclude_each_other(branches: Any, root: Any) -> bool:
    """Whether no value can be valid by two of these schemas, as far as types, constants and required properties tell."""
    if not isinstance(branches, list) or len(branches) > _MOST_BRANCHES:
        return False
    kinds = [_kinds(branch, root) for branch in branches]
    return all(_exclusive(one, other) for one, other in itertools.combinations(kinds, 2))


def _kinds(branch: Any, root: Any) -> dict[str, _Kind]:
    """What values of a branch are, under "", and what its required properties are if it has objects alone."""
    schema = _target(branch, root)
    found = {"": _kind(schema)}
    properties = schema.get("properties") if found[""][0] == {"object"} else None
    if isinstance(properties, dict):
        names = [name for name in _names(schema.get("required")) if name in properties][:_MOST_NAMES]
        found |= {f".{name}": _kind(_target(properties[name], root)) for name in names}
    return found


def _exclusive(one: Mapping[str, _Kind], other: Mapping[str, _Kind]) -> bool:
    """Whether a type or a value of the branches, or of a property that both require, differs always."""
    for name in one.keys() & other.keys():
        (types, values), (other_types, other_values) = one[name], other[name]
        if types and other_types and not types & other_types:
            return True
        if values is not None and other_values is not None and not values & other_values:
            return True
    return False


def _kind(schema: Any) -> _Kind:
    """The types of valid values, empty if any may be; and the only valid values, None if they are not listed or no scalars."""
    if not isinstance(schema, dict):
        return frozenset(), None
    given, listed = schema.get("type"), [schema["const"]] if "const" in schema else schema.get("enum")
    types = {given} if isinstance(given, str) else set(_names(given))
    if "number" in types:
        types.add("integer")
    if not isinstance(listed, list) or len(listed) > _MOST_VALUES or any(isinstance(value, list | dict) for value in listed):
        return frozenset(types), None
    types = types or {name for value in listed for name in _TYPES[type(value)]}
    return frozenset(types), frozenset((isinstance(value, bool), value) for value in listed)  # true is no 1


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _target(schema: Any, root: Any) -> Any:
    """What a schema that is a reference within `root` refers to; others as they are. None for a reference elsewhere."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#") or len(reference) > _LONGEST_REFERENCE:
            return None
        schema = root
        for part in unquote(reference[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, dict) else None
    return None

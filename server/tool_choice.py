"""The tools of a chat request: which the model may, must or must not call, and the constraint that makes it.

Where calls are not constrained in the model's own format (call_grammar.py), with `tool_choice` "required" the text is
constrained to a JSON array of calls, with a named function to its arguments.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urljoin

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}  # keywords that hold no schemas
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's: no white space that costs tokens


class ToolsInvalid(ValueError):
    """Fields of a request's tools contradict each other. `param` is the one to change."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ToolChoice:
    """The tools of one request.

    Args:
        fields: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` of the request, as far as it gives them, and its
            `response_format` and `structured_outputs`. Each tool has a function with a name.

    Attributes:
        named: The function that must be called, if the choice names one.
        is_required: Some function must be called.
        has_form: The answer has a form of its own. Calls are none of it, unless they are constrained beside it. A call that has
            to be is no answer.
        is_single: One call at most.
        schemas: The parameters of each function that may be called; None: there are no calls.

    Raises ToolsInvalid for inconsistent fields.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._tools: list[dict[str, Any]] = list(fields.get("tools") or ())
        choice = fields.get("tool_choice") or ("auto" if self._tools else "none")
        if choice != "none" and not self._tools:
            raise ToolsInvalid("tool_choice needs tools", "tool_choice")
        names = [tool["function"]["name"] for tool in self._tools]
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ToolsInvalid(f"each tool needs a name of its own, tools has two functions {twice[0]!r}", "tools")
        self._allowed = known = frozenset(names)
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            self._allowed = frozenset(tool["function"]["name"] for tool in choice["allowed_tools"]["tools"])
            choice = choice["allowed_tools"]["mode"]
            if unknown := sorted(self._allowed - known) or ([] if self._allowed else ["none"]):
                raise ToolsInvalid(f"tool_choice allows {unknown[0]!r}, tools has {', '.join(names)}", "tool_choice")
        self.named: str | None = choice["function"]["name"] if isinstance(choice, Mapping) else None
        if self.named is not None and self.named not in known:
            raise ToolsInvalid(f"tool_choice names {self.named!r}, tools has {', '.join(names)}", "tool_choice")
        self.is_required = choice == "required"
        if self.must_call and fields.get("structured_outputs"):
            raise ToolsInvalid("a required tool call cannot have another constraint beside it", "tool_choice")
        asked = (fields.get("response_format") or {}).get("type", "text")
        self.has_form = not self.must_call and (asked != "text" or bool(fields.get("structured_outputs")))
        self._choice = choice
        self.is_single = fields.get("parallel_tool_calls") is False or self.named is not None
        self.schemas: dict[str, dict[str, Any]] | None = None
        if choice != "none":
            self.schemas = {tool["name"]: tool.get("parameters") or {} for tool in self._callable}

    @property
    def _callable(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        return [tool["function"] for tool in self._tools if tool["function"]["name"] in self._allowed]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be calls."""
        return self.is_required or self.named is not None

    @property
    def is_strict(self) -> bool:
        """Whether a function that may be called demands arguments by its schema."""
        return self.schemas is not None and any(function.get("strict") is True for function in self._callable)

    @property
    def not_strict(self) -> list[str]:
        """The functions that may be called with other arguments than their schemas permit."""
        return [function["name"] for function in self._callable if function.get("strict") is not True]

    def parameters(self, lenient: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """The schema of the arguments of each function that may be called.

        Raises ToolsInvalid for one that permits no object, unless the function is `lenient`: it takes any then.
        """
        found = {}
        for function in self._callable:
            name = function["name"]
            if self.named in (None, name):
                found[name] = _parameters(function) if name not in lenient or _takes_objects(function) else {"type": "object"}
        return found

    def params(self) -> dict[str, Any]:
        """The constraint as arguments of `SamplingParams`. Raises ToolsInvalid for parameters that are no object."""
        if self.named is not None:
            (function,) = (tool["function"] for tool in self._tools if tool["function"]["name"] == self.named)
            return {"json_schema": _parameters(function) | _COMPACT}
        if self.is_required:
            return {"json_schema": self._calls_schema() | _COMPACT}
        return {}

    def template(self) -> dict[str, Any]:
        """Options of the chat template. Models do not know of `strict`."""
        tools = [
            tool | {"function": {key: value for key, value in tool["function"].items() if key != "strict"}}
            for tool in self._tools
        ]
        return {"tools": tools} if self._choice != "none" else {}

    def _calls_schema(self) -> dict[str, Any]:
        """An array of calls. Raises ToolsInvalid for schemas that differ and claim the same `$id`, at any depth.

        Each function's parameters have an `$id`, so that references within them mean what they mean by themselves.
        """
        items, taken = [], dict[str, str]()
        for number, function in enumerate(self._callable):
            given = _parameters(function)
            own = given.get("$id", "")
            if not isinstance(own, str):
                raise ToolsInvalid(f"the $id of a tool's parameters must be a text, got {own!r:.80}", "tools")
            place = {"$anchor": own[1:]} if own[1:] and own[0] == "#" else {}  # of draft 7
            base = f"http://tool-{number}.invalid/"
            parameters = given | {"$id": base if own.startswith("#") else _joined(base, own)} | place
            for uri, identified in _identified(parameters):
                text = json.dumps(identified)  # values that Python calls equal may differ, as 1 and true
                if taken.setdefault(uri, text) != text:
                    raise ToolsInvalid(
                        f"two schemas in the parameters of tools have the $id {uri!r:.80}: give each its own", "tools"
                    )
            items.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
        return schema | ({"maxItems": 1} if self.is_single else {})


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object; without one it takes none. Raises ToolsInvalid."""
    given = function.get("parameters")
    if given is None:
        return _NO_PARAMETERS
    if not _takes_objects(function):
        raise ToolsInvalid(f"the parameters of {function['name']!r} permit no object, which a call's arguments are", "tools")
    return {**given, "type": "object"}


def _takes_objects(function: dict[str, Any]) -> bool:
    """Whether a function's parameters permit an object, as far as their type and values say."""
    given = function.get("parameters") or {}
    kinds = given.get("type", "object")
    values = [given["const"]] if "const" in given else given.get("enum", [{}])
    of_type = "object" in (kinds if isinstance(kinds, list) else [kinds])
    return of_type and isinstance(values, list) and any(isinstance(value, dict) for value in values)


def _identified(parameters: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas within a tool's parameters that have an `$id`, and its URI. Raises ToolsInvalid for what is no URI."""
    left: list[tuple[Any, str]] = [(parameters, "")]
    while left:
        schema, base = left.pop()
        if isinstance(schema, list):
            left += [(each, base) for each in schema]
        if not isinstance(schema, dict):
            continue
        own = schema.get("$id")
        if isinstance(own, str):
            uri = base + own if own.startswith("#") else _joined(base, own)
            base = base if own.startswith("#") else uri
            yield uri, schema
        for key, value in schema.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                left += [(each, base) for each in value.values()]
            elif key not in _VALUES:
                left.append((value, base))


def _joined(base: str, uri: str) -> str:
    """A URI, which may be relative to `base`, without an empty fragment. Raises ToolsInvalid."""
    try:
        return urljoin(base, uri).rstrip("#")
    except ValueError as error:
        raise ToolsInvalid(f"the $id {uri!r:.80} of a tool's parameters is no URI", "tools") from error

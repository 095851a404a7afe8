"""Tool calls: what a request's tools add to the prompt and the constraint, and the calls in the model's text.

A model writes its calls in the format that its chat template asks for (`ToolParser`). With `tool_choice` "required" the text is
constrained to a JSON array of calls, with a named function to its arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args
from urllib.parse import urljoin

ToolParser = Literal["hermes", "llama3", "mistral", "none"]
TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)
Delta = dict[str, Any]

_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
_HERMES_END = "</tool_call>"
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}
_SEPARATORS = " \t\r\n[],;"  # between the calls of a list
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}  # keywords that hold no schemas
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's: no white space that costs tokens


def detect_parser(chat_template: str | None) -> ToolParser:
    """The format of the tool calls that a chat template asks for."""
    template = chat_template or ""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if "<|python_tag|>" in template or "Environment: ipython" in template else "none"


class ToolsInvalid(ValueError):
    """Fields of a request's tools contradict each other. `param` is the one to change."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ToolCalls:
    """The tools of one request, and the calls in each of its choices.

    Args:
        fields: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` of the request, as far as it gives them, and its
            `response_format` and `structured_outputs`. Each tool has a function with a name.
        response_id: The ids of the calls are made of it, so that they are the same whenever the output is read.

    Raises ToolsInvalid for inconsistent fields.
    """

    def __init__(self, fields: Mapping[str, Any], parser: ToolParser, response_id: str) -> None:
        self._response_id = response_id
        self._tools: list[dict[str, Any]] = list(fields.get("tools") or ())
        choice = fields.get("tool_choice") or ("auto" if self._tools else "none")
        if choice != "none" and not self._tools:
            raise ToolsInvalid("tool_choice needs tools", "tool_choice")
        names = [tool["function"]["name"] for tool in self._tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ToolsInvalid(f"each tool needs a name of its own, tools has two functions {twice[0]!r}", "tools")
        self._named = choice["function"]["name"] if isinstance(choice, Mapping) else None
        if self._named is not None and self._named not in names:
            raise ToolsInvalid(f"tool_choice names {self._named!r}, tools has {', '.join(names)}", "tool_choice")
        answers = (fields.get("response_format") or {}).get("type", "text") != "text"  # JSON that is no call
        if (self._named is not None or choice == "required") and (answers or fields.get("structured_outputs")):
            raise ToolsInvalid("a required tool call cannot have another constraint beside it", "tool_choice")
        self._choice = choice
        self._single = fields.get("parallel_tool_calls") is False
        self._parser: ToolParser = parser if choice == "auto" and not answers else "none"
        self._streams: dict[int, _CallStream] = {}  # by choice

    @property
    def may_call(self) -> bool:
        """Whether calls are looked for: a portion of text may become several deltas then."""
        return self._named is not None or self._choice == "required" or self._parser != "none"

    def params(self) -> dict[str, Any]:
        """The constraint, as arguments of `SamplingParams`. Raises ToolsInvalid for parameters that are no object."""
        if self._named is not None:
            (function,) = (tool["function"] for tool in self._tools if tool["function"]["name"] == self._named)
            return {"json_schema": _parameters(function) | _COMPACT}
        return {"json_schema": self._calls_schema() | _COMPACT} if self._choice == "required" else {}

    def template(self) -> dict[str, Any]:
        """Options of the chat template."""
        return {"tools": self._tools} if self._choice != "none" else {}

    def parse(self, index: int, text: str) -> tuple[Delta, bool]:
        """The message in the whole text of a choice, `content` and perhaps `tool_calls`, and whether it has calls."""
        deltas, called = self._new_stream(index).push(text, ends=True)
        content = "".join(delta.get("content") or "" for delta in deltas)
        if not called:
            return {"content": content}, False
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"id": None, "type": "function", "function": {"arguments": ""}})
                call["id"] = part.get("id", call["id"])
                function = part["function"]
                call["function"]["name"] = function.get("name", call["function"].get("name"))
                call["function"]["arguments"] += function["arguments"]
        return {"content": content or None, "tool_calls": list(calls.values())}, True

    def stream(self, index: int, text: str, ends: bool) -> tuple[list[Delta], bool]:
        """The deltas of new text of a choice, and whether the choice has calls so far."""
        if index not in self._streams:
            self._streams[index] = self._new_stream(index)
        return self._streams[index].push(text, ends)

    def _new_stream(self, index: int) -> _CallStream:
        choice_id = f"{self._response_id}/{index}"
        if self._named is not None:
            return _NamedStream(choice_id, self._named)
        names = frozenset(tool["function"]["name"] for tool in self._tools)
        if self._choice == "required":
            return _RequiredStream(choice_id, names)
        if self._parser == "hermes":
            return _HermesStream(choice_id, names)
        return _CallStream(choice_id) if self._parser == "none" else _JsonStream(choice_id, names, _MARKS[self._parser])

    def _calls_schema(self) -> dict[str, Any]:
        """An array of calls. Raises ToolsInvalid for schemas that differ and claim the same `$id`, at any depth.

        Each function's parameters have an `$id`, so that references within them mean what they mean by themselves.
        """
        items, taken = [], dict[str, str]()
        for number, tool in enumerate(self._tools):
            parameters = {"$id": f"tool:{number}"} | _parameters(tool["function"])
            if not isinstance(parameters["$id"], str):
                raise ToolsInvalid(
                    f"the $id of a tool's parameters must be a text, got {parameters['$id']!r:.80}", "tools"
                )
            for uri, identified in _identified(parameters):
                text = json.dumps(identified)  # values that Python calls equal may differ, as 1 and true
                if taken.setdefault(uri, text) != text:
                    raise ToolsInvalid(
                        f"two schemas in the parameters of tools have the $id {uri!r:.80}: give each its own", "tools"
                    )
            items.append({
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            })  # fmt: skip
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
        return schema | ({"maxItems": 1} if self._single else {})


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object; without one it takes none. Raises ToolsInvalid."""
    given = function.get("parameters")
    if given is None:
        return _NO_PARAMETERS
    kinds = given.get("type", "object")
    values = [given["const"]] if "const" in given else given.get("enum", [{}])
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]) or not (
        isinstance(values, list) and any(isinstance(value, dict) for value in values)
    ):
        raise ToolsInvalid(
            f"the parameters of {function['name']!r} permit no object, which a call's arguments are", "tools"
        )
    return {**given, "type": "object"}


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
            try:
                base = (base + own if own.startswith("#") else urljoin(base, own)).rstrip("#")
            except ValueError as error:
                raise ToolsInvalid(f"the $id {own!r:.80} of a tool's parameters is no URI", "tools") from error
            yield base, schema
        for key, value in schema.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                left += [(each, base) for each in value.values()]
            elif key not in _VALUES:
                left.append((value, base))


class _CallStream:
    """Turns the text of a choice into deltas. This base class finds no calls."""

    def __init__(self, choice_id: str) -> None:
        self.num_calls = 0
        self._choice_id = choice_id

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        """The deltas of new text, and whether there are calls so far."""
        return ([{"content": text}] if text else []), False

    def _head(self, name: str) -> Delta:
        """The delta that begins a call."""
        digest = hashlib.sha256(f"{self._choice_id}/{self.num_calls}".encode()).hexdigest()
        call = {
            "index": self.num_calls, "id": f"call_{digest[:24]}", "type": "function",
            "function": {"name": name, "arguments": ""},
        }  # fmt: skip
        self.num_calls += 1
        return {"tool_calls": [call]}

    def _arguments(self, text: str) -> Delta:
        """A delta with more arguments of the newest call."""
        return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]}


class _NamedStream(_CallStream):
    """The whole text is the arguments of one function."""

    def __init__(self, choice_id: str, name: str) -> None:
        super().__init__(choice_id)
        self._name = name

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        deltas = [] if self.num_calls else [self._head(self._name)]
        return deltas + ([self._arguments(text)] if text else []), True


class _ObjectStream(_CallStream):
    """Reads calls that are JSON objects. Subclasses find where they begin.

    A call names one of the request's tools, and its arguments are an object (or its text). Other objects are content.
    """

    def __init__(self, choice_id: str, names: frozenset[str]) -> None:
        super().__init__(choice_id)
        self._names = names
        self._call: _CallScanner | None = None  # the object that is being read
        self._held = ""  # text that may turn out to be a part of a call
        self._raw = ""  # text since the last delta that is content unless a call begins with it

    def _read_call(self, text: str) -> tuple[list[Delta], str]:
        """Feed the open object. Returns its deltas, and the text behind its end."""
        call = self._call
        assert call is not None
        size = call.feed(text)
        self._raw += text[:size]
        deltas: list[Delta] = []
        if not call.told and call.is_call(self._names):
            assert call.name is not None
            call.told = True
            self._raw = ""
            deltas.append(self._head(call.name))
        if call.told and (new := call.new_arguments()):
            deltas.append(self._arguments(new))
        if call.done:
            self._call = None
            self._raw = "" if call.told else self._raw
        return deltas, text[size:]

    def _content(self) -> list[Delta]:
        """What was read since the last delta, as content."""
        content, self._raw = self._raw, ""
        return [{"content": content}] if content else []

    def _close(self) -> list[Delta]:
        """The deltas at the end of the text: what was held back and began no call, as content."""
        self._raw = ("" if self._call is not None and self._call.told else self._raw) + self._held
        self._held, self._call = "", None
        return self._content() if self._raw.strip() or not self.num_calls else []


class _JsonStream(_ObjectStream):
    """Calls are objects, or an array of them, at the beginning of the text or behind a mark; the rest is content."""

    def __init__(self, choice_id: str, names: frozenset[str], mark: str = "") -> None:
        super().__init__(choice_id, names)
        self._mark = mark
        self._state: Literal["begins", "content", "calls", "over"] = "begins"  # "over": no calls come any more
        self._beside = False  # text beside calls stands behind the last one

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        text, self._held = self._held + text, ""
        deltas: list[Delta] = []
        if self._state in ("begins", "content"):
            text = self._find(text, ends, deltas)
        while text and self._state == "calls":
            if self._call is None and (text := self._skip(text, deltas)):
                self._call = _CallScanner()
            if self._call is not None:
                more, text = self._read_call(text)
                deltas += more
                self._beside = self._beside and not more
                if self._call is None and self._raw:  # an object, but no call
                    deltas += self._content()
                    self._beside, self._state = True, "calls" if self.num_calls else "over"
        if text and self._state == "over":
            deltas.append({"content": text})
        if (
            ends
            and self._state == "calls"
            and self._call is None
            and self.num_calls
            and not self._raw.strip(_SEPARATORS)
        ):
            self._raw = ""
        return deltas + (self._close() if ends else []), self.num_calls > 0

    def _find(self, text: str, ends: bool, deltas: list[Delta]) -> str:
        """Look for the beginning of calls, and hold back what may be one. Returns the text from there on."""
        start = text.lstrip()
        if self._state == "begins" and not (self._mark and start.startswith(self._mark)):
            if not ends and (start in ("", "[") or (self._mark and self._mark.startswith(start))):
                self._held = text
                return ""
            if start.startswith("{") or (start[:1] == "[" and start[1:].lstrip()[:1] in ("{", "")):
                self._state = "calls"
                return text
            self._state = "content"
        before, found, behind = text.partition(self._mark) if self._mark else (text, "", "")
        if found:
            deltas += [{"content": before.rstrip()}] if before.strip() else []
            self._state, self._raw = "calls", before[len(before.rstrip()) :] + found
            return behind
        size = len(text) if ends or not self._mark else _content_length(text, (self._mark,))
        deltas += [{"content": text[:size]}] if size else []
        self._held = text[size:]
        return ""

    def _skip(self, text: str, deltas: list[Delta]) -> str:
        """Pass by what stands between objects: content, unless it separates calls. Returns the text from the next object on."""
        begin = text.find("{")
        self._raw += text if begin < 0 else text[:begin]
        if self.num_calls and (self._beside or self._raw.strip(_SEPARATORS)):
            self._beside = True
            deltas += self._content()
        return "" if begin < 0 else text[begin:]


class _RequiredStream(_JsonStream):
    """The text is constrained to an array of calls: what is cut off before a call has begun is no content."""

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        deltas, called = super().push(text, ends)
        return [delta for delta in deltas if "content" not in delta], called


class _HermesStream(_ObjectStream):
    """Calls between `<tool_call>` and `</tool_call>`, content around them."""

    def __init__(self, choice_id: str, names: frozenset[str]) -> None:
        super().__init__(choice_id, names)
        self._ends_call = False  # the mark of a call's end comes next
        self._behind = False  # that mark has just ended: line ends are no content

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        deltas: list[Delta] = []
        mark = _MARKS["hermes"]
        text, self._held = self._held + text, ""
        while text:
            if self._behind and not (text := text.lstrip("\n")):
                break
            self._behind = False
            if self._call is not None:
                more, text = self._read_call(text)
                deltas += more
                if self._call is None:
                    self._ends_call = not self._raw
                    deltas += self._content()  # of an object that is no call
                continue
            if self._ends_call and (stripped := text.lstrip()).startswith(_HERMES_END):
                text, self._ends_call, self._behind = stripped[len(_HERMES_END) :], False, True
                continue
            before, found, behind = text.partition(mark)
            start = behind.lstrip()
            if found and start.startswith("{"):
                deltas += [{"content": before.rstrip()}] if before.strip() else []
                self._raw = before[len(before.rstrip()) :] + mark + behind[: len(behind) - len(start)]
                self._call, text, self._ends_call = _CallScanner(), start, False
                continue
            if found and start:  # calls in another format
                deltas.append({"content": before + mark})
                text = behind
                continue
            keep = len(before.rstrip()) if found else _content_length(text, (mark, _HERMES_END))
            if text[:keep].strip():
                deltas.append({"content": text[:keep]})
                text = text[keep:]
            self._held = text
            break
        return deltas + (self._close() if ends else []), self.num_calls > 0


def _content_length(text: str, marks: tuple[str, ...]) -> int:
    """Characters of `text` that cannot belong to a mark, nor to the white space before one."""
    longest = max(map(len, marks))
    end = len(text)
    for begin in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[begin:]) for mark in marks):
            end = begin
            break
    return len(text[:end].rstrip())


class _CallScanner:
    """Reads `{"name": ..., "arguments": ...}` character by character; "parameters" is another word for arguments.

    A call without arguments, or with null, has the empty object.
    """

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.done = False
        self.told = False  # the call has begun in the output
        self._depth = 0
        self._in_string = self._escaped = False
        self._string_at = 0
        self._keys: set[str] = set()
        self._odd = False  # the arguments are a number or a truth value
        self._key: str | None = None
        self._value_at: int | None = None  # where the value of `_key` begins
        self._arguments: tuple[int, int | None] | None = None  # where they begin and end
        self._given = 0  # characters of the arguments in the output

    def feed(self, text: str) -> int:
        """Read on. Returns how many characters belong to the object."""
        for count, character in enumerate(text, 1):
            at = len(self.text)
            self.text += character
            if self._in_string:
                self._read_string(character, at)
            else:
                self._read(character, at)
            if self.done:
                return count
        return len(text)

    def is_call(self, names: frozenset[str]) -> bool:
        """Whether what was read so far is a call of one of these functions."""
        if self.name not in names or self._odd:
            return False
        if self._arguments is None:
            return self.done and self._keys <= _CALL_KEYS
        return self.text[self._arguments[0]] == "{" or (self._arguments[1] is not None and self._whole() is not None)

    def new_arguments(self) -> str:
        """The arguments that have become known since the last call, as JSON text."""
        if self._arguments is None or self.text[self._arguments[0]] != "{":  # known only at its end
            whole = None if self._given else self._whole()
            self._given = self._given or len(whole or "")
            return whole or ""
        begin, end = self._arguments
        new = self.text[begin:end][self._given :]
        self._given += len(new)
        return new

    def _whole(self) -> str | None:
        """The text of the object that arguments stand for which are none themselves; None if they stand for nothing else."""
        value = None if self._arguments is None else _loads(self.text[slice(*self._arguments)], "")
        if value is None:
            return "{}"
        return value if isinstance(value, str) and isinstance(_loads(value), dict) else None

    def _read_string(self, character: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key = str(_loads(self.text[self._string_at : at + 1]))
                self._keys.add(self._key)

    def _read(self, character: str, at: int) -> None:
        if self._depth == 1 and self._value_at == at and character.isspace():
            self._value_at = at + 1
        elif character == '"':
            self._in_string, self._string_at = True, at
            self._begin_arguments(at)
        elif character in "{[":
            self._begin_arguments(at)
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_value(at + 1)
            elif self._depth == 0:
                self._end_value(at)
                self.done = True
        elif character == ":" and self._depth == 1:
            self._value_at = at + 1
        elif character == "," and self._depth == 1:
            self._end_value(at)
            self._key = self._value_at = None

    def _begin_arguments(self, at: int) -> None:
        if self._depth == 1 and self._value_at == at and self._key in ("arguments", "parameters"):
            self._arguments = at, None

    def _end_value(self, end: int) -> None:
        if self._value_at is None:
            return
        if self._key == "name":
            name = _loads(self.text[self._value_at : end])
            self.name = name if isinstance(name, str) else None
        elif self._key in ("arguments", "parameters") and self._arguments is None:
            self._odd = self.text[self._value_at : end].strip() != "null"
        elif self._arguments is not None and self._arguments[0] == self._value_at and self._arguments[1] is None:
            self._arguments = self._value_at, self._value_at + len(self.text[self._value_at : end].rstrip())


def _loads(text: str, otherwise: Any = None) -> Any:
    """The value of a JSON text; `otherwise` for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise

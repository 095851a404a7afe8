"""Tool calls: what a request's tools add to the prompt and the constraint, and the calls in the model's text.

A model writes its calls in the format that its chat template asks for (`ToolParser`). With `tool_choice` "required" the text is
constrained to a JSON array of calls, with a named function to its arguments.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, get_args

from .errors import invalid
from .requests import ChatRequest, NamedTool

ToolParser = Literal["hermes", "llama3", "mistral", "none"]
TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)
Delta = dict[str, Any]

_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
_HERMES_END = "</tool_call>"
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's: no white space that costs tokens


def detect_parser(chat_template: str | None) -> ToolParser:
    """The format of the tool calls that a chat template asks for."""
    template = chat_template or ""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if "<|python_tag|>" in template or "Environment: ipython" in template else "none"


class ToolCalls:
    """The tools of one request, and the calls in each of its choices. Raises ApiError for inconsistent fields.

    Args:
        response_id: The ids of the calls are made of it, so that they are the same whenever the output is read.
    """

    def __init__(self, body: ChatRequest, parser: ToolParser, response_id: str) -> None:
        self._response_id = response_id
        self._tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if self._tools else "none")
        if choice != "none" and not self._tools:
            raise invalid("tool_choice needs tools", "tool_choice")
        names = [tool["function"]["name"] for tool in self._tools]
        self._named = choice.function.name if isinstance(choice, NamedTool) else None
        if self._named is not None and self._named not in names:
            raise invalid(f"tool_choice names {self._named!r}, tools has {', '.join(names)}", "tool_choice")
        constrained = self._named is not None or choice == "required"
        if constrained and (body.structured_outputs or (body.response_format and body.response_format.type != "text")):
            raise invalid("a required tool call cannot have another constraint beside it", "tool_choice")
        self._choice = choice
        self._single = body.parallel_tool_calls is False
        self._parser: ToolParser = parser if choice == "auto" else "none"
        self._streams: dict[int, _CallStream] = {}  # by choice

    @property
    def may_call(self) -> bool:
        """Whether calls are looked for: a portion of text may become several deltas then."""
        return self._named is not None or self._choice == "required" or self._parser != "none"

    def params(self) -> dict[str, Any]:
        """The constraint, as arguments of `SamplingParams`."""
        if self._named is not None:
            (function,) = (tool["function"] for tool in self._tools if tool["function"]["name"] == self._named)
            return {"json_schema": (function.get("parameters") or {"type": "object"}) | _COMPACT}
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
        if self._choice == "required":
            return _RequiredStream(choice_id)
        if self._parser == "hermes":
            return _HermesStream(choice_id)
        return _CallStream(choice_id) if self._parser == "none" else _JsonStream(choice_id, _MARKS[self._parser])

    def _calls_schema(self) -> dict[str, Any]:
        """An array of calls. Definitions of the functions' parameters move to the top, where references look for them."""
        definitions: dict[str, Any] = {}
        items = []
        for tool in self._tools:
            parameters = dict(tool["function"].get("parameters") or {"type": "object"})
            definitions |= parameters.pop("$defs", {})
            items.append({
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            })  # fmt: skip
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
        if self._single:
            schema["maxItems"] = 1
        return schema | ({"$defs": definitions} if definitions else {})


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
    """Reads calls that are JSON objects. Subclasses find where they begin."""

    def __init__(self, choice_id: str) -> None:
        super().__init__(choice_id)
        self._call: _CallScanner | None = None  # the call that is being read
        self._held = ""  # text that may turn out to be a part of a call
        self._raw = ""  # text since the last delta that is content unless a call begins with it

    def _read_call(self, text: str) -> tuple[list[Delta], str]:
        """Feed the open call. Returns its deltas, and the text behind its end."""
        call = self._call
        assert call is not None
        size = call.feed(text)
        self._raw += text[:size]
        deltas: list[Delta] = []
        if call.name is not None and not call.told:
            call.told = True
            self._raw = ""
            deltas.append(self._head(call.name))
        if call.told and (new := call.new_arguments()):
            deltas.append(self._arguments(new))
        if call.done:
            self._call = None
            self._raw = "" if call.told else self._raw
        return deltas, text[size:]

    def _close(self) -> list[Delta]:
        """The deltas at the end of the text: what was held back and began no call, as content."""
        left = ("" if self._call is not None and self._call.told else self._raw) + self._held
        self._held, self._raw, self._call = "", "", None
        return [{"content": left}] if left.strip() or (left and not self.num_calls) else []


class _JsonStream(_ObjectStream):
    """The whole text is a call, several calls, or an array of calls, perhaps after a mark; otherwise it is content."""

    def __init__(self, choice_id: str, mark: str = "") -> None:
        super().__init__(choice_id)
        self._mark = mark
        self._begun = False  # the text has calls
        self._content = False  # the text has none

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        deltas: list[Delta] = []
        if self._content:
            return super(_ObjectStream, self).push(text, ends)
        text = self._held + text
        self._held = ""
        if not self._begun:
            start = text.lstrip()
            if self._mark and start.startswith(self._mark):
                start = start[len(self._mark) :].lstrip()
            elif not ends and (not start or self._mark.startswith(start)):
                self._held = text
                return [], False
            if start in ("", "[") and not ends:
                self._held = text
                return [], False
            self._begun = start.startswith("{") or (start[:1] == "[" and start[1:].lstrip()[:1] in ("{", ""))
            if not self._begun:
                self._content = True
                return super(_ObjectStream, self).push(text, ends)
            self._raw, text = text[: len(text) - len(start)], start
        while text:
            if self._call is None:
                begin = text.find("{")
                skipped = text if begin < 0 else text[:begin]  # brackets, commas and semicolons between calls
                self._raw += "" if self.num_calls else skipped
                if begin < 0:
                    break
                self._call, text = _CallScanner(), text[begin:]
            more, text = self._read_call(text)
            deltas += more
        return deltas + (self._close() if ends else []), self.num_calls > 0


class _RequiredStream(_JsonStream):
    """The text is constrained to an array of calls: what is cut off before a call has begun is no content."""

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        deltas, called = super().push(text, ends)
        return [delta for delta in deltas if "content" not in delta], called


class _HermesStream(_ObjectStream):
    """Calls between `<tool_call>` and `</tool_call>`, content around them."""

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        deltas: list[Delta] = []
        mark = _MARKS["hermes"]
        text, self._held = self._held + text, ""
        while text:
            if self._call is not None:
                more, text = self._read_call(text)
                deltas += more
                if self._call is None and self._raw:  # an object, but no call
                    deltas.append({"content": self._raw})
                    self._raw = ""
                continue
            if self.num_calls and (stripped := text.lstrip()).startswith(_HERMES_END):
                text = stripped[len(_HERMES_END) :].lstrip("\n")
                continue
            before, found, behind = text.partition(mark)
            if found and (begin := behind.find("{")) >= 0:
                deltas += [{"content": before.rstrip()}] if before.strip() else []
                self._raw = before[len(before.rstrip()) :] + mark + behind[:begin]
                self._call, text = _CallScanner(), behind[begin:]
                continue
            keep = len(before) if found else _content_length(text, (mark, _HERMES_END))
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
    """Reads `{"name": ..., "arguments": ...}` character by character; "parameters" is another word for arguments."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.done = False
        self.told = False  # the call has begun in the output
        self._depth = 0
        self._in_string = self._escaped = False
        self._string_at = 0
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

    def new_arguments(self) -> str:
        """The arguments that have become known since the last call, as JSON text."""
        if self._arguments is None:
            return ""
        begin, end = self._arguments
        if self.text[begin] != "{":  # known only at its end
            if end is None or self._given:
                return ""
            self._given = end
            value = _loads(self.text[begin:end])
            return value if isinstance(value, str) else self.text[begin:end]
        new = self.text[begin:end][self._given :]
        self._given += len(new)
        return new

    def _read_string(self, character: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key = str(_loads(self.text[self._string_at : at + 1]))

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
        elif self._arguments is not None and self._arguments[0] == self._value_at and self._arguments[1] is None:
            self._arguments = self._value_at, self._value_at + len(self.text[self._value_at : end].rstrip())


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None

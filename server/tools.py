"""Tool calls: what a request's tools add to the prompt and the constraint, and the calls in the model's text.

A model writes its calls in the format that its chat template asks for (`ToolParser`). With `tool_choice` "required" the text is
constrained to a JSON array of calls, with a named function to its arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args
from urllib.parse import urljoin

ToolParser = Literal["hermes", "llama3", "mistral", "none"]
TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)
Delta = dict[str, Any]

_MARKS = {  # of a call, and of its end, by format
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
}
_CALL_KEYS = {"name", "arguments", "id", "type"}
# JSON's tokens, and an escape that is cut off.
_TEXT = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"null|true|false|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WHITE = re.compile(r"[ \t\n\r]*")
_VALUE = '{["0'  # what a value may begin with
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
            `response_format`, `structured_outputs` and `skip_special_tokens`. Each tool has a function with a name.
        response_id: The ids of the calls are made of it, so that they are the same whenever the output is read.
        special_tokens: Of the tokenizer. The marks of calls among them stay in the text, and are no content.

    Raises ToolsInvalid for inconsistent fields.
    """

    def __init__(
        self, fields: Mapping[str, Any], parser: ToolParser, response_id: str, special_tokens: Collection[str] = ()
    ) -> None:
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
        skips = fields.get("skip_special_tokens") is not False
        self._hidden = [mark for mark in _MARKS.get(self._parser, ()) if skips and mark in special_tokens]
        self._streams: dict[int, _CallStream] = {}  # by choice

    @property
    def may_call(self) -> bool:
        """Whether calls are looked for: a portion of text may become several deltas then."""
        return self._named is not None or self._choice == "required" or self._parser != "none"

    def params(self) -> dict[str, Any]:
        """The constraint, or the marks to be found in the text, as arguments of `SamplingParams`. Raises ToolsInvalid for
        parameters that are no object.
        """
        if self._named is not None:
            (function,) = (tool["function"] for tool in self._tools if tool["function"]["name"] == self._named)
            return {"json_schema": _parameters(function) | _COMPACT}
        if self._choice == "required":
            return {"json_schema": self._calls_schema() | _COMPACT}
        return {"kept_special_tokens": self._hidden} if self._hidden else {}

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
            return _CallFinder(choice_id, names, (), required=True)
        marks = _MARKS.get(self._parser)
        return _CallStream(choice_id) if marks is None else _CallFinder(choice_id, names, marks, self._hidden)

    def _calls_schema(self) -> dict[str, Any]:
        """An array of calls. Raises ToolsInvalid for schemas that differ and claim the same `$id`, at any depth.

        Each function's parameters have an `$id`, so that references within them mean what they mean by themselves.
        """
        items, taken = [], dict[str, str]()
        for number, tool in enumerate(self._tools):
            given = _parameters(tool["function"])
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
                    "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
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
        raise ToolsInvalid(f"the parameters of {function['name']!r} permit no object, which a call's arguments are", "tools")
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


class _CallStream:
    """Turns the text of a choice into deltas. This base class finds no calls."""

    def __init__(self, choice_id: str) -> None:
        self.num_calls = 0
        self._choice_id = choice_id

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        """The deltas of new text, and whether there are calls so far."""
        return ([{"content": text}] if text else []), False

    def _head(self, name: str, arguments: str) -> Delta:
        """The delta that begins a call, with its arguments so far."""
        digest = hashlib.sha256(f"{self._choice_id}/{self.num_calls}".encode()).hexdigest()
        call = {
            "index": self.num_calls,
            "id": f"call_{digest[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
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
        if not self.num_calls:
            return [self._head(self._name, text)], True
        return ([self._arguments(text)] if text else []), True


class _CallFinder(_CallStream):
    """Finds the calls in a text: JSON objects as `_CallReader` reads them, behind the mark of a format. The rest is content.

    - In a format without an end mark calls may also begin the text, be in a list, and follow a call behind separators.
    - A call is delivered when it is complete: until then it may turn out to be content. Where calls are `required` the text is
      constrained to them, so that arguments are delivered as they come, and there is no content.
    - Of the white space around calls, the first between two texts stays.
    - Each character is read a bounded number of times: a push leaves at most a mark for the next one.

    Args:
        marks: The mark of a call and that of its end, as far as the format has them.
        hidden: Marks that are no content without a call either.
    """

    def __init__(
        self,
        choice_id: str,
        names: frozenset[str],
        marks: tuple[str, ...],
        hidden: Collection[str] = (),
        required: bool = False,
    ) -> None:
        super().__init__(choice_id)
        self.unread = ""  # what may be a mark or an escape
        self._names, self._marks, self._hidden, self._required = names, marks, hidden, required
        self._is_list = len(marks) < 2
        self._mark = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._mark_or_object = re.compile("|".join([*map(re.escape, marks), "{"]))
        self._separator = re.compile(r"[\s\[\],;]*" if self._is_list else r"\s*")
        self._opening = re.compile(r"\s+|\[" if self._is_list else r"\s+")
        self._read = self._read_opening if self._is_list else self._read_content
        self._candidate: list[str] = []  # text that is content unless a call follows
        self._call = _CallReader(names)
        self._begun = False  # the call is being delivered
        self._deltas: list[Delta] = []
        self._has_content = False
        self._space: list[str] = []  # white space at the end of the content
        self._separators: list[str] | None = None  # the text since the last call, as long as it separates calls

    def push(self, text: str, ends: bool) -> tuple[list[Delta], bool]:
        self._deltas, text, at = [], self.unread + text, 0
        while at < len(text):
            begin, read = at, self._read
            at = read(text, at, ends)
            if at == begin and self._read == read:
                break
        self.unread = text[at:]
        if ends:
            self._candidate.append(self.unread)
            self._end_candidate(is_call=False)
            if self._space and not self.num_calls:
                self._deltas.append({"content": "".join(self._space)})
        if self._required:
            self._deltas = [delta for delta in self._deltas if "content" not in delta]
        return self._deltas, self.num_calls > 0

    # The next three read `text` from `at` on, and return where they stopped: where another goes on, or more text is needed.

    def _read_content(self, text: str, at: int, ends: bool) -> int:
        """Read up to a mark, or to an object behind a call."""
        pattern = self._mark_or_object if self._is_list and self.num_calls else self._mark
        found = pattern.search(text, at)
        if found is None:
            end = len(text) - (0 if ends else self._begun_mark(text, at))
            self._add_content(text[at:end])
            return end
        self._add_content(text[at : found.start()])
        if found[0] == "{":
            self._read = self._read_object
            return found.start()
        shown = "" if found[0] in self._hidden else found[0]
        if found[0] == self._marks[0]:
            self._candidate, self._read = [shown], self._read_opening
        elif self._separators is None:  # a mark that ends no call
            self._add_content(shown)
        return found.end()

    def _begun_mark(self, text: str, at: int) -> int:
        """Characters at the end of `text`, from `at` on, that may begin a mark."""
        sizes = range(min(max(map(len, self._marks), default=0), len(text) - at), 0, -1)
        return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in self._marks)), 0)

    def _read_opening(self, text: str, at: int, ends: bool) -> int:
        """Read what stands between an object and the mark, or the beginning of the text."""
        if not ends and self._begun_mark(text, at) == len(text) - at:
            return at
        if text[at] == "{":
            self._read = self._read_object
        elif (found := self._opening.match(text, at)) is not None and self._mark.match(text, at) is None:
            self._candidate.append(found[0])
            return found.end()
        else:
            self._end_candidate(is_call=False)
        return at

    def _read_object(self, text: str, at: int, ends: bool) -> int:
        call = self._call
        end = call.feed(text, at)
        self._candidate.append(text[at:end])
        if call.name and call.arguments and (self._required or call.state == "call"):
            arguments, call.arguments = "".join(call.arguments), []
            self._deltas.append(self._arguments(arguments) if self._begun else self._head(call.name, arguments))
            self._begun = True
        if call.state != "open":
            self._end_candidate(call.state == "call")
        return end

    def _end_candidate(self, is_call: bool) -> None:
        """Go on with content behind a call, or with the candidate, which is content."""
        candidate, self._candidate = "".join(self._candidate), []
        self._call, self._begun, self._read = _CallReader(self._names), False, self._read_content
        if not is_call:
            self._add_content(candidate)
            return
        if not self._has_content:
            self._space = []
        elif not self._space:
            self._space = [each for each in "".join(self._separators or ()) if each.isspace()]
        self._separators = []

    def _add_content(self, text: str) -> None:
        """Deliver content, except white space at its end, which may stand before a call."""
        if self._separators is not None:
            self._separators.append(text)
            if self._separator.fullmatch(text):
                return
            text, self._separators = "".join(self._separators), None
            if self._space or not self._has_content:
                text = text.lstrip()
        content = text.rstrip()
        if content:
            self._deltas.append({"content": "".join([*self._space, content])})
            self._has_content, self._space = True, []
        self._space += [text[len(content) :]] if len(content) < len(text) else []


class _CallReader:
    """Reads a JSON object as it comes, up to its end or to the first character with which it is no call.

    A call is `{"name": ..., "arguments": {...}}`, in any order, with one of these names; "parameters" is another word for
    arguments, which may also be the JSON text of an object. Without arguments, or with null, a call has the empty object.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.state: Literal["open", "call", "other"] = "open"
        self.name: str | None = None
        self.arguments: list[str] = []  # their JSON text, in parts
        self._names = names
        self._keys: set[str] = set()
        self._key = ""  # of the call's next value
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._next = "{"  # what may come: these characters, and "0" for a number or a word
        self._token: list[str] | None = None  # the parts of an open text, number or word
        self._pattern = _TEXT  # of that token
        self._in_arguments = False

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns where that stopped: behind the object, before what is no part of it, or before an
        escape that is cut off.
        """
        begin = at
        while at < len(text) and self.state == "open":
            if self._token is not None:
                end = _end_of(self._pattern, text, at)
                self._token.append(text[at:end])
                at = end
                if at == len(text) or (self._pattern is _TEXT and _CUT_ESCAPE.match(text, at)):
                    break
                at = self._end_token(text, at)
            elif (white := _end_of(_WHITE, text, at)) > at:
                at = white
            elif (kind := text[at] if text[at] in '{}[]:,"' else "0") not in self._next:
                self.state = "other"
            elif kind == "0":
                self._token, self._pattern = [], _WORD
            else:
                if kind == "{" and len(self._closers) == 1 and self._key == "arguments":
                    begin, self._in_arguments = at, True
                self._read_mark(kind)
                at += 1
                if self._in_arguments and len(self._closers) == 1:
                    self.arguments.append(text[begin:at])
                    self._in_arguments = False
        if self._in_arguments:
            self.arguments.append(text[begin:at])
        return at

    def _read_mark(self, kind: str) -> None:
        """A quotation mark that opens a text, or a mark of structure."""
        if kind == '"':
            self._token, self._pattern = [], _TEXT
            self._next = _VALUE if "{" in self._next else ":"
        elif kind in "{[":
            self._closers.append("}" if kind == "{" else "]")
            self._next = '"}' if kind == "{" else _VALUE + "]"
        elif kind in "}]":
            self._closers.pop()
            self._end_value("")
        else:
            self._next = '"' if kind == "," and self._closers[-1] == "}" else _VALUE

    def _end_token(self, text: str, at: int) -> int:
        token, self._token = "".join(self._token or ()), None
        if self._pattern is _WORD:
            self._end_value(token)
            if _SCALAR.fullmatch(token) is None:
                self.state = "other"
            return at
        if text[at] != '"':
            self.state = "other"
            return at
        if self._next != ":":
            self._end_value(f'"{token}"')
        elif len(self._closers) == 1:
            key = json.loads(f'"{token}"')
            self._key = "arguments" if key == "parameters" else key
            self.state = "other" if self._key in self._keys else self.state
            self._keys.add(self._key)
        return at + 1

    def _end_value(self, token: str) -> None:
        """Behind a value: a `token`, or an object or array."""
        self._next = "".join([",", *self._closers[-1:]])
        if len(self._closers) == 1 and self._key == "name":
            self.name = json.loads(token) if token.startswith('"') else None
            self.state = self.state if self.name in self._names else "other"
        elif len(self._closers) == 1 and self._key == "arguments" and not self._in_arguments:
            whole = "{}" if token == "null" else _object_in(token)
            self.arguments = [whole or ""]
            self.state = "other" if whole is None else self.state
        elif not self._closers:
            if "arguments" not in self._keys:
                self.arguments = ["{}"]
            is_whole = self.name is not None and ("arguments" in self._keys or self._keys <= _CALL_KEYS)
            self.state = "call" if is_whole else "other"


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the match at `at` ends."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _object_in(token: str) -> str | None:
    """The JSON text of an object that a JSON text holds as a text; None for another value."""
    try:
        text = json.loads(token)
        value = json.loads(text, parse_constant=int) if isinstance(text, str) else None  # int raises for NaN
        return text if isinstance(value, dict) and text.encode() else None
    except (ValueError, RecursionError):
        return None

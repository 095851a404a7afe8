"""Finds content, reasoning and tool calls in the text of an answer, as it comes, in the format of a `ResponseTemplate`."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from .response_templates import CallFormat, ResponseTemplate
from .text_reader import JSON, PYTHON, Literals, MalformedText, Reading, TextReader, read_value

_NAME = re.compile(r"[\w.:/-]*")
_CALL_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")  # of harmony
_CHANNEL = re.compile(r"(?:<\|channel\|>|^\s*(?:assistant\s*)?)(analysis|commentary|final)\b")
MOST_OTHERS = 32  # parameters that are looked for where the end of another one is missing
LONGEST_OTHERS = 2048  # characters of their names together
_HALF = "\ufffd"  # as a text is decoded that ends amid a character
_SURROGATE = re.compile("[\ud800-\udfff]")
_REST_OF_HEADER = Literals([" to="])
_BEGUN_CALL = re.compile(r"""\[?\s*(?:\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*)?"?([\w.-]+)(["(]|\Z)""")


class Part(NamedTuple):
    """A part of an answer.

    A call is whole: `name` is its function's, `text` the JSON of its arguments, which are an object. The parser gives it an id
    only if the model wrote one; `AnswerReader` gives each an id, and its number among the calls.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""
    call_id: str = ""
    number: int = 0


class ResponseParser:
    """Reads one answer. All parts together are the same however the text is cut into pieces.

    - A region that is no call becomes content. Of a call that is cut off amid itself nothing is left.
    - Each character is read a bounded number of times.
    - White space beside reasoning and calls is left out where it belongs to the format. Words beside a call stay apart.

    Args:
        schemas: The parameters of each function that may be called; None: calls are not looked for.
        hidden: Special tokens: among the fixed texts of the template, they never are content.
        prompt_end: The end of the prompt, which may have opened reasoning.
        named: The answer is constrained to the arguments of this function.
        is_either: The answer is constrained to calls with their marks, or to content: what begins as content is content to its
            end.

    Attributes:
        message_channels: Of a format in which messages have headers: the channel of each message so far; "" of a call.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        hidden: Collection[str] = (),
        prompt_end: str = "",
        named: str | None = None,
        is_either: bool = False,
    ) -> None:
        self._template = template
        self._calls = template.calls if schemas is not None else None
        self._schemas = schemas or {}
        self._reader = TextReader()
        self._unsure = ""  # at the end of the text: what replaces a character of which bytes are missing
        self._parts: list[Part] = []
        self.message_channels: list[str] = []
        self._is_either = is_either
        self._is_cut = self._is_reasoning = False
        # Of the content
        self._has_content = False
        self._at_region = False  # no content since the last region
        self._before = ""  # white space between the content and the region behind it
        self._space: list[str] = []  # white space at the end, which a region may follow
        self._reasoning_space: list[str] | None = None  # the same of reasoning; None before any
        in_template = template.special_marks(hidden)
        self._hidden = re.compile("|".join(map(re.escape, sorted(in_template, key=len, reverse=True))) or "(?!)")
        self._hidden_marks = set(in_template)
        self._not_content = {*in_template, *template.dropped, *template.reasoning_close}
        form = self._calls
        self._call_opens = set() if form is None else set(form.opens)
        self._header_opens = set(template.header_open)
        anywhere = {*self._call_opens, *self._header_opens, *template.dropped, *template.header_end, *in_template}
        self._later = Literals(anywhere)
        self._first = Literals({*anywhere, *template.reasoning_open})
        calls_end_it = self._call_opens if template.calls_end_reasoning else ()
        self._reasoning_end = Literals({*template.reasoning_close, *calls_end_it})
        if form is not None:
            self._close, self._item_close = Literals(form.close), Literals(form.item_close)
            self._name_end = Literals(form.name_end)
            self._item_or_close = Literals({*form.item_open, *form.close})
            if form.content == "xml":
                self._parameter_open = Literals(form.parameter[:1])
                self._parameter_ends = Literals({form.parameter[3], *form.missing_ends})
                self._parameter_follows = Literals({form.parameter[0], *(form.item_close or form.close)})
            self._separators = re.compile(rf"[\s{re.escape(form.separators)}]*")
        self._header_marks = Literals({*template.header_close, *template.header_end, *template.header_open})
        self._message_end = Literals({*template.header_end, *template.header_open})
        self._message_close = Literals(template.header_end)
        self._text_end = Literals([*template.header_end[:1], *template.header_open[:1]])
        self._stray_marks = self._hidden_marks.difference(self._text_end.texts)
        self._text_marks = Literals({*self._text_end.texts, *self._stray_marks})
        begins_amid_reasoning = template.opens_reasoning(prompt_end)
        self._run = self._answer(begins_amid_reasoning) if named is None else self._read_arguments(named)
        next(self._run)

    def feed(self, text: str) -> list[Part]:
        """The parts that more text completes."""
        text = self._unsure + text
        whole = text.rstrip(_HALF)
        self._unsure = text[len(whole) :]
        if whole:
            self._run.send(whole)
        return self._taken()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """The parts at the end of the text. No `feed` may follow.

        Args:
            is_cut: The answer was cut off: the model would have gone on.
        """
        self._is_cut = self._reader.is_cut = is_cut
        with suppress(StopIteration):
            if self._unsure and not (is_cut and self._reader.holds):
                self._run.send(self._unsure)
            self._run.send(None)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # -- the answer --------------------------------------------------------------------------------------------------

    def _answer(self, begins_amid_reasoning: bool) -> Reading[None]:
        reader = self._reader
        if begins_amid_reasoning:
            yield from self._read_reasoning()
        elif self._header_opens and (yield from reader.sees(_REST_OF_HEADER)):
            yield from self._read_header("")
        while True:
            if not self._has_content or self._at_region:  # reasoning, and calls without a mark, begin here
                self._give_content((yield from reader.space()))
                found = yield from reader.literal(self._first)
                reader.drop_begun(self._first, least=1 if self._is_either and self._at_region else 2)
                may_be_bare = self._calls is not None and self._calls.is_bare and not self._is_either
                if not found and may_be_bare and not self._has_content and (yield from self._begins_bare()):
                    yield from self._read_region("")
            else:
                found = ""
            if not found:
                found = yield from reader.until(self._later, self._give_content)
            if self._is_either and self._has_content:
                self._give_content(found)
                yield from self._read_rest(self._give_content)
                break
            elif found in self._call_opens:
                yield from self._read_region(found)
            elif found in self._header_opens:
                yield from self._read_header(found)
            elif found in self._template.reasoning_open:
                yield from self._read_reasoning()
            elif found and found not in self._not_content:
                self._give_content(found)
            elif not found and reader.ended and reader.at == len(reader.text):
                break
        if (space := "".join(self._space)) and not (self._at_region and self._template.trims):
            self._parts.append(Part("content", space))

    def _read_arguments(self, name: str) -> Reading[None]:
        """An answer that is the arguments of a function alone."""
        self._reader.record()
        try:
            self._deliver(name, _dumped((yield from read_value(self._reader, JSON))), "")
        except MalformedText:
            self._give_content("" if self._is_cut else self._reader.recorded())
        yield from self._read_rest(lambda _: None)

    def _read_rest(self, give: Callable[[str], None]) -> Reading[None]:
        """All text that is left."""
        give(self._reader.take(len(self._reader.text)))
        while (yield from self._reader.more()):
            give(self._reader.take(len(self._reader.text)))

    def _give_content(self, text: str) -> None:
        body = text.strip()
        if not body:
            self._space.append(text)
            return
        space = "".join([*self._space, text[: text.index(body[0])]])
        if self._at_region:
            if self._template.trims:
                space = (self._before or space or "\n") if self._has_content else ""
            elif self._has_content and not space and not self._before:
                space = "\n"
            self._at_region, self._before = False, ""
        self._parts.append(Part("content", space + body))
        self._has_content = True
        self._space = [text[len(text.rstrip()) :]]

    def _begin_region(self) -> None:
        """There is a region behind the content so far."""
        space, self._space = "".join(self._space), []
        if self._at_region:
            self._before = self._before or space
        elif self._has_content:
            self._before = space
            if space and not self._template.trims:
                self._parts.append(Part("content", space))
        self._at_region = True

    # -- reasoning ---------------------------------------------------------------------------------------------------

    def _read_reasoning(self, end: Literals | None = None) -> Reading[None]:
        """Reasoning up to its end. In some formats a call ends it too."""
        reader = self._reader
        self._begin_region()
        self._is_reasoning = True
        if self._reasoning_space is not None:
            self._reasoning_space = ["\n"]
        while True:
            found = yield from reader.find(end or self._reasoning_end, self._give_reasoning)
            if found not in self._call_opens:
                break
            reader.take(reader.at + len(found))
            yield from self._read_region(found)
            if not self._is_reasoning:  # a mark that would have ended it may follow
                self._later = Literals({*self._later.texts, *self._template.reasoning_close})
                self._first = Literals({*self._first.texts, *self._template.reasoning_close})
                return
        if end is None:
            reader.take(reader.at + len(found))
        self._is_reasoning = False

    def _give_reasoning(self, text: str) -> None:
        body = text.strip() if self._reasoning_space is None else text.rstrip()
        if not body:
            if self._reasoning_space is not None:
                self._reasoning_space.append(text)
            return
        space = "".join(self._reasoning_space or ())
        self._parts.append(Part("reasoning", space + body))
        self._reasoning_space = [text[len(text.rstrip()) :]]

    # -- harmony -----------------------------------------------------------------------------------------------------

    def _read_header(self, opener: str) -> Reading[None]:
        """A message with a header, behind what opens it; "": the prompt did."""
        reader, header = self._reader, opener
        while True:
            parts: list[str] = []
            found = yield from reader.until(self._header_marks, parts.append)
            if found in self._template.header_close:
                yield from self._read_message(header + "".join(parts))
                return
            if found in self._header_opens and found not in header and found != "<|start|>":
                header += "".join(parts) + found
                continue
            # A header without a message
            if found or not self._is_cut:
                self._give_content(self._hidden.sub("", "".join(parts)))
            if found not in self._header_opens:
                return
            header = found

    def _read_message(self, header: str) -> Reading[None]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_call = recipient is not None and recipient[1] != "assistant" and self._calls is not None
        if any(mark in header for mark in self._header_opens):
            self.message_channels.append("" if is_call or channel is None else channel[1])
        if recipient is not None and is_call:
            yield from self._read_addressed(recipient[1])
        elif channel is not None and channel[1] == "analysis":
            yield from self._read_reasoning(self._text_end)
        else:
            if self._has_content:
                self._begin_region()
            while (found := (yield from self._reader.find(self._text_marks, self._give_content))) in self._stray_marks:
                self._reader.take(self._reader.at + len(found))
        yield from self._reader.literal(self._message_close)

    def _read_addressed(self, name: str) -> Reading[None]:
        """A message to a function: its arguments."""
        reader = self._reader
        reader.record()
        try:
            arguments = _dumped((yield from read_value(reader, self._form.notation)))
            if (yield from reader.next()) and not (yield from reader.sees(self._message_end)):
                raise MalformedText
        except MalformedText:
            self._fail("<|message|>")
        else:
            reader.recorded()
            self._deliver(name, arguments, "")

    # -- calls -------------------------------------------------------------------------------------------------------

    @property
    def _form(self) -> CallFormat:
        assert self._calls is not None
        return self._calls

    def _read_region(self, opener: str) -> Reading[None]:
        """A region with calls, behind what opens it: nothing, if `opener` is "". What is no call becomes content."""
        self._reader.record()
        try:
            if self._form.item_open:
                yield from self._read_items(opener)
            else:
                yield from self._read_list(is_bare=not opener)
        except MalformedText:
            self._fail(opener)
        else:
            self._reader.recorded()

    def _begins_bare(self) -> Reading[bool]:
        """Whether a call may begin here, without a mark."""
        mark = yield from self._reader.peek()
        return bool(mark) and mark in "{["

    def _fail(self, opener: str) -> None:
        """What was read of a region is no call: it is content, unless the answer was cut off amid it."""
        reader = self._reader
        text = reader.recorded()
        if reader.ended and self._is_cut and (opener or self._begins_known(text)):
            reader.take(len(reader.text))
            self._begin_region()
        else:
            if opener and (begun := self._later.begun(text, 0)):  # perhaps the next mark
                text = reader.put_back(text, begun)
            (self._give_reasoning if self._is_reasoning else self._give_content)(self._hidden.sub("", opener + text))

    def _begins_known(self, text: str) -> bool:
        """Whether a text begins a call of a function that there is, or ends amid its name."""
        found = _BEGUN_CALL.match(text)
        if found is None or found[2]:
            return found is not None and found[1] in self._schemas
        return any(name.startswith(found[1]) for name in self._schemas)

    def _read_items(self, opener: str) -> Reading[None]:
        """Calls of which each has a mark of its own. Raises MalformedText if there is none."""
        reader, count = self._reader, 0
        is_open = opener in self._form.item_open
        while True:
            if not is_open:
                yield from reader.space()
                found = yield from reader.literal(self._item_or_close)
                if not found and not count:
                    raise MalformedText
                if not found:
                    reader.drop_begun(self._item_or_close, least=1)
                if not found or found in self._form.close:
                    return
            self._deliver(*(yield from self._read_call()))
            reader.record()
            is_open, count = False, count + 1

    def _read_list(self, is_bare: bool) -> Reading[None]:
        """A call, a list of them, or several behind each other. Raises MalformedText."""
        reader, form = self._reader, self._form
        in_list = (yield from self._next_in_region()) == "["
        if in_list:
            reader.take(reader.at + 1)
        while True:
            call = yield from self._read_call(is_bare)
            mark = yield from self._next_in_region()
            if in_list and mark not in (",", "]"):
                raise MalformedText
            if in_list:
                reader.take(reader.at + 1)
            if (mark == "," and in_list) or (mark == "{" and not form.close):
                self._deliver(*call)
                reader.record()
                continue
            break
        if form.close:
            yield from reader.space()
            closed = yield from reader.literal(self._close)
            if not closed and not is_bare and (self._is_cut or reader.at < len(reader.text)):
                raise MalformedText
        self._deliver(*call)

    def _next_in_region(self) -> Reading[str]:
        yield from self._reader.pattern(self._separators)
        return (yield from self._reader.peek())

    def _read_call(self, is_bare: bool = False) -> Reading[tuple[str, str, str]]:
        """A call, with what ends it. Returns its name, arguments and id. Raises MalformedText."""
        reader, form = self._reader, self._form
        mark = yield from reader.next()
        if mark == "{" and form.content != "xml":
            call = yield from read_value(reader, form.notation, _CALL_KEYS if is_bare else None)
            name, value = _name_and_arguments(call)
            if is_bare and name not in self._schemas:
                raise MalformedText
            return name, _dumped(value), ""
        found = re.fullmatch(form.name_pattern, (yield from reader.pattern(_NAME)))
        if found is None or (is_bare and found["name"] not in self._schemas):
            raise MalformedText
        name, call_id = found["name"], found.groupdict().get("id") or ""
        yield from reader.space()
        if form.name_end:
            end = yield from reader.literal(self._name_end)
            if end and end == form.id_mark:
                call_id = yield from reader.pattern(_NAME)
                end = yield from reader.literal(self._name_end)
            if not end:
                raise MalformedText
        if form.content == "xml":
            return name, (yield from self._read_parameters(name)), call_id
        if (yield from reader.next()) != ("(" if form.content == "python" else "{"):
            raise MalformedText
        value = yield from read_value(reader, PYTHON if form.content == "python" else form.notation)
        if form.item_close:
            yield from reader.space()
            if not (yield from reader.literal(self._item_close)) and (self._is_cut or reader.at < len(reader.text)):
                raise MalformedText
        return name, _dumped(value), call_id

    def _read_parameters(self, name: str) -> Reading[str]:
        """The parameters of a call of the form "xml", and what ends it unless that ends the region too."""
        reader, form = self._reader, self._form
        _, key_end, value_open, _ = form.parameter
        if form.head_end:
            head: list[str] = []
            if not (yield from reader.until(_literals(form.head_end), head.append)):
                raise MalformedText
            if "".join(head).endswith("/"):
                return "{}"
        values: dict[str, Any] = {}
        properties = self._schemas.get(name, {}).get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        while True:
            yield from reader.space()
            if not (yield from reader.literal(self._parameter_open)):
                break
            key: list[str] = []
            attributes: list[str] = []
            if not (yield from reader.until(_literals(key_end), key.append)):
                raise MalformedText
            if value_open and not (yield from reader.until(_literals(value_open), attributes.append)):
                raise MalformedText
            named = "".join(key).strip()
            if form.escaped_keys:
                named = html.unescape(named)
            text = yield from self._read_parameter(properties.keys() - values.keys() - {named})
            schema = properties.get(named)
            values[named] = _typed(text, schema, form.typed and (form.typed in "".join(attributes)))
        if form.item_close and not (yield from reader.literal(self._item_close)):
            raise MalformedText
        if not form.item_close and not (yield from reader.sees(self._close)) and reader.at < len(reader.text):
            raise MalformedText
        return _dumped(values)

    def _read_parameter(self, others: Collection[str]) -> Reading[str]:
        """The text of a parameter: up to its end behind which the call goes on, or up to one of the `others`."""
        reader, form = self._reader, self._form
        parts: list[str] = []
        ends = self._parameter_ends
        if form.missing_ends and 0 < len(others) <= MOST_OTHERS and sum(map(len, others)) <= LONGEST_OTHERS:
            opens, key_end = form.parameter[:2]
            ends = _literals(*ends.texts, *(f"\n{opens}{key}{key_end}" for key in sorted(others)))
        while True:
            found = yield from reader.find(ends, parts.append)
            if not found:
                raise MalformedText
            if found != form.parameter[3]:  # the end of the call, without that of the parameter
                break
            reader.take(reader.at + len(found))
            space = yield from reader.space()
            if (yield from reader.sees(self._parameter_follows)) or (reader.ended and reader.at == len(reader.text)):
                break
            parts += [found, space]
        text = "".join(parts)
        if form.strips_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        return text

    def _deliver(self, name: str, arguments: str, call_id: str) -> None:
        self._begin_region()
        self._is_reasoning = False
        self._parts.append(Part("call", arguments, name, call_id))


@lru_cache(maxsize=64)
def _literals(*texts: str) -> Literals:
    """As `Literals`, for texts that are looked for again with the next parameter or call."""
    return Literals(texts)


def _name_and_arguments(call: Any) -> tuple[str, Any]:
    """Those that an object says: `{"name": ..., "arguments": {...}}`, or with "parameters". Raises MalformedText."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name", call.get("function")) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise MalformedText
    given = [call[key] for key in ("arguments", "parameters") if key in call]
    if (not given and not call.keys() <= set(_CALL_KEYS)) or len(given) > 1:
        raise MalformedText
    value = {} if not given or given[0] is None else given[0]
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=int) if value.strip() else {}  # int raises for NaN
        except (ValueError, RecursionError):
            raise MalformedText from None
    return _encodable(name), value


def _dumped(value: Any) -> str:
    """The JSON text of an object. Raises MalformedText for another value."""
    if not isinstance(value, dict):
        raise MalformedText
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise MalformedText from None
    return _encodable(text)


def _encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone. JSON's escapes can say one, UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _SURROGATE.search(text) else text


def types_of(schema: Any) -> set[str]:
    """The types that a schema names."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    found = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        options = schema.get(union)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option)
    for value in schema["enum"] if isinstance(schema.get("enum"), list) else ():
        found |= {"string"} if isinstance(value, str) else {"any"}
    return found


def _typed(text: str, schema: Any, is_text: bool | Literal[""]) -> Any:
    """The value of a parameter's text, as its attributes (`is_text`; "": there are none) or its schema say."""
    types = types_of(schema)
    if is_text or (is_text == "" and "string" in types and not (text.strip() == "null" and "null" in types)):
        return text
    if is_text == "" and not types and schema is None:
        return text
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if "null" in types and text.strip() == "None":
        return None
    try:
        value = json.loads(text, parse_constant=int)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and types == {"integer"} and value.is_integer():
        return int(value)
    return value

"""The formats in which model families write answers, reasoning and tool calls: data in `configs/response_templates`.

The vocabulary is that of transformers' `response_template`, which a tokenizer may bring: fields with what opens and closes
them, and how their content is written.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from .text_reader import GEMMA, JSON, Notation

PLAIN = "plain"  # the name of no format: all text is content
FOLDER = Path(__file__).parent.parent / "configs" / "response_templates"
log = logging.getLogger(__name__)

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the field in tokenizers' own templates


class TemplateInvalid(ValueError):
    """A response template says what it cannot say."""


def _texts(given: str | list[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class WrittenCalls:
    """How a family's chat template writes calls, for grammars.

    Attributes:
        call: With NAME, and ARGUMENTS (JSON) or PARAMETERS; INDEX is a number.
        begin, between, end: Texts around all calls, and between two.
        parameter: With KEY and VALUE; TYPED is "true" for a text.
        needs: A special token; tokenizers without it write calls otherwise.
    """

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    parameter: str = ""
    needs: str = ""


@dataclass(frozen=True)
class CallFormat:
    """How a family writes tool calls: regions with one or several calls.

    Attributes:
        content: "json": an object with a name and arguments, or a name and an object of arguments. "xml": a name and
            parameters. "python": a list of calls in Python's notation, or in JSON.
        open, close: Texts around a region. Without `close` it ends behind its last call.
        item_open, item_close: Around each call of a region. `item_open` may open a region too.
        name_end: Behind the name. Missing: the name ends with the first character that no name has.
        name_pattern: What in the place of the name is the name (a group `name`), and perhaps the id of the call (`id`).
        id_mark: Behind the name, before an id.
        head_end: Of "xml": behind the name and its attributes.
        parameter: Of "xml": texts before the key, behind it, before the value (if other text may stand between) and behind it.
        typed: Of "xml": how a parameter's attributes say that its value is a text. Without it the tool's schema says so.
        strips_lines: Of "xml": a line end before and behind a value is no part of it.
        missing_ends: Of "xml": what ends a value without an end of its own; it is not read.
        escaped_keys: Of "xml": keys are written as in HTML.
        is_bare: A call may begin an answer without `open`.
        separators: Between calls, beside white space.
        id_length: Of the ids of calls, where the chat template accepts no other.
        written: How the family writes calls, in several ways of which the first one that fits the tokenizer counts. None: it is
            read, and cannot be constrained.
    """

    content: Literal["json", "xml", "python"]
    open: tuple[str, ...]
    close: tuple[str, ...] = ()
    item_open: tuple[str, ...] = ()
    item_close: tuple[str, ...] = ()
    name_end: tuple[str, ...] = ()
    name_pattern: str = r"(?P<name>.+)"
    id_mark: str = ""
    head_end: str = ""
    parameter: tuple[str, ...] = ()
    typed: str = ""
    strips_lines: bool = False
    missing_ends: tuple[str, ...] = ()
    escaped_keys: bool = False
    is_bare: bool = False
    separators: str = ""
    notation: Notation = JSON
    id_length: int | None = None
    written: tuple[WrittenCalls, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CallFormat:
        """The format of a template's field `tool_calls`. Raises TemplateInvalid."""
        arguments: dict[str, Any] = {**given, **given.get("content_args", {})}
        arguments.pop("content_args", None)
        arguments["notation"] = {"json": JSON, "gemma": GEMMA}[arguments.get("notation", "json")]
        for name in ("open", "close", "item_open", "item_close", "name_end", "parameter", "missing_ends"):
            arguments[name] = _texts(arguments.get(name, []))
        try:
            arguments["written"] = tuple(WrittenCalls(**one) for one in arguments.get("written", ()))
            return cls(**arguments)
        except TypeError as error:
            raise TemplateInvalid(f"tool_calls: {error}") from error

    def written_with(self, special_tokens: Collection[str]) -> WrittenCalls | None:
        """How calls are written by a model with these special tokens; None if that is not known."""
        return next((one for one in self.written if not one.needs or one.needs in special_tokens), None)

    @property
    def opens(self) -> tuple[str, ...]:
        """What may open a region."""
        return (*self.open, *(text for text in self.item_open if text.startswith(("<", "["))))

    @property
    def marks(self) -> tuple[str, ...]:
        """All fixed texts, of which some may be special tokens."""
        ids = (self.id_mark,) if self.id_mark else ()
        return (*self.open, *self.close, *self.item_open, *self.item_close, *self.name_end, *ids, *self.parameter)


@dataclass(frozen=True)
class ResponseTemplate:
    """How a family writes an answer.

    Attributes:
        name: That of the file; of a tokenizer's own template "own".
        source: Where the format comes from.
        detect: Texts in a chat template that writes this format: all of one of these lists.
        reasoning_open, reasoning_close: Around reasoning.
        calls_end_reasoning: A call amid reasoning is a call.
        calls: None for a family without tool calls.
        header_open, header_close, header_end: Of harmony, where a message has a header: what opens the header, what closes it,
            and what ends the message.
        dropped: Texts around content that are no part of it.
        trims: White space beside reasoning and calls is the format's, and no content.
    """

    name: str
    source: str = ""
    detect: tuple[tuple[str, ...], ...] = ()
    reasoning_open: tuple[str, ...] = ()
    reasoning_close: tuple[str, ...] = ()
    calls_end_reasoning: bool = False
    calls: CallFormat | None = None
    header_open: tuple[str, ...] = ()
    header_close: tuple[str, ...] = ()
    header_end: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    trims: bool = True

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> ResponseTemplate:
        """The template that a mapping says. Raises TemplateInvalid."""
        fields = given.get("fields", {})
        if unknown := given.keys() - {"source", "detect", "fields", "header", "dropped", "space"}:
            raise TemplateInvalid(f"unknown keys {sorted(unknown)}")
        reasoning, header = fields.get("reasoning_content", {}), given.get("header", {})
        return cls(
            name=name,
            source=given.get("source", ""),
            detect=tuple(map(_texts, given.get("detect", ()))),
            reasoning_open=_texts(reasoning.get("open", [])),
            reasoning_close=_texts(reasoning.get("close", [])),
            calls_end_reasoning=reasoning.get("calls_end_it", False),
            calls=CallFormat.of(fields["tool_calls"]) if "tool_calls" in fields else None,
            **{f"header_{key}": _texts(value) for key, value in header.items()},
            dropped=_texts(given.get("dropped", [])),
            trims=given.get("space", "trim") == "trim",
        )

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """All fixed texts, of which some may be special tokens."""
        calls = () if self.calls is None else self.calls.marks
        header = (*self.header_open, *self.header_close, *self.header_end)
        return tuple(filter(None, (*self.reasoning_open, *self.reasoning_close, *calls, *header, *self.dropped)))

    def special_marks(self, special_tokens: Collection[str]) -> list[str]:
        """The special tokens that stand in the fixed texts."""
        return [token for token in special_tokens if any(token in mark for mark in self.marks)]

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so leaves the answer amid reasoning."""
        return prompt_end.rstrip().endswith(tuple(mark.rstrip() for mark in self.reasoning_open)) and bool(self.reasoning_open)


PLAIN_TEMPLATE = ResponseTemplate(PLAIN)
# A text that is constrained to a JSON array of calls
REQUIRED_TEMPLATE = ResponseTemplate("required", calls=CallFormat("json", (), is_bare=True))


@lru_cache(maxsize=1)
def templates() -> dict[str, ResponseTemplate]:
    """All templates by name, without `PLAIN`."""
    from ..common.yaml_file import read_yaml

    found = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        found[file.stem] = ResponseTemplate.of(file.stem, read_yaml(file)[1])
    return found


def names() -> tuple[str, ...]:
    """The names of all formats."""
    return (*sorted(file.stem for file in FOLDER.glob("*.yaml")), PLAIN)


def template_named(name: str) -> ResponseTemplate:
    """The template of a name. Raises TemplateInvalid."""
    if name == PLAIN:
        return PLAIN_TEMPLATE
    if name not in templates():
        raise TemplateInvalid(f"there is no response format {name!r:.80}: it is one of {', '.join(names())}")
    return templates()[name]


@lru_cache(maxsize=32)
def choose_template(chat_template: str | None, own: str = "") -> ResponseTemplate:
    """The template that a tokenizer brings, else that of what its chat template writes, else plain text.

    Of several with their texts in a chat template, the one with the most.

    Args:
        own: The tokenizer's `response_template` as JSON; "" without one.
    """
    if own:
        try:
            found = _of_tokenizer(json.loads(own))
        except (AttributeError, TypeError, TemplateInvalid) as error:
            log.warning("the tokenizer's response template cannot be followed: %s", error)
            found = None
        if found := found or _detected(own.replace("\\", "")):  # of patterns
            return found
    return _detected(chat_template or "") or PLAIN_TEMPLATE


def _detected(text: str) -> ResponseTemplate | None:
    sizes = {
        template.name: max(sum(map(len, texts)) for texts in template.detect if all(each in text for each in texts))
        for template in templates().values()
        if any(all(each in text for each in texts) for texts in template.detect)
    }
    return templates()[max(sizes, key=sizes.__getitem__)] if sizes else None


def _of_tokenizer(own: Mapping[str, Any]) -> ResponseTemplate | None:
    """A template of transformers with fixed texts around its fields and calls in JSON; None for another one."""
    fields = own.get("fields")
    found: dict[str, Any] = {}
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        opens, closes = field.get("open", _fixed(field.get("open_pattern", "(?:)"))), field.get("close", [])
        if name in _REASONING and opens and closes and field.get("content", "text") == "text":
            found["reasoning_content"] = {"open": opens, "close": closes}
        elif name == "tool_calls":
            is_object = field.get("content") == "json" and not field.get("content_args")
            if not opens or not is_object or field.get("transform", {}).get("function") != "{content}":
                return None
            found["tool_calls"] = {"content": "json", "open": opens, "close": closes}
    return ResponseTemplate.of("own", {"fields": found}) if found else None


def _fixed(pattern: str) -> str:
    """The text that a pattern matches, beside white space before it; "" for a pattern of several texts."""
    pattern = pattern.removeprefix(r"\s*")
    return "" if re.search(r"(?<!\\)[.^$*+?{}\[\]|()]|\\\w", pattern) else re.sub(r"\\(\W)", r"\1", pattern)

"""Grammars of llguidance for tool calls in the format of a model family: arguments match their schemas.

docs/decisions/0072-calls-or-a-form.md says how an answer with a form of its own stands beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

from ..api.json_schemas import json_options, readable
from ..api.sampling_params import LONGEST_CONSTRAINT
from .response_parser import types_of
from .response_templates import ResponseTemplate

Beginning: TypeAlias = Literal["none", "some", "begun"]

_HEAD = "%llguidance {}\n"
_TEXT = "/(.|\\n)*/"
_LINE_END = "/\\n{0,2}/"
# As the chat templates of all families write JSON
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLACE = re.compile("(NAME|ARGUMENTS|PARAMETERS|INDEX|KEY|VALUE|TYPED)")
_KEY = re.compile(r"[\w.$-]+")
_ANNOTATIONS = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "nullable"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", *_ANNOTATIONS}
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef)": "(?!#/\$defs/|#/definitions/)')

# Of what is compiled here, before the engine does, to see whether a schema can be held: work, characters and references
_FUEL, _LONGEST_CHAIN, _MOST_REFERENCES = 8_000, 8_192, 4
_Given = TypeVar("_Given")


class CannotConstrain(ValueError):
    """Calls cannot be constrained in a family's format; the message says why."""


class CallGrammar:
    """Grammars for calls of some functions.

    Args:
        functions: Their parameters by name, each the schema of an object.
        special_ids: The ids of the special tokens, by text. They are no text to a grammar.
        lenient: Names of functions of which the arguments are held to what can be held, and to no more.

    Raises CannotConstrain where the format cannot be constrained, and for parameters that it cannot hold to.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        functions: Mapping[str, Any],
        special_ids: Mapping[str, int],
        lenient: Collection[str] = (),
    ) -> None:
        written = None if template.calls is None else template.calls.written_with(special_ids)
        if written is None:
            raise CannotConstrain(f"the format {template.name} cannot be constrained")
        self._template = template
        self._written = written
        self._ids = special_ids
        self._special = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._length = 0  # of the rules
        self._is_lenient = False  # of the function whose rules are added
        self._lenient = lenient
        self._calls = [self._call(number, *one) for number, one in enumerate(functions.items())]

    def required(self, is_single: bool, reasoning: Beginning = "some", answer: Mapping[str, Any] | None = None) -> str:
        """Some calls or an answer of a given form, perhaps behind reasoning, and nothing else.

        Args:
            is_single: One call at most.
            reasoning: "begun" where the prompt ends amid it, so the text begins there.
            answer: The form, as an argument of `SamplingParams`. None: there have to be calls.

        Raises CannotConstrain if the answer has a form and calls begin without a mark: they could not be told from it.
        """
        written = self._written
        more = "" if is_single else f"({self._terms(written.between)} call)*"
        rules = [f"calls: {self._terms(written.begin)} call {more} {self._terms(written.end)}", self._any_call("")]
        before, body = "", "calls"
        if answer is not None:
            self._mark()
            rules.append(f"answer: {_form(answer)}")
            body = "(calls | answer)"
        if self._template.reasoning_open and reasoning != "none":
            opener, closer = self._template.reasoning_open[0], self._template.reasoning_close[0]
            behind = f"{self._until('reasoning', closer, rules)} {_LINE_END}"
            before = behind if reasoning == "begun" else f"({self._terms(opener)} {behind})?"
        return self._joined(f"start: {before} {body}", *rules)

    def automatic(self) -> str:
        """Any text, in which what begins as a call is one. Raises CannotConstrain if calls begin without a mark."""
        written, mark = self._written, self._mark()
        if written.begin:
            more = f"({self._terms(written.between)} call)*"
            body = f"{self._terms(written.begin.removeprefix(mark))} call {more} {self._terms(written.end)}"
            rules = [self._any_call("")]
        else:
            body, rules = "call", [self._any_call(mark)]
        if mark in self._ids:
            item = f"TEXT <[{self._ids[mark]}]> {body}"
        else:
            rules.append(f"mark[lazy]: TEXT {json.dumps(mark, ensure_ascii=False)}")
            item = f"mark {body}"
        marks = (*self._template.reasoning_open, *self._template.reasoning_close, *self._template.dropped)
        others = [f"TEXT <[{self._ids[one]}]>" for one in marks if one in self._ids]
        return self._joined(f"start: ({' | '.join([item, *others])})* tail", "tail: TEXT", f"TEXT: {_TEXT}", *rules)

    def _mark(self) -> str:
        """What calls begin with. Raises CannotConstrain if that is no mark."""
        form, beginning = self._template.calls, self._written.begin or self._written.call
        mark = next((mark for mark in (() if form is None else form.opens) if beginning.startswith(mark)), None)
        if mark is None:
            raise CannotConstrain(f"calls in the format {self._template.name} begin without a mark")
        return mark

    def _joined(self, *rules: str) -> str:
        grammar = _HEAD + "\n".join([*rules, *self._rules]) + "\n"
        _check_length(len(grammar))
        return grammar

    def _add(self, rule: str) -> None:
        """Add a rule. Raises CannotConstrain as soon as all are too long: each parameter may repeat what they share."""
        self._rules.append(rule)
        self._length += len(rule)
        _check_length(self._length)

    def _any_call(self, mark: str) -> str:
        """The rule of a call of any function, without the `mark` at its beginning."""
        return "call: " + " | ".join(self._terms(head.removeprefix(mark)) + f" {tail}" for head, tail in self._calls)

    def _call(self, number: int, name: str, schema: Mapping[str, Any]) -> tuple[str, str]:
        """The text at the beginning of a call, and the terms that follow. Adds their rules."""
        parts, self._is_lenient = _PLACE.split(self._written.call), name in self._lenient
        head, at = parts[0], 1
        while parts[at] == "NAME":
            head, at = head + name + parts[at + 1], at + 2
        terms = []
        for place, text in zip(parts[at::2], parts[at + 1 :: 2], strict=True):
            if place == "ARGUMENTS":
                self._add(f"arguments_{number}: {self._json(schema, {'type': 'object'})}")
            elif place == "PARAMETERS":
                self._add(f"arguments_{number}: {self._parameters(number, schema)}")
            terms += ["/[0-9]+/" if place == "INDEX" else f"arguments_{number}", self._terms(text)]
        return head, " ".join(terms)

    def _parameters(self, number: int, schema: Mapping[str, Any]) -> str:
        """The parameters of a function in order, each at most once. Raises CannotConstrain."""
        others = schema.keys() - _OF_OBJECTS
        if others and not self._is_lenient:
            raise CannotConstrain(f"parameters in the format {self._template.name} cannot hold {sorted(others)[0]!r}")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if self._is_lenient:
            properties, required = (
                _of_type(properties, {}),
                [key for key in _of_type(required, list[Any]()) if isinstance(key, str)],
            )
        are_names = isinstance(required, list) and all(isinstance(key, str) for key in required)
        if not isinstance(properties, Mapping) or not are_names:
            raise CannotConstrain("`properties` or `required` of a tool's parameters are malformed")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        named = dict(properties) | {key: True for key in required if key not in properties}
        terms = []
        for place, (key, value) in enumerate(named.items()):
            if self._is_lenient and key not in required and not _KEY.fullmatch(key):
                continue
            rule = f"parameter_{number}_{place}"
            self._add(f"{rule}: {self._parameter(f'value_{number}_{place}', key, value, shared)}")
            terms.append(rule if key in required else f"{rule}?")
        return " ".join(terms) or '""'

    def _parameter(self, rule: str, key: str, schema: Any, shared: Mapping[str, Any]) -> str:
        """The terms of a parameter. Raises CannotConstrain."""
        form, before_key = self._template.calls, self._written.parameter
        assert form is not None
        if not _KEY.fullmatch(key):
            raise CannotConstrain(f"a parameter in the format {self._template.name} cannot be named {key!r:.80}")
        is_text = "string" in types_of(schema)
        texts = _texts(schema) if is_text else None
        if texts is None and is_text and self._is_lenient:
            texts = []
        as_json = not is_text or (texts is None and bool(form.typed))  # where attributes tell texts from JSON
        before, after = before_key.split("VALUE")  # first: a key may be named as a place is
        places = {"KEY": key, "TYPED": "false" if as_json else "true"}
        before = _PLACE.sub(lambda found: places[found[0]], before)
        if as_json:
            if not isinstance(schema, Mapping | bool) and not self._is_lenient:
                raise CannotConstrain("the schema of a tool's parameter is malformed")
            whole = dict(shared) | (dict(schema) if isinstance(schema, Mapping) else {})
            if _REFERENCE.search(json.dumps(whole)):
                if not self._is_lenient:
                    raise CannotConstrain("a reference in a tool's parameters leads out of a parameter")
                whole = {}
            return f"{self._terms(before)} {self._json(whole, {})} {self._terms(after)}"
        if texts is None:
            raise CannotConstrain(f"a text in the format {self._template.name} cannot hold to a pattern, a format or a length")
        if texts:
            edge = "/\\n?/" if form.strips_lines else ""  # more would be the text's
            some = f"{edge} ({' | '.join(map(self._terms, texts))}) {edge}"
            return f"{self._terms(before.rstrip())} {some} {self._terms(after.lstrip())}"
        end = form.parameter[3]  # line ends before it are the text's, until they are read
        return f"{self._terms(before.rstrip())} {self._until(rule, end, self._rules)} {self._terms(after.partition(end)[2])}"

    def _json(self, schema: Mapping[str, Any], least: Mapping[str, Any]) -> str:
        """The term of a value. `least`: what a lenient function is held to where its schema cannot be held."""
        if not self._is_lenient:
            return "%json " + json.dumps(readable(dict(schema)) | {"x-guidance": _JSON})
        options = _JSON | {"lenient": True}
        try:
            term = "%json " + json.dumps(readable(dict(schema)) | {"x-guidance": options})
        except RecursionError:
            term = ""
        return term if term and _compiles(term) else "%json " + json.dumps(dict(least) | {"x-guidance": options})

    def _until(self, rule: str, end: str, rules: list[str]) -> str:
        """The term of any text up to `end`, and that. Adds its rule."""
        if self._special.search(end):
            rules.append(f"{rule}: {_TEXT}")
            return f"{rule} {self._terms(end)}"
        rules.append(f"{rule}[suffix={json.dumps(end, ensure_ascii=False)}]: {_TEXT}")
        return rule

    def _terms(self, text: str) -> str:
        """A text as terms: special tokens by their ids, and line ends that may be missing, as not all versions write them."""
        return " ".join(self._each_term(text))

    def _each_term(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._special.finditer(text):
            yield from _plain(text[at : found.start()])
            yield f"<[{self._ids[found[0]]}]>"
            at = found.end()
        yield from _plain(text[at:])


def _of_type(value: Any, other: _Given) -> _Given:
    """The value if its type is that of `other`, else that."""
    return value if isinstance(value, type(other)) else other


@lru_cache(maxsize=64)
def _compiles(term: str) -> bool:
    """Whether llguidance takes a term. Chains of references with which its recursion may overflow the stack are not tried."""
    if len(term) > LONGEST_CONSTRAINT or (len(term) > _LONGEST_CHAIN and term.count('ef": "') > _MOST_REFERENCES):
        return False
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:  # the engine will tell
        return True
    limits = LLParserLimits(initial_lexer_fuel=_FUEL, step_max_items=_FUEL)
    matcher = LLMatcher(_bytes(), f"{_HEAD}start: {term}", log_level=0, limits=limits)
    return not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error()


@lru_cache(maxsize=1)
def _bytes() -> Any:
    """llguidance's tokenizer of bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _check_length(length: int) -> None:
    """Raise CannotConstrain for a grammar that is too long."""
    if length > LONGEST_CONSTRAINT:
        raise CannotConstrain(f"the schemas of the tools are longer than the {LONGEST_CONSTRAINT:,} characters of a grammar")


def _plain(text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n")):
        if number:
            yield _LINE_END
        if line:
            yield json.dumps(line, ensure_ascii=False)


def _form(answer: Mapping[str, Any]) -> str:
    """The term of an answer with this constraint. Raises CannotConstrain."""
    ((kind, given),) = answer.items()
    if kind == "regex":
        line = re.sub(r"\\.|[/\n]", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), given)
        return f"/{line}/"
    if kind == "grammar":
        return f"%lark {{\n{given}\n}}"
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        options = json_options(schema)
        return "%json " + json.dumps(readable(schema if options is None else schema | {"x-guidance": options}))
    except (ValueError, RecursionError) as error:
        raise CannotConstrain("the schema of the answer is no JSON, or too deep") from error


def _texts(schema: Any) -> list[str] | None:
    """The texts that a schema allows; none: any. None: it demands more of them than a format of plain text can hold to."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and schema.keys() <= {"type", "const", "enum", *_ANNOTATIONS}:
        texts = [value for value in values if isinstance(value, str)]
        return texts if texts and all("\n" not in text and text.strip() == text for text in texts) else None
    for union in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(union), list) and schema.keys() <= {union, *_ANNOTATIONS}:
            found = [_texts(option) for option in options if "string" in types_of(option)]
            if [] in found:
                return []
            return None if None in found else [text for texts in found for text in texts or ()]
    return [] if schema.keys() <= {"type", *_ANNOTATIONS} else None

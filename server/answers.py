"""The answers to a chat: content, reasoning and tool calls in one form, of which each API makes its own."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from .call_grammar import CallGrammar, CannotConstrain
from .messages import ReasoningGrammar
from .response_parser import Part, ResponseParser
from .response_templates import PLAIN_TEMPLATE, REQUIRED_TEMPLATE, ResponseTemplate
from .tool_choice import ToolChoice

log = logging.getLogger(__name__)

CONSTRAINTS = ("response_format", "structured_outputs")


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Part] = field(default_factory=list)


class AnswerReader:
    """Reads the answers to one request.

    Args:
        fields: Those of `ToolChoice`, and `skip_special_tokens`, `include_reasoning` and `enable_thinking`, as far as they are
            given. `constraint` is the form of the answer as an argument of `SamplingParams`; {} if it has none.
        template: The model's.
        response_id: The ids of the calls are made of it, so that they are the same whenever the output is read.
        special_tokens: Of the tokenizer. Those in the fixed texts of the template are kept for the parser, and are no content.
        added_tokens: The ids of the tokenizer's added tokens.
        constrains: Calls that have to be, those of strict functions, and those beside an answer with a form of its own are
            constrained in the format of the model. Where that cannot be, the first are JSON, the second stay free, and the
            third are not: the text is an answer.

    Attributes:
        prompt_end: The end of the prompt's text. Set it before an answer is read.

    Raises ToolsInvalid for inconsistent fields.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        template: ResponseTemplate = PLAIN_TEMPLATE,
        response_id: str = "",
        special_tokens: Collection[str] = (),
        added_tokens: Mapping[str, int] | None = None,
        constrains: bool = False,
    ) -> None:
        self.prompt_end = ""
        self._choice = choice = ToolChoice(fields)
        self._response_id = response_id
        self._grammar = self._reasoning_grammar = ""
        self._answer: Mapping[str, Any] = fields.get("constraint") or {}
        asks = choice.schemas is not None and bool(self._answer) if choice.has_form else choice.must_call or choice.is_strict
        if constrains and asks:
            added = added_tokens or {}
            special_ids = {token: added[token] for token in special_tokens if token in added}
            self._constrain(template, special_ids, fields.get("enable_thinking") is not False)
        self._named = None if self._grammar else choice.named
        if (choice.must_call or choice.has_form) and not self._grammar:
            template = REQUIRED_TEMPLATE if choice.is_required else PLAIN_TEMPLATE
        elif choice.must_call or choice.has_form:  # the grammar holds calls to their schemas behind reasoning alone
            template = replace(template, calls_end_reasoning=False)
        self._template = template
        skips = fields.get("skip_special_tokens") is not False
        self._hidden = template.special_marks(special_tokens) if skips else []
        self._shows_reasoning = fields.get("include_reasoning") is not False
        self._parsers: dict[int, ResponseParser] = {}  # by choice
        self._num_calls: dict[int, int] = {}
        self._reasoning = _ReasoningTokens(template, added_tokens or {})

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self._template is PLAIN_TEMPLATE and self._named is None

    def params(self) -> dict[str, Any]:
        """Arguments of `SamplingParams`: the constraint, and the special tokens that the parser reads. Raises ToolsInvalid."""
        constraint = dict.fromkeys(self._answer) | {"grammar": self._grammar}  # instead of the request's own
        if not self._grammar:
            constraint = self._choice.params()
        return constraint | ({"kept_special_tokens": self._hidden} if self._hidden else {})

    def reasoning_grammar(self) -> ReasoningGrammar | None:
        """What replaces the grammar of `params` where the prompt opens reasoning; None if nothing does."""
        if not self._reasoning_grammar:
            return None
        return ReasoningGrammar(self._template.reasoning_open, self._reasoning_grammar)

    def template(self) -> dict[str, Any]:
        """Options of the chat template."""
        return self._choice.template()

    def read(self, index: int, text: str, is_cut: bool = False) -> Answer:
        """The whole text of a choice. `is_cut`: it ended at the limit of its tokens."""
        answer = Answer()
        for part in self.stream(index, text, ends=True, is_cut=is_cut):
            if part.kind == "call":
                answer.calls.append(part)
            elif part.kind == "content":
                answer.content += part.text
            else:
                answer.reasoning += part.text
        return answer

    def stream(self, index: int, text: str, ends: bool, is_cut: bool = False) -> list[Part]:
        """What new text of a choice adds: at most one part of content or reasoning between two of others."""
        if index not in self._parsers:
            self._parsers[index] = self._parser()
        parser = self._parsers[index]
        found = parser.feed(text)
        if ends:
            found += parser.finish(is_cut)
            self._reasoning.messages[index] = parser.message_channels
            del self._parsers[index]
        return list(self._parts(index, found))

    def has_calls(self, index: int) -> bool:
        """Whether a choice has calls so far."""
        return bool(self._num_calls.get(index))

    def count_tokens(self, index: int, token_ids: Sequence[int]) -> None:
        """Count the tokens of reasoning among more tokens of a choice."""
        self._reasoning.add(index, token_ids, self.prompt_end)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning that were counted, with its marks; None where these are no single tokens.

        Where messages have headers, those that are reasoning are known once the text of a choice was read to its end.
        """
        return self._reasoning.count

    def _constrain(self, template: ResponseTemplate, special_ids: Mapping[str, int], may_reason: bool) -> None:
        """Make the grammars of calls in the model's own format, if there are some."""
        choice = self._choice
        try:
            lenient = choice.not_strict if choice.has_form else ()
            grammar = CallGrammar(template, choice.parameters(lenient), special_ids, lenient)
            if not choice.must_call and not choice.has_form:
                self._grammar = grammar.automatic()
                return
            answer = None if choice.must_call else self._answer
            self._grammar = grammar.required(choice.is_single, "some" if may_reason else "none", answer)
            if template.reasoning_open:
                self._reasoning_grammar = grammar.required(choice.is_single, "begun", answer)
        except CannotConstrain as error:
            instead = "strict functions are not held to"
            if choice.has_form:
                instead = "with a form of its own the answer is never a call"
            _tell(f"{error}: {'calls that have to be are JSON' if choice.must_call else instead}")

    def _parser(self) -> ResponseParser:
        is_either = self._choice.has_form
        return ResponseParser(self._template, self._choice.schemas, self._hidden, self.prompt_end, self._named, is_either)

    def _parts(self, index: int, parts: list[Part]) -> Iterable[Part]:
        for kind, group in groupby(parts, key=lambda part: part.kind):
            if kind == "call":
                yield from (self._call(index, part) for part in group)
            elif (kind == "content" and not self._choice.is_required) or (kind == "reasoning" and self._shows_reasoning):
                yield Part(kind, "".join(part.text for part in group))

    def _call(self, index: int, part: Part) -> Part:
        number = self._num_calls[index] = self._num_calls.get(index, 0) + 1
        digest = hashlib.sha256(f"{self._response_id}/{index}/{number - 1}".encode()).hexdigest()
        size = None if self._template.calls is None else self._template.calls.id_length
        call_id = part.call_id or (f"call_{digest[:24]}" if size is None else digest[:size])
        return part._replace(call_id=call_id, number=number - 1)


class _ReasoningTokens:
    """Counts the tokens of reasoning in the choices of a request.

    Where messages have headers (harmony), the tokens of each message are counted, and `messages` says which ones are reasoning.

    Attributes:
        messages: The channels of the messages in the text of a choice, as the parser finds them.
    """

    def __init__(self, template: ResponseTemplate, added_tokens: Mapping[str, int]) -> None:
        def ids(*marks: str) -> set[int]:
            return {added_tokens[mark.strip()] for mark in marks if mark.strip() in added_tokens}

        self.messages: dict[int, list[str]] = {}
        self._template = template
        self._opens, self._ends = ids(*template.reasoning_open), ids(*template.reasoning_close)
        self._headers, self._bodies = ids(*template.header_open), ids(*template.header_close)
        self._starts, self._message_ends = ids(*template.header_open[:1]), ids(*template.header_end)
        self._is_amid: dict[int, bool] = {}  # whether the tokens of a choice end amid reasoning
        self._count = 0
        self._sizes: dict[int, list[int]] = {}  # tokens of each message of a choice
        self._places: dict[int, tuple[str, int]] = {}  # where the tokens of a choice end, and those of its header so far

    @property
    def count(self) -> int | None:
        """The tokens of reasoning, with its marks; None where these are no single tokens."""
        if not self._bodies:
            return self._count if self._ends else None
        found = 0
        for index, channels in self.messages.items():
            sizes = self._sizes.get(index, ())
            found += sum(size for size, channel in zip(sizes, channels, strict=False) if channel == "analysis")
        return found

    def add(self, index: int, token_ids: Sequence[int], prompt_end: str) -> None:
        """Count more tokens of a choice."""
        if self._bodies:
            self._add_to_messages(index, token_ids)
        elif self._ends:
            amid = self._is_amid.get(index, self._template.opens_reasoning(prompt_end))
            for token_id in token_ids:
                amid = amid or token_id in self._opens
                self._count += amid
                amid = amid and token_id not in self._ends
            self._is_amid[index] = amid

    def _add_to_messages(self, index: int, token_ids: Sequence[int]) -> None:
        sizes = self._sizes.setdefault(index, [])
        place, num_header = self._places.get(index, ("", 0))
        for token_id in token_ids:
            if token_id in (self._starts if place == "body" else self._headers) and place != "header":
                place, num_header = "header", 0
            if place == "body":
                sizes[-1] += 1
            num_header += place == "header"
            if token_id in self._message_ends:
                place = ""
            elif place == "header" and token_id in self._bodies:
                place = "body"
                sizes.append(num_header)
        self._places[index] = place, num_header


@lru_cache(maxsize=64)
def _tell(message: str) -> None:
    """Log `message` the first time."""
    log.warning(message)


def thinking_options(enable_thinking: bool | None, reasoning_effort: str | None) -> dict[str, Any]:
    """The options of chat templates for reasoning. "none" is an effort without any."""
    options: dict[str, Any] = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    if enable_thinking is None and reasoning_effort == "none":
        enable_thinking = False
    return options if enable_thinking is None else options | {"enable_thinking": enable_thinking, "thinking": enable_thinking}


def openai_call(call: Part) -> dict[str, Any]:
    """OpenAI's form of a call in a message."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


def openai_message(answer: Answer) -> dict[str, Any]:
    """OpenAI's form of an answer. Reasoning stands under both names that clients read."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    return message | ({"tool_calls": [openai_call(call) for call in answer.calls]} if answer.calls else {})


def openai_delta(part: Part) -> dict[str, Any]:
    """OpenAI's form of a part of an answer that is streamed."""
    if part.kind == "call":
        return {"tool_calls": [{"index": part.number, **openai_call(part)}]}
    return {"content": part.text} if part.kind == "content" else {"reasoning_content": part.text, "reasoning": part.text}

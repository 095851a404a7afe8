"""The input of `pagetide run`: lines of text, JSON objects or OpenAI batch requests, read one at a time."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from ..api.sampling_params import ALIASES, SamplingParams
from ..engine.errors import ConfigError
from ..server.answers import thinking_options
from ..server.fields import Role, ignored_fields
from ..server.tool_choice import ToolChoice
from .config import STDIN, InputOptions

Format = Literal["text", "jsonl", "openai"]
InputKind = Literal["plain", "completion", "chat"]

LONGEST_LINE_BYTES = 32 << 20
_BOM = b"\xef\xbb\xbf"
_SUFFIXES: dict[str, Format] = {".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_KINDS_OF_URL: dict[str, InputKind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name not in ("logits_processors", "kept_special_tokens"))
_RENAMED = {**ALIASES, "max_completion_tokens": "max_new_tokens"}
_OTHER = ("top_logprobs", "response_format", "structured_outputs")
# Fields that change no token with these values. `model` is ignored in favour of the run's.
_IGNORED = ("model", "stream_options", "priority", "request_id", "cache_salt")
_ONLY = {
    "stream": False, "echo": False, "parallel_tool_calls": True, "modalities": ["text"], "tool_choice": "none",
    "tools": [], "use_beam_search": False, "return_token_ids": False, "suffix": "",
}  # fmt: skip


class Summary(NamedTuple):
    """The results of one pass over the whole input."""

    sha256: str
    num_lines: int  # non-blank lines
    format: Format


@dataclass(frozen=True, slots=True)
class InputRequest:
    """One line as a request, or `error`, the reason why it is invalid.

    The prompt is a text, token ids, or `messages` for the chat template, with the fields of their `tools` (`ToolChoice`).
    `sampling` holds the fields of SamplingParams that the line itself sets, checked; `id` is copied to the record. A line that
    `scores_only` asks for no tokens: one is generated, and left out of the record.
    """

    line: int  # from 1
    kind: InputKind
    id: str | int | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Any] | None = None
    scores_only: bool = False
    ignored: tuple[str, ...] = ()  # fields of other servers that change nothing here
    error: str | None = None


class InvalidLine(ValueError):
    """A line is no valid request; the message says why."""


class InputFile:
    """The open input file. Standard input is first copied to a temporary file, so that it can be read twice.

    Raises ConfigError if the format is unknown, OSError if the file cannot be opened.
    """

    def __init__(self, options: InputOptions) -> None:
        of_name = _SUFFIXES.get(Path(options.path).suffix.lower())
        form: Any = of_name if options.format == "auto" else options.format
        if form is None and options.path == STDIN:
            raise ConfigError(
                "the format of standard input is unknown: add --input-format text, jsonl or openai "
                "(`input: {path: '-', format: text}` in the file)"
            )
        if form is None:
            _opened(Path(options.path)).close()  # a name of no file needs no other name
            raise ConfigError(
                f"the name of the input {options.path} does not tell its format: name it .txt or .jsonl, or set "
                "`format: text`, jsonl or openai (--input-format)"
            )
        self._format: Format = form
        self._may_be_batch = options.format == "auto" and form == "jsonl"
        self._file = _copy_of_standard_input() if options.path == STDIN else _opened(Path(options.path))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def survey(self) -> Summary:
        """Read the whole input once. Without a given format, JSON lines are OpenAI's if the first object has a body."""
        looking, form = self._may_be_batch, self._format
        num_lines, digest = 0, hashlib.sha256()
        for _, raw in self.lines(digest):
            num_lines += 1
            if looking and (first := _object_or_none(raw)) is not None:
                form, looking = "openai" if "body" in first else "jsonl", False
        return Summary(digest.hexdigest(), num_lines, form)

    def lines(self, digest: Any) -> Iterator[tuple[int, bytes | None]]:
        """Yield the non-blank lines with their numbers from 1, without line ends; None for a line that is too long.

        `digest` is updated with every byte read, including blank lines.
        """
        self._file.seek(0)
        number = 0
        while raw := self._file.readline(LONGEST_LINE_BYTES):
            number += 1
            digest.update(raw)
            part, too_long = raw, False
            while len(part) == LONGEST_LINE_BYTES and not part.endswith(b"\n"):
                part = self._file.readline(LONGEST_LINE_BYTES)
                digest.update(part)
                too_long = too_long or part != b""
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if too_long:
                yield number, None
            elif raw.strip():
                yield number, raw.removesuffix(b"\n").removesuffix(b"\r")


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


def _copy_of_standard_input() -> BinaryIO:
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # it is the caller's
    shutil.copyfileobj(sys.stdin.buffer, copy)
    return copy


def read_line(number: int, raw: bytes | None, form: Format) -> InputRequest:
    """Parse a line to a request. Raises nothing: an invalid line gets an `error`."""
    if form == "text":
        return _of_text(number, raw)
    content: dict[str, Any] = {}
    try:
        content = _object(raw)
        return _of_batch(number, content) if form == "openai" else _of_object(number, content)
    except ValueError as error:
        key = content.get("custom_id") if form == "openai" or "id" not in content else content["id"]
        kind = _KINDS_OF_URL.get(str(content.get("url")), "completion") if form == "openai" else "plain"
        return InputRequest(number, kind, key if _is_id(key) else None, error=str(error))


def _of_text(number: int, raw: bytes | None) -> InputRequest:
    try:
        return InputRequest(number, "plain", prompt=_text(raw))
    except InvalidLine as error:
        return InputRequest(number, "plain", error=str(error))


def _text(raw: bytes | None) -> str:
    if raw is None:
        raise InvalidLine(f"it is longer than {LONGEST_LINE_BYTES >> 20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidLine(f"it is not UTF-8 text: {error}") from error


def _object(raw: bytes | None) -> dict[str, Any]:
    text = _text(raw)
    try:
        content = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise InvalidLine(f"it is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidLine(f"it must be a JSON object, got {type(content).__name__}")
    return content


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of `pairs`. Raises ValueError for a duplicate key. Linear in the number of pairs."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name!r:.80} appears twice")
        content[name] = value
    return content


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _object_or_none(raw: bytes | None) -> dict[str, Any] | None:
    try:
        return _object(raw)
    except InvalidLine:
        return None


def _is_id(key: object) -> bool:
    return isinstance(key, str | int) and not isinstance(key, bool)


def _of_object(number: int, content: dict[str, Any]) -> InputRequest:
    """Parse {"prompt" or "messages", "id" or "custom_id", sampling fields}."""
    if "body" in content and "url" in content:
        raise InvalidLine("it is an OpenAI batch request, but the input has another format: set `format: openai`")
    given = {key: value for key, value in content.items() if value is not None}
    names = [name for name in ("id", "custom_id") if name in given]
    key = given.pop(names[0]) if names else None
    if len(names) > 1:
        raise InvalidLine("it has an id and a custom_id: give one of them")
    if key is not None and not _is_id(key):
        raise InvalidLine(f"{names[0]} must be a text or an integer, got {key!r:.80}")
    if ("prompt" in given) == ("messages" in given):
        raise InvalidLine("it must have a prompt or messages, one of the two")
    return _asked(number, "plain", key, given)


def _of_batch(number: int, content: dict[str, Any]) -> InputRequest:
    """Parse {"custom_id", "method": "POST", "url", "body"}."""
    key, method, url, body = (content.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(key, str) or not key:
        raise InvalidLine(f"custom_id must be a text, got {key!r:.80}")
    if method not in (None, "POST"):
        raise InvalidLine(f"method must be POST, got {method!r:.80}")
    if not isinstance(url, str) or url not in _KINDS_OF_URL:
        raise InvalidLine(f"url must be {' or '.join(_KINDS_OF_URL)}, got {url!r:.80}")
    if not isinstance(body, dict):
        raise InvalidLine(f"body must be a JSON object, got {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None}
    wanted = "messages" if _KINDS_OF_URL[url] == "chat" else "prompt"
    if wanted not in given:
        raise InvalidLine(f"the body for {url} must have {wanted}")
    return _asked(number, _KINDS_OF_URL[url], key, given)


def _asked(number: int, kind: InputKind, key: str | int | None, given: dict[str, Any]) -> InputRequest:
    if "messages" in given:
        messages = _messages(given.pop("messages"))
        options = given.pop("chat_template_kwargs", {})
        if not isinstance(options, dict):
            raise InvalidLine(f"chat_template_kwargs must be a JSON object, got {options!r:.80}")
        own = ("add_generation_prompt", "continue_final_message", "documents")
        options = options | {name: given.pop(name) for name in own if name in given}
        if options.get("continue_final_message"):
            options["add_generation_prompt"] = False
        options = thinking_options(given.pop("enable_thinking", None), given.pop("reasoning_effort", None)) | options
        tools = _tools(given)
        sampling, ignored = _sampling(given)
        return InputRequest(
            number, kind, key, messages=messages, template_options=options, sampling=sampling, tools=tools, ignored=ignored
        )
    prompt = _prompt(given.pop("prompt"))
    asks_none = [name for name in given if _RENAMED.get(name, name) == "max_new_tokens" and given[name] == 0]
    given |= dict.fromkeys(asks_none, 1)
    sampling, ignored = _sampling(given)
    return InputRequest(number, kind, key, prompt=prompt, sampling=sampling, scores_only=bool(asks_none), ignored=ignored)


def _prompt(prompt: object) -> str | list[int]:
    """A text or token ids; a list with a single prompt, which OpenAI's requests allow, is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return prompt
    if isinstance(prompt, list) and all(isinstance(i, str | list) for i in prompt):
        raise InvalidLine(f"it has {len(prompt)} prompts: give each a line of its own")
    raise InvalidLine(f"prompt must be a text or a list of token ids, got {prompt!r:.80}")


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidLine(f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r:.80}")
    if unknown := [role for message in messages if (role := message.get("role")) not in (None, *get_args(Role))]:
        raise InvalidLine(f"the role of a message must be one of {', '.join(get_args(Role))}, got {unknown[0]!r:.80}")
    return messages


def _tools(given: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of tools out of `given`. Others that say how an answer is read stay there too."""
    others = ("response_format", "structured_outputs", "skip_special_tokens")
    fields: dict[str, Any] = {name: given[name] for name in others if name in given}
    fields["include_reasoning"] = given.pop("include_reasoning", True)
    if not given.get("tools"):
        return fields
    tools, choice = given.pop("tools"), given.pop("tool_choice", None)
    if not isinstance(tools, list) or not all(_names_a_function(tool) for tool in tools):
        raise InvalidLine(f"tools must be a list of {{'type': 'function', 'function': {{'name': ...}}}}, got {tools!r:.80}")
    if choice not in (None, "none", "auto", "required") and not _names_a_function(choice):
        raise InvalidLine(
            f'tool_choice must be "none", "auto", "required" or {{"type": "function", "function": ...}}, got {choice!r:.80}'
        )
    fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": given.pop("parallel_tool_calls", None)}
    ToolChoice(fields).params()  # raises for contradictions
    return fields


def _names_a_function(value: object) -> bool:
    """Whether a value is a tool, or the choice of one."""
    function = value.get("function") if isinstance(value, dict) and value.get("type", "function") == "function" else None
    schema = function.get("parameters") if isinstance(function, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(schema, dict | None)


def _sampling(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The line's sampling fields, by pagetide's names or OpenAI's, and the names of those that are ignored.

    Raises ValueError for invalid ones.
    """
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in given.items():
        name = _RENAMED.get(key, key)
        if name in _SAMPLING:
            if name in found and found[name] != value:
                raise InvalidLine(f"{key} {value!r:.80} and another {name} of {found[name]!r:.80}: they mean the same")
            found[name] = value
        elif key in _ONLY and value != _ONLY[key]:
            raise InvalidLine(f"{key} must be left out here, got {value!r:.80}")
        elif key not in (*_IGNORED, *_ONLY, *_OTHER):
            if (without_effect := ignored_fields(key, value)) is None:
                known = (*_SAMPLING, *_RENAMED, *_OTHER, "prompt", "messages")
                near = difflib.get_close_matches(key[:80], known, n=1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise InvalidLine(f"unknown field {key!r:.80}{meant}")
            ignored += without_effect
    if isinstance(found.get("logprobs"), bool) or "top_logprobs" in given:
        found["logprobs"] = _chat_logprobs(found.get("logprobs"), given.get("top_logprobs", 0))
    if "response_format" in given:
        found |= _constraint(given["response_format"])
    if "structured_outputs" in given:
        found |= _structured(given["structured_outputs"])
    if isinstance(bias := found.get("logit_bias"), dict):
        found["logit_bias"] = {_token_id(token): value for token, value in bias.items()}
    SamplingParams(**found)  # validates the fields
    return found, tuple(ignored)


def _chat_logprobs(asked: object, top: object) -> object:
    """OpenAI's `logprobs` flag and `top_logprobs` as one number or None."""
    if not isinstance(asked, bool):
        raise InvalidLine(f"top_logprobs needs logprobs to be true, got {asked!r}")
    if top and not asked:
        raise InvalidLine("top_logprobs needs logprobs to be true, got False")
    return top if asked else None


def _constraint(response_format: object) -> dict[str, Any]:
    if isinstance(response_format, dict):
        kind = response_format.get("type")
        if kind == "text":
            return {}
        if kind == "json_object" and isinstance(schema := response_format.get("schema"), dict | None):
            return {"json_schema": schema or {"type": "object"}}
        inner = response_format.get("json_schema")
        if kind == "json_schema" and isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
            return {"json_schema": inner["schema"]}
    raise InvalidLine(
        "response_format must have the type text, json_object, or json_schema with {'json_schema': {'schema': ...}}; "
        f"got {response_format!r:.80}"
    )


def _structured(given: object) -> dict[str, Any]:
    """vLLM's `structured_outputs` as arguments of SamplingParams."""
    each: dict[str, Any] = {name: value for name, value in given.items() if value} if isinstance(given, dict) else {}
    match list(each.items()):
        case [("json", (dict() | str()) as schema)]:
            return {"json_schema": schema}
        case [(("regex" | "grammar") as name, str() as text)]:
            return {name: text}
        case [("choice", list() as choices)] if all(isinstance(choice, str) for choice in choices):
            return {"regex": "|".join(f"({re.escape(choice)})" for choice in choices)}
        case [("json_object", True)]:
            return {"json_schema": {"type": "object"}}
    raise InvalidLine(f"structured_outputs must have one of json, regex, choice, grammar, json_object, got {given!r:.80}")


def _token_id(text: str) -> int:
    """Parse a token id from a JSON object's key, which is a text."""
    if not text.isdecimal():
        raise InvalidLine(f"logit_bias must map token ids to numbers, got {text!r:.40}")
    return int(text)

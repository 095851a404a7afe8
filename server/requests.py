"""The bodies of requests: OpenAI's fields, vLLM's by the same names, and how they become sampling parameters."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from ..api.sampling_params import SamplingParams
from ..cache.retention import Retention
from .answers import thinking_options
from .errors import ApiError, invalid
from .fields import FieldRefused, Role, ignored_fields
from .keys import MOST_PRIORITY
from .retention_hints import KvHints, PromptCacheOptions, hint_of

MOST_DRAIN_S = 3600
MOST_N = 128  # continuations of a request
MOST_PROMPTS = 2048  # prompts of a request
MOST_SEQUENCES = 2048  # of all prompts of a request together
LONGEST_ID = 256  # characters of names and salts

_Number = TypeAdapter(float)


def _up_to_fault(given: Any) -> Any:
    """Of a mapping to numbers, only the first entry that is wrong, if one is; older versions of pydantic report every one."""
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        try:
            _Number.validate_python(value)
        except ValidationError:
            return {name: value}
    return given


# Of a list, the first fault is reported: thousands would take pydantic ten times as long as thousands that are right.
_FIRST = Field(fail_fast=True)
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _FIRST]
Texts = Annotated[list[str], _FIRST]
Objects = Annotated[list[dict[str, Any]], _FIRST]
Name = Annotated[str, Field(max_length=LONGEST_ID)]

# Names that differ between the API and `SamplingParams`, for its messages.
_API_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
}


class RequestBody(BaseModel):
    """A body with fields that are not known beside those that are."""

    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())

    def check_fields(self, ignores_unknown: bool) -> list[str]:
        """The fields of other servers that are ignored, for the log. Null is no value for a field of OpenAI's.

        Raises ApiError for an unknown field, unless those are ignored.
        """
        found: list[str] = []
        for name, value in (self.model_extra or {}).items():
            try:
                ignored = ignored_fields(name, value)
            except FieldRefused as error:
                if ignores_unknown:
                    continue
                raise invalid(str(error), name) from None
            found += ignored or ()
            if ignored is None and not ignores_unknown and not self._is_null_of_other_endpoint(name, value):
                near = difflib.get_close_matches(name[:200], type(self).model_fields, n=1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise invalid(f"unknown field {name!r:.200}{meant}", name[:200])
        return found

    def _is_null_of_other_endpoint(self, name: str, value: Any) -> bool:
        known = name in ChatRequest.model_fields or name in CompletionRequest.model_fields
        return value is None and isinstance(self, _Sampling) and known


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """OpenAI's `response_format.json_schema`."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: Name = "response"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`; `schema` beside `json_object` is llama.cpp's."""

    model_config = ConfigDict(populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one constraint, got {len(given)}")
        return self

    def constraint(self) -> dict[str, Any]:
        """The argument of `SamplingParams`."""
        if self.choice:
            return {"regex": "|".join(f"({re.escape(text)})" for text in self.choice)}
        if self.regex is not None:
            return {"regex": self.regex}
        if self.grammar is not None:
            return {"grammar": self.grammar}
        return {"json_schema": {"type": "object"} if self.json_ is None else self.json_}


class _Accepted(RequestBody):
    """OpenAI's fields without effect here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class _Extras(_Accepted):
    """vLLM's fields. None stands for the model's default."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    cache_salt: Name | None = None
    return_token_ids: bool = False
    request_id: Name | None = None
    use_beam_search: bool = False
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None
    kv_hints: KvHints | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    @property
    def retention(self) -> Retention | None:
        """How long the prompt is worth keeping, as the request hints. Raises ApiError."""
        try:
            return hint_of(self.prompt_cache_options, self.prompt_cache_retention, self.kv_hints)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, fault["loc"]))
            raise invalid(
                f"kv_hints: {place} of a kv.retain payload: {fault['msg'].removeprefix('Value error, ')}", "kv_hints"
            ) from None


class _Sampling(_Extras):
    """Fields of completions and chat completions. None stands for the model's default."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MOST_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_up_to_fault)] | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    def sampling(self, **others: Any) -> dict[str, Any]:
        """Arguments of `SamplingParams`: `others` are those of the endpoint. Raises ApiError."""
        given: dict[str, Any] = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0) if self.top_k >= -1 else self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _bias(self.logit_bias),
            "seed": self.seed,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids,
            "bad_words": self.bad_words or None,
            "skip_special_tokens": self.skip_special_tokens,
            "min_new_tokens": self.min_tokens,
            "prompt_logprobs": self.prompt_logprobs,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            **self.constraint(),
            **others,
        }
        if self.use_beam_search:
            given |= self._beams(given)
        params = {name: value for name, value in given.items() if value is not None} | {"ignore_eos": self.ignore_eos}
        checked(params)
        return params

    def _beams(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a beam search as wide as `n`. Raises ApiError for what the engine cannot do with beams."""
        for name in ("best_of", "stop", "logprobs", "prompt_logprobs"):
            if given.get(name) is not None and (self.n or 1) > 1:
                raise invalid(f"{name} cannot be given with use_beam_search: leave one of them out", name)
        # The most likely, unless asked to draw.
        return {"num_beams": self.n or 1, "temperature": self.temperature or 0.0}

    def constraint(self) -> dict[str, Any]:
        """The form of the answer as an argument of `SamplingParams`; {} without one. Raises ApiError."""
        form = self.response_format
        if self.structured_outputs is not None:
            if form is not None and form.type != "text":
                raise invalid("give either response_format or structured_outputs", "structured_outputs")
            return self.structured_outputs.constraint()
        if form is None or form.type == "text":
            return {}
        if form.type == "json_object":
            return {"json_schema": form.schema_ or {"type": "object"}}
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
        return {"json_schema": form.json_schema.schema_}


class CompletionRequest(_Sampling):
    """The body of `POST /v1/completions`."""

    prompt: str | TokenIds | Annotated[Texts | Annotated[list[TokenIds], _FIRST], Field(max_length=MOST_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    best_of: Annotated[int, Field(ge=1, le=MOST_N)] | None = None
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, given: Any) -> Any:
        return None if given is False else given

    def prompts(self) -> list[str | list[int]]:
        """One prompt, or several. Raises ApiError for none, and for too many sequences."""
        prompt: Any = self.prompt
        many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not many:
            raise invalid("no prompt was given: pass a text, token ids, or a list of them", "prompt")
        if (count := len(many) * self.num_sequences_each) > MOST_SEQUENCES:
            raise invalid(
                f"{len(many):,} prompts of {self.num_sequences_each} sequences each are {count:,} sequences, and a request may "
                f"have {MOST_SEQUENCES:,}: send several requests",
                "prompt",
            )
        return many

    @property
    def num_sequences_each(self) -> int:
        """Sequences that run for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def scores_prompt(self) -> bool:
        """Whether the echoed prompt comes with log-probabilities."""
        return self.echo and self.logprobs is not None

    def params(self) -> dict[str, Any]:
        """Arguments of `SamplingParams`. Raises ApiError."""
        if self.suffix:
            raise invalid("suffix is not supported: put the text that follows into the prompt", "suffix")
        most = self.max_tokens if self.max_tokens is not None else None
        others: dict[str, Any] = {
            "max_new_tokens": None if most is None else max(most, 1),  # 0: only the prompt is scored
            "best_of": self.best_of,
            "logprobs": self.logprobs,
            "add_special_tokens": self.add_special_tokens,
        }
        if self.scores_prompt and self.prompt_logprobs is None:
            others["prompt_logprobs"] = self.logprobs
        return self.sampling(**others)


class FunctionCall(BaseModel):
    """A call of a function by the model. `arguments` is an object, or its JSON text."""

    model_config = ConfigDict(extra="allow")
    name: str = ""
    arguments: str | dict[str, Any] | None = ""


class ToolCall(BaseModel):
    """A tool call in an assistant's message."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A message of a conversation; `engine.text.conversation` says what becomes of it."""

    model_config = ConfigDict(extra="allow")
    role: Role
    content: str | Objects | None = None
    tool_calls: Annotated[list[ToolCall], _FIRST] | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]  # Anthropic's limit; OpenAI's is 64
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """An entry of `tools`."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The name in a `tool_choice`."""

    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(BaseModel):
    """Those of the tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], _FIRST]


class AllowedChoice(BaseModel):
    """A `tool_choice` that allows some of the tools. The prompt shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(_Sampling):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), _FIRST]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], _FIRST] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None

    reasoning_effort: Name | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool = True

    # OpenAI's, without effect.
    verbosity: str | None = None
    modalities: Annotated[list[Literal["text"]], _FIRST] | None = None
    prediction: Any = None
    web_search_options: Any = None

    def params(self, **others: Any) -> dict[str, Any]:
        """Arguments of `SamplingParams`; `others` replace them. Raises ApiError."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        return self.sampling(
            **{"max_new_tokens": most, "logprobs": (self.top_logprobs or 0) if self.logprobs else None} | others
        )

    def template(self) -> dict[str, Any]:
        """Options of the chat template. Raises ApiError."""
        options = thinking_options(self.enable_thinking, self.reasoning_effort) | (self.chat_template_kwargs or {})
        if "chat_template" in options:
            raise invalid("a request cannot bring a chat template", "chat_template_kwargs")
        generation = self.add_generation_prompt and not self.continue_final_message
        options |= {"add_generation_prompt": generation, "continue_final_message": self.continue_final_message}
        if self.documents is not None:
            options["documents"] = self.documents
        return options


class ChatForm(RequestBody):
    """A body of another API's form, which is served as a chat. A field that has the name of a chat's means the same."""

    def chat_fields(self) -> dict[str, Any]:
        """The fields of the chat that differ from this body's own of the same names. Raises ApiError."""
        raise NotImplementedError

    def as_chat(self) -> ChatRequest:
        """The same request as a chat. Raises ApiError."""
        same = type(self).model_fields.keys() & ChatRequest.model_fields.keys()
        fields = {name: getattr(self, name) for name in same} | self.chat_fields()
        fields["messages"] = _alternating(fields["messages"])
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise from_validation(list(error.errors(include_url=False, include_input=False))) from None


_OF_SYSTEM = ("system", "developer")


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: one of the system, which is the first, and no two of the user in a row.

    Coding agents send several of both, and some of the system between others: these become the user's.
    """
    found: list[dict[str, Any]] = []
    joined: dict[str, Any] = {}  # the last message that was made of several
    for message in messages:
        before = found[-1] if found else {}
        role, last = message.get("role"), before.get("role")
        if role in _OF_SYSTEM and before and last not in _OF_SYSTEM:
            message, role = message | {"role": "user"}, "user"
        joins = role == last == "user" or (role in _OF_SYSTEM and last in _OF_SYSTEM)
        if joins and isinstance(before["content"], str | list) and isinstance(message.get("content"), str | list):
            if joined is not before:
                found[-1] = joined = before | {"content": list(_content_parts(before["content"]))}
            joined["content"] += _content_parts(message["content"])
        else:
            found.append(message)
    return found


def _content_parts(content: str | list[Any]) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def schema_format(schema: Any) -> dict[str, Any]:
    """The `response_format` that constrains a chat to a JSON schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}


class TokenizeRequest(RequestBody):
    """The body of `POST /tokenize`: `prompt`, or `messages`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _FIRST] | None = None
    tools: Annotated[list[Tool], _FIRST] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    model: Name | None = None
    tokens: TokenIds


class LoadRequest(RequestBody):
    """The body of `POST /admin/models/load`: `options` are arguments of `LLM`."""

    model: Name
    name: Name | None = None
    options: dict[str, Any] = {}


class UnloadRequest(RequestBody):
    """The body of `POST /admin/models/unload`."""

    name: Name
    drain_s: Annotated[float, Field(ge=0, le=MOST_DRAIN_S)] = 0.0


class ErrorDetail(BaseModel):
    """OpenAI's `error`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of a response with an error."""

    error: ErrorDetail


def checked(params: dict[str, Any]) -> SamplingParams:
    """`SamplingParams` of these arguments. Raises ApiError, with the API's name of the field."""
    try:
        return SamplingParams(**params)
    except ValueError as error:
        message = str(error)
        for ours, name in _API_NAMES.items():
            message = message.replace(ours, name)
        word = re.match(r"\w+", message)
        raise invalid(message, None if word is None else word[0]) from error


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return None if not given else {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise invalid("logit_bias maps token ids to numbers", "logit_bias") from None


# What fields take that take several types; a union's own errors name the types of Python instead.
_UNIONS = {
    "prompt": "a text, token ids (from 0 to 2,147,483,647), or a list of them",
    "stop": "a text, or a list of texts",
    "tool_choice": '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or "allowed_tools"',
    "early_stopping": 'true, false or "never"',
    "content": "a text, or a list of parts",
    "arguments": "an object, or its text",
    "json": "a schema, or its text",
}


def from_validation(errors: list[Any]) -> ApiError:
    """The error for what pydantic says of a body or of the query's parameters."""
    first = errors[0]
    place = list(first["loc"])
    place = place[1:] if place and place[0] in ("body", "query", "path") else place
    branch = next((number for number, part in enumerate(place) if _is_branch(part)), None)
    if branch and (wanted := _UNIONS.get(str(place[branch - 1]))):
        param = ".".join(map(str, place[:branch]))
        long = next((error["msg"] for error in errors if error["type"] == "too_long"), None)
        return invalid(f"{param}: {long or f'give {wanted}'}", param)
    param = ".".join(str(part) for part in place if not _is_branch(part))
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    missing = first["type"] == "missing"
    said = first["msg"].removeprefix("Value error, ")
    what = f"{param or 'the body'} is missing" if missing else f"{param or 'the body'}: {said}"
    return invalid(what, param or None)


def _is_branch(part: Any) -> bool:
    """Whether a part of an error's place is the branch of a union instead of a field: a type's name."""
    return isinstance(part, str) and (
        part in ("str", "int", "bool", "float") or bool(re.match(r"[A-Z]|[\w-]+[\[(]|constrained", part))
    )

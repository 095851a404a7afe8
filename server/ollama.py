"""Ollama's API: `POST /api/chat` and `/api/generate` as adapters on chats, and what is said of models."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..common.checked_file import InvalidFile, read_checked
from .chat import ChatCompletion, logprobs_of
from .choices import json_encode, raw_list
from .errors import ApiError, invalid
from .messages import Piece
from .models import LATEST, ServedModel
from .requests import ChatForm, FunctionCall, Name, RequestBody, Texts, Tool, schema_format
from .response_parser import Part
from .retention_hints import duration_s

# The version of Ollama that has this API: clients refuse a server that is older than what they use.
API_VERSION = "0.12.11"
NOT_SERVED = {
    **dict.fromkeys(("/api/embed", "/api/embeddings"), "embeddings are not served: this server generates text"),
    **dict.fromkeys(
        ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest}"),
        "models are not fetched, made or deleted through this API: `pagetide serve MODEL` serves one that is on this machine",
    ),
}
_FOREVER = "9999-12-31T23:59:59Z"
_MOST_CONFIG_BYTES = 16 << 20
_IMAGES = "only text is served: leave `images` out"


def _lower(given: Any) -> Any:
    return given.lower() if isinstance(given, str) else given


def _seconds(given: Any) -> Any:
    return duration_s(given) if isinstance(given, str) else given


class OllamaOptions(RequestBody):
    """Ollama's `options`. Others are judged by the table of other servers' fields."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat."""
        names = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
        has_length = self.num_predict is not None and self.num_predict > 0  # else up to the end of the context
        return {name: getattr(self, name) for name in names} | {
            "max_tokens": self.num_predict if has_length else None,
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
            "repetition_penalty": None if self.repeat_last_n == 0 else self.repeat_penalty,
        }


class OllamaCall(BaseModel):
    """A tool call in an assistant's message."""

    id: str | None = None
    function: FunctionCall


class OllamaMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(Tool):
    """An entry of `tools`."""

    type: Literal["function"] = "function"


class OllamaRequest(ChatForm):
    """What both bodies have."""

    model: Name
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: Annotated[float | None, BeforeValidator(_seconds)] = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    priority: int = 0
    cache_salt: Name | None = None

    def check_fields(self, ignores_unknown: bool) -> list[str]:
        """See `RequestBody`; the fields of `options` too."""
        found = super().check_fields(ignores_unknown)
        return found + (self.options.check_fields(ignores_unknown) if self.options is not None else [])

    def chat_fields(self) -> dict[str, Any]:
        """See `ChatForm`."""
        form: dict[str, Any] | None = {"type": "json_object"} if self.format == "json" else None
        fields = self.options.chat_fields() if self.options is not None else {}
        return fields | {
            "stream": self.stream is not False,
            "response_format": schema_format(self.format) if isinstance(self.format, dict) else form,
            "enable_thinking": None if self.think is None else self.think is not False,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
        }


class OllamaChatRequest(OllamaRequest):
    """The body of `POST /api/chat`. Without messages it asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(fail_fast=True)] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """See `ChatForm`."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return super().chat_fields() | {"messages": _messages(self.messages or []), "tools": tools or None}


class OllamaGenerateRequest(OllamaRequest):
    """The body of `POST /api/generate`. Without a prompt it asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """See `ChatForm`."""
        for name, answer in (
            ("suffix", "put the text that follows into a `raw` prompt, in the model's own form"),
            ("template", "--chat-template sets it at the start"),
            ("context", "send the conversation to /api/chat; its prefix stays cached"),
        ):
            if getattr(self, name):
                raise invalid(f"{name} is not supported: {answer}", name)
        if self.images:
            raise invalid(_IMAGES, "images")
        if self.raw and self.system:
            raise invalid("a raw prompt has no system message: write it into the prompt", "system")
        system = [{"role": "system", "content": self.system}] if self.system else []
        return super().chat_fields() | {"messages": [*system, {"role": "user", "content": self.prompt}]}


class ShowRequest(RequestBody):
    """The body of `POST /api/show`."""

    model: Name = ""
    name: Name = ""  # of older clients; some send both
    verbose: bool | None = None  # without effect: the texts of the vocabulary are not shown

    @model_validator(mode="after")
    def _named(self) -> ShowRequest:
        if not (self.model or self.name):
            raise ValueError("give `model`")
        return self


def _messages(given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages of a chat. Calls without an id get one, results that of the call that they answer. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    calls = _OpenCalls([])
    num_calls = 0
    for one in given:
        if one.images:
            raise invalid(_IMAGES, "messages")
        message: dict[str, Any] = {"role": one.role, "content": one.content or ""}
        if one.thinking:
            message["reasoning_content"] = one.thinking
        if one.tool_calls:
            message["tool_calls"] = made = []
            for call in one.tool_calls:
                num_calls += 1
                function = {"name": call.function.name, "arguments": call.function.arguments}
                made.append({"type": "function", "id": call.id or f"{num_calls:09}", "function": function})
            calls = _OpenCalls(made)
        if one.role == "tool":
            if (answered := calls.answered_by(one)) is not None:
                message["tool_call_id"] = answered["id"]
            elif one.tool_call_id is not None:
                message["tool_call_id"] = one.tool_call_id
            if one.tool_name is not None:
                message["name"] = one.tool_name
        messages.append(message)
    return messages


class _OpenCalls:
    """The calls of a message that have no result yet. Each is looked at a bounded number of times."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._open = dict(enumerate(calls))
        self._places: dict[tuple[str, str], deque[int]] = {}  # in `_open`, by the calls' ids, by their names, and all
        for place, call in self._open.items():
            for key in (("id", call["id"]), ("name", call["function"]["name"]), ("", "")):
                self._places.setdefault(key, deque()).append(place)

    def answered_by(self, result: OllamaMessage) -> dict[str, Any] | None:
        """The first call with the id of a result, else of its function. It is open no more."""
        by_function = ("", "") if result.tool_name is None else ("name", result.tool_name)
        for key in (("id", result.tool_call_id or ""), by_function):
            places = self._places.get(key)
            while places:
                if (call := self._open.pop(places.popleft(), None)) is not None:
                    return call
        return None


def error_line(error: ApiError) -> bytes:
    """The line of an error that ends a stream."""
    return json_encode(error.ollama_body) + b"\n"


class OllamaChat(ChatCompletion):
    """A chat with a response in the form of `/api/chat`: an object, or a stream with a line for each piece and for the end."""

    media_type = "application/x-ndjson"
    failed = staticmethod(error_line)

    def __init__(self, model: ServedModel, *chat: Any, **named: Any) -> None:
        super().__init__(model, *chat, **named)
        for what, asks in (("tools", self._body.tools), ("thinking", self._body.enable_thinking)):
            if asks and self._prompt is None and what not in capabilities(model):
                raise invalid(f"{model.name!r} does not support {what}: no format of them is known for it (--response-format)")

    async def parts(self) -> AsyncIterator[bytes]:
        """The whole response as JSON. Raises RequestFailed, EngineUnavailable or ApiError."""
        said = [await self._said(piece, parts) async for piece, parts in self._read_pieces()]
        yield json_encode(self._now() | said[0] | self._end())

    async def events(self) -> AsyncIterator[bytes]:
        """The lines of the response. Raises as `parts`."""
        async for piece, parts in self._read_pieces():
            if parts or piece.scores:
                yield json_encode(self._now() | await self._said(piece, parts) | {"done": False}) + b"\n"
        yield json_encode(self._now() | self._form("", {}) | self._end()) + b"\n"

    def _now(self) -> dict[str, Any]:
        return {"model": self._head["model"], "created_at": utc(datetime.now(UTC))}

    async def _said(self, piece: Piece, parts: list[Part]) -> dict[str, Any]:
        """What a piece of the answer adds."""
        more: dict[str, Any] = {}
        if thinking := "".join(part.text for part in parts if part.kind == "reasoning"):
            more["thinking"] = thinking
        if calls := [_call(part) for part in parts if part.kind == "call"]:
            more["tool_calls"] = calls
        said = self._form("".join(part.text for part in parts if part.kind == "content"), more)
        return said | ({"logprobs": await raw_list(piece.scores, logprobs_of)} if piece.scores else {})

    def _form(self, content: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": content, **more}}

    def _end(self) -> dict[str, Any]:
        """Why the answer ended, its tokens and times in nanoseconds. The engine's times are there once it has ended."""
        generation = self.batch.generations[0]
        end = generation.finished
        assert end is not None and generation.ended_at is not None
        first_s = end.total_s if end.first_token_s is None else end.first_token_s
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(generation.ended_at - generation.submitted_at),
            "load_duration": 0,  # it is loaded before
            "prompt_eval_count": len(generation.prompt_token_ids or ()),
            "prompt_eval_duration": _ns(first_s - (end.queued_s or 0.0)),
            "eval_count": generation.num_generated,
            "eval_duration": _ns(end.total_s - first_s),
        }


class OllamaGenerate(OllamaChat):
    """A chat, or the continuation of a raw prompt, with a response in the form of `/api/generate`."""

    def _form(self, content: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": content, **more}


def loaded(body: OllamaRequest, model: ServedModel, reason: str) -> dict[str, Any]:
    """The answer to a request without a prompt, which loaded the model ("load") or unloaded it ("unload")."""
    form = {"message": {"role": "assistant", "content": ""}} if isinstance(body, OllamaChatRequest) else {"response": ""}
    return {"model": model.name, "created_at": utc(datetime.now(UTC)), **form, "done": True, "done_reason": reason}


def capabilities(model: ServedModel) -> list[str]:
    """What a model can do, in Ollama's words."""
    template = model.response_template
    has_reasoning = bool(template.reasoning_open or template.header_open)
    return ["completion"] + ["tools"] * (template.calls is not None) + ["thinking"] * has_reasoning


def listed(model: ServedModel, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A model in `/api/tags`.

    Args:
        stats: The statistics of its engines, by name; empty if there are none now.
    """
    name = model.name if ":" in model.name.rpartition("/")[2] else model.name + LATEST
    return {
        "name": name,
        "model": name,
        "modified_at": utc(datetime.fromtimestamp(model.created, UTC)),
        "size": max((one["weights_bytes"] for one in stats.values()), default=0),
        "digest": hashlib.sha256(model.options.reference.encode()).hexdigest(),
        "details": _details(model),
    }


def running(model: ServedModel, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A model in `/api/ps`: `size` is that of the weights and of the KV pool now. Arguments as of `listed`."""
    entry = listed(model, stats)
    del entry["modified_at"]
    left_s = max(model.expires_at - time.monotonic(), 0.0)
    sizes = [(one["device"].startswith("cpu"), one["weights_bytes"] + one["kv_bytes"]) for one in stats.values()]
    return entry | {
        "size": sum(size for _, size in sizes),
        "size_vram": sum(size for on_cpu, size in sizes if not on_cpu),
        "context_length": model.engine.info.max_model_len,
        "expires_at": _FOREVER if left_s == math.inf else utc(datetime.now(UTC) + timedelta(seconds=left_s)),
    }


def shown(model: ServedModel) -> dict[str, Any]:
    """The answer of `/api/show`, for a model that is not loaded with what its folder says."""
    info, details = None if model.process is None else model.process.info, _details(model)
    family = details["family"]
    facts = {"general.architecture": family} | ({} if info is None else {f"{family}.context_length": info.max_model_len})
    return {
        "modelfile": f"# Served by pagetide, which has no modelfiles.\nFROM {model.options.reference}\n",
        "parameters": "",
        "template": model.options.chat_template or (info and info.chat_template) or "",
        "details": details,
        "model_info": facts,
        "capabilities": capabilities(model),
        "modified_at": utc(datetime.fromtimestamp(model.created, UTC)),
    }


def utc(time: datetime) -> str:
    """A time as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def _details(model: ServedModel) -> dict[str, Any]:
    info = None if model.process is None else model.process.info
    family = _family(model.options.reference if info is None else info.path)
    level = "" if info is None else info.dtype
    return {
        "parent_model": "", "format": "safetensors", "family": family, "families": [family], "parameter_size": "",
        "quantization_level": level,
    }  # fmt: skip


@lru_cache(maxsize=64)
def _family(folder: str) -> str:
    """The type of the model in a folder."""
    try:
        config = msgspec.json.decode(read_checked(Path(folder) / "config.json", _MOST_CONFIG_BYTES, "configurations"))
    except (OSError, InvalidFile, msgspec.DecodeError):
        return "unknown"
    return str(config.get("model_type", "unknown")) if isinstance(config, dict) else "unknown"


def _call(part: Part) -> dict[str, Any]:
    function = {"index": part.number, "name": part.name, "arguments": json.loads(part.text)}
    return {"id": part.call_id, "function": function}


def _ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)

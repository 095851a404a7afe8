"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages, as an adapter on chats."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from .chat import ChatCompletion
from .choices import json_encode
from .errors import ApiError, invalid
from .requests import ChatForm, Name, Objects, RequestBody, Texts, schema_format
from .response_parser import Part
from .retention_hints import longest_ttl

log = logging.getLogger(__name__)

# Claude Code's first block of the system prompt. It has a hash that changes with each turn, and would end all equal prefixes.
BILLING_BLOCK = "x-anthropic-billing-header:"
SIGNATURE = "pagetide"  # of thinking: clients send it back, and drop thinking without one
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_EMPTY: dict[str, dict[str, Any]] = {
    "call": {"input": {}}, "content": {"text": ""}, "reasoning": {"thinking": "", "signature": ""},
}  # fmt: skip
_BLOCKS = '"text", "tool_use", "tool_result" and "thinking"'


class AnthropicMessage(RequestBody):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Objects


class AnthropicTool(RequestBody):
    """A tool. Without an `input_schema` it is one that Anthropic's own servers run, or know the schema of."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestBody):
    """Which tools the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountRequest(ChatForm):
    """The body of `POST /v1/messages/count_tokens`."""

    model: Name
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: str | Objects | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    cache_control: Any = None
    thinking: dict[str, Any] | None = None  # its budget is not held
    output_config: dict[str, Any] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """See `ChatForm`."""
        messages = [message for given in self.messages for message in _messages(given)]
        system = _texts(self.system, "system")
        if system and system[0].startswith(BILLING_BLOCK):
            del system[0]
        if system:
            messages.insert(0, {"role": "system", "content": "\n".join(system)})
        config = self.output_config or {}
        fields: dict[str, Any] = {"messages": messages, **self._tools(), "reasoning_effort": config.get("effort")}
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        contents = [{"content": content} for content in (self.system, *(message.content for message in self.messages))]
        tools = [tool.model_extra for tool in self.tools or ()]
        if (ttl := longest_ttl([{"cache_control": self.cache_control}, *contents, *tools])) is not None:
            fields["prompt_cache_options"] = {"ttl": ttl}
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.get("type") != "disabled"
        if isinstance(form := config.get("format"), dict) and form.get("type") == "json_schema":
            fields["response_format"] = schema_format(form.get("schema"))
        return fields

    def _tools(self) -> dict[str, Any]:
        """OpenAI's fields of the tools. Raises ApiError."""
        tools = []
        for tool in self.tools or ():
            if tool.input_schema is None:
                log.warning("the tool %s of type %s is ignored: it has no input_schema", tool.name[:80], str(tool.type)[:80])
                continue
            function: dict[str, Any] = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            function |= {"strict": True} if tool.strict else {}
            tools.append({"type": "function", "function": function})
        choice = self.tool_choice
        if not tools:
            if choice is not None and choice.type in ("any", "tool"):
                raise invalid("tool_choice needs tools with an input_schema", "tool_choice")
            return {"tools": None, "tool_choice": None}
        fields: dict[str, Any] = {"tools": tools}
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            if choice.type == "tool" and choice.name is None:
                raise invalid("tool_choice of type tool needs a name", "tool_choice")
            forms: dict[str, Any] = {"any": "required", "tool": named}
            fields["tool_choice"] = forms.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return fields


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Texts | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    priority: int = 0
    cache_salt: Name | None = None

    def chat_fields(self) -> dict[str, Any]:
        """See `ChatForm`."""
        return super().chat_fields() | {"stop": self.stop_sequences}


def _messages(given: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as those of a chat: each result of a tool is one of its own. Raises ApiError."""
    if isinstance(given.content, str):
        return [{"role": given.role, "content": given.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    message: dict[str, Any] = {"role": given.role}
    for block in given.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = "\n".join(_texts(block.get("content"), "the content of a tool_result"))
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": content})
        elif kind == "tool_use":
            call = {"name": str(block.get("name", "")), "arguments": block.get("input") or {}}
            message.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": call})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts += _texts([block], "messages")
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if texts or not results:
        message["content"] = "\n".join(texts)
        results.append(message)
    return results


def _texts(content: Any, where: str) -> list[str]:
    """The texts of blocks. Raises ApiError for blocks of another type."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    found = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else None
        source = block.get("source") if kind == "document" else None
        if isinstance(source, dict) and source.get("type") == "text":
            text = source.get("data")
        else:
            text = block.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise invalid(f"{where}: a block of type {kind!r:.80} is not supported, only {_BLOCKS} are", "messages")
        found.append(text)
    return found


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json_encode({"type": kind, **fields}) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event of an error that ends a stream."""
    return _event("error", error=error.anthropic_body["error"])


class MessageCompletion(ChatCompletion):
    """A chat with a response in Anthropic's form."""

    kind = "msg"
    failed = staticmethod(error_event)

    async def parts(self) -> AsyncIterator[bytes]:
        """The whole response as JSON. Raises RequestFailed, EngineUnavailable or ApiError."""
        parts = [part async for part in self._one_answer()]
        blocks = [_block(part) for part in parts if part.kind == "call" or part.text.strip()]
        yield json_encode(self._message(blocks) | await self._stop() | {"usage": self._tokens()})

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of the response. Raises as `parts`."""
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._tokens() | {"output_tokens": 0}}
        yield _event("message_start", message=start)
        kind, index = "", -1
        async for part in self._one_answer():
            if kind != part.kind and not part.text.strip():  # white space makes no block
                continue
            if kind != part.kind or kind == "call":
                for data in _block_end(kind, index):
                    yield data
                kind, index = part.kind, index + 1
                block = _block(part)
                yield _event("content_block_start", index=index, content_block=block | _EMPTY[kind])
            yield _event("content_block_delta", index=index, delta=_delta(part))
        for data in _block_end(kind, index):
            yield data
        yield _event("message_delta", delta=await self._stop(), usage=self._tokens())
        yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return head | {"content": content}

    def _tokens(self) -> dict[str, Any]:
        """Anthropic's `usage`: tokens of the prompt that were found in the prefix cache, that are to stay there, and others."""
        generation = self.batch.generations[0]
        cached = 0 if generation.finished is None else generation.finished.num_cached_tokens
        count = self._answers.num_reasoning_tokens
        return {
            "input_tokens": len(generation.prompt_token_ids or ()) - cached - self._num_written,
            "cache_creation_input_tokens": self._num_written,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_generated,
        } | ({} if count is None else {"output_tokens_details": {"thinking_tokens": count}})

    async def _stop(self) -> dict[str, Any]:
        """Why the answer ended. The output's text ends before a stop sequence, which only its tokens have."""
        stops, reason = self._params.get("stop") or (), self._reason
        if reason == "stop" and self._answers.has_calls(0):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "stop" and stops:
            tail = await self._engine.call("detokenize", tenant=self.batch.tenant, tokens=self._last_ids)
            found = [(tail.rfind(stop), stop) for stop in stops if stop in tail]
            if found:
                return {"stop_reason": "stop_sequence", "stop_sequence": min(found)[1]}
        if reason == "length" and self.batch.generations[0].num_generated < self._params["max_new_tokens"]:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[reason or "stop"], "stop_sequence": None}


def _block(part: Part) -> dict[str, Any]:
    """A part of an answer as a content block."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json.loads(part.text)}
    if part.kind == "content":
        return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}


def _delta(part: Part) -> dict[str, Any]:
    """What a part adds to its block."""
    if part.kind == "call":
        return {"type": "input_json_delta", "partial_json": part.text}
    if part.kind == "content":
        return {"type": "text_delta", "text": part.text}
    return {"type": "thinking_delta", "thinking": part.text}


def _block_end(kind: str, index: int) -> Iterator[bytes]:
    """The events behind the last delta of a block; none without a block."""
    if kind == "reasoning":
        yield _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": SIGNATURE})
    if kind:
        yield _event("content_block_stop", index=index)

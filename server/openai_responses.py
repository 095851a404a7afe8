"""`POST /v1/responses`: OpenAI's responses without a state on the server, as an adapter on chats."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from .chat import ChatCompletion
from .choices import json_encode, new_id
from .errors import ApiError, invalid
from .requests import ChatForm, Name, Objects, schema_format
from .response_parser import Part
from .retention_hints import PromptCacheOptions

log = logging.getLogger(__name__)

_STATELESS = "responses are not kept: send the whole conversation in `input`"
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_DEFAULT_NAMESPACE = "functions"


class ClientTool(NamedTuple):
    """A tool as the client names it."""

    is_custom: bool
    name: str
    namespace: str | None


class ResponsesRequest(ChatForm):
    """The body of `POST /v1/responses`."""

    model: Name | None = None
    input: str | Annotated[Objects, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    priority: int = 0
    cache_salt: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None

    stream_options: Any = None  # without effect, as is the next one
    top_logprobs: Any = None

    def client_tools(self) -> dict[str, ClientTool]:
        """The tools by the names that the model knows them by."""
        return {
            str(_name(tool)): ClientTool(tool["type"] == "custom", str(tool.get("name")), tool.get("namespace"))
            for tool in self._each_tool() if tool.get("type") in ("function", "custom")
        }  # fmt: skip

    def _each_tool(self) -> Iterator[dict[str, Any]]:
        """The tools, also those that come amid the input, equal ones once. Those of a namespace have its name as `namespace`.

        Codex sends the tools of an MCP server so. The description of a namespace becomes that of its first tool.
        """
        items = self.input if isinstance(self.input, list) else ()
        more = [tool for item in items if item.get("type") == "additional_tools" for tool in _dicts(item.get("tools"))]
        for tool in {json.dumps(tool, sort_keys=True): tool for tool in (*(self.tools or ()), *more)}.values():
            if tool.get("type") != "namespace":
                yield tool
                continue
            about = str(tool.get("description") or "")
            for inner in _dicts(tool.get("tools")):
                own = str(inner.get("description") or "")
                yield inner | {"namespace": tool.get("name"), "description": f"{about}\n\n{own}".strip()}
                about = ""

    def chat_fields(self) -> dict[str, Any]:
        """See `ChatForm`."""
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise invalid(f"{name} is not served: {_STATELESS}", name)
        messages = _messages(self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        form = (self.text or {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = schema_format(form.get("schema"))
        effort = (self.reasoning or {}).get("effort")
        return {
            "messages": messages, "max_tokens": self.max_output_tokens, "response_format": form, "reasoning_effort": effort,
            "stream_options": None, "top_logprobs": None, **self._tools(),
        }  # fmt: skip

    def _tools(self) -> dict[str, Any]:
        """OpenAI's fields of the tools of a chat."""
        tools = []
        for tool in self._each_tool():
            kind, description = tool.get("type"), str(tool.get("description") or "")
            if kind == "custom":
                form = tool.get("format")
                if isinstance(form, dict) and isinstance(form.get("definition"), str):
                    description += f"\n\nThe input has this grammar:\n{form['definition']}"
            elif kind != "function":
                log.warning("the tool of type %s is ignored: this server runs none", str(kind)[:80])
                continue
            parameters = _CUSTOM if kind == "custom" else tool.get("parameters")
            tools.append(_function(tool) | {"function": {**_function(tool)["function"], "description": description.strip()}})
            if parameters is not None:
                tools[-1]["function"]["parameters"] = parameters
            if tool.get("strict") is True:
                tools[-1]["function"]["strict"] = True
        if not tools:
            return {"tools": None, "tool_choice": None}
        choice: Any = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            given = _dicts(choice.get("tools"))
            named = [_function(tool) for tool in given if tool.get("type") in ("function", "custom")]
            allowed = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}
            # Where only tools of OpenAI's servers are allowed, none is.
            choice = "none" if given and not named else allowed
        elif isinstance(choice, dict):
            choice = _function(choice) if choice.get("type") in ("function", "custom") else "auto"
        return {"tools": tools, "tool_choice": choice}


def _dicts(given: Any) -> list[dict[str, Any]]:
    """The objects in a list; none of another value."""
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A function's name in the form of chats."""
    return {"type": "function", "function": {"name": _name(tool)}}


def _name(tool: dict[str, Any]) -> Any:
    """The name by which the model knows a tool, or that of a call: with its namespace, if it has one."""
    name, namespace = tool.get("name"), tool.get("namespace")
    if namespace is None or namespace == _DEFAULT_NAMESPACE:
        return name
    return f"{str(namespace).removesuffix('__')}__{name}"


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input as messages of a chat: those of one turn of the assistant are one. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []

    def turn() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        return messages[-1]

    for item in given:
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            own = turn()
            if "content" in own or "tool_calls" in own:
                messages.append(own := {"role": "assistant"})
            own["content"] = item.get("content")
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "reasoning":
            texts = [str(part.get("text", "")) for part in _dicts(item.get("content")) + _dicts(item.get("summary"))]
            if texts:
                before = turn().get("reasoning_content")
                turn()["reasoning_content"] = "\n".join(texts if before is None else [before, *texts])
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input", "")}
            call = {"name": _name(item), "arguments": arguments}
            turn().setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
        elif kind in _OUTPUTS:
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "additional_tools":
            continue  # see `_each_tool`
        elif str(kind).endswith(("_call", "_output")):
            log.warning("the item of type %s is ignored: this server runs no such tool", str(kind)[:80])
        else:
            raise invalid(f"an item of type {kind!r:.80} in `input` is not supported; {_STATELESS}", "input")
    if not messages:
        raise invalid("`input` has no message", "input")
    return messages


class ResponseCompletion(ChatCompletion):
    """A chat with a response in the form of OpenAI's responses."""

    kind = "resp"

    def __init__(self, *chat: Any, tools: Mapping[str, ClientTool]) -> None:
        super().__init__(*chat)
        self._output = ResponseItems(tools)

    async def parts(self) -> AsyncIterator[bytes]:
        """The whole response as JSON. Raises RequestFailed, EngineUnavailable or ApiError."""
        output = self._output
        async for part in self._one_answer():
            list(output.add(part))
        list(output.close())
        yield json_encode(self._response(output.items))

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of the response. Raises as `parts`."""
        output = self._output
        for kind in ("response.created", "response.in_progress"):
            yield output.event(kind, response=self._response([]))
        async for part in self._one_answer():
            for data in output.add(part):
                yield data
        for data in output.close():
            yield data
        kind = "response.incomplete" if self._reason == "length" else "response.completed"
        yield output.event(kind, response=self._response(output.items))

    def failed(self, error: ApiError) -> bytes:
        """The event of an error that ends a stream."""
        output = self._output
        response = self._response(output.items) | {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
        }
        return output.event("response.failed", response=response)

    def _response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response so far; with a reason it has ended."""
        body, reason = self._body, self._reason
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        return {
            "id": self._head["id"], "object": "response", "created_at": self._head["created"], "model": self._head["model"],
            "status": status, "error": None, "instructions": None, "previous_response_id": None, "store": False,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": output, "usage": None if reason is None else self._tokens(), "max_output_tokens": body.max_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False, "tool_choice": "auto", "tools": [],
            "temperature": body.temperature, "top_p": body.top_p,
        }  # fmt: skip

    def _tokens(self) -> dict[str, Any]:
        found, reasoning = self._usage(), self._answers.num_reasoning_tokens or 0
        return {
            "input_tokens": found["prompt_tokens"], "output_tokens": found["completion_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0} | found["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": reasoning}, "total_tokens": found["total_tokens"],
        }  # fmt: skip


class ResponseItems:
    """The items of a response as they come, and their events."""

    def __init__(self, tools: Mapping[str, ClientTool]) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._open = ""  # the kind of the text of the item that is open: "output_text" or "reasoning_text"
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event, with the next number."""
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + json_encode(body) + b"\n\n"

    def add(self, part: Part) -> Iterator[bytes]:
        """The events of a part of the answer."""
        if part.kind == "call":
            yield from self.close()
            yield from self._add_call(part)
            return
        kind = "output_text" if part.kind == "content" else "reasoning_text"
        content: dict[str, Any] = {"type": kind, "text": ""}
        if self._open != kind:
            yield from self.close()
            self._open = kind
            if kind == "output_text":
                item: dict[str, Any] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
                content |= {"annotations": [], "logprobs": []}
            else:
                item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            yield from self._add_item(item | {"status": "in_progress", "content": []})
            self.items[-1]["content"].append(content)
            yield self._of_content("content_part.added", part=content)
        self.items[-1]["content"][0]["text"] += part.text
        yield self._of_content(f"{kind}.delta", delta=part.text, logprobs=[])

    def close(self) -> Iterator[bytes]:
        """The events that end an item with text."""
        if not self._open:
            return
        item = self.items[-1]
        yield self._of_content(f"{self._open}.done", text=item["content"][0]["text"], logprobs=[])
        yield self._of_content("content_part.done", part=item["content"][0])
        self._open = ""
        yield from self._end_item()

    def _add_call(self, call: Part) -> Iterator[bytes]:
        tool = self._tools.get(call.name, ClientTool(False, call.name, None))
        head = {"status": "in_progress", "call_id": call.call_id, "name": tool.name}
        if tool.namespace is not None:
            head["namespace"] = tool.namespace
        if tool.is_custom:
            key, kind, text = "input", "custom_tool_call", json.loads(call.text).get("input")
            text, events = text if isinstance(text, str) else call.text, "custom_tool_call_input"
        else:
            key, kind, text, events = "arguments", "function_call", call.text, "function_call_arguments"
        yield from self._add_item({"id": new_id("fc"), "type": kind, **head, key: ""})
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        yield self.event(f"response.{events}.delta", **place, delta=text)
        yield self.event(f"response.{events}.done", **place, **{key: text})
        self.items[-1][key] = text
        yield from self._end_item()

    def _add_item(self, item: dict[str, Any]) -> Iterator[bytes]:
        self.items.append(item)
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _end_item(self) -> Iterator[bytes]:
        self.items[-1]["status"] = "completed"
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=self.items[-1])

    def _of_content(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return self.event(f"response.{kind}", **place, **fields)

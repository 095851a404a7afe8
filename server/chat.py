"""`POST /v1/chat/completions`: OpenAI's chat completions, with vLLM's extra fields and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from .choices import DONE, event, finish_reason, merged, new_id, now_s, usage
from .completions import prompt_logprob
from .engine_client import Batch, EngineClient, Observer
from .messages import Piece, RequestEnd, Score
from .requests import ChatRequest
from .tools import ToolCalls, ToolParser


class ChatCompletion:
    """One request of this endpoint. Make it, `begin` it, then take `response` or `events`.

    Args:
        model: The model's name in responses.
        cache_salt: See `messages.Submit`.
        tools: The format of the model's tool calls.
        chat_template: Used instead of the model's own.
    """

    def __init__(
        self,
        engine: EngineClient,
        body: ChatRequest,
        model: str,
        cache_salt: str | None,
        tools: ToolParser,
        chat_template: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._body = body
        self._tools = ToolCalls(body, tools)
        self._params = body.params(**self._tools.params())
        self._template = body.template() | self._tools.template()
        if chat_template is not None:
            self._template["chat_template"] = chat_template
        self._head = {"id": new_id("chatcmpl"), "created": now_s(), "model": model}
        self._cache_salt = cache_salt
        self.batch = Batch(engine, observer)

    @property
    def num_choices(self) -> int:
        """Continuations in all."""
        return self._body.n or 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run for this request."""
        return self.num_choices

    async def begin(self) -> None:
        """Send the conversation and wait until it is tokenized. Raises RequestFailed or EngineUnavailable."""
        self.batch.submit(
            messages=[message.to_template() for message in self._body.messages], template=self._template,
            params=self._params, priority=self._body.priority, cache_salt=self._cache_salt,
            streams=bool(self._body.stream) and self._body.prompt_logprobs is None,  # the prompt's come with the end
            fills_context="max_new_tokens" not in self._params,
        )  # fmt: skip
        await self.batch.accepted()

    async def response(self) -> dict[str, Any]:
        """The whole response, once all has ended. Raises RequestFailed, EngineUnavailable or ApiError."""
        (end,) = await self.batch.whole()
        extras = self._of_prompt(end)
        choices = [self._choice(piece) for piece in end.pieces]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage(self.batch.generations), **extras}

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of the response. Raises as `response`."""
        options = self._body.stream_options
        asks_usage = options is not None and options.include_usage
        usage_null: dict[str, Any] = {"usage": None} if asks_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"}
        end = None if self._body.prompt_logprobs is None else (await self.batch.whole())[0]
        of_prompt = self._of_prompt(end)  # in the first chunk
        for index in range(self.num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield event({**head, "choices": [choice], **usage_null, **of_prompt})
            of_prompt = {}
        for piece in () if end is None else end.pieces:
            for choice in self._deltas(piece):
                yield event({**head, "choices": [choice], **usage_null})
        while new := await self.batch.read():
            for piece in merged([piece for _, pieces in new for piece in pieces]):
                running = usage_null
                if options is not None and options.continuous_usage_stats:
                    running = {"usage": usage(self.batch.generations)}
                for choice in self._deltas(piece):
                    yield event({**head, "choices": [choice], **running})
        if asks_usage:
            yield event({**head, "choices": [], "usage": usage(self.batch.generations)})
        yield DONE

    def _of_prompt(self, end: RequestEnd | None) -> dict[str, Any]:
        """vLLM's fields of the prompt, for requests that ask for them."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = self.batch.generations[0].prompt_token_ids
        if self._body.prompt_logprobs is not None and end is not None and end.prompt_scores is not None:
            extras["prompt_logprobs"] = [prompt_logprob(score) for score in end.prompt_scores]
        return extras

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
        message, calls = self._tools.parse(piece.text)
        reason = finish_reason(piece)
        return {
            "index": piece.index,
            "message": {"role": "assistant", **message},
            "logprobs": None if piece.scores is None else {"content": logprobs_of(piece.scores)},
            "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
            **({"token_ids": piece.token_ids} if self._body.return_token_ids else {}),
        }

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """What is new of a choice: one event, or several where tool calls begin and end."""
        reason = finish_reason(piece)
        deltas, calls = self._tools.stream(piece.index, piece.text, ends=reason is not None)
        if reason is not None and not deltas:
            deltas = [{}]
        elif not deltas and piece.scores:
            deltas = [{"content": ""}]
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices and piece.scores:
            choices[0]["logprobs"] = {"content": logprobs_of(piece.scores)}
        if choices and reason is not None:
            choices[-1]["finish_reason"] = "tool_calls" if calls and reason == "stop" else reason
        if choices and self._body.return_token_ids:
            choices[0]["token_ids"] = piece.token_ids
        return choices


def logprobs_of(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """OpenAI's log-probabilities of chat completions."""
    return [
        {**_one(score.token, score.logprob), "top_logprobs": [_one(token, logprob) for _, token, logprob in score.top]}
        for score in scores
    ]


def _one(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "surrogatepass"))}

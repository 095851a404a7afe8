"""`POST /v1/chat/completions`: OpenAI's chat completions, with vLLM's extra fields, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..common.answer_memory import AnswerSize
from .answers import CONSTRAINTS, AnswerReader, openai_delta, openai_message
from .choices import EVENTS, error_event, finish_reason, json_encode, json_list, new_id, raw_list, running_usage, usage
from .completions import prompt_logprob
from .engine_client import Batch, Observer, answer_size
from .errors import invalid
from .messages import Piece, Score, token_text
from .models import ServedModel
from .requests import ChatRequest
from .response_parser import Part
from .response_templates import PLAIN_TEMPLATE
from .resume import DurableRequest, StreamPosition
from .tool_choice import ToolsInvalid

LAST_TOKENS = 512  # of an output, among which a stop sequence is looked for
_OF_ANSWERS = {"tools", "tool_choice", "parallel_tool_calls", *CONSTRAINTS, "skip_special_tokens", "include_reasoning"}


class ChatCompletion:
    """One request of this endpoint. Make it, `begin` it, then take `response` or `events`.

    Args:
        cache_salt: See `messages.Submit`.
        durable: Given with a durable engine.
        prompt: A text to continue instead of the messages, without the chat template. All of its output is content.

    Raises ApiError.
    """

    kind = "chatcmpl"  # the prefix of ids
    media_type = EVENTS  # of a stream
    failed = staticmethod(error_event)

    def __init__(
        self,
        model: ServedModel,
        body: ChatRequest,
        cache_salt: str | None,
        observer: Observer | None = None,
        durable: DurableRequest | None = None,
        prompt: str | None = None,
    ) -> None:
        self._engine = engine = model.engine
        self._body = body
        self._prompt = prompt
        response_id = new_id(self.kind) if durable is None else durable.base_id
        try:
            options = body.template()
            fields = body.model_dump(include=_OF_ANSWERS, exclude_none=True) | {
                "enable_thinking": options.get("enable_thinking"), "constraint": body.constraint(),
            }  # fmt: skip
            known = engine.info.special_tokens, engine.info.added_tokens, engine.info.constrains
            template = PLAIN_TEMPLATE if prompt is not None else model.response_template
            self._answers = AnswerReader(fields, template, response_id, *known)
            self._params = body.params(**self._answers.params())
        except ToolsInvalid as error:
            raise invalid(str(error), error.param) from error
        self._template = options | self._answers.template()
        if model.options.chat_template is not None:
            self._template["chat_template"] = model.options.chat_template
        self._head = {"id": response_id, "created": 0, "model": model.name}
        self._durable = durable
        self._position = StreamPosition(durable, self.num_choices, joins=self._answers.is_plain)
        self._cache_salt = cache_salt
        self._reason: str | None = None
        self._last_ids: list[int] = []
        self.batch = Batch(engine, observer)

    @property
    def num_choices(self) -> int:
        """Continuations in all."""
        return self._body.n or 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run for this request."""
        return self.num_choices

    async def count_prompt(self, tenant: str) -> int:
        """The tokens of the prompt. Raises RequestFailed or EngineUnavailable."""
        found = await self._engine.call("tokenize", messages=self._messages, template=self._template, tenant=tenant)
        return len(found["tokens"])

    @property
    def _messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_unset=True) for message in self._body.messages]

    async def begin(self) -> None:
        """Send the conversation and wait until it is tokenized. Raises RequestFailed or EngineUnavailable."""
        is_chat = self._prompt is None
        asked: dict[str, Any] = {"prompt": self._prompt}
        if is_chat:
            asked = {"messages": self._messages, "template": self._template}
        if (grammar := self._answers.reasoning_grammar()) is not None:
            asked["reasoning_grammar"] = grammar
        self.batch.submit(
            **asked,
            params=self._params,
            priority=self._body.priority,
            cache_salt=self._cache_salt,
            streams=self._streams,
            fills_context="max_new_tokens" not in self._params,
            **({} if self._durable is None else self._durable.fields(0)),
        )
        await self.batch.accepted()
        self._answers.prompt_end = self.batch.generations[0].prompt_end
        self._head["created"] = self._position.begin(self.batch.generations[0].created)

    def answer_size(self, max_model_len: int) -> AnswerSize:
        """What the response may come to have, as far as the prompt's length is known."""
        return answer_size(self.batch, self._params, self.num_sequences, self._streams, max_model_len)

    @property
    def _streams(self) -> bool:
        """Whether the output is sent as it comes. The prompt's log-probabilities come with the end: all is sent then."""
        return bool(self._body.stream) and self._body.prompt_logprobs is None

    async def parts(self) -> AsyncIterator[bytes]:
        """The whole response as JSON, in parts, once all has ended. Raises RequestFailed, EngineUnavailable or ApiError before
        the first one.
        """
        ((pieces, prompt_scores),) = await self.batch.take()
        for piece in pieces:
            finish_reason(piece)
            self._answers.count_tokens(piece.index, piece.token_ids)
        yield json_encode({**self._head, "object": "chat.completion"})[:-1] + b',"choices":'
        before = b"["
        while pieces:
            yield before
            async for part in self._choice(pieces.popleft()):
                yield part
            before = b","
        yield b'],"usage":' + json_encode(self._usage())
        for name, value in (await self._of_prompt(prompt_scores)).items():
            yield b"," + json_encode(name) + b":" + json_encode(value)
        yield b"}"

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of the response. Raises as `parts`."""
        options = self._body.stream_options
        asks_usage = options is not None and options.include_usage
        usage_null: dict[str, Any] = {"usage": None} if asks_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"}
        num_tokens, position = 0, self._position
        end = None if self._body.prompt_logprobs is None else (await self.batch.whole())[0]
        of_prompt = await self._of_prompt(None if end is None else end.prompt_scores)  # in the first chunk
        for index in range(self.num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for data in position.events(index, 1, [{**head, "choices": [choice], **usage_null, **of_prompt}]):
                yield data
            of_prompt = {}
        for piece in () if end is None else end.pieces:
            bodies = [{**head, "choices": [choice], **usage_null} for choice in await self._deltas(piece)]
            for data in position.events(piece.index, 1, bodies):
                yield data
        while new := await self.batch.read():
            for index, num_records, piece in position.portions(0, [piece for _, pieces in new for piece in pieces]):
                running, num_tokens = usage_null, num_tokens + len(piece.token_ids)
                if options is not None and options.continuous_usage_stats:
                    running = {"usage": running_usage(self.batch.generations, num_tokens)}
                bodies = [{**head, "choices": [choice], **running} for choice in await self._deltas(piece)]
                for data in position.events(index, num_records, bodies):
                    yield data
        end_usage = {**head, "choices": [], "usage": self._usage()} if asks_usage else None
        for data in position.last(end_usage):
            yield data

    async def _one_answer(self) -> AsyncIterator[Part]:
        """The parts of the only choice: see `_read_pieces`."""
        async for _, parts in self._read_pieces():
            for part in parts:
                yield part

    async def _read_pieces(self) -> AsyncIterator[tuple[Piece, list[Part]]]:
        """The pieces of the only choice and their parts, as they come if it is streamed. `_reason` says then why it ended, and
        `_last_ids` has its last tokens. Raises RequestFailed, EngineUnavailable or ApiError.
        """
        async for piece in self._pieces():
            self._reason = finish_reason(piece)
            self._last_ids = (self._last_ids + piece.token_ids)[-LAST_TOKENS:]
            self._answers.count_tokens(0, piece.token_ids)
            yield piece, self._answers.stream(0, piece.text, self._reason is not None, is_cut=self._reason == "length")

    async def _pieces(self) -> AsyncIterator[Piece]:
        if not self._streams:
            (((piece,), _),) = await self.batch.take()
            yield piece
            return
        while new := await self.batch.read():
            for piece in (piece for _, pieces in new for piece in pieces):
                yield piece

    def _usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        count = self._answers.num_reasoning_tokens
        found = usage(self.batch.generations)
        if self.batch.retention is not None:
            found["prompt_tokens_details"]["cache_write_tokens"] = self._num_written
        return found | ({} if count is None else {"completion_tokens_details": {"reasoning_tokens": count}})

    @property
    def _num_written(self) -> int:
        """Tokens of the prompt that a hint asks to keep and that were not cached; 0 before the answer has ended."""
        hint, generation = self.batch.retention, self.batch.generations[0]
        if hint is None or generation.finished is None:
            return 0
        num_tokens = len(generation.prompt_token_ids or ())
        num_tokens = num_tokens if hint.num_tokens is None else min(num_tokens, hint.num_tokens)
        whole = num_tokens - num_tokens % self._engine.info.block_size
        return max(whole - generation.finished.num_cached_tokens, 0)

    async def _of_prompt(self, prompt_scores: Sequence[Score] | None) -> dict[str, Any]:
        """vLLM's fields of the prompt, for requests that ask for them."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = self.batch.generations[0].prompt_token_ids
        if self._body.prompt_logprobs is not None and prompt_scores is not None:
            extras["prompt_logprobs"] = await raw_list(prompt_scores, prompt_logprob)
        return extras

    async def _choice(self, piece: Piece) -> AsyncIterator[bytes]:
        """A whole choice as JSON, in parts."""
        reason = finish_reason(piece)
        answer = self._answers.read(piece.index, piece.text, is_cut=reason == "length")
        choice = {
            "index": piece.index,
            "message": openai_message(answer),
            "finish_reason": "tool_calls" if answer.calls and reason == "stop" else reason,
            **({"token_ids": piece.token_ids} if self._body.return_token_ids else {}),
        }
        yield json_encode(choice)[:-1] + b',"logprobs":'
        if piece.scores is None:
            yield b"null}"
            return
        yield b'{"content":'
        async for part in json_list(piece.scores, logprobs_of):
            yield part
        yield b"}}"

    async def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """What is new of a choice: one event, or several where tool calls begin and end."""
        reason = finish_reason(piece)
        parts = self._answers.stream(piece.index, piece.text, reason is not None, is_cut=reason == "length")
        deltas: list[dict[str, Any]] = [openai_delta(part) for part in parts]
        self._answers.count_tokens(piece.index, piece.token_ids)
        if reason is not None and not deltas:
            deltas = [{}]
        elif not deltas and piece.scores:
            deltas = [{"content": ""}]
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices and piece.scores:
            choices[0]["logprobs"] = {"content": await raw_list(piece.scores, logprobs_of)}
        if choices and reason is not None:
            choices[-1]["finish_reason"] = "tool_calls" if reason == "stop" and self._answers.has_calls(piece.index) else reason
        if choices and self._body.return_token_ids:
            choices[0]["token_ids"] = piece.token_ids
        return choices


def logprobs_of(score: Score) -> dict[str, Any]:
    """OpenAI's log-probabilities of a token of a chat completion."""
    top = [_one(token, logprob) for _, token, logprob in score.top]
    return {**_one(score.token, score.logprob), "top_logprobs": top}


def _one(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}

"""`POST /v1/completions`: OpenAI's text completions, with vLLM's extra fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from .choices import DONE, event, finish_reason, merged, new_id, now_s, usage
from .engine_client import Batch, EngineClient, Observer
from .messages import Piece, Score
from .requests import CompletionRequest


class TextCompletion:
    """One request of this endpoint. Make it, `begin` it, then take `response` or `events`.

    Args:
        model: The model's name in responses.
        cache_salt: See `messages.Submit`.
    """

    def __init__(
        self,
        engine: EngineClient,
        body: CompletionRequest,
        model: str,
        cache_salt: str | None,
        observer: Observer | None = None,
    ) -> None:
        self._engine = engine
        self._body = body
        self._prompts = body.prompts()
        self._params = body.params()
        self._head = {"id": new_id("cmpl"), "object": "text_completion", "created": now_s(), "model": model}
        self._cache_salt = cache_salt
        self._texts: list[str] = []  # of the prompts, to be echoed
        self._offsets: dict[int, int] = {}  # characters of each choice so far
        self.batch = Batch(engine, observer)

    @property
    def num_sequences(self) -> int:
        """Sequences that run for this request."""
        return len(self._prompts) * self._body.num_sequences_each

    @property
    def _each(self) -> int:
        return self._body.n or 1

    @property
    def _scores_only(self) -> bool:
        return self._body.max_tokens == 0

    async def begin(self) -> None:
        """Send the prompts and wait until they are tokenized. Raises RequestFailed or EngineUnavailable."""
        streams = bool(self._body.stream) and (self._body.best_of or 1) <= self._each and not self._scores_only
        for prompt in self._prompts:
            self.batch.submit(
                prompt=prompt, params=self._params, priority=self._body.priority, cache_salt=self._cache_salt,
                streams=streams, fills_context=self._body.max_tokens is None,
            )  # fmt: skip
        await self.batch.accepted()
        if self._body.echo:
            self._texts = [
                prompt if isinstance(prompt, str) else await self._engine.call("detokenize", tokens=prompt)
                for prompt in self._prompts
            ]

    async def response(self) -> dict[str, Any]:
        """The whole response, once all has ended. Raises RequestFailed, EngineUnavailable or ApiError."""
        ends = await self.batch.whole()
        choices = [
            self._choice(number, piece, end.prompt_scores) for number, end in enumerate(ends) for piece in end.pieces
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of the response. Raises as `response`."""
        options = self._body.stream_options
        asks_usage = options is not None and options.include_usage
        usage_null: dict[str, Any] = {"usage": None} if asks_usage else {}
        while new := await self.batch.read():
            for number, pieces in new:
                for piece in merged(pieces):
                    running = usage_null
                    if options is not None and options.continuous_usage_stats:
                        running = {"usage": self._usage()}
                    yield event({**self._head, "choices": [self._delta(number, piece)], **running})
        for number, generation in enumerate(self.batch.generations):  # what could not be streamed
            assert generation.finished is not None
            for piece in generation.finished.pieces:
                choice = self._choice(number, piece, generation.finished.prompt_scores)
                yield event({**self._head, "choices": [choice], **usage_null})
        if asks_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> dict[str, Any]:
        dropped = sum(generation.num_generated for generation in self.batch.generations) if self._scores_only else 0
        return usage(self.batch.generations, dropped)

    def _choice(self, number: int, piece: Piece, prompt_scores: Sequence[Score] | None) -> dict[str, Any]:
        """A whole choice."""
        body = self._body
        text, scores = ("", []) if self._scores_only else (piece.text, piece.scores)
        reason = finish_reason(piece)
        logprobs = None
        if body.logprobs is not None:
            echoed = prompt_scores or () if body.scores_prompt else ()
            logprobs = _logprobs([*echoed, *(scores or ())])
        return {
            "index": number * self._each + piece.index,
            "text": self._texts[number] + text if body.echo else text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._scores_only else reason,
            **self._extras(number, piece, prompt_scores),
        }

    def _delta(self, number: int, piece: Piece) -> dict[str, Any]:
        """What is new of a choice."""
        index = number * self._each + piece.index
        offset = self._offsets.get(index)
        text = piece.text
        if offset is None:
            offset = 0
            if self._body.echo:
                text = self._texts[number] + text
        self._offsets[index] = offset + len(text)
        return {
            "index": index,
            "text": text,
            "logprobs": None if piece.scores is None else _logprobs(piece.scores, offset),
            "finish_reason": finish_reason(piece),
            **({"token_ids": piece.token_ids} if self._body.return_token_ids else {}),
        }

    def _extras(self, number: int, piece: Piece, prompt_scores: Sequence[Score] | None) -> dict[str, Any]:
        """vLLM's fields, for requests that ask for them."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["token_ids"] = [] if self._scores_only else piece.token_ids
            extras["prompt_token_ids"] = self.batch.generations[number].prompt_token_ids
        if self._body.prompt_logprobs is not None and prompt_scores is not None:
            extras["prompt_logprobs"] = [prompt_logprob(score) for score in prompt_scores]
        return extras


def prompt_logprob(score: Score) -> dict[str, Any] | None:
    """vLLM's form of a prompt token's log-probabilities: by token id. None for the first token."""
    if score.logprob is None:
        return None
    found = {str(score.token_id): {"logprob": score.logprob, "rank": score.rank, "decoded_token": score.token}}
    for rank, (token_id, token, logprob) in enumerate(score.top, 1):
        found.setdefault(str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": token})
    return found


def _logprobs(scores: Sequence[Score], offset: int = 0) -> dict[str, Any]:
    """OpenAI's `logprobs` of completions. `offset` is that of the first token in the text."""
    offsets, tops = [], []
    for score in scores:
        offsets.append(offset)
        offset += len(score.token)
        top = {token: logprob for _, token, logprob in score.top}
        tops.append(None if score.logprob is None else top | {score.token: score.logprob})
    return {
        "tokens": [score.token for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": offsets,
    }

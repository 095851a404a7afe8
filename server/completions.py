"""`POST /v1/completions`: OpenAI's text completions, with vLLM's extra fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from ..common.answer_memory import AnswerSize
from .choices import EVENTS, error_event, finish_reason, json_encode, json_list, new_id, raw_list, running_usage, usage
from .engine_client import Batch, Observer, answer_size
from .messages import Piece, Score, token_text
from .models import ServedModel
from .requests import CompletionRequest
from .resume import DurableRequest, StreamPosition

BROKEN = "\ufffd"  # stands for bytes of a token that are no whole character


class TextCompletion:
    """One request of this endpoint. Make it, `begin` it, then take `response` or `events`.

    Args:
        model: The model's name in responses.
        cache_salt: See `messages.Submit`.
        durable: Given with a durable engine.

    Raises ApiError.
    """

    media_type = EVENTS  # of a stream
    failed = staticmethod(error_event)

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest,
        cache_salt: str | None,
        observer: Observer | None = None,
        durable: DurableRequest | None = None,
    ) -> None:
        self._engine = engine = model.engine
        self._body = body
        self._prompts = body.prompts()
        self._params = body.params()
        response_id = new_id("cmpl") if durable is None else durable.base_id
        self._head = {"id": response_id, "object": "text_completion", "created": 0, "model": model.name}
        self._durable = durable
        self._position = StreamPosition(durable, len(self._prompts) * self._each)
        self._cache_salt = cache_salt
        self._texts: list[str] = []  # of the prompts, to be echoed
        self._places: dict[int, TextPlaces] = {}  # of each choice that is streamed
        self.batch = Batch(engine, observer)

    @property
    def num_sequences(self) -> int:
        """Sequences that run for this request."""
        return len(self._prompts) * self._body.num_sequences_each

    def answer_size(self, max_model_len: int) -> AnswerSize:
        """What the response may come to have, as far as the prompts' lengths are known."""
        return answer_size(self.batch, self._params, self.num_sequences, self._streams, max_model_len)

    @property
    def _streams(self) -> bool:
        """Whether the output is sent as it comes. The prompt's log-probabilities come with the end: all is sent then."""
        scores_prompt = self._body.scores_prompt or self._body.prompt_logprobs is not None
        whole = (self._body.best_of or 1) > self._each or self._scores_only or scores_prompt
        return bool(self._body.stream) and not whole

    @property
    def _each(self) -> int:
        return self._body.n or 1

    @property
    def _scores_only(self) -> bool:
        return self._body.max_tokens == 0

    async def begin(self) -> None:
        """Send the prompts and wait until they are tokenized. Raises RequestFailed or EngineUnavailable."""
        for number, prompt in enumerate(self._prompts):
            self.batch.submit(
                prompt=prompt,
                params=self._params,
                priority=self._body.priority,
                cache_salt=self._cache_salt,
                streams=self._streams,
                fills_context=self._body.max_tokens is None,
                **({} if self._durable is None else self._durable.fields(number)),
            )
        await self.batch.accepted()
        self._head["created"] = self._position.begin(self.batch.generations[0].created)
        if self._body.echo:
            self._texts = [
                prompt
                if isinstance(prompt, str)
                else await self._engine.call("detokenize", tenant=self.batch.tenant, tokens=prompt)
                for prompt in self._prompts
            ]

    async def parts(self) -> AsyncIterator[bytes]:
        """The whole response as JSON, in parts, once all has ended. Raises RequestFailed, EngineUnavailable or ApiError before
        the first one.
        """
        ends = await self.batch.take()
        for piece in (piece for pieces, _ in ends for piece in pieces):
            finish_reason(piece)
        yield json_encode(self._head)[:-1] + b',"choices":'
        before = b"["
        for number, (pieces, prompt_scores) in enumerate(ends):
            while pieces:
                yield before
                async for part in self._choice(number, pieces.popleft(), prompt_scores):
                    yield part
                before = b","
        yield b'],"usage":' + json_encode(self._usage()) + b"}"

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of the response. Raises as `parts`."""
        options = self._body.stream_options
        asks_usage = options is not None and options.include_usage
        usage_null: dict[str, Any] = {"usage": None} if asks_usage else {}
        num_tokens, position = 0, self._position
        while new := await self.batch.read():
            for number, pieces in new:
                for choice, num_records, piece in position.portions(number * self._each, pieces):
                    running, num_tokens = usage_null, num_tokens + len(piece.token_ids)
                    if options is not None and options.continuous_usage_stats:
                        running = {"usage": running_usage(self.batch.generations, num_tokens)}
                    body = {**self._head, "choices": [await self._delta(number, piece)], **running}
                    for data in position.events(choice, num_records, [body]):
                        yield data
        for number, generation in enumerate(self.batch.generations):  # what could not be streamed
            assert generation.finished is not None
            for piece in generation.finished.pieces:
                parts = [part async for part in self._choice(number, piece, generation.finished.prompt_scores)]
                body = {**self._head, "choices": [msgspec.Raw(b"".join(parts))], **usage_null}
                for data in position.events(number * self._each + piece.index, 1, [body]):
                    yield data
        for data in position.last({**self._head, "choices": [], "usage": self._usage()} if asks_usage else None):
            yield data

    def _usage(self) -> dict[str, Any]:
        dropped = sum(generation.num_generated for generation in self.batch.generations) if self._scores_only else 0
        return usage(self.batch.generations, dropped)

    async def _choice(self, number: int, piece: Piece, prompt_scores: Sequence[Score] | None) -> AsyncIterator[bytes]:
        """A whole choice as JSON, in parts."""
        body = self._body
        text, scores = ("", []) if self._scores_only else (piece.text, piece.scores)
        reason = finish_reason(piece)
        text = self._texts[number] + text if body.echo else text
        choice = {
            "index": number * self._each + piece.index,
            "text": text,
            "finish_reason": "length" if self._scores_only else reason,
            **self._extras(number, piece),
        }
        yield json_encode(choice)[:-1] + b',"logprobs":'
        if body.logprobs is None:
            yield b"null"
        else:
            every = [*(prompt_scores or () if body.scores_prompt else ()), *(scores or ())]
            places = TextPlaces().add(text, [score.text for score in every], ends=True)
            yield json_encode(_logprobs(every, places))[:-1] + b',"top_logprobs":'
            async for part in json_list(every, _top_logprobs):
                yield part
            yield b"}"
        if body.prompt_logprobs is not None and prompt_scores is not None:
            yield b',"prompt_logprobs":'
            async for part in json_list(prompt_scores, prompt_logprob):
                yield part
        yield b"}"

    async def _delta(self, number: int, piece: Piece) -> dict[str, Any]:
        """What is new of a choice."""
        index = number * self._each + piece.index
        text, begins = piece.text, index not in self._places
        if begins:
            self._places[index] = TextPlaces()
            text = self._texts[number] + text if self._body.echo else text
        reason, logprobs = finish_reason(piece), None
        if piece.scores is not None:
            tokens = [score.text for score in piece.scores]
            logprobs = _logprobs(piece.scores, self._places[index].add(text, tokens, reason is not None))
            logprobs["top_logprobs"] = await raw_list(piece.scores, _top_logprobs)
        extras: dict[str, Any] = {"token_ids": piece.token_ids} if self._body.return_token_ids else {}
        if begins and extras:
            extras["prompt_token_ids"] = self.batch.generations[number].prompt_token_ids
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **extras}

    def _extras(self, number: int, piece: Piece) -> dict[str, Any]:
        """vLLM's fields, for requests that ask for them."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["token_ids"] = [] if self._scores_only else piece.token_ids
            extras["prompt_token_ids"] = self.batch.generations[number].prompt_token_ids
        return extras


def prompt_logprob(score: Score) -> dict[str, Any] | None:
    """vLLM's form of a prompt token's log-probabilities: by token id. None for the first token."""
    if score.logprob is None:
        return None
    found = {str(score.token_id): {"logprob": score.logprob, "rank": score.rank, "decoded_token": score.text}}
    for rank, (token_id, token, logprob) in enumerate(score.top, 1):
        found.setdefault(str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": token_text(token)})
    return found


class TextPlaces:
    """Finds the places of tokens in a text that comes in pieces. The text may lag behind its tokens.

    A token that is not in the text (a special one) takes no characters; tokens that make a character together are all at
    its place.
    """

    def __init__(self) -> None:
        self._tail = ""  # the text from the first token on with a place that may still change
        self._tail_at = 0
        self._open: list[str] = []  # these tokens
        self._num_broken = 0  # tokens before them that are parts of characters, since the last other token

    def add(self, text: str, tokens: Sequence[str], ends: bool) -> list[int]:
        """The places of further tokens; with `ends` there is no more text."""
        self._tail += text
        every = [*self._open, *tokens]
        places: list[int] = []
        # Kept: the first token that stays open, its place, broken before it.
        at, broken, kept = (0, self._num_broken, None)
        for number, token in enumerate(every):
            begin, size, broken_then, sure = self._place(token, at, broken, ends)
            if not sure and kept is None:
                kept = number, at, broken
            places.append(self._tail_at + begin)
            at, broken = begin + size, broken_then
        first, known, self._num_broken = kept or (len(every), at, broken)
        new = places[len(self._open) :]
        self._open, self._tail, self._tail_at = every[first:], self._tail[known:], self._tail_at + known
        return new

    def _place(self, token: str, at: int, num_broken: int, ends: bool) -> tuple[int, int, int, bool]:
        """Where a token begins, its characters, the broken tokens up to it, and whether more text cannot change that."""
        tail = self._tail
        if BROKEN in token and not tail.startswith(token, at):
            lead = token.partition(BROKEN)[0]
            size = len(lead) if tail.startswith(lead, at) else 0
            return at, size, num_broken + 1, len(tail) > at + size or ends
        if not self._tail_at + at and not tail.startswith(token) and tail.startswith(token.lstrip()) and token.strip():
            return at, len(token.lstrip()), 0, True  # decoders drop the space before the first word
        if num_broken and (found := tail.find(token, at, at + num_broken + len(token))) >= 0:
            return found, len(token), 0, True
        # Their character is there, this is not.
        if num_broken and not ends and len(tail) < at + num_broken + len(token):
            return min(at + 1, len(tail)), len(token), num_broken, False
        if tail.startswith(token, at):
            return at, len(token), 0, True
        rest = tail[at : at + len(token)]
        if token.startswith(rest) and len(rest) < len(token) and len(tail) <= at + len(rest):  # the end of the text
            return at, len(rest) if ends else len(token), num_broken, ends
        return at, 0, num_broken, True


def _logprobs(scores: Sequence[Score], places: list[int]) -> dict[str, Any]:
    """OpenAI's `logprobs` of completions, without `top_logprobs`. `places` are those of the tokens in the text."""
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "text_offset": places,
    }


def _top_logprobs(score: Score) -> dict[str, float] | None:
    """An entry of OpenAI's `top_logprobs` of completions."""
    if score.logprob is None:
        return None
    return {token_text(token): logprob for _, token, logprob in score.top} | {score.text: score.logprob}

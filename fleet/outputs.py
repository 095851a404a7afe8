"""Makes the engine's outputs of a fleet's pieces: `PromptOutput` takes in pieces, and gives chunks and the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..engine.requests.inputs import PromptInput
from ..engine.requests.outputs import Completion, RequestOutput, StreamChunk, Timings, TokenLogprobs, mean_logprob
from ..scheduler.request import FinishReason
from ..server.messages import Piece, RequestEnd, Score
from .messages import NewRequest


@dataclass(slots=True)
class ContinuationOutput:
    """The output of one continuation so far. `PromptOutput` changes it. Times are seconds since the call.

    Attributes:
        num_taken, num_taken_texts: Tokens and texts that chunks have delivered.
    """

    number: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    num_taken: int = 0
    num_taken_texts: int = 0


class PromptOutput:
    """The output of one prompt of a call as its pieces arrive.

    Args:
        index: Of the prompt in the call.
        began_at: Time of the call, in seconds of the clock of the other methods.
    """

    def __init__(self, index: int, prompt: PromptInput, request: NewRequest, has_tokenizer: bool, began_at: float) -> None:
        self.index = index
        self.end: RequestEnd | None = None
        self._prompt = prompt
        self._request = request
        self._has_tokenizer = has_tokenizer
        self._began_at = began_at
        params = prompt.params
        count = (params.n or 1) if request.is_beam_search else params.num_started
        self._continuations = [ContinuationOutput(number) for number in range(count)]
        self._untold = list(self._continuations)  # that have not delivered their last chunk

    # -- what arrives ------------------------------------------------------------------------------------------------

    def take(self, pieces: Sequence[Piece], now: float) -> None:
        """Add pieces that have arrived."""
        for piece in pieces:
            one = self._continuations[piece.index]
            if piece.token_ids and one.first_token_s is None:
                one.first_token_s = now - self._began_at
            one.token_ids += piece.token_ids
            one.texts.append(piece.text)
            one.scores += piece.scores or ()
            if piece.finish_reason is not None:
                one.finish_reason, one.error = piece.finish_reason, piece.error
                one.total_s = now - self._began_at

    def finish(self, end: RequestEnd) -> None:
        """Take in the end of the request."""
        self.end = end

    def abort(self, now: float) -> None:
        """End it with the output so far, and the reason "aborted"."""
        for one in self._continuations:
            if one.finish_reason is None:
                one.finish_reason, one.total_s = "aborted", now - self._began_at
        self.end = self.end or RequestEnd(0, [], 0)

    @property
    def has_failed(self) -> bool:
        """Whether a continuation ended with an error."""
        return any(one.finish_reason == "error" for one in self._continuations)

    @property
    def num_generated(self) -> int:
        """Tokens so far, with those of continuations that `best_of` leaves out."""
        return sum(len(one.token_ids) for one in self._continuations)

    # -- what callers get --------------------------------------------------------------------------------------------

    @property
    def is_told(self) -> bool:
        """Whether all chunks were taken."""
        return not self._untold

    def chunks(self, interval: int) -> Iterator[StreamChunk]:
        """Take the chunks that are due: of at least `interval` tokens, or the last of a continuation.

        The last chunk of the prompt has its output, and is due once the request has ended.
        """
        while (one := next((one for one in self._untold if self._is_due(one, interval)), None)) is not None:
            self._untold.remove(one)
            if one.finish_reason is None:
                self._untold.append(one)
            yield self._chunk(one)

    def _is_due(self, one: ContinuationOutput, interval: int) -> bool:
        if one.finish_reason is not None:
            return len(self._untold) > 1 or self.end is not None
        return len(one.token_ids) - one.num_taken >= interval

    def _chunk(self, one: ContinuationOutput) -> StreamChunk:
        begin, texts = one.num_taken, one.texts[one.num_taken_texts :]
        one.num_taken, one.num_taken_texts = len(one.token_ids), len(one.texts)
        is_scored = self._prompt.params.logprobs is not None
        return StreamChunk(
            self.index,
            "".join(texts),
            one.token_ids[begin:],
            one.number,
            self._completion(one) if one.finish_reason is not None else None,
            self.output if self.is_told else None,
            tuple(map(_logprobs, one.scores[begin:])) if is_scored else None,
        )

    @property
    def output(self) -> RequestOutput:
        """The output. Valid once the request has ended."""
        assert self.end is not None
        params, prompt_scores = self._prompt.params, self.end.prompt_scores
        completions = [self._completion(one) for one in self._continuations]
        if len(completions) > (n := params.n or 1):
            completions = sorted(completions, key=mean_logprob, reverse=True)[:n]  # stable, as the engine's
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = (None, *(_logprobs(one) for one in (prompt_scores or ())[1:]))
        return RequestOutput(
            self._request.request_id,
            self._prompt.prompt,
            self._request.prompt_token_ids,
            tuple(completions),
            prompt_logprobs,
            self.end.num_cached_tokens,
        )

    def _completion(self, one: ContinuationOutput) -> Completion:
        assert one.finish_reason is not None
        is_asked = self._prompt.params.logprobs is not None
        is_scored = self._request.handover["sampling"].get("logprobs") is not None  # for `best_of` too
        return Completion(
            decoded="".join(one.texts) if self._has_tokenizer else None,
            token_ids=one.token_ids,
            finish_reason=one.finish_reason,
            timings=Timings(one.first_token_s, one.total_s, self._queued_s(one)),
            error=one.error,
            logprobs=tuple(map(_logprobs, one.scores)) if is_asked else None,
            cumulative_logprob=_total(one.scores) if is_scored else None,
        )

    def _queued_s(self, one: ContinuationOutput) -> float | None:
        """Seconds to the first admission: those to the first token without those that the engine took for it."""
        end = self.end
        if end is None or end.first_token_s is None or end.queued_s is None or one.first_token_s is None:
            return None
        return max(0.0, one.first_token_s - (end.first_token_s - end.queued_s))


def _logprobs(score: Score) -> TokenLogprobs:
    assert score.logprob is not None
    top = tuple((token_id, logprob) for token_id, _, logprob in score.top)
    return TokenLogprobs(score.token_id, score.logprob, score.rank, top)


def _total(scores: Sequence[Score]) -> float:
    """The sum of the tokens' log-probabilities, with the rounding of `LogprobTable.total`."""
    return float(np.array([score.logprob for score in scores], np.float32).sum(dtype=np.float64))

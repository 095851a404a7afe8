"""Delivery state of requests: tokens, text and log-probabilities of each continuation as they arrive."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ...scheduler.errors import RequestRejected
from ...scheduler.outcome import Finished
from ...scheduler.plan import ChunkLogprobs
from ...scheduler.request import Request, SamplingParams
from ...scheduler.sequence import FinishReason
from ..errors import is_interrupt
from ..text.detokenizer import TextStream
from ..text.encoder import PreparedParams
from .handover import Handover, scores_of, settled
from .logprob_table import LogprobTable
from .outputs import Completion, RequestOutput, StreamChunk, Timings, TokenLogprobs

log = logging.getLogger(__name__)


class RequestState:
    """The delivery state of one continuation of a prompt. Mutated under the engine's lock."""

    def __init__(
        self, answer: RequestGroup, number: int, request: Request, text: TextStream | None, streams: bool
    ) -> None:
        self.answer = answer
        self.number = number
        self.request = request
        self.completion: Completion | None = None
        self._num_prompt = len(request.prompt_token_ids)
        self._of_prompt = None if request.sampling.prompt_logprobs is None else LogprobTable(1)
        self._of_output = None if request.sampling.logprobs is None else LogprobTable(self._num_prompt)
        self._text = text
        self._eager = text is not None and (streams or text.has_stops)
        self._num_taken = 0  # tokens delivered in chunks
        self._new: list[int] = []
        self._new_text: list[str] = []
        self._first_token_at: float | None = None
        self._num_preemptions = 0  # in another process, before the import
        self.num_cached_tokens: int | None = None  # of the prompt at its first admission, here or in another process
        self._failure: str | None = None  # why the request ends with an error

    def score(self, scores: ChunkLogprobs) -> None:
        """Record log-probabilities of prompt tokens, or of the token that is pushed next."""
        table = self._of_prompt if scores.first < self._num_prompt else self._of_output
        if table is not None:
            table.put(scores)

    def push(self, token: int, now: float) -> FinishReason | None:
        """Record a token. Returns "stop" after a stop string, "error" if detokenization failed, else None."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._new.append(token)
        if self._eager and self._failure is None:
            self._read([token])
        return "error" if self._failure else "stop" if self._text is not None and self._text.stopped else None

    def fail(self, error: BaseException) -> None:
        """Mark the request to end with `error`; the first error counts."""
        self._failure = self._failure or f"{type(error).__name__}: {error}"

    def end(self, finished: Finished, now: float) -> None:
        """Complete the request, with an error completion if `finish` raises."""
        try:
            self.finish(finished, now)
        except BaseException as error:
            self.fail(error)
            self.completion = self.completion or Completion(
                text=None if self._text is None else "",
                token_ids=finished.token_ids.tolist(),
                finish_reason="error",
                timings=Timings(first_token_s=None, total_s=now - self.request.arrival),
                num_preemptions=finished.num_preemptions,
                error=self._failure,
            )
            if is_interrupt(error):
                raise
            log.exception("request %s: its end could not be taken in", self.request.request_id)

    def finish(self, finished: Finished, now: float) -> None:
        """Build the completion. If its text or log-probabilities cannot be made, it is an error."""
        tokens = finished.token_ids.tolist()
        logprobs, total = None, None
        self._admitted_with(finished)
        try:
            if self._text is not None and self._failure is None:
                self._read(tokens if not self._eager else [], last=True)
            logprobs = self._logprobs(0, len(tokens))
            total = None if self._of_output is None else self._of_output.total
        except Exception as error:
            log.exception("request %s: what it generated cannot be given in full", self.request.request_id)
            self.fail(error)
        finally:
            stopped = self._text is not None and self._text.stopped
            self.completion = Completion(
                text=None if self._text is None else self._text.text,
                token_ids=tokens,
                finish_reason="error" if self._failure else "stop" if stopped else finished.reason,
                timings=self._timings(now),
                num_preemptions=self._num_preemptions + finished.num_preemptions,
                error=self._failure or finished.error,
                logprobs=logprobs,
                cumulative_logprob=total,
            )

    def hand_over(self, withdrawn: Finished, now: float) -> Handover:
        """End the request here, for another process to continue.

        The completion here has what chunks have delivered; the importing process delivers the rest.
        """
        answer, told = self.answer, self._num_taken
        self._admitted_with(withdrawn)
        text = None if self._text is None else self._text.text[: self._num_characters]
        logprobs = self._logprobs(0, told)
        timings, num_preemptions = self._timings(now), self._num_preemptions + withdrawn.num_preemptions
        self.completion = Completion(
            text=text,
            token_ids=withdrawn.token_ids[:told].tolist(),
            finish_reason="aborted",
            timings=timings,
            num_preemptions=num_preemptions,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else math.fsum(entry.logprob for entry in logprobs),
        )
        self._new, self._new_text = [], []
        salt = self.request.cache_salt
        of_prompt = answer.states[0].prompt_logprobs  # only the first continuation scores the prompt
        return Handover(
            prompt=answer.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=withdrawn.token_ids,
            params=settled(answer.params, self.request.sampling),
            index=self.request.sampling.index,
            priority=self.request.priority,
            cache_salt=None if salt is None else salt.decode("utf-8", "surrogatepass"),
            num_told_tokens=told,
            num_told_characters=len(text or ""),
            num_preemptions=num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
            first_token_s=timings.first_token_s,
            total_s=timings.total_s,
            logprobs=self._logprobs(0, len(withdrawn.token_ids)),
            prompt_logprobs=None if of_prompt is None else tuple(entry for entry in of_prompt if entry is not None),
        )

    def import_request(self, before: Handover) -> None:
        """Restore the state of an exported request. Raises RequestRejected if its text differs here or has a stop string."""
        tokens, told = before.token_ids.tolist(), before.num_told_tokens
        self._num_preemptions = before.num_preemptions
        self.num_cached_tokens = before.num_cached_tokens
        if before.first_token_s is not None:
            self._first_token_at = self.request.arrival + before.first_token_s
        if before.prompt_logprobs is not None:
            self._of_prompt = LogprobTable(1)
        for table, entries in ((self._of_prompt, before.prompt_logprobs), (self._of_output, before.logprobs)):
            if table is not None and entries:
                table.put(scores_of(entries, 1 if table is self._of_prompt else self._num_prompt))
        if self._text is not None:
            for token in tokens:  # one by one, as in the other process, so that the same text is held back
                self._read([token])
            text = self._text.text
            if self._text.stopped:
                raise RequestRejected("the text of the tokens that were generated has a stop string: it is at its end")
            if self._failure is not None or before.num_told_characters > len(text):
                raise RequestRejected(f"its tokens have another text here: {self._failure or 'it is shorter'}")
            self._new_text = [text[before.num_told_characters :]]
        self._num_taken, self._new = told, tokens[told:]

    def _admitted_with(self, end: Finished) -> None:
        """Record `num_cached_tokens` of the first admission."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = end.num_cached_tokens

    @property
    def _num_characters(self) -> int:
        """Characters of the text delivered in chunks."""
        return 0 if self._text is None else len(self._text.text) - sum(map(len, self._new_text))

    def _timings(self, now: float) -> Timings:
        arrival, first = self.request.arrival, self._first_token_at
        return Timings(first_token_s=None if first is None else first - arrival, total_s=now - arrival)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry for each scored token of the prompt, None for the first; None if not requested."""
        return None if self._of_prompt is None else (None, *self._of_prompt.told(0, self._num_prompt - 1))

    def _logprobs(self, begin: int, end: int) -> tuple[TokenLogprobs, ...] | None:
        """Those of generated tokens, if the caller requested them; `best_of` computes them for itself too."""
        table = None if self.answer.params.logprobs is None else self._of_output
        return None if table is None else table.told(begin, end)

    def _read(self, tokens: list[int], last: bool = False) -> None:
        """Detokenize `tokens`. A tokenizer that raises fails this request only; an interrupt propagates."""
        assert self._text is not None
        try:
            self._new_text.append(self._text.push(tokens)[0])
            if last:
                self._new_text.append(self._text.finish())
        except BaseException as error:
            self._failure = f"the text cannot be made: {type(error).__name__}: {error}"
            if is_interrupt(error):
                raise
            log.exception("request %s: the tokenizer cannot say its tokens; it ends", self.request.request_id)

    def ready(self, interval: int) -> bool:
        """Whether a chunk is due."""
        return self.completion is not None or len(self._new) >= interval

    def take(self) -> StreamChunk:
        """Take what is new since the last chunk. The last chunk of the prompt's continuations carries the output."""
        answer, done = self.answer, self.completion is not None
        answer.num_taken += done
        output = answer.output if done and answer.num_taken == len(answer.states) else None
        begin, end = self._num_taken, self._num_taken + len(self._new)
        chunk = StreamChunk(
            answer.index, "".join(self._new_text), self._new, self.number, self.completion, output,
            self._logprobs(begin, end),
        )  # fmt: skip
        self._num_taken, self._new, self._new_text = end, [], []
        return chunk


class RequestGroup:
    """The request states of one prompt: one for each continuation that is generated. `params` are resolved."""

    def __init__(
        self, index: int, prompt: str | None, params: SamplingParams, prepared: PreparedParams | None = None
    ) -> None:
        self.index = index  # of the prompt in its call
        self.prompt = prompt
        self.params = params
        self.prepared = prepared  # keeps the constraint compiled until the request ends
        self.states: Sequence[RequestState] = ()
        self.num_taken = 0  # request states that have delivered their last chunk

    @property
    def exportable(self) -> list[RequestState]:
        """The unfinished request states; of a beam search only the first, which represents the search."""
        states = self.states if (self.params.num_beams or 1) == 1 else self.states[:1]
        return [state for state in states if state.completion is None]

    @property
    def output(self) -> RequestOutput:
        """The output. Valid once all request states have ended."""
        first = self.states[0].request
        completions = [state.completion for state in self.states if state.completion is not None]
        if self.params.num_started > (n := self.params.n or 1):
            completions = sorted(completions, key=_mean_logprob, reverse=True)[:n]  # stable
        return RequestOutput(
            first.request_id, self.prompt, first.prompt_token_ids.tolist(), tuple(completions),
            self.states[0].prompt_logprobs, self.states[0].num_cached_tokens or 0,
        )  # fmt: skip


def _mean_logprob(completion: Completion) -> float:
    """The score for `best_of`: the mean log-probability of a token; -inf unless the reason is "stop" or "length"."""
    total, whole = completion.cumulative_logprob, completion.finish_reason in ("stop", "length")
    return total / len(completion.token_ids) if whole and total is not None and completion.token_ids else -math.inf

"""Delivery state of requests: tokens, text and log-probabilities of each continuation as they arrive.

`RequestGroup` is the interface of all kinds of groups; the kinds are in groups.py.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...cache.block_table import Int32
from ...scheduler.outcome import BeamMove, Finished
from ...scheduler.plan import NO_TOKENS, Candidates, ChunkLogprobs
from ...scheduler.request import FinishReason, Request, RequestRejected
from ..errors import Attempt, format_error
from ..text.detokenizer import TextStream
from .handover import Handover, resolved_params, scores_of
from .inputs import PromptInput
from .kept_tokens import KeptTokens
from .logprob_table import LogprobTable
from .outputs import Completion, RequestOutput, StreamChunk, Timings, TokenLogprobs, mean_logprob

log = logging.getLogger(__name__)

Event = int | ChunkLogprobs | Finished | Candidates  # a step's output for one request; an int is a token


class RequestState:
    """The delivery state of one continuation of a prompt. Mutated by the engine's thread."""

    def __init__(self, group: RequestGroup, number: int, request: Request, text: TextStream | None, streams: bool) -> None:
        self.group = group
        self.number = number
        self.request = request
        self.completion: Completion | None = None
        self._num_prompt = len(request.prompt_token_ids)
        self._prompt_table = None if request.sampling.prompt_logprobs is None else LogprobTable(1)
        self._output_table = None if request.sampling.logprobs is None else LogprobTable(self._num_prompt)
        self._text = text
        self._eager = text is not None and (streams or text.has_stops)
        self.keeps_logprobs = True  # else those that a chunk has delivered are released
        self.is_followed = streams or self._eager  # each token is due at once; else they are only kept
        self._num_taken = 0  # tokens delivered in chunks
        self._new: list[int] = []  # that no chunk has delivered
        self._kept: KeptTokens | None = None  # has the latest tokens, if the state is not followed
        self._told_text: list[str] = []  # of each chunk
        self._new_text: list[str] = []
        self._first_token_at: float | None = None
        self._num_preemptions = 0  # in another process, before the import
        self.num_disk_tokens = 0
        self.num_cached_tokens: int | None = None  # of the prompt at its first admission, here or in another process
        self._admitted_at: float | None = None  # that admission, if it was here
        self._failure: str | None = None  # why the request ends with an error

    def score(self, scores: ChunkLogprobs) -> None:
        """Record log-probabilities of prompt tokens, or of the token that is pushed next."""
        table = self._prompt_table if scores.first < self._num_prompt else self._output_table
        if table is not None:
            table.put(scores)

    def keep_tokens_in(self, kept: KeptTokens) -> None:
        """Take the request's further tokens from `kept`, not by `push`. For a state that is not followed."""
        self._kept = kept
        kept.add(self.request.request_id, self._new)

    def note_token(self, now: float) -> None:
        """Record the time of the first token."""
        if self._first_token_at is None:
            self._first_token_at = now

    def push(self, token: int, now: float) -> FinishReason | None:
        """Record a token. Returns "stop" after a stop string, "error" if detokenization failed, else None."""
        self.note_token(now)
        self._new.append(token)
        if not self._eager or self._text is None:
            return "error" if self._failure else None
        if self._failure is None:
            self._detokenize([token])
        return "error" if self._failure else "stop" if self._text.stopped else None

    def fail(self, error: BaseException) -> None:
        """Mark the request to end with `error`; the first error counts."""
        self._failure = self._failure or format_error(error)

    def end(self, finished: Finished, now: float) -> None:
        """Complete the request, with an error completion if `finish` raises."""
        try:
            self.finish(finished, now)
        except Exception as error:
            log.exception("request %s: its end could not be taken in", self.request.request_id)
            self.fail(error)
            self.completion = self.completion or Completion(
                decoded=None if self._text is None else "",
                token_ids=finished.token_ids.tolist(),
                finish_reason="error",
                timings=Timings(first_token_s=None, total_s=now - self.request.arrival),
                num_preemptions=finished.num_preemptions,
                error=self._failure,
            )

    def finish(self, finished: Finished, now: float) -> None:
        """Build the completion. If its text or log-probabilities cannot be made, it is an error."""
        tokens = finished.token_ids.tolist()
        logprobs, total = None, None
        self._record_admission(finished)
        try:
            if self._text is not None and self._failure is None:
                self._detokenize(tokens if not self._eager else [], last=True)
            logprobs = self._logprobs(0, len(tokens)) if self.keeps_logprobs else None
            total = None if self._output_table is None else self._output_table.total
        except Exception as error:
            log.exception("request %s: what it generated cannot be given in full", self.request.request_id)
            self.fail(error)
        finally:
            stopped = self._text is not None and self._text.stopped
            self.completion = Completion(
                decoded=None if self._text is None else "".join(self._told_text + self._new_text),
                token_ids=tokens,
                finish_reason="error" if self._failure else "stop" if stopped else finished.reason,
                timings=self._timings(now),
                num_preemptions=self._num_preemptions + finished.num_preemptions,
                error=self._failure or finished.error,
                logprobs=logprobs,
                cumulative_logprob=total,
            )
            if logprobs is not None:
                self._output_table = None  # the completion has them all

    @property
    def num_generated(self) -> int:
        """Tokens received so far."""
        if self._kept is not None:
            self._kept.settle()
        return self._num_taken + len(self._new) if self.completion is None else len(self.completion.token_ids)

    def check_exportable(self) -> None:
        """Raise RequestRejected if the request has ended, or its settings are no plain data."""
        name = self.request.request_id
        if self.completion is not None:
            reason = self.completion.finish_reason
            raise RequestRejected(f"request {name} has ended ({reason!r}): there is nothing left to hand over")
        if self.request.sampling.logits_processors:
            raise RequestRejected(
                f"request {name} has logits_processors, which are code and no plain data: it cannot be handed over, and goes on"
            )
        if not self.keeps_logprobs and self._output_table is not None:
            raise RequestRejected(
                f"request {name} is a stream with keep_logprobs=False, whose log-probabilities are gone: it goes on here"
            )

    def hand_over(self, withdrawn: Finished, now: float) -> Handover:
        """End the request here, for another process to continue.

        The completion here has what chunks have delivered; the importing process delivers the rest.
        """
        num_delivered = self._num_taken
        self._record_admission(withdrawn)
        text = None if self._text is None else "".join(self._told_text)
        logprobs = self._logprobs(0, num_delivered)
        timings, num_preemptions = self._timings(now), self._num_preemptions + withdrawn.num_preemptions
        handover = self._handover(withdrawn.token_ids, num_delivered, len(text or ""), timings, num_preemptions)
        self.completion = Completion(
            decoded=text,
            token_ids=withdrawn.token_ids[:num_delivered].tolist(),
            finish_reason="aborted",
            timings=timings,
            num_preemptions=num_preemptions,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else math.fsum(entry.logprob for entry in logprobs),
        )
        self._new, self._new_text = [], []
        return handover

    def copy(self, now: float) -> Handover | None:
        """As `hand_over`, of a request without chunks that goes on here. None if it has no token or cannot be continued."""
        if self._kept is not None:
            self._kept.settle()
        is_over = self._failure is not None or (self._text is not None and self._text.stopped)
        if is_over or not self._new or self.request.sampling.logits_processors:
            return None
        return self._handover(np.array(self._new, np.int32), 0, 0, self._timings(now), self._num_preemptions)

    def _handover(
        self, token_ids: Int32, num_told_tokens: int, num_told_characters: int, timings: Timings, num_preemptions: int
    ) -> Handover:
        group, salt, logprobs = self.group, self.request.cache_salt, self._logprobs(0, len(token_ids))
        prompt_logprobs = group.states[0].prompt_logprobs  # only the first continuation scores the prompt
        return Handover(
            prompt=group.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=token_ids,
            params=resolved_params(group.params, self.request.sampling),
            index=self.request.sampling.index,
            priority=self.request.priority,
            cache_salt=None if salt is None else salt.decode("utf-8", "surrogatepass"),
            num_told_tokens=num_told_tokens,
            num_told_characters=num_told_characters,
            num_preemptions=num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
            first_token_s=timings.first_token_s,
            total_s=timings.total_s,
            logprobs=None if logprobs is None else tuple(logprobs),
            prompt_logprobs=None if prompt_logprobs is None else tuple(entry for entry in prompt_logprobs if entry is not None),
        )

    def import_request(self, before: Handover) -> None:
        """Restore the state of an exported request. Raises RequestRejected if its text differs here or has a stop string."""
        tokens, num_delivered = before.token_ids.tolist(), before.num_told_tokens
        self._num_preemptions = before.num_preemptions
        self.num_cached_tokens = before.num_cached_tokens
        if before.first_token_s is not None:
            self._first_token_at = self.request.arrival + before.first_token_s
        if before.prompt_logprobs is not None:
            self._prompt_table = LogprobTable(1)
        for table, entries in ((self._prompt_table, before.prompt_logprobs), (self._output_table, before.logprobs)):
            if table is not None and entries:
                table.put(scores_of(entries, 1 if table is self._prompt_table else self._num_prompt))
        if self._text is not None and self._eager:  # else the text is made at the end
            # One by one, as in the other process, so that the same text is held back
            for token in tokens:
                self._detokenize([token])
            text = "".join(self._new_text)
            if self._text.stopped:
                raise RequestRejected("the text of the tokens that were generated has a stop string: it is at its end")
            if self._failure is not None or before.num_told_characters > len(text):
                raise RequestRejected(f"its tokens have another text here: {self._failure or 'it is shorter'}")
            self._told_text, self._new_text = [text[: before.num_told_characters]], [text[before.num_told_characters :]]
        self._num_taken, self._new = num_delivered, tokens[num_delivered:]

    def _record_admission(self, end: Finished) -> None:
        """Record `num_cached_tokens` and the time of the first admission."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens, self._admitted_at = end.num_cached_tokens, end.admitted_at
            self.num_disk_tokens = end.num_disk_tokens

    def _timings(self, now: float) -> Timings:
        arrival, admitted, first = self.request.arrival, self._admitted_at, self._first_token_at
        return Timings(
            first_token_s=None if first is None else first - arrival,
            total_s=now - arrival,
            queued_s=None if admitted is None else admitted - arrival,
        )

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs | None] | None:
        """One entry for each scored token of the prompt, None for the first; None if not requested."""
        return None if self._prompt_table is None else self._prompt_table.all_after_none()

    def _logprobs(self, begin: int, end: int) -> Sequence[TokenLogprobs] | None:
        """Those of generated tokens, if the caller requested them; `best_of` computes them for itself too."""
        if self.completion is not None and self.completion.logprobs is not None:
            return self.completion.logprobs[begin:end]
        table = None if self.group.params.logprobs is None else self._output_table
        return None if table is None else table.entries(begin, end)

    def put_back(self, chunks: Sequence[StreamChunk]) -> None:
        """Take back `chunks`, the last ones, which no caller has read. The request has not ended."""
        self._new = [token for chunk in chunks for token in chunk.token_ids] + self._new
        self._new_text = [chunk.text for chunk in chunks] + self._new_text
        del self._told_text[len(self._told_text) - len(chunks) :]
        self._num_taken -= sum(len(chunk.token_ids) for chunk in chunks)

    def _detokenize(self, tokens: list[int], last: bool = False) -> None:
        """Detokenize `tokens`. A tokenizer that raises fails this request only."""
        assert self._text is not None
        with Attempt() as attempt:
            self._new_text.append(self._text.push(tokens))
            if last:
                self._new_text.append(self._text.finish())
        if (error := attempt.error) is not None:
            self._failure = f"the text cannot be made: {format_error(error)}"
            log.error("request %s ends: the tokenizer failed on its tokens", self.request.request_id, exc_info=error)

    def ready(self, interval: int) -> bool:
        """Whether a chunk is due."""
        return self.completion is not None or len(self._new) >= interval

    def take_chunk(self) -> StreamChunk:
        """Take what is new since the last chunk. The last chunk of the prompt's continuations carries the output."""
        group, done = self.group, self.completion is not None
        group.num_taken += done
        output = group.output if done and group.num_taken == len(group.states) else None
        begin, end = self._num_taken, self._num_taken + len(self._new)
        text, logprobs = "".join(self._new_text), self._logprobs(begin, end)
        chunk = StreamChunk(group.index, text, self._new, self.number, self.completion, output, logprobs)
        self._told_text.append(text)
        self._num_taken, self._new, self._new_text = end, [], []
        if self._output_table is not None and not self.keeps_logprobs:
            self._output_table.release(end)
        return chunk


class GroupActions(NamedTuple):
    """What the engine must do for a request group: requests to abort, each with the reason, and beam moves to apply."""

    aborts: Sequence[tuple[str, FinishReason]] = ()
    moves: Sequence[BeamMove] = ()
    spare: Sequence[str] = ()  # beams without a move


class RequestGroup(ABC):
    """The continuations of one prompt: their requests in the engine, and a request state for each that the caller receives.

    Mutated by the engine's thread.

    Args:
        requests: The first `params.num_started` have a request state.
        streams: Whether chunks are read before the end.
    """

    def __init__(
        self,
        index: int,
        prompt: PromptInput,
        requests: Sequence[Request],
        text_stream: Callable[[], TextStream | None] = lambda: None,
        streams: bool = False,
    ) -> None:
        self.index = index
        self.prompt = prompt.prompt
        self.params = prompt.params
        self.prepared = prompt.prepared  # keeps the constraint compiled until the group ends
        self.states = tuple(
            RequestState(self, number, request, text_stream(), streams)
            for number, request in enumerate(requests[: self.params.num_started])
        )
        self.num_taken = 0  # request states that have delivered their last chunk

    @property
    @abstractmethod
    def request_ids(self) -> list[str]:
        """The requests whose end has not been delivered."""

    @property
    @abstractmethod
    def exportable(self) -> list[RequestState]:
        """The unfinished request states that can be handed over one by one."""

    def unfollowed_state(self, request_id: str) -> RequestState | None:
        """The request's state, if `deliver` need not get its tokens: they go to `RequestState.keep_tokens_in`."""
        return None

    @abstractmethod
    def deliver(self, request_id: str, event: Event, now: float) -> GroupActions | None:
        """Apply an event of one request. Returns what the engine must do; None for nothing."""

    @abstractmethod
    def fail_delivery(self, request_id: str, error: BaseException, now: float) -> GroupActions:
        """Handle an error of `deliver` or of the actions it returned."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Let all unfinished request states end with `error`, once their requests are aborted."""

    @abstractmethod
    def requests_of(self, state: RequestState) -> list[str]:
        """The requests to withdraw from the engine, to hand `state` over; none if its end is decided."""

    @abstractmethod
    def hand_over(self, state: RequestState, withdrawn: Sequence[Finished], now: float) -> Handover:
        """End `state` here, for another process to continue. `withdrawn` are the ends of its requests."""

    def copy(self, now: float) -> Handover | None:
        """The state of the one request of this group, which goes on: see `RequestState.copy`. None if there are several."""
        return None

    @property
    def is_finished(self) -> bool:
        """Whether all request states have ended."""
        return all(state.completion is not None for state in self.states)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, of all continuations that were started."""
        return sum(state.num_generated for state in self.states)

    @property
    def output(self) -> RequestOutput:
        """The output. Valid once all request states have ended."""
        first = self.states[0].request
        completions = [state.completion for state in self.states if state.completion is not None]
        if self.params.num_started > (n := self.params.n or 1):
            completions = sorted(completions, key=mean_logprob, reverse=True)[:n]  # stable
        return RequestOutput(
            first.request_id,
            self.prompt,
            first.prompt_token_ids.tolist(),
            tuple(completions),
            self.states[0].prompt_logprobs,
            self.states[0].num_cached_tokens or 0,
            self.states[0].num_disk_tokens,
        )

    def end_lost(self, now: float) -> None:
        """End the unfinished request states with an error: the engine has no work left that could end them."""
        lost = "the request's end was lost, as a step broke"
        for state in self.states:
            if state.completion is None:
                state.end(Finished(state.request.request_id, "error", NO_TOKENS, 0, lost), now)


def ready_chunk(states: list[RequestState], interval: int) -> StreamChunk | None:
    """Take a chunk from the first request state that has one ready; None if none has. Call it in the engine's thread.

    That state moves to the end of `states`, or is removed after its last chunk.
    """
    for i, state in enumerate(states):
        if state.ready(interval):
            del states[i]
            chunk = state.take_chunk()
            if chunk.completion is None:
                states.append(state)
            return chunk
    return None

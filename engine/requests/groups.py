"""The kinds of request groups: independent continuations of a prompt, and the beams of a search."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ...scheduler.outcome import Finished
from ...scheduler.plan import Candidates, ChunkLogprobs
from ...scheduler.request import FinishReason, Request
from ..errors import format_error
from ..text.detokenizer import TextStream
from .beams import BeamRules, BeamSearch, Hypothesis
from .handover import Handover
from .inputs import PromptInput
from .states import Event, GroupActions, RequestGroup, RequestState

log = logging.getLogger(__name__)


class ContinuationGroup(RequestGroup):
    """One continuation of a prompt, or several (`n`, `best_of`), each with a request and a request state of its own."""

    @cached_property
    def _state_of(self) -> dict[str, RequestState]:
        """The request states by request id."""
        return {state.request.request_id: state for state in self.states}

    @property
    def request_ids(self) -> list[str]:
        """See `RequestGroup`."""
        return [state.request.request_id for state in self.exportable]

    @property
    def exportable(self) -> list[RequestState]:
        """See `RequestGroup`."""
        return [state for state in self.states if state.completion is None]

    def unfollowed_state(self, request_id: str) -> RequestState | None:
        """See `RequestGroup`."""
        state = self._state_of[request_id]
        return None if state.is_followed else state

    def deliver(self, request_id: str, event: Event, now: float) -> GroupActions | None:
        """See `RequestGroup`."""
        state = self._state_of[request_id]
        if isinstance(event, int):
            reason = state.push(event, now)
            return None if reason is None else GroupActions(aborts=[(request_id, reason)])
        if isinstance(event, Finished):
            state.end(event, now)
        elif isinstance(event, ChunkLogprobs):
            state.score(event)
        return None

    def fail_delivery(self, request_id: str, error: BaseException, now: float) -> GroupActions:
        """End this continuation with `error`, and no other."""
        self._state_of[request_id].fail(error)
        return GroupActions(aborts=[(request_id, "error")])

    def fail(self, error: BaseException) -> None:
        """See `RequestGroup`."""
        for state in self.exportable:
            state.fail(error)

    def requests_of(self, state: RequestState) -> list[str]:
        """See `RequestGroup`."""
        return [state.request.request_id]

    def hand_over(self, state: RequestState, withdrawn: Sequence[Finished], now: float) -> Handover:
        """See `RequestGroup`. The other continuations stay."""
        return state.hand_over(withdrawn[0], now)

    def copy(self, now: float) -> Handover | None:
        """See `RequestGroup`."""
        return self.states[0].copy(now) if len(self.states) == 1 and not self.is_finished else None


class BeamGroup(RequestGroup):
    """The beams of a search, a request for each. The request states receive the best hypotheses at the end.

    Args:
        requests: One for each beam, all with the same prompt.
    """

    def __init__(
        self,
        index: int,
        prompt: PromptInput,
        requests: Sequence[Request],
        rules: BeamRules,
        text_stream: Callable[[], TextStream | None] = lambda: None,
        streams: bool = False,
    ) -> None:
        super().__init__(index, prompt, requests, text_stream, streams)
        self._running = {request.request_id: None for request in requests}  # ordered
        self._search = BeamSearch(rules, list(self._running))
        self._num_preemptions = 0
        self._num_cached_tokens: int | None = None
        self._num_disk_tokens = 0
        self._admitted_at: float | None = None
        self._end: FinishReason | None = None  # why it ended early
        self._error: str | None = None

    @property
    def request_ids(self) -> list[str]:
        """See `RequestGroup`. Also after the result is decided."""
        return list(self._running)

    @property
    def exportable(self) -> list[RequestState]:
        """The first request state, which represents the search."""
        return [state for state in self.states[:1] if state.completion is None]

    @property
    def num_generated(self) -> int:
        """See `RequestGroup`: those of the best hypotheses."""
        return sum(len(found.token_ids) for found in self._search.best)

    def deliver(self, request_id: str, event: Event, now: float) -> GroupActions | None:
        """See `RequestGroup`."""
        if isinstance(event, Candidates):
            return self._choose(request_id, event)
        return self._finish(event, now) if isinstance(event, Finished) else None

    def fail_delivery(self, request_id: str, error: BaseException, now: float) -> GroupActions:
        """End the search with `error`: moves may be half applied, or candidates lost."""
        self.fail(error)
        if not self._running:
            for state in self.states:
                if state.completion is None:
                    state.fail(error)
                    state.end(self._end_of(state, "error", []), now)
        return GroupActions(aborts=[(name, "stop") for name in self._running])

    def fail(self, error: BaseException) -> None:
        """See `RequestGroup`."""
        self._end, self._error = "error", format_error(error)

    def requests_of(self, state: RequestState) -> list[str]:
        """See `RequestGroup`: those of all beams."""
        return [] if self._is_decided else list(self._running)

    def hand_over(self, state: RequestState, withdrawn: Sequence[Finished], now: float) -> Handover:
        """End the whole search here. An imported one starts again from the prompt, so the data have no tokens."""
        self._num_preemptions += sum(end.num_preemptions for end in withdrawn)
        self._num_cached_tokens = withdrawn[0].num_cached_tokens
        self._running.clear()
        first, *_ = [one.hand_over(self._end_of(one, "aborted", []), now) for one in self.states]
        return first

    @property
    def _is_decided(self) -> bool:
        return self._end is not None or self._search.over

    def _choose(self, request_id: str, candidates: Candidates) -> GroupActions | None:
        """Record a beam's candidates. Once all are there, move the beams, or end the requests of a search that is over."""
        if self._is_decided:
            return None
        self._search.record(request_id, candidates)
        if not self._search.ready:
            return None
        moves = self._search.choose()
        spare = sorted(self._running.keys() - {move.request_id for move in moves})
        return GroupActions(moves=moves, spare=spare) if moves else GroupActions(aborts=[(name, "stop") for name in spare])

    def _finish(self, finished: Finished, now: float) -> GroupActions | None:
        """Record the end of one request; the last one completes the request states."""
        self._running.pop(finished.request_id, None)
        self._num_preemptions += finished.num_preemptions
        if finished.num_cached_tokens is not None:  # all forks have the same number
            self._num_cached_tokens, self._admitted_at = finished.num_cached_tokens, finished.admitted_at
            self._num_disk_tokens = finished.num_disk_tokens
        is_dropped = finished.reason == "stop"  # the search needed it no more
        if not is_dropped and not self._is_decided:
            self._end, self._error = finished.reason, finished.error
        if not self._running:
            self._complete(now)
        return None if is_dropped else GroupActions(aborts=[(name, "aborted") for name in self._running])

    def _complete(self, now: float) -> None:
        """Give each request state its hypothesis. A state that cannot take it ends with an error."""
        best: list[Hypothesis] = []
        try:
            best = self._search.best
        except Exception as error:
            log.exception("a beam search cannot say what it found")
            self.fail(error)
        for place, state in enumerate(self.states):
            found = best[place] if place < len(best) else None
            tokens = found.token_ids if found is not None else []
            try:
                for token in tokens:
                    state.push(token, now)
            except Exception as error:
                state.fail(error)
            reason: FinishReason = self._end or (found.reason if found is not None else "length")
            state.end(self._end_of(state, reason, tokens), now)

    def _end_of(self, state: RequestState, reason: FinishReason, tokens: list[int]) -> Finished:
        return Finished(
            state.request.request_id,
            reason,
            np.array(tokens, np.int32),
            self._num_preemptions,
            self._error,
            self._num_cached_tokens,
            self._admitted_at,
            self._num_disk_tokens,
        )

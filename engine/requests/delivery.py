"""Delivers the outputs and errors of steps to the request groups they belong to; an error in a group ends this group alone.

A step may give thousands of tokens, and most requests need them only at their end: `KeptTokens` takes these. The others, of
streams and of requests with stop strings, are events for their groups.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ...scheduler.outcome import Finished, StepOutputs
from ...scheduler.request import Request
from ..core import EngineCore
from ..errors import is_interrupt
from .kept_tokens import KeptTokens
from .states import Event, GroupActions, RequestGroup, RequestState

log = logging.getLogger(__name__)


class OutputDelivery:
    """The request groups of an engine, and the step outputs on their way to them. Mutated under the engine's lock."""

    def __init__(self) -> None:
        self.groups: dict[str, RequestGroup] = {}  # by each request whose end has not been delivered
        # Called at the end of `deliver` with the groups that have new tokens and are followed, and those of ended requests. A
        # group may occur several times.
        self.on_outputs: Callable[[Sequence[RequestGroup], Sequence[RequestGroup]], None] | None = None
        # Events of the last step. Empty between steps unless an interrupt stopped their delivery.
        self._undelivered: deque[tuple[str, Event]] = deque()
        self._unfollowed = KeptTokens()
        self._without_token: dict[str, RequestState] = {}  # of these requests, those without a token so far
        self._started: list[RequestState] = []  # of these, those whose first token is being delivered

    @property
    def is_pending(self) -> bool:
        """Whether `deliver` has anything to do."""
        return bool(self._undelivered)

    def add(self, group: RequestGroup, requests: Iterable[Request]) -> None:
        """Deliver the outputs of `requests` to `group`."""
        for request in requests:
            self.groups[request.request_id] = group
            if (state := group.unfollowed_state(request.request_id)) is not None:
                state.keep_tokens_in(self._unfollowed)
                self._without_token[request.request_id] = state

    def remove(self, request_ids: Iterable[str]) -> None:
        """Ignore further outputs of these requests."""
        for request_id in request_ids:
            self._unfollowed.remove(request_id)
            for known in (self.groups, self._without_token):
                known.pop(request_id, None)

    def queue(self, outputs: StepOutputs) -> None:
        """Queue the outputs of a step, for `deliver`."""
        events = self._undelivered
        events.extend(outputs.scores)  # before their tokens
        self._queue_tokens(outputs.request_ids, outputs.tokens)
        events.extend((finished.request_id, finished) for finished in outputs.finished)
        events.extend(outputs.candidates)  # after the ends: only for beams that are still running

    def _queue_tokens(self, request_ids: list[str], tokens: list[int]) -> None:
        unfollowed, pairs = self._unfollowed, zip(request_ids, tokens, strict=True)
        if not len(unfollowed):
            self._undelivered.extend(pairs)
            return
        unfollowed.put(request_ids, tokens)
        if len(unfollowed) < len(self.groups):
            self._undelivered.extend(pair for pair in pairs if pair[0] not in unfollowed)
        if self._without_token:
            started = list(filter(self._without_token.__contains__, request_ids))
            self._started += [self._without_token.pop(request_id) for request_id in started]

    def deliver(self, core: EngineCore, now: float) -> None:
        """Deliver the queued outputs, and apply to `core` what their groups ask for.

        An error of a group ends the requests that it concerns, and no others. An interrupt (`is_interrupt`) propagates; the
        next call delivers the rest.
        """
        groups, events = self.groups, self._undelivered
        while self._started:
            self._started.pop().note_token(now)
        updated: list[RequestGroup] = []
        ended: list[RequestGroup] = []
        try:
            while events:
                request_id, event = events.popleft()
                if (group := groups.get(request_id)) is None:
                    continue
                if isinstance(event, int):
                    updated.append(group)
                elif isinstance(event, Finished):
                    ended.append(group)
                    self.remove([request_id])
                try:
                    actions = group.deliver(request_id, event, now)
                    if actions is not None:
                        _apply(core, actions)
                except BaseException as error:
                    _apply(core, group.fail_delivery(request_id, error, now))
                    if is_interrupt(error):
                        raise
                    log.exception("request %s ends: an output of a step could not be delivered", request_id)
        finally:
            if self.on_outputs is not None and (updated or ended):
                self.on_outputs(updated, ended)


def _apply(core: EngineCore, actions: GroupActions) -> None:
    for request_id, reason in actions.aborts:
        core.abort(request_id, reason)
    if actions.moves:
        core.scheduler.apply_beam_moves(actions.moves, spare=actions.spare)

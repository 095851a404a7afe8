"""Delivers the outputs and errors of steps to the request groups they belong to; an error in a group ends this group alone.

A step may give thousands of tokens, and most requests need them only at their end: `KeptTokens` takes these. The others, of
streams and of requests with stop strings, are events for their groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from ...scheduler.outcome import Finished, StepOutputs
from ...scheduler.request import Request
from ..core import EngineCore
from .kept_tokens import KeptTokens
from .states import Event, GroupActions, RequestGroup, RequestState

log = logging.getLogger(__name__)


class OutputDelivery:
    """The request groups of an engine, and the step outputs on their way to them. For the engine's thread."""

    def __init__(self) -> None:
        self.groups: dict[str, RequestGroup] = {}  # by each request whose end has not been delivered
        # Called by `deliver` with the groups that have new tokens and are followed, and those of ended requests. A group may
        # occur several times.
        self.on_outputs: Callable[[Sequence[RequestGroup], Sequence[RequestGroup]], None] = lambda updated, ended: None
        self._unfollowed = KeptTokens()
        self._without_token: dict[str, RequestState] = {}  # of these requests, those without a token so far

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

    def deliver(self, core: EngineCore, outputs: StepOutputs, now: float) -> None:
        """Deliver the outputs of a step, and apply to `core` what their groups ask for.

        An error of a group ends the requests that it concerns, and no others.
        """
        updated: list[RequestGroup] = []
        ended: list[RequestGroup] = []
        events: Iterable[tuple[str, Event]] = chain(
            # Before their tokens.
            outputs.scores,
            self._followed_tokens(outputs.request_ids, outputs.tokens, now),
            ((finished.request_id, finished) for finished in outputs.finished),
            # After the ends: only for beams that are still running.
            outputs.candidates,
        )
        for request_id, event in events:
            if (group := self.groups.get(request_id)) is None:
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
            except Exception as error:
                log.exception("request %s ends: an output of a step could not be delivered", request_id)
                _apply(core, group.fail_delivery(request_id, error, now))
        if updated or ended:
            self.on_outputs(updated, ended)

    def _followed_tokens(self, request_ids: list[str], tokens: list[int], now: float) -> Iterable[tuple[str, int]]:
        """The tokens that are due at once, by request. The others are kept."""
        unfollowed, pairs = self._unfollowed, zip(request_ids, tokens, strict=True)
        if not len(unfollowed):
            return pairs
        unfollowed.put(request_ids, tokens)
        if self._without_token:
            for request_id in list(filter(self._without_token.__contains__, request_ids)):
                self._without_token.pop(request_id).note_token(now)
        return [pair for pair in pairs if pair[0] not in unfollowed] if len(unfollowed) < len(self.groups) else ()


def _apply(core: EngineCore, actions: GroupActions) -> None:
    for request_id, reason in actions.aborts:
        core.abort(request_id, reason)
    if actions.moves:
        core.scheduler.apply_beam_moves(actions.moves, spare=actions.spare)

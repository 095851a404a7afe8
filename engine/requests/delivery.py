"""Delivers the outputs and errors of steps to the request groups they belong to; an error in a group ends this group alone."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ...scheduler.outcome import Finished, StepOutputs
from ...scheduler.request import Request
from ..core import EngineCore
from ..errors import is_interrupt
from .states import Event, GroupActions, RequestGroup

log = logging.getLogger(__name__)


class OutputDelivery:
    """The request groups of an engine, and the step outputs on their way to them. Mutated under the engine's lock."""

    def __init__(self) -> None:
        self.groups: dict[str, RequestGroup] = {}  # by each request whose end has not been delivered
        # Called at the end of `deliver` with the groups that have new tokens, and those of ended requests. A group may occur
        # several times.
        self.on_outputs: Callable[[Sequence[RequestGroup], Sequence[RequestGroup]], None] | None = None
        # Events of the last step. Empty between steps unless an interrupt stopped their delivery.
        self._undelivered: deque[tuple[str, Event]] = deque()

    @property
    def is_pending(self) -> bool:
        """Whether `deliver` has anything to do."""
        return bool(self._undelivered)

    def add(self, group: RequestGroup, requests: Iterable[Request]) -> None:
        """Deliver the outputs of `requests` to `group`."""
        self.groups.update((request.request_id, group) for request in requests)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Ignore further outputs of these requests."""
        for request_id in request_ids:
            self.groups.pop(request_id, None)

    def queue(self, outputs: StepOutputs) -> None:
        """Queue the outputs of a step, for `deliver`."""
        events = self._undelivered
        events.extend(outputs.scores)  # before their tokens
        events.extend(zip(outputs.request_ids, outputs.tokens, strict=True))
        events.extend((finished.request_id, finished) for finished in outputs.finished)
        events.extend(outputs.candidates)  # after the ends: only for beams that are still running

    def deliver(self, core: EngineCore, now: float) -> None:
        """Deliver the queued outputs, and apply to `core` what their groups ask for.

        An error of a group ends the requests that it concerns, and no others. An interrupt (`is_interrupt`) propagates; the
        next call delivers the rest.
        """
        groups, events = self.groups, self._undelivered
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
                    del groups[request_id]
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

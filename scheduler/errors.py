"""The errors of the scheduler.

SchedulerError
├── RequestRejected   (a ValueError) the request cannot be served; nothing was kept of it
│   ├── PromptTooLong     it can never fit: the model's context or the whole pool is too small
│   └── DuplicateRequest  its id is in use
└── InvalidCallOrder         schedule and apply were not called in turn, or with another plan's result
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Root of everything the scheduler raises on purpose."""


class RequestRejected(SchedulerError, ValueError):
    """The request cannot be served; the scheduler is as it was."""


class PromptTooLong(RequestRejected):
    """The prompt can never fit."""


class DuplicateRequest(RequestRejected):
    """A request of this id is waiting or running."""


class InvalidCallOrder(SchedulerError):
    """A plan is out and its result not applied, or the result belongs to another plan."""

"""The errors of the scheduler.

SchedulerError
├── RequestRejected   (a ValueError) the request cannot be served; nothing of it is kept
│   ├── PromptTooLong     it can never fit: the model's context or the whole pool is too small
│   └── DuplicateRequest  its id is in use
└── InvalidCallOrder  schedule and apply were not called in turn, or with another plan's result

UnknownArgument       (a TypeError and a ValueError) a call has no argument of that name; says what to write instead
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base class of the scheduler's errors."""


class RequestRejected(SchedulerError, ValueError):
    """The request cannot be served; the scheduler is unchanged."""


class PromptTooLong(RequestRejected):
    """The prompt can never fit."""


class DuplicateRequest(RequestRejected):
    """A request with this id is waiting or running."""


class InvalidCallOrder(SchedulerError):
    """A plan is pending without its result, or the result belongs to another plan."""


class UnknownArgument(TypeError, ValueError):
    """A call has no argument of that name.

    A TypeError, as Python raises it, and a ValueError, like pagetide's other errors for bad input.
    """

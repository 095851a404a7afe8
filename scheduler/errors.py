"""The errors of the scheduler.

SchedulerError
├── RequestRejected   (a ValueError) the request cannot be served; nothing of it is kept
│   ├── PromptTooLong     it can never fit: the model's context or the whole pool is too small
│   └── DuplicateRequest  its id is in use
└── InvalidCallOrder  schedule and apply were not called in turn, or with another plan's result
"""

from __future__ import annotations

# How the error of a completion begins if its request asked for something that cannot be followed: no fault of the engine.
NO_TOKEN_LEFT = "what was asked for rules out every token that could come next"
LOGITS_OVERFLOW = "the logits overflow under the temperature, the penalties or the biases that were asked for"
CANNOT_FOLLOW = "the constraint cannot be followed"
REQUEST_FAULTS = (NO_TOKEN_LEFT, LOGITS_OVERFLOW, CANNOT_FOLLOW)


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

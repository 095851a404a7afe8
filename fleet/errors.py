"""The error of a fleet for its callers: the cluster, the queue or all workers are away."""

from __future__ import annotations

from ..engine.errors import EngineError


class FleetError(EngineError):
    """The fleet cannot be reached or started, or failed on a request; the message says why and what to do."""

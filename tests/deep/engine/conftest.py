"""One monitor for all engines of these tests."""

from engine_session import _one_monitor  # noqa: F401

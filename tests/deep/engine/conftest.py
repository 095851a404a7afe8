"""One monitor for all engines of these tests, and tests that are coroutines."""

from coroutine_tests import pytest_pyfunc_call  # noqa: F401
from engine_session import _one_monitor  # noqa: F401

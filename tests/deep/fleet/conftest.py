"""Tests of fleets may be coroutines."""

from coroutine_tests import pytest_pyfunc_call  # noqa: F401
from fleet_fixtures import batch, command, cutter  # noqa: F401
from kv_event_structs import context, publish  # noqa: F401

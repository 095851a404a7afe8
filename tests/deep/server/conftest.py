"""Tests that are coroutines, and a browser for those of the page."""

from browser_session import browser, open_page  # noqa: F401
from coroutine_tests import pytest_pyfunc_call  # noqa: F401

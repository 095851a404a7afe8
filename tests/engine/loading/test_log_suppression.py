"""The suppression of transformers' log lines, which threads share."""

from __future__ import annotations

import logging

from pagetide.engine.loading.log_suppression import quiet_transformers

LOGGER = logging.getLogger("transformers")


def test_contexts_that_overlap_leave_the_logger_as_it_was() -> None:
    before = LOGGER.handlers[:], LOGGER.propagate
    first, second = quiet_transformers(), quiet_transformers()
    one = first.__enter__()
    LOGGER.warning("to the first")
    two = second.__enter__()
    LOGGER.warning("to both")
    first.__exit__(None, None, None)
    assert not LOGGER.propagate, "the second context is open"
    LOGGER.warning("to the second")
    second.__exit__(None, None, None)
    assert (one, two) == (["to the first", "to both"], ["to both", "to the second"])
    assert (LOGGER.handlers[:], LOGGER.propagate) == before

"""The checks of attention and graphs with the real Triton kernels, interpreted: what they are handed there suits them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import triton_interpreter  # noqa: F401  before anything has kernels
from host_seams import seams

from pagetide.engine.attention.backends import BACKENDS
from pagetide.engine.attention.choose import MAKERS
from pagetide.engine.self_check.parts import check_part
from pagetide.engine.self_check.report import GRAPHS, PASSED


def again(work: Callable[[], None]) -> Callable[[], None]:
    """Records nothing: an interpreted kernel is in no tape. What it does again is right."""
    work()
    return work


@pytest.mark.parametrize("part", ["triton", GRAPHS])
def test_the_triton_kernel_passes(part: str) -> None:
    outcome = check_part(part, seams(makers=dict.fromkeys(BACKENDS, MAKERS["triton"]), record=lambda: again))
    assert (outcome.state, outcome.reason) == (PASSED, None)

"""What a block has begun is undone where it raises, an interrupt included, and nowhere else."""

from __future__ import annotations

import pytest

from pagetide.common.on_error import OnError


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_undoing_comes_in_order_and_with_an_error_alone(error: type[BaseException]) -> None:
    undone: list[int] = []
    with OnError(lambda: undone.append(0)):
        pass
    with pytest.raises(error), OnError(lambda: undone.append(1), lambda: undone.append(2)):
        raise error
    assert undone == [1, 2]

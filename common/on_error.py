"""Undoing what a block has begun, where it does not run to its end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class OnError:
    """Calls each of `undo`, in order, if the block raises anything, an interrupt included. The error goes on."""

    __slots__ = ("_undo",)

    def __init__(self, *undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            for undo in self._undo:
                undo()

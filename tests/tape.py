"""A stand-in for CUDA graphs: torch operations are written down and done again over the same tensors.

As in a captured graph, addresses and whatever the host decided stay as they were; what the tensors hold is read anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagetide.engine.execution.graphs import CaptureCheck


class Tape(CaptureCheck):
    """What is done while it is on, and can be `replay`ed. Counts the replays."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            pairs = zip(new, out, strict=True) if isinstance(out, tuple | list) else [(new, out)]
            for now, before in pairs:
                if isinstance(before, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def recorder(tapes: list[Tape]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Records as `CudaRecorder` does; the tapes are added to `tapes`."""

    def record(work: Callable[[], None]) -> Callable[[], None]:
        work()
        tapes.append(tape := Tape())
        with tape:
            work()
        return tape.replay

    return record

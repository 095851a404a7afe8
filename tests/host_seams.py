"""A CUDA device of host memory for the self-check: host extents, a kernel in plain torch, a tape in place of a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from dense_kernel import DenseKernel
from tape import recorder

from pagetide.allocator.host_arena import HostArena
from pagetide.engine.attention.backends import BACKENDS
from pagetide.engine.self_check.parts import Seams


def seams(**changed: Any) -> Seams:
    """A device of compute capability 9.0 whose memory is the host's."""
    here = Seams(
        device=torch.device("cpu"),
        capability=(9, 0),
        granule_bytes=64 << 10,
        arena=HostArena,
        record=lambda: recorder([]),
        makers=dict.fromkeys(BACKENDS, DenseKernel),
        synchronize=lambda: None,
    )
    return replace(here, **changed)

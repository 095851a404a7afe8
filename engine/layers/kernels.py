"""The kernels that compute norms, rotary embeddings and gates in place of modules: native ones on a CPU, Triton's on CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ... import native

log = logging.getLogger(__name__)

# Of a gated MLP on a CPU at once, so that the hidden values of a long chunk stay in a cache, and take memory that the heap
# holds already.
_MOST_ROWS = 512


class RowKernels(NamedTuple):
    """Three functions with the arguments of those in `triton_kernels`; and `gated_norm(x, gate, ...)`, `rms_norm` of x times
    the SiLU of a gate, where there is one.
    """

    rms_norm: Callable[..., torch.Tensor]
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated: Callable[..., torch.Tensor]
    most_rows: int | None  # of a gated MLP at once
    merges_plain: bool  # linear layers of torch; packed ones are merged in any case
    device: torch.device
    gated_norm: Callable[..., torch.Tensor] | None = None


def kernels_on(device: torch.device) -> RowKernels | None:
    """The kernels for a device; None where there are none."""
    if device.type == "cpu" and native.instructions() is not None:
        ops = torch.ops.pagetide
        three = ops.rms_norm.default, ops.rotate.default, ops.gated.default
        return RowKernels(*three, _MOST_ROWS, False, device, ops.gated_rms_norm.default)
    if device.type == "cuda":
        try:
            return triton_kernels(device)
        except ImportError as error:
            log.info("modules are not replaced: %s", error)
    return None


def triton_kernels(device: torch.device) -> RowKernels:
    """Those by Triton. Raises ImportError where it is not installed."""
    from .triton_kernels import gated, rms_norm, rotate

    return RowKernels(rms_norm, rotate, gated, None, True, device)

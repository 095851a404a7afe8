"""The import of Triton: only this module does it, and pagetide works without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ...common.error_text import install_command

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ImportError(
        f"the Triton kernels need the package triton, which is not installed: {install_command('triton')}"
    ) from error

__all__ = ("on_device", "padded", "tl", "triton")


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current for a launch, because Triton uses the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def padded(size: int) -> int:
    """The next power of two, at least 16, as `tl.dot` requires."""
    return max(16, 1 << (size - 1).bit_length())

"""Memory that this process holds on a device, and the release of cached memory."""

from __future__ import annotations

import ctypes

import psutil
import torch

from ...common.units import MIB

_CUDA_CONTEXT_BYTES = 512 * MIB


def trim(device: torch.device) -> None:
    """Free cached memory: torch's unused segments on CUDA, or the heap's free pages (malloc_trim, glibc)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def process_bytes(device: torch.device) -> int:
    """Bytes that this process holds on the device: its resident set, or on CUDA torch's segments and the context."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) if torch.cuda.is_initialized() else 0
        return reserved + _CUDA_CONTEXT_BYTES
    return int(psutil.Process().memory_info().rss)

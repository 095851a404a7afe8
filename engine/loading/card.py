"""A CUDA device for a process that is no engine: what it is, and plain allocations of torch on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .loader import choose_device


def find_card(name: str) -> torch.device | None:
    """The card of this name; None where "auto" finds none. Raises DeviceNotFound, ConfigError."""
    device = choose_device(name)
    return None if device.type == "cpu" else device


def card_facts(device: torch.device) -> dict[str, Any]:
    """The card's names, its bytes, and torch's version of CUDA. Makes a CUDA context."""
    found = torch.cuda.get_device_properties(device)
    _, total_bytes = torch.cuda.mem_get_info(device)
    uuid = str(found.uuid)
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"  # as NVML writes it
    return {
        "device": str(device), "uuid": uuid, "name": found.name, "total_bytes": total_bytes, "cuda": torch.version.cuda,
    }  # fmt: skip


def card_pieces(device: torch.device) -> tuple[Callable[[int], torch.Tensor], Callable[[list[Any]], None]]:
    """Functions that take a piece of so many bytes, and give pieces to which a list has the only references back."""

    def give(pieces: list[Any]) -> None:
        pieces.clear()
        torch.cuda.empty_cache()

    return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device), give

"""A model on the host whose weights lie in a CUDA arena: over a driver without a device, with addresses that the host has."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda_driver import OUT_OF_MEMORY, Fault, HostedCudaDriver
from families import tiny

from pagetide.cache.storage import as_bytes
from pagetide.engine.loading import arena_weights
from pagetide.engine.loading.arena_weights import ArenaWeights
from pagetide.engine.loading.mapped_weights import weights_of

CPU = torch.device("cpu")


def host_bytes(buffer: Any, device: torch.device) -> torch.Tensor:
    """`as_bytes`, where addresses of a CUDA device are the host's. Nothing is touched."""
    if not hasattr(buffer, "__cuda_array_interface__"):
        return as_bytes(buffer, device)
    there = buffer.__cuda_array_interface__
    array = (ctypes.c_ubyte * there["shape"][0]).from_address(there["data"][0])
    array.owner = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


class Leased:
    def __init__(self, rig: Rig, size: int) -> None:
        self.rig, self.size = rig, size
        rig.leased.append(size)

    def close(self) -> None:
        self.rig.leased.remove(self.size)


class Rig:
    """A small model, and the driver. `leased`: host memory that is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **driver: Any) -> None:
        self.leased: list[int] = []
        self.driver = HostedCudaDriver(**driver)
        self.model: Any = tiny("llama")
        self.stream = 0
        monkeypatch.setattr(arena_weights, "CudaBindings", lambda: self.driver)
        monkeypatch.setattr(arena_weights, "as_bytes", host_bytes)
        monkeypatch.setattr(arena_weights, "_current_stream", lambda device: self.stream)
        monkeypatch.setattr(arena_weights, "_LEAST_EXTENTS", 4)

    def sleepers(self) -> ArenaWeights:
        return ArenaWeights.of(self.model, CPU, lambda size: Leased(self, size))

    def fail(self, number: int, call: str | None = None, *, goes_on: bool = False) -> None:
        """Let a call fail, counted from now: of any name, or of one; with `goes_on` all from it on."""
        first = number + (len(self.driver.calls) if call is None else self.driver._counts[call])
        self.driver.faults = [Fault(first, 1 << 60 if goes_on else first, OUT_OF_MEMORY, call)]

    @property
    def failed(self) -> bool:
        """Whether the call that `fail` named was made."""
        (fault,) = self.driver.faults
        return len(self.driver.calls) > fault.first

    def logits(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(input_ids=torch.arange(1, 20)[None], use_cache=False).logits

    def content(self) -> list[bytes]:
        return [one.detach().view(torch.uint8).numpy().tobytes() for one in self.weights()]

    def places(self) -> list[int]:
        return [one.data_ptr() for one in self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [one for one in weights_of(self.model) if one.device == CPU]

    def within(self, address: int) -> bool:
        """Whether it is the device's."""
        return any(base <= address < base + size for base, size in self.driver._ranges.items())

    def hooks(self) -> int:
        return sum(len(module._forward_pre_hooks) for module in self.model.modules())

    def check_nothing_is_left(self) -> None:
        self.driver.faults, self.model = [], None
        gc.collect()
        assert self.driver.leaks() == [] and self.driver.violations == [] and self.leased == []


def checked_rig(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Rig]:
    """A fixture's rig, of which nothing may be left."""
    caplog.set_level(logging.ERROR, "pagetide")  # what is kept of errors would keep their frames, too
    made = Rig(monkeypatch)
    yield made
    made.check_nothing_is_left()

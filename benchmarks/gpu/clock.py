"""Time on a device: CUDA's events on CUDA, the host's clock on a CPU. What else differs between the two stands here too."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import psutil
import torch

_AHEAD_CYCLES = 20_000_000  # about 10 ms, in which the host puts a whole measurement in the queue


class DeviceClock:
    """Measures on `device`, "cuda" or "cpu"."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int, warm: int = 2) -> list[float]:
        """Seconds that the device takes for each of `repeats` calls, the host's part of them hidden where it can be."""
        for _ in range(warm):
            run()
        self.synchronize()
        if not self.cuda:
            return [timed(run) for _ in range(repeats)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda._sleep(_AHEAD_CYCLES)
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    def host_seconds(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Seconds from each call until the device has done what it asked for."""
        samples = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            run()
            self.synchronize()
            samples.append(time.perf_counter() - began)
        return samples

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of host memory, pinned for CUDA, every page touched."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.cuda).fill_(1)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the device, random."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).random_(256)

    def free_bytes(self) -> int:
        """Free bytes of the device, as its driver reports them; without CUDA, available host memory."""
        return int(torch.cuda.mem_get_info(self.device)[0] if self.cuda else psutil.virtual_memory().available)

    def release(self) -> None:
        """Give back what torch keeps for later."""
        if self.cuda:
            torch.cuda.empty_cache()


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call, by the host."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began

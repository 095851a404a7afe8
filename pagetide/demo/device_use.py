"""What engine processes and an external process hold of a private device, and the external process's coming and going."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.units import MIB
from ..pressure import ExternalProcess, PrivateDevice


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Bytes that each process held at one time; tuples list the engines in order."""

    at_s: float
    other: tuple[int, ...]  # programs and weights
    kv: tuple[int, ...]
    external: int
    granted: int
    recalling: tuple[bool, ...] = ()

    @property
    def held_bytes(self) -> int:
        """Bytes that all processes held together."""
        return sum(self.other) + sum(self.kv) + self.external


def sample_device(at_s: float, engine_pids: Sequence[int], device: PrivateDevice, external: ExternalProcess) -> DeviceSample:
    """Measure the processes now."""
    leases = {lease.pid: lease for lease in device.leases()}
    kv = tuple(leases[pid].held.get("kv", 0) if pid in leases else 0 for pid in engine_pids)
    for _ in range(10):  # until no piece came between the readings: memory that moves would be counted twice
        outside = _resident(external.pid)
        other = tuple(max(0, _resident(pid) - mapped) for pid, mapped in zip(engine_pids, kv, strict=True))
        if _resident(external.pid) == outside:
            break
    recalling = tuple(pid in leases and leases[pid].state in ("recalling", "overdue") for pid in engine_pids)
    return DeviceSample(at_s, other, kv, outside, sum(lease.granted_bytes for lease in leases.values()), recalling)


def _resident(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error as error:
        raise ChildProcessError(f"process {pid} has ended") from error


class Visitor:
    """The external process as it comes and goes: piece by piece up to what it wants, and in pieces down again."""

    def __init__(self, device: PrivateDevice, external: ExternalProcess, piece_bytes: int, piece_s: float) -> None:
        self.pieces = 0  # that the external process took
        self.refused = 0  # attempts at a piece that did not fit
        self._device, self._external = device, external
        self._piece_bytes, self._piece_s = piece_bytes, piece_s
        self._next_s = 0.0

    def advance(self, at_s: float, wanted_bytes: int) -> None:
        """Take or return the next piece on the way to `wanted_bytes`, if it is time."""
        held = self._external.held_bytes
        if at_s < self._next_s or abs(wanted_bytes - held) < MIB:
            return
        self._next_s = at_s + self._piece_s
        if wanted_bytes < held:
            self._external.hold(max(wanted_bytes, held - self._piece_bytes))
        elif self._device.free_bytes() >= (piece := min(self._piece_bytes, wanted_bytes - held)):
            self._external.hold(held + piece)
            self.pieces += 1
        else:
            self.refused += 1  # what a driver would answer

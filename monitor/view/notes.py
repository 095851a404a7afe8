"""What a printed view does not show, and why: no GPU, no monitor."""

from __future__ import annotations

import textwrap

from rich.segment import Segment

from ..snapshot import DeviceKind, Origin, Snapshot
from .symbols import Symbols
from .text import DIM, Line, printable

_CONTAINED = "In a container, start it with the GPUs (docker run --gpus all)."
_OTHERS = "GPUs of other makers than NVIDIA are not read."
_NO_MONITOR = (
    "No monitor runs, so there are no leases and no events. An engine starts one, and so does `vram-monitor serve`; "
    "`vram-monitor events` then lists what took memory."
)


def note_lines(snapshot: Snapshot, width: int, symbols: Symbols) -> list[Line]:
    """The notes as lines of at most `width` cells; [] if nothing is missing."""
    lines: list[Line] = []
    for note in _notes(snapshot):
        text = printable(note, ascii_only=symbols.ascii_only)
        lines += [[Segment(part, DIM)] for part in textwrap.wrap(text, width)]
    return [[], *lines] if lines else []


def _notes(snapshot: Snapshot) -> list[str]:
    notes = []
    if "nvml" in snapshot.source.split("+") and {device.info.kind for device in snapshot.devices} == {DeviceKind.HOST}:
        why = snapshot.unavailable.get("nvml", "its driver is missing, or it is hidden from this process")
        notes.append(f"No NVIDIA GPU is seen: {why}. {_CONTAINED} {_OTHERS} What is shown is the memory of this machine.")
    if snapshot.origin is Origin.WAITING:
        notes.append(_NO_MONITOR)
    return notes

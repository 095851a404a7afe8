"""A program that reserves memory by `pagetide.reserve` and takes it, as told by lines. It is a member of a test device.

reserve BYTES WAIT_S   resize BYTES WAIT_S   take BYTES   close   state   flood NUMBER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from broker_rig import Process, say

import pagetide
from pagetide.allocator.errors import LeaseError
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.reservation import Reservation

PAGE = 1 << 20


class Reserver(Process):
    """That program, for tests."""

    file = __file__

    def __init__(self, directory: Path) -> None:
        super().__init__(env={"PAGETIDE_RUNTIME_DIR": str(directory)})

    def reserve(self, num_bytes: int, wait_s: float = 60) -> bool:
        """Whether the bytes are reserved now."""
        return bool(self.tell(f"reserve {num_bytes} {wait_s}")["kept"])

    def resize(self, num_bytes: int, wait_s: float = 60) -> int:
        """The size of the reservation afterwards."""
        return int(self.tell(f"resize {num_bytes} {wait_s}")["size"])


def main() -> None:
    arena, lease = HostArena(1024, PAGE), None
    said: str | None = None
    floods: list[Reservation] = []
    arena.map(range(1))  # what Python needs for it is there
    arena.unmap(range(1))
    say({"pid": os.getpid()})
    for line in sys.stdin:
        said = None
        try:
            match line.split():
                case ["reserve", size, wait]:
                    lease = pagetide.reserve(int(size), wait=float(wait))
                case ["resize", size, wait] if lease is not None:
                    lease.resize(int(size), wait=float(wait))
                case ["take", size]:
                    mapped, wanted = len(arena.mapped_extents), int(size) // PAGE
                    arena.map(range(mapped, wanted))
                    arena.unmap(range(wanted, mapped))
                case ["close"] if lease is not None:
                    lease.close()
                    lease = None
                case ["flood", number] if lease is not None:
                    for _ in range(int(number)):
                        floods.append(Reservation.ask(lease._path, lease.device_uuid, 1))
                        floods[-1].wait_answered(60)
        except LeaseError as error:
            said = f"{type(error).__name__}: {error}"
        say(_state(lease, arena) | {"said": said, "floods": len(floods)})


def _state(lease: Reservation | None, arena: HostArena) -> dict[str, Any]:
    return {
        "kept": lease is not None and lease.kept,
        "size": 0 if lease is None else lease.num_bytes,
        "taken": arena.mapped_bytes,
    }


if __name__ == "__main__":
    main()

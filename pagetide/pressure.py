"""A private device: some of this machine's memory, or a card, behind its own broker, and an external process that uses it.

`pagetide demo`, `pagetide stress` and examples/tide.py use it. The monitor is the real one, in a temporary
runtime directory, so that it disturbs no other monitor. The external process takes real memory and knows no broker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .common.child_process import ChildProcess, parent_channel
from .common.frames import ChannelClosed, PickleChannel
from .common.on_error import OnError
from .monitor.errors import MonitorFailed
from .monitor.runtime_dir import VARIABLE, FileLock, RuntimeDir

if TYPE_CHECKING:
    from .allocator.broker_client import BrokerClient
    from .allocator.wire import LeaseView
    from .monitor.record import RecordReader

START_S = 30.0
END_S = 10.0
FOLDERS = "pagetide-private-"  # how their names begin, in the temporary folder


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device, as the external process on it found it."""

    device: str  # "cuda:0"
    uuid: str
    name: str
    total_bytes: int
    cuda: str | None  # torch's version of CUDA


class ExternalProcess(ChildProcess):
    """A process that holds a given amount of memory. It ends with the context or with this process.

    Attributes:
        card: The card of which it takes memory; None: it takes this machine's.
        held_bytes: What it holds.
    """

    name = "the external process"

    def __init__(self, device: str = "cpu") -> None:
        """Start the process, which holds nothing yet. `device`: "cpu", "cuda", "cuda:1"; "auto" is a card if there is one.

        Raises ValueError if there is no such device.
        """
        super().__init__(("-m", __name__, device))
        with OnError(self.close):
            found = self.receive()
            if isinstance(found, str):
                raise ValueError(found)
        self.card: Card | None = found
        self.held_bytes: int = self.receive()

    def hold(self, num_bytes: int) -> None:
        """Allocate up to `num_bytes` in one piece, or free the last pieces beyond it; returns when done.

        What a card refuses is not held.
        """
        self.send(num_bytes)
        self.held_bytes = self.receive()


class PrivateDevice:
    """`vram-monitor serve` over `capacity_bytes` of this machine's memory, for engines and external processes.

    Where the external process is on a card, over that card instead. Engines use the device if they are made in a process with
    `environ`, or inside `here`.
    """

    def __init__(self, capacity_bytes: int, headroom_bytes: int, *externals: ExternalProcess) -> None:
        """Start the monitor and wait until it answers. Raises MonitorFailed with its output if it ends or does not answer."""
        self.capacity_bytes = capacity_bytes
        self.headroom_bytes = headroom_bytes
        self.card = externals[0].card if externals else None
        self._externals = externals
        _remove_left()
        self._folder, self._users = _locked_folder()
        self._directory = RuntimeDir(self._folder / "run")
        self._said = ""
        self._process: ChildProcess | None = None
        self._reader: RecordReader | None = None
        with OnError(self.close):
            self.start_monitor()

    def start_monitor(self) -> None:
        """Start the monitor, which counts the external processes that are alive. Raises as the constructor does."""
        from .monitor.watching import start_monitor

        living = [str(external.pid) for external in self._externals if external.status is None]
        source = ["--source", "host", "--capacity", str(self.capacity_bytes)]
        if self.card is not None:
            source = ["--source", "nvml", "--devices", self.card.uuid]
        elif living:
            source += ["--members", ",".join(living)]
        self._process = start_monitor(self._directory, *source, "--headroom", str(self.headroom_bytes))
        if self._reader is not None:
            self._reader.close()
        self._reader = self._wait(self._process)

    def kill_monitor(self) -> None:
        """Kill the monitor, and with it its broker."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._said = self.said  # the next one begins its log anew

    @property
    def monitor_ended(self) -> str | None:
        """How the monitor has ended; None while it runs."""
        assert self._process is not None
        return None if self._process.status is None else self._process.ending()

    @property
    def said(self) -> str:
        """What the monitors have logged."""
        return self._said + self._directory.log.read_text("utf-8", "replace")

    @property
    def socket(self) -> Path:
        """The broker's socket."""
        return self._directory.socket

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that put a process's engines on this device."""
        return {VARIABLE: str(self._directory.path)}

    @property
    def client(self) -> BrokerClient:
        """A client for commands to the broker."""
        from .allocator.broker_client import BrokerClient

        return BrokerClient(self.socket)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Put the engines that this process makes inside the context on this device."""
        before = os.environ.get(VARIABLE)
        os.environ.update(self.environ)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

    def leases(self) -> tuple[LeaseView, ...]:
        """The leases of the engines."""
        return self.client.leases()

    def free_bytes(self) -> int:
        """Free bytes by the last measurement."""
        assert self._reader is not None
        (device,) = self._reader.snapshot().devices
        if device.memory.free_bytes is None:
            raise MonitorFailed(f"the private device is not measured: {device.memory.error}")
        return device.memory.free_bytes

    def close(self) -> None:
        """End the monitor and delete its files. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self._users.close()
        if self._process is not None:
            self._process.kill(signal.SIGTERM)
            self._process.close(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> PrivateDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait(self, process: ChildProcess) -> RecordReader:
        from .monitor.watching import find_live

        deadline = time.monotonic() + START_S
        while True:
            if (found := find_live((self._directory,))) is not None:
                _, reader = found
                measured = all(device.memory.at_ns for device in reader.snapshot().devices)
                if reader.monitor_pid == process.pid and measured:
                    return reader
                reader.close()  # that of a monitor before, or of one that starts
            if process.status is not None or time.monotonic() > deadline:
                raise MonitorFailed(f"the monitor of the private device does not answer; it said: {self.said.strip()[-2000:]}")
            time.sleep(0.005)


def _locked_folder() -> tuple[Path, FileLock]:
    """A folder of a new private device, and its users' lock, which is held before the folder has the name of one.

    The monitor ends when this lock is free, also after this process is killed.
    """
    made = Path(tempfile.mkdtemp(prefix=f".{FOLDERS}"))
    with OnError(lambda: shutil.rmtree(made, ignore_errors=True)):
        users = FileLock(RuntimeDir(made / "run").prepare().users_lock)
        with OnError(users.close):
            users.wait_shared(END_S)
            return made.rename(made.with_name(made.name[1:])), users


def _remove_left() -> None:
    """Remove the folders of devices that no process uses any more, such as those of killed ones."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with contextlib.closing(FileLock(RuntimeDir(folder / "run").users_lock)) as users:
                if users.try_exclusive():
                    shutil.rmtree(folder, ignore_errors=True)


def _host_piece(num_bytes: int) -> mmap.mmap:
    """Real memory of this machine."""
    piece = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, num_bytes, mmap.PAGESIZE):
        piece[at] = 1
    return piece


def _close_all(pieces: list[mmap.mmap]) -> None:
    for piece in pieces:
        piece.close()


def serve_pieces(parent: PickleChannel, take: Callable[[int], Any], give: Callable[[list[Any]], None]) -> None:
    """Hold what `parent` says until it ends. `take` raises MemoryError or RuntimeError where there is no room; `give` gets
    pieces of which nothing else has a reference.
    """
    pieces: list[tuple[int, Any]] = []
    with contextlib.suppress(ChannelClosed):
        while True:
            held = sum(size for size, _ in pieces)
            parent.send(held)
            wanted = parent.receive()
            if wanted > held:
                with contextlib.suppress(MemoryError, RuntimeError):
                    pieces.append((wanted - held, take(wanted - held)))
            given = []
            while pieces and held - pieces[-1][0] >= wanted:
                size, piece = pieces.pop()
                held -= size
                given.append(piece)
                del piece
            if given:
                give(given)


def main(device: str) -> None:
    """The external process: holds what its parent says, in pieces of real memory or of the card's."""
    parent = parent_channel()
    if device != "cpu":
        from .engine.errors import EngineError
        from .engine.loading.card import card_facts, card_pieces, find_card

        try:
            card = find_card(device)
        except EngineError as error:
            parent.send(str(error))
            return
        if card is not None:
            parent.send(Card(**card_facts(card)))
            serve_pieces(parent, *card_pieces(card))
            return
    parent.send(None)
    serve_pieces(parent, _host_piece, _close_all)


if __name__ == "__main__":
    main(sys.argv[1])

"""The errors of the allocator.

AllocatorError
├── OutOfDeviceMemory   the device refuses the bytes (map)
├── DriverUnavailable   the driver of this kind of device, or the package that calls it, is not there
├── DriverError         the device's driver refuses a call, for another reason than lack of memory
├── NoFreeBlocks        the pool has no such number of free blocks (allocate)
├── BlockMisuse         a caller's mistake: a block freed twice, the null block, an id outside the pool
└── LeaseError          what goes wrong between an engine and the broker
    ├── BrokerUnavailable           nobody answers at the socket, or not in time
    ├── ProtocolMismatch            the broker speaks another version
    ├── ProtocolViolation           what came over the socket is no message of this version
    ├── LeaseRefused                the broker says no
    │   ├── InvalidLease            the numbers contradict each other: min above max (ValueError too)
    │   ├── MinimumsExceedCapacity  the minimums would not fit: of all leases, or of one user's in what he may be promised
    │   ├── UnknownEngine           no lease of that name, or several
    │   └── NotPermitted            it is another user's engine
    ├── LeaseTooSmall               the lease cannot hold what the engine needs to start
    ├── GrantExceeded               more would be held than is granted
    └── LeaseClosed                 the lease has ended
"""

from __future__ import annotations


class AllocatorError(Exception):
    """Root of everything the allocator raises on purpose."""


class OutOfDeviceMemory(AllocatorError):
    """The device has not the bytes asked for. Nothing was mapped."""

    def __init__(self, asked_bytes: int, free_bytes: int, what: str = "memory") -> None:
        super().__init__(f"asked for {asked_bytes:,} bytes of {what}, {free_bytes:,} bytes are free")
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


class DriverUnavailable(AllocatorError):
    """Extents cannot be mapped on this machine or device at all; the message says what is missing."""


class DriverError(AllocatorError):
    """The device's driver answered a call with an error."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"the device's driver answered {call} with {name} ({code})")
        self.call = call
        self.code = code


class NoFreeBlocks(AllocatorError):
    """Fewer blocks are free than were asked for. Nothing was allocated."""

    def __init__(self, asked: int, available: int) -> None:
        super().__init__(f"asked for {asked:,} blocks, {available:,} are available")
        self.asked = asked
        self.available = available


class BlockMisuse(AllocatorError, ValueError):
    """A block id was used in a way its state forbids. Nothing was changed."""


class LeaseError(AllocatorError):
    """Root of what goes wrong between an engine and the broker; the message is a sentence for the user."""


class BrokerUnavailable(LeaseError):
    """Nobody answers at the broker's socket, or not in time."""


class ProtocolMismatch(LeaseError):
    """The two ends of a socket are of different versions."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"the broker speaks version {theirs} of the lease protocol and this process version {ours}; "
            f"update the {'broker: restart vram-monitor' if theirs < ours else 'engine'}"
        )
        self.ours = ours
        self.theirs = theirs


class ProtocolViolation(LeaseError):
    """What came over the socket is no message of this version. The connection is of no further use."""


class LeaseRefused(LeaseError):
    """The broker refuses what was asked. Nothing was changed."""


class InvalidLease(LeaseRefused, ValueError):
    """The numbers of a lease, or of a request about it, contradict each other."""


class MinimumsExceedCapacity(LeaseRefused):
    """The minimums of all leases together would not fit on the device, or those of one user in what he may be promised."""


class UnknownEngine(LeaseRefused):
    """No engine of that name holds a lease, or more than one does."""


class NotPermitted(LeaseRefused):
    """Only root, the broker's owner and an engine's own user may do that."""


class LeaseTooSmall(LeaseError):
    """The most that a lease may ever hold is less than the engine needs to start."""

    def __init__(self, needed_bytes: int, max_bytes: int, what: str) -> None:
        super().__init__(
            f"{what} need {needed_bytes:,} bytes and the lease may hold {max_bytes:,} at most; "
            f"raise its max by {needed_bytes - max_bytes:,} bytes or more"
        )
        self.needed_bytes = needed_bytes
        self.max_bytes = max_bytes


class GrantExceeded(LeaseError):
    """More would be held than is granted. Nothing was changed."""

    def __init__(self, asked_bytes: int, granted_bytes: int) -> None:
        super().__init__(f"the lease grants {granted_bytes:,} bytes, {asked_bytes:,} would be held; ask for more first")
        self.asked_bytes = asked_bytes
        self.granted_bytes = granted_bytes


class LeaseClosed(LeaseError):
    """The lease has ended; register another."""

"""The errors of the allocator.

All are an `AllocatorError`:

    AllocatorError
    ├── OutOfDeviceMemory
    ├── DriverUnavailable
    ├── DriverError
    ├── NoFreeBlocks
    ├── BlockMisuse
    └── LeaseError
        ├── BrokerUnavailable
        ├── ProtocolMismatch
        ├── ProtocolViolation
        ├── LeaseRefused
        │   ├── InvalidLease
        │   ├── MinimumsExceedCapacity
        │   ├── UnknownEngine
        │   ├── NotPermitted
        │   └── MemoryNotFree
        ├── GrantExceeded
        └── LeaseClosed
"""

from __future__ import annotations


class AllocatorError(Exception):
    """Base class of all errors that the allocator raises deliberately."""


class OutOfDeviceMemory(AllocatorError):
    """The device has too little free memory. Nothing was mapped."""

    def __init__(self, asked_bytes: int, free_bytes: int, what: str = "memory") -> None:
        super().__init__(f"asked for {asked_bytes:,} bytes of {what}, {free_bytes:,} bytes are free")
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


class DriverUnavailable(AllocatorError):
    """Extents cannot be mapped on this machine or device."""


class DriverError(AllocatorError):
    """A call of the device's driver returned an error."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"the device's driver answered {call} with {name} ({code})")
        self.call = call
        self.code = code


class NoFreeBlocks(AllocatorError):
    """Fewer blocks are free than requested. Nothing was allocated."""

    def __init__(self, asked: int, available: int) -> None:
        super().__init__(f"asked for {asked:,} blocks, {available:,} are available")
        self.asked = asked
        self.available = available


class BlockMisuse(AllocatorError, ValueError):
    """A block id was used in a way its state forbids. Nothing was changed."""


class LeaseError(AllocatorError):
    """Base class of failures between an engine and the broker; the message is a sentence for the user."""


class BrokerUnavailable(LeaseError):
    """No broker answers at the socket, or not in time."""


class ProtocolMismatch(LeaseError):
    """The two ends of a socket speak different versions."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"the broker speaks version {theirs} of the lease protocol and this process version {ours}; "
            f"update the {'broker: restart vram-monitor' if theirs < ours else 'engine'}"
        )
        self.ours = ours
        self.theirs = theirs


class ProtocolViolation(LeaseError):
    """Received data is not a message of this version. The connection cannot be used further."""


class LeaseRefused(LeaseError):
    """The broker refuses the request. Nothing was changed."""


class InvalidLease(LeaseRefused, ValueError):
    """The numbers of a lease, or of a request about it, contradict each other."""


class MinimumsExceedCapacity(LeaseRefused):
    """The minimums of all leases would exceed the device, or those of one user would exceed the user's quota."""


class UnknownEngine(LeaseRefused):
    """No engine of that name holds a lease, or more than one does."""


class NotPermitted(LeaseRefused):
    """Only root, the broker's owner and the engine's own user may do this."""


class MemoryNotFree(LeaseRefused):
    """A reservation's bytes were not free in time; the message says which processes hold them, and until when."""


class GrantExceeded(LeaseError):
    """More would be held than is granted. Nothing was changed."""

    def __init__(self, asked_bytes: int, granted_bytes: int) -> None:
        super().__init__(f"the lease grants {granted_bytes:,} bytes, {asked_bytes:,} would be held; ask for more first")
        self.asked_bytes = asked_bytes
        self.granted_bytes = granted_bytes


class LeaseClosed(LeaseError):
    """The lease has ended; register another."""

"""The log of changes of the prefix index: which blocks became findable and which did not stay so, for watchers.

A watcher keeps a copy of the set of findable blocks. It applies each `CacheEvents` in this order: forget everything if
`cleared`, forget `removed`, then take in `stored`. The result is the set of findable blocks at the time of `take`.

The index appends arrays to the log, which takes a few microseconds a call; `PendingEvents.events` makes plain data of them,
in any thread. The log is bounded: if it is not taken in time, it is dropped, and the next `take` says so (`lost`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .block_table import Int32
from .prefix_hash import Digests

MOST_PENDING = 65_536  # blocks in the log; with blocks of 16 tokens some 8 MiB


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A findable block.

    Attributes:
        digest: The prefix hash of the block's tokens and all tokens before it: 128 bits, the first word above the second.
        parent: The digest of the block before it; None for the first block of a prefix.
        tokens: The tokens of the block alone.
        on_host: It is in the host tier, and not on the device.
        salt: Of the first block of a salted prefix. None for all other blocks.
    """

    digest: int
    parent: int | None
    tokens: tuple[int, ...]
    on_host: bool = False
    salt: bytes | None = None


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """The changes of a prefix cache since the last look at it. The order of application: `cleared`, `removed`, `stored`.

    Attributes:
        stored: New findable blocks, parents before children. A block that was known before has moved (`on_host`).
        removed: Digests of blocks that are not findable any more.
        cleared: No block from before is findable, but for `stored`.
        lost: Changes are missing, since too many had come: the rest is empty, and only a snapshot tells what is findable.
    """

    stored: list[StoredBlock] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    cleared: bool = False
    lost: bool = False

    def __bool__(self) -> bool:
        """Whether there is anything to apply."""
        return bool(self.stored or self.removed or self.cleared or self.lost)


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Findable blocks as arrays: `digests` and `parents` [n, 2], `tokens` [n, block_size], `is_root` and `on_host` [n].

    `salts` are those of salted roots, by their position. Parents of roots are undefined.
    """

    digests: Digests
    parents: Digests
    is_root: npt.NDArray[np.bool_]
    tokens: Int32
    on_host: npt.NDArray[np.bool_]
    salts: Mapping[int, bytes]

    def __len__(self) -> int:
        return len(self.digests)

    def blocks(self) -> Iterator[StoredBlock]:
        """The blocks as plain data, in their order."""
        rows = zip(
            as_integers(self.digests),
            as_integers(self.parents),
            self.is_root.tolist(),
            self.tokens.tolist(),
            self.on_host.tolist(),
            strict=True,
        )
        for at, (digest, parent, is_root, tokens, on_host) in enumerate(rows):
            yield StoredBlock(digest, None if is_root else parent, tuple(tokens), on_host, self.salts.get(at))


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One call of the index: blocks that are new or, with `moved`, have another place; or the digests of removed blocks."""

    stored: BlockBatch | None
    moved: bool
    removed: Digests | None


@dataclass(frozen=True, slots=True, eq=False)
class PendingEvents:
    """What was in the log when it was taken."""

    num_blocks: int
    cleared: bool
    lost: bool
    _changes: tuple[_Change, ...]

    def events(self) -> CacheEvents:
        """The net changes: a block that came and went in between, or moved and moved back, is in no list."""
        stored: dict[int, StoredBlock] = {}
        moved: set[int] = set()  # of `stored`: they were findable at the last look already
        removed: dict[int, None] = {}
        for change in self._changes:
            if change.stored is not None:
                for block in change.stored.blocks():
                    if block.digest in moved:  # a move is from one of two places to the other: it is back
                        moved.remove(block.digest)
                        del stored[block.digest]
                        continue
                    if change.moved and block.digest not in stored:
                        moved.add(block.digest)
                    stored[block.digest] = block
            if change.removed is not None:
                for digest in as_integers(change.removed):
                    # A block that was stored since the last look, and was findable before, is in `removed` already.
                    if stored.pop(digest, None) is None or digest in moved:
                        removed[digest] = None
                    moved.discard(digest)
        return CacheEvents(_parents_first(stored), list(removed), self.cleared, self.lost)


class CacheEventLog:
    """The changes since the last `take`, at most `most_pending` blocks. Written by the prefix index."""

    def __init__(self, most_pending: int = MOST_PENDING) -> None:
        self._most = most_pending
        self._changes: list[_Change] = []
        self._num_blocks = 0
        self._cleared = self._lost = False

    def add_stored(self, blocks: BlockBatch) -> None:
        """`blocks` are findable now, and were not before."""
        self._add(len(blocks), _Change(blocks, False, None))

    def add_moved(self, blocks: BlockBatch) -> None:
        """`blocks` stay findable and are in another place now."""
        self._add(len(blocks), _Change(blocks, True, None))

    def add_removed(self, digests: Digests) -> None:
        """The blocks of `digests` are not findable any more."""
        self._add(len(digests), _Change(None, False, digests))

    def add_cleared(self) -> None:
        """Nothing is findable any more. All earlier changes are void, lost ones too."""
        self._forget()
        self._cleared, self._lost = True, False

    def take(self) -> PendingEvents:
        """The changes since the last call. If some were lost, the log begins anew with this call."""
        taken = PendingEvents(self._num_blocks, self._cleared, self._lost, tuple(self._changes))
        self._forget()
        self._cleared = self._lost = False
        return taken

    def _add(self, num_blocks: int, change: _Change) -> None:
        if self._lost:
            return
        if self._num_blocks + num_blocks > self._most:
            self._forget()
            self._cleared, self._lost = False, True
            return
        self._num_blocks += num_blocks
        self._changes.append(change)

    def _forget(self) -> None:
        self._changes.clear()
        self._num_blocks = 0


def _parents_first(stored: Mapping[int, StoredBlock]) -> list[StoredBlock]:
    """The blocks of `stored`, each after its parent if that is one of them. A parent may have moved after its child came."""
    ordered: dict[int, StoredBlock] = {}
    for block in stored.values():
        path: list[StoredBlock] = []
        above: StoredBlock | None = block
        while above is not None and above.digest not in ordered:
            path.append(above)
            above = None if above.parent is None else stored.get(above.parent)
        ordered.update((one.digest, one) for one in reversed(path))
    return list(ordered.values())


def as_integers(digests: Digests) -> Iterator[int]:
    """Each of `digests` [n, 2] as an integer of 128 bits, as in `StoredBlock`."""
    return (first << 64 | second for first, second in digests.tolist())

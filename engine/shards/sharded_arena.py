"""The pool of a divided model as the driver sees it: extents that all shards have mapped, counted in the lease of each.

    expect   before a plan is sent: every lease must allow what comes, or nothing is mapped anywhere
    settle   with the shards' outcomes: what one of them refused, the others have to unmap again (`undo`)
    undone   with the next plan's outcome: they have

Between the two a lease's bounds hold what its shard may have mapped meanwhile. Nothing happens in the background: shards
prepare no extents and keep none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...allocator.arena import ExtentSet
from ...allocator.errors import BlockMisuse, GrantExceeded
from ...allocator.lease import Lease
from ...allocator.lease_record import HeldBounds
from ...scheduler.plan import Resize, Result


@dataclass(frozen=True, slots=True)
class ResizeOutcome:
    """What one shard did of a resize, and why not the rest."""

    mapped: tuple[int, ...]
    unmapped: tuple[int, ...]
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """What counts as done of a resize: extents mapped on all shards, and extents that at least one has unmapped."""

    mapped: frozenset[int]
    unmapped: frozenset[int]
    refused: str | None

    def applied_to(self, result: Result) -> Result:
        """`result` with this as the outcome of its resize."""
        mapped, unmapped = (np.array(sorted(extents), np.int64) for extents in (self.mapped, self.unmapped))
        return replace(result, mapped=mapped, unmapped=unmapped, refused=self.refused)


class ShardedArena(ExtentSet):
    """See `Arena`; it holds no memory itself, and maps nothing but by plans. An extent is mapped that all shards have.

    Args:
        leases: Of the shards, which count `mapped` already; None without leases.
        mapped: Extents that all shards have mapped.
    """

    def __init__(
        self, num_extents: int, extent_bytes: int, leases: Sequence[Lease] | None, mapped: Iterable[int], num_shards: int
    ) -> None:
        super().__init__(num_extents, extent_bytes, mapped)
        self.num_shards = num_shards
        self._leases = leases
        self._left: list[set[int]] = [set() for _ in range(num_shards)]  # mapped there, and not in `_mapped`

    @property
    def held(self) -> HeldBounds:
        """The bytes that the shard with most holds: what the others refused included, until it is unmapped."""
        most = self.mapped_bytes + max(map(len, self._left)) * self.extent_bytes
        return HeldBounds(self.mapped_bytes, most)

    @property
    def buffer(self) -> object:
        """None: the memory is in other processes."""
        return None

    def map(self, extents: Sequence[int]) -> None:
        """Raises BlockMisuse: only plans map extents on all shards."""
        raise BlockMisuse("the extents of a divided pool are mapped by plans")

    def unmap(self, extents: Sequence[int]) -> None:
        """Raises BlockMisuse: only plans unmap extents on all shards."""
        raise BlockMisuse("the extents of a divided pool are unmapped by plans")

    def close(self) -> None:
        """Forget all extents: the shards are gone. Idempotent."""
        for left in self._left:
            left.clear()
        self._mapped = frozenset()

    def undo(self, rank: int) -> tuple[int, ...]:
        """Extents that shard `rank` has to unmap before the next plan."""
        return tuple(sorted(self._left[rank]))

    def expect(self, resize: Resize) -> str | None:
        """Let every lease count what the shards may hold while they execute `resize`. Returns why nothing can be mapped: then
        the plan must be sent without that part.

        An extent that some shard has to unmap again (`undo`) cannot be mapped by the same plan: that may fail once more.
        """
        if uneven := frozenset().union(*self._left).intersection(resize.map.tolist()):
            self._shift_lower(-len(resize.unmap) * self.extent_bytes)
            return f"extents {sorted(uneven)} are still mapped on some of the {self.num_shards} shards, from a resize before"
        coming, going = len(resize.map) * self.extent_bytes, len(resize.unmap) * self.extent_bytes
        done: list[Lease] = []
        for lease in self._leases or ():
            try:
                lease.shift(0, coming)
            except GrantExceeded as error:
                for other in done:
                    other.shift(0, -coming)
                self._shift_lower(-going)
                return f"{type(error).__name__}: {error}"
            done.append(lease)
        self._shift_lower(-going)
        return None

    def settle(self, resize: Resize, outcomes: Sequence[ResizeOutcome]) -> Settled:
        """Take what each shard did of `resize`, which was expected and sent."""
        wanted, leaving = frozenset(resize.map.tolist()), frozenset(resize.unmap.tolist())
        mapped = wanted if all(wanted <= set(outcome.mapped) for outcome in outcomes) else frozenset[int]()
        unmapped = leaving & frozenset().union(*(outcome.unmapped for outcome in outcomes))
        self._mapped = (self._mapped | mapped) - unmapped
        for rank, outcome in enumerate(outcomes):
            own = set(outcome.mapped) & wanted
            left = (own - mapped) | (unmapped - set(outcome.unmapped))
            self._left[rank] |= left
            if self._leases is not None:
                # Upper: what was expected to come and did not, and what went. Lower: what came and stays, and what did not go.
                size = self.extent_bytes
                stays = leaving - set(outcome.unmapped)
                self._leases[rank].shift(
                    (len(own & mapped) + len(stays - unmapped)) * size,
                    -(len(wanted - own) + len(set(outcome.unmapped) & leaving)) * size,
                )
        return Settled(mapped, unmapped, next((one.refused for one in outcomes if one.refused), None))

    def undone(self, rank: int, extents: Iterable[int]) -> None:
        """Shard `rank` has unmapped `extents` of those it had to."""
        gone = self._left[rank] & set(extents)
        self._left[rank] -= gone
        if self._leases is not None and gone:
            self._leases[rank].shift(0, -len(gone) * self.extent_bytes)

    def _shift_lower(self, num_bytes: int) -> None:
        for lease in self._leases or ():
            lease.shift(num_bytes, 0)

"""The contract of a group of shards: what they compute together. `Alone` is the group of a model that is not divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class CollectiveAborted(RuntimeError):
    """Another shard has stopped computing this step."""


@dataclass(slots=True)
class CollectiveCount:
    """Collectives of one kind since the start, as one shard counts them.

    Attributes:
        calls: Those that began.
        num_bytes: Of this shard's part.
        seconds: Including the wait for the other shards.
    """

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class ShardGroup(Protocol):
    """The shards of one model. Each process has an object for its own place. All call the same methods in the same order.

    Attributes:
        rank: This shard's place, from 0 on.
        name: Of the way that data takes, for logs.
        captures: Whether CUDA graphs can hold its collectives.
    """

    rank: int
    size: int
    name: str
    captures: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the shards' x, of one shape and type, in the order of ranks; of 16-bit types in float32.

        The same bits on all shards. May overwrite x and return it. Raises CollectiveAborted, as all but `abort` and `reset` do.
        """
        ...

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        """The columns of all shards in the order of ranks: x [..., widths[rank]] -> [..., sum(widths)].

        On shard 0, or on all if `everywhere`; the others get x.
        """
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Shard 0's x on all shards, of one shape and type. No shard leaves before all have arrived."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """The data of every shard, by rank. Of any length; slow."""
        ...

    def abort(self) -> None:
        """Let every shard's running or next collective raise CollectiveAborted, until `reset`."""
        ...

    def reset(self) -> None:
        """After an abort, on all shards: wait for all; then collectives work again."""
        ...

    def counts(self) -> dict[str, CollectiveCount]:
        """The collectives so far, by kind."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class Alone:
    """The group of one: nothing is to be done."""

    rank = 0
    size = 1
    name = "none"
    captures = True

    def all_reduce(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        """x."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def exchange(self, data: bytes) -> list[bytes]:
        """The data alone."""
        return [data]

    def abort(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def counts(self) -> dict[str, CollectiveCount]:
        """None."""
        return {}

    def close(self) -> None:
        """Do nothing."""


ALONE = Alone()

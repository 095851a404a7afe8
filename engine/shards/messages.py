"""What the driver and its shards say to each other. Every message of the driver has a number, which the answer repeats;
between the answers come signs of life (`pulse.Sign`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...cache.block_table import BlockBytes, Int32
from ..config import EngineConfig
from ..memory.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Launch:
    """The first message, to a process that has loaded nothing yet. The descriptors are inherited.

    Attributes:
        num_threads: Of a step on a CPU.
    """

    rank: int
    devices: tuple[str, ...]
    group_fd: int
    store_fd: int
    num_threads: int
    log_level: int = 0
    search_path: tuple[str, ...] = ()  # of the driver's modules, for logits processors that are named by theirs


@dataclass(frozen=True, slots=True)
class Hello:
    """The answer to `Launch`: torch is imported, and the shard has its device."""

    pid: int
    free_bytes: int
    total_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load this shard's part of the model, and map the minimum of its pool."""

    config: EngineConfig
    plan: MemoryPlan  # of one shard
    num_rows: int
    max_tokens: int
    faults: Mapping[str, str] = field(default_factory=dict)  # parts that failed in the device's self-check


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """What the driver has to know of a loaded shard."""

    kernel: str
    captures: bool
    overlaps: bool
    graph_sizes: tuple[int, ...]
    elastic: bool
    num_slots: int  # of the host tier
    swap_bytes_per_s: float | None
    collectives: str


@dataclass(frozen=True, slots=True)
class ExecutePlan:
    """Execute a plan.

    Attributes:
        plan: A `Plan`, pickled once for all shards.
        undo: Extents to unmap before: those of a mapping that another shard refused, or that could not be unmapped before.
        answers: Whether the result is asked for: always of the first shard, of the others if it says more than that they are
            alive.
    """

    plan: bytes
    undo: tuple[int, ...]
    answers: bool


@dataclass(frozen=True, slots=True)
class PutBytes:
    """Bytes of this shard's part of blocks, which the plan of step `step_id`, a later message, puts there. It has no answer."""

    step_id: int
    read: BlockBytes


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy this shard's part of `blocks`, behind the plans before. The answer: uint8 [n, payload_bytes], or the error."""

    blocks: Int32


@dataclass(frozen=True, slots=True)
class ShardCall:
    """Call a method of the shard: `empty_caches`, `tidy`, `give_back_host`."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanDone:
    """The answer to `ExecutePlan`: a Result, and the extents of `undo` that were unmapped now."""

    result: Any
    undone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """A message could not be handled: `error`, or its text if it cannot be pickled.

    The shard's process then ends, unless the message was a `LoadShard`.
    """

    error: Exception

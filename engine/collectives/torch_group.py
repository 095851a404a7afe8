"""Groups over torch.distributed: NCCL between CUDA devices, gloo in host memory. Both meet in a FileStore of this machine.

Gloo's result of a sum depends on the place of an element in the tensor, so tensors are gathered and summed here, in the order
of ranks. A shard that aborts leaves its group: the others' operations raise, and `reset` joins the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _dist
from torch import Tensor

from .group import CollectiveAborted, CollectiveCount

dist: Any = _dist  # its classes of stores and groups are public, and not annotated
_TIMEOUT = timedelta(hours=24)  # a peer that is gone or hangs is the driver's to notice
_LOOPBACK = "127.0.0.1"


class GlooGroup:
    """A group in host memory; tensors of a device are copied there and back.

    Args:
        store: Path of the file where the shards meet.
    """

    captures = False

    def __init__(self, rank: int, size: int, store: str) -> None:
        self.rank = rank
        self.size = size
        self.name = "gloo, in host memory"
        self._store = dist.FileStore(store, size)
        self._generation = 0
        self._counts: dict[str, CollectiveCount] = {}
        self._group: Any = self._joined()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ShardGroup`."""
        with self._counted("all_reduce", x.nbytes):
            parts = self._all(x)
            if x.dtype in (torch.float16, torch.bfloat16):
                parts = [part.float() for part in parts]
            total = parts[0]
            for part in parts[1:]:
                total = total.add_(part)
            return total.to(x)

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        """See `ShardGroup`."""
        with self._counted("gather", x.nbytes):
            most = max(widths)
            padded = x if x.shape[-1] == most else torch.nn.functional.pad(x, (0, most - x.shape[-1]))
            parts = self._all(padded, everywhere)
            if not parts:
                return x
            return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1).to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `ShardGroup`."""
        with self._counted("broadcast", x.nbytes):
            return self._all(x)[0].to(x.device)

    def exchange(self, data: bytes) -> list[bytes]:
        """See `ShardGroup`."""
        with self._counted("exchange", len(data)):
            lengths = [int(one) for one in self._all(torch.tensor([len(data)]))]
            mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
            parts = self._all(mine)
            return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths, strict=True)]

    def abort(self) -> None:
        """See `ShardGroup`."""
        self._group = None

    def reset(self) -> None:
        """See `ShardGroup`."""
        self._generation += 1
        self._group = None
        self._group = self._joined()
        self._all(torch.zeros(1))

    def counts(self) -> dict[str, CollectiveCount]:
        """See `ShardGroup`."""
        return self._counts

    def close(self) -> None:
        """See `ShardGroup`."""
        self._group = None

    def _all(self, x: Tensor, everywhere: bool = True) -> list[Tensor]:
        """The x of all shards, on the host; empty after the first shard unless `everywhere`. Raises CollectiveAborted."""
        if self._group is None:
            raise CollectiveAborted("this shard has left the group")
        host = x.detach().cpu().contiguous()
        if not host.numel():  # gloo takes none; the shards meet nevertheless
            self._all(torch.zeros(1), everywhere)
            return [host] * self.size if everywhere or self.rank == 0 else []
        mine = host.view(-1).view(torch.uint8)  # gloo knows few types
        parts = [torch.empty_like(mine) for _ in range(self.size)] if everywhere or self.rank == 0 else []
        try:
            if everywhere:
                self._group.allgather([parts], [mine]).wait()
            else:
                self._group.gather([parts] if parts else [], [mine], _rooted()).wait()
        except RuntimeError as error:
            self._group = None  # so that shards in wait for this one raise too
            raise CollectiveAborted(f"another shard has left the group: {error}") from error
        return [part.view(host.dtype).view(host.shape) for part in parts]

    def _joined(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _TIMEOUT
        store = dist.PrefixStore(f"generation{self._generation}", self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    @contextmanager
    def _counted(self, kind: str, num_bytes: int) -> Iterator[None]:
        count = self._counts.setdefault(kind, CollectiveCount())
        count.calls += 1
        began = time.perf_counter()
        try:
            yield
        finally:
            count.num_bytes += num_bytes
            count.seconds += time.perf_counter() - began


def _rooted() -> Any:
    options = dist.GatherOptions()
    options.rootRank = 0
    return options


class NcclGroup:
    """A group of CUDA devices, one for each shard. Its collectives are queued on the device, and CUDA graphs can hold them.

    It cannot be aborted: a shard that stops ends its process, and the driver the others.
    """

    captures = True

    def __init__(self, rank: int, size: int, store: str) -> None:
        self.rank = rank
        self.size = size
        self.name = "nccl"
        self._host = GlooGroup(rank, size, store)
        self._counts: dict[str, CollectiveCount] = {}
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        prefix = dist.PrefixStore("nccl", self._host._store)
        self._group: Any = dist.ProcessGroupNCCL(prefix, rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ShardGroup`; sums 16-bit types in their own type."""
        self._count("all_reduce", x)
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        """See `ShardGroup`; gathers on all shards."""
        self._count("gather", x)
        most = max(widths)
        padded = (x if x.shape[-1] == most else torch.nn.functional.pad(x, (0, most - x.shape[-1]))).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._group.allgather([parts], [padded]).wait()
        if self.rank and not everywhere:
            return x
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `ShardGroup`; in the order of the device's work."""
        self._count("broadcast", x)
        x = x.contiguous()
        self._group.broadcast([x]).wait()
        return x

    def exchange(self, data: bytes) -> list[bytes]:
        """See `ShardGroup`; through host memory."""
        return self._host.exchange(data)

    def abort(self) -> None:
        """Raises RuntimeError: what the other shards have queued on their devices cannot be taken back."""
        raise RuntimeError("a shard of the model failed within a step, and NCCL's collectives cannot be repeated")

    def reset(self) -> None:
        """Raises RuntimeError; see `abort`."""
        self.abort()

    def counts(self) -> dict[str, CollectiveCount]:
        """See `ShardGroup`. Times are the device's and not counted."""
        return self._counts | self._host.counts()

    def close(self) -> None:
        """See `ShardGroup`."""
        self._group = None
        self._host.close()

    def _count(self, kind: str, x: Tensor) -> None:
        count = self._counts.setdefault(kind, CollectiveCount())
        count.calls += 1
        count.num_bytes += x.nbytes

"""Helpers for rows of logits: the largest per row, chunks of rows, and index tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import native_sampling

Rows = npt.NDArray[np.integer]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Best = tuple[Int64, Float32]  # each row's largest logit: id (ties: the lowest) and value

LARGEST = float(np.finfo(np.float32).max)
_CPU_CHUNK = 1 << 19  # logits processed at once per thread: they and their copies fit the core's cache
_GPU_CHUNK = 1 << 24  # logits processed at once: temporaries take some 15 bytes each, 240 MiB


def largest(logits: Tensor, at_hand: bool) -> tuple[Tensor, Tensor]:
    """(ids int64[n], values float32[n]) of the largest logit per row. Ties: the lowest id. A NaN is largest; the id of
    a value that is not finite may be any.

    `at_hand`: the logits can be read without a wait.
    """
    if at_hand:
        ids_, tops = _largest_on_host(logits)
        return torch.from_numpy(ids_), torch.from_numpy(tops)
    values, ids = logits.max(-1)
    return ids, values.float()


def _largest_on_host(logits: Tensor) -> Best:
    """As `largest`, of logits on a CPU. numpy's argmax is ten times faster than torch's there."""
    if native_sampling.serves(logits.device):
        return unpacked(native_sampling.sample(logits, ())[1].numpy())
    ids, tops = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    size = rows_at_once(logits.shape[-1], logits.device)
    for start in range(0, len(logits), size):
        x = logits[start : start + size].detach().float().numpy()
        ids[start : start + size] = best = x.argmax(-1)
        tops[start : start + size] = x[np.arange(len(best)), best]
    return ids, tops


def packed(ids: Tensor, values: Tensor) -> Tensor:
    """float64[2, n] of int64[n] below 2^53 and float32[n]: one copy brings both to the host, for `unpacked`."""
    return torch.stack((ids.double(), values.double()))


def unpacked(both: Float64) -> Best:
    """(ids int64[n], values float32[n]) from `packed`."""
    return both[0].astype(np.int64), both[1].astype(np.float32)


def argmax(logits: Tensor) -> Best:
    """As `largest`, on the host: waits for the device."""
    if logits.device.type == "cpu":
        return _largest_on_host(logits)
    return unpacked(packed(*largest(logits, False)).cpu().numpy())


def chunks(logits: Tensor, chosen: Int64) -> Iterator[tuple[Int64, Tensor]]:
    """Some of the chosen rows (ascending) at a time: their places in `logits`, and float32[m, vocab], view or copy."""
    size = rows_at_once(logits.shape[-1], logits.device)
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        first, last = int(part[0]), int(part[-1])
        consecutive = last - first + 1 == len(part)
        x = logits[first : last + 1] if consecutive else logits[index(part, logits)]
        yield part, x.detach().float().contiguous()


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """The number of logits rows processed at once."""
    limit = _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _GPU_CHUNK
    return max(1, limit // max(1, vocab_size))


def index(values: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    """int64 index tensor on the device of `like`."""
    return on_device(np.asarray(values, np.int64), like)


def on_device(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    """A tensor of `values` on the device of `like`. On a CPU it shares their memory."""
    return torch.from_numpy(values).to(like.device)

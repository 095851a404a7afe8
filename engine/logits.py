"""Rows of logits: the largest of each, some rows at a time, and indices into them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = npt.NDArray[np.integer]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Best = tuple[Int64, Float32]  # each row's largest logit: its id (ties: the lowest), and its value

LARGEST = float(np.finfo(np.float32).max)
_CPU_CHUNK = 1 << 19  # logits treated at once per thread: they and their copies stay in the core's cache
_GPU_CHUNK = 1 << 25  # logits treated at once: bounds the temporaries to a few times 128 MiB


def argmax(logits: Tensor) -> Best:
    """(ids int64[n], values float32[n]) of the largest in each row; ties: the lowest id; a NaN is largest."""
    if logits.device.type != "cpu":
        top, ids = logits.max(-1)
        both = torch.stack((top.double(), ids.double())).cpu().numpy()  # one transfer
        return both[1].astype(np.int64), both[0].astype(np.float32)
    ids_, tops = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    for part, x in chunks(logits, np.arange(len(logits))):  # numpy's argmax is ten times faster than torch's on a CPU
        ids_[part] = best = x.numpy().argmax(-1)
        tops[part] = x.numpy()[np.arange(len(best)), best]
    return ids_, tops


def chunks(logits: Tensor, chosen: Int64) -> Iterator[tuple[Int64, Tensor]]:
    """Some of the chosen rows (ascending) at a time: their places in `logits`, and float32[m, vocab], view or copy."""
    limit = _CPU_CHUNK * torch.get_num_threads() if logits.device.type == "cpu" else _GPU_CHUNK
    size = max(1, limit // max(1, logits.shape[-1]))
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        first, last = int(part[0]), int(part[-1])
        consecutive = last - first + 1 == len(part)
        x = logits[first : last + 1] if consecutive else logits[index(part, logits)]
        yield part, x.detach().float().contiguous()


def index(values: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    """int64 index tensor on the device of `like`."""
    return torch.from_numpy(np.asarray(values, np.int64)).to(like.device)

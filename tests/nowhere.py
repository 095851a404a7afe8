"""A device without values, on which whatever waits for a value raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Nowhere(TorchDispatchMode):
    """Lets only operations through that stay on the device "meta", whose tensors have no values: who asks for one, or for a
    shape that depends on one, raises there. Numbers that go along with an operation are no tensors that are uploaded.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        assert tensors and all(t.device.type == "meta" for t in tensors), f"{func} is not on the device alone"
        indexed = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        assert not indexed or all(i is None or i.dtype == torch.int64 for i in args[1]), f"{func} by a mask"
        return result

"""A kernel that can be captured, in plain torch: decodes attend to all that their tables could hold, behind a mask."""

from __future__ import annotations

import torch

from pagetide.engine.attention.context import AttentionCall
from pagetide.engine.attention.torch_kernel import TorchKernel


class DenseKernel(TorchKernel):
    """Decodes as said; chunks as in `TorchKernel`. Reads no length of a decode on the host."""

    name = "dense"
    captures = True

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query, cache, step = call.query, call.cache, call.step
        if step.num_decodes < len(step.q_lens):
            return super().attend(call)
        out = query.new_zeros(*query.shape[:2], cache.value.shape[-1])
        query, table = query[: len(step.q_lens)], step.tables[cache.table]
        at = torch.arange(table.shape[1] * step.block_size)
        seen = at < step.lens[:, None]
        if call.window is not None:
            seen = seen & (at >= step.lens[:, None] - call.window)
        group = query.shape[1] // cache.key.shape[2]
        k, v = (
            torch.where(seen[:, :, None, None], view[table].flatten(1, 2), 0).repeat_interleave(group, 2)
            for view in (cache.key, cache.value)
        )
        scores = torch.einsum("nhd,nkhd->nhk", query, k) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = torch.where(seen[:, None, :], scores, -torch.inf)
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks[None, :, None].expand(len(scores), -1, 1)), -1)
        weights = torch.nan_to_num(scores.softmax(-1))[..., : len(at)]  # padding sees nothing
        out[: len(query)] = torch.einsum("nhk,nkhd->nhd", weights, v)
        return out

"""Chunks as a batch, against a naive packer that goes token by token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetide.cache.block_table import TableUpdate
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.execution.batch import ON_ITS_WAY, DeviceRows, pack
from pagetide.engine.execution.transfers import Upload
from pagetide.scheduler.plan import NO_ROWS, Plan

ROWS, TOKENS, BLOCK = 6, 40, 4
CPU = torch.device("cpu")


def plan_of(updates: list[tuple[int, int, int]]) -> Plan:
    rows, slots, blocks = (np.array(column, np.int64) for column in zip(*updates, strict=True))
    return Plan(
        0, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS.astype(bool), tables=(TableUpdate(rows, slots, blocks.astype(np.int32)),)
    )


def device_rows() -> DeviceRows:
    return DeviceRows(ROWS, TOKENS, Geometry((LayerShape(1, 8, 8),), BLOCK, "float32"), CPU)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_batch_is_what_it_says(data: st.DataObject) -> None:
    """Ids, positions and places of all tokens; tables without what is stale; tokens that no host has seen; padding."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rows = device_rows()
    table = rng.permutation(np.arange(1, 1 + ROWS * 10)).reshape(ROWS, 10)
    plan = plan_of([(r, s, int(table[r, s])) for r in range(ROWS) for s in range(10)])
    upload = Upload(CPU, 4096)
    rows.follow(plan, upload.put(rows.changes(plan)))
    newest = rng.integers(0, 99, ROWS + 1)
    rows.newest.copy_(torch.from_numpy(newest))
    tokens = rng.integers(0, 1000, (ROWS, TOKENS)).astype(np.int32)
    chosen = rng.permutation(ROWS)[: data.draw(st.integers(1, ROWS))]
    decodes = data.draw(st.integers(0, len(chosen)))
    lengths = np.where(np.arange(len(chosen)) < decodes, 1, rng.integers(2, 9, len(chosen)))
    starts = rng.integers(0, TOKENS - lengths + 1)
    unseen = {int(r): int(s) for r, s in zip(chosen[:decodes], starts[:decodes], strict=True) if rng.random() < 0.5}
    for row, start in unseen.items():
        tokens[row, start] = ON_ITS_WAY
    padding = data.draw(st.integers(0, 3)) if decodes == len(chosen) else 0
    batch = pack(tokens, chosen, starts, lengths, len(chosen) + padding)

    width = data.draw(st.integers(-(-int(batch.kv_lens.max()) // BLOCK), rows.num_slots))
    step, ids, positions = rows.context(batch, upload.put(batch.arrays), width, (), TorchKernel())

    expected = [
        (int(newest[r]) if unseen.get(int(r)) == p else int(tokens[r, p]), p, int(table[r, p // BLOCK]), p % BLOCK)
        for r, start, length in zip(chosen, starts, lengths, strict=True)
        for p in range(start, start + length)
    ] + [(0, 0, 0, 0)] * padding
    got = zip(ids.tolist(), positions.tolist(), step.write_blocks[0].tolist(), step.write_offsets.tolist(), strict=True)
    assert list(got) == expected
    ends = np.cumsum([*lengths, *[1] * padding])
    kv_lens = [*(starts + lengths).tolist(), *[0] * padding]
    assert step.kv_lens.tolist() == step.lens.tolist() == kv_lens
    assert step.bounds.tolist() == [0, *ends] and step.q_starts.tolist() == [0, *ends[:-1]]
    assert step.num_decodes == decodes + padding
    for line, row, length in zip(step.tables[0].tolist(), [*chosen, *[None] * padding], kv_lens, strict=True):
        used = -(-length // BLOCK)
        assert line == [*(table[row, :used] if used else []), *[0] * (width - used)]


def test_tables_follow_plans() -> None:
    rows, upload = device_rows(), Upload(CPU, 4096)
    for updates in ([(0, 0, 5), (3, 1, 9)], [(0, 0, 7)]):
        plan = plan_of(updates)
        rows.follow(plan, upload.put(rows.changes(plan)))
    nothing = Plan(0, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS.astype(bool))
    rows.follow(nothing, upload.put(rows.changes(nothing)))
    assert rows.tables[0].nonzero().tolist() == [[0, 0], [3, 1]] and rows.tables[0][0, 0] == 7
    assert rows.num_slots == TOKENS // BLOCK

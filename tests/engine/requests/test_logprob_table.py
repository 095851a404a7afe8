"""Log-probabilities in arrays: the entries that were put, also behind released ones."""

from __future__ import annotations

import numpy as np

from pagetide.engine.requests.logprob_table import LogprobTable
from pagetide.engine.requests.outputs import TokenLogprobs
from pagetide.scheduler.plan import ChunkLogprobs


def test_entries_are_those_that_were_put_and_are_not_released() -> None:
    def scores(first: int, count: int) -> ChunkLogprobs:
        at = np.arange(first, first + count)
        ids = np.stack([at, at + 50], 1).astype(np.int32)
        return ChunkLogprobs(0, first, ids, (-ids / 4).astype(np.float32), at.astype(np.int32))

    wanted = [TokenLogprobs(i, -i / 4, i, ((i + 50, -(i + 50) / 4),)) for i in range(7, 27)]
    table = LogprobTable(7)
    for first, count in ((7, 3), (10, 9), (12, 15)):  # some are reported again
        table.put(scores(first, count))
    every = table.entries(0, 100)
    assert every == wanted and wanted == every and every != wanted[1:]
    assert every[2:5] == wanted[2:5] and every[-1] == wanted[-1]
    assert every[::2] == tuple(wanted[::2]) and repr(every[:1]) == repr(tuple(wanted[:1]))
    whole = table.all_after_none()
    assert whole == [None, *wanted] and whole[:2] == [None, wanted[0]] and whole[1:3] == wanted[:2] and whole[0] is None
    assert table.total == sum(one.logprob for one in wanted)
    table.release(8)
    table.release(12)
    table.put(scores(7, 20))
    table.put(scores(27, 1))
    assert table.entries(12, 20) == wanted[12:] and table.entries(0, 13) == wanted[12:13] and table.total is None
    assert every == wanted

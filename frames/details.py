"""What watchers ask for beside frames: the details of a block, and the decisions about a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..allocator.pool_view import NULL_BLOCK, BlockState
from ..scheduler.errors import RequestRejected
from ..scheduler.outcome import Decision
from ..scheduler.scheduler import Scheduler
from .source import sequence_in, with_labels


def block_details(scheduler: Scheduler, block: int) -> dict[str, Any]:
    """The state of `block`, its rows, and what lies in it; "text" holds its token ids. Raises RequestRejected."""
    cache, rows = scheduler.cache, scheduler.rows
    if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < cache.pool.num_blocks:
        raise RequestRejected(f"the pool has the blocks 0 .. {cache.pool.num_blocks - 1:,}; there is no block {block!r:.80}")
    block_state = BlockState(int(cache.pool.states()[block]))
    details: dict[str, Any] = {"state": block_state.name.lower(), "rows": [], "hits": 0, "tokens": None, "text": None}
    if block == NULL_BLOCK:
        return details
    for row in cache.row_tables.rows_with(np.array([block], np.int32)).tolist():
        sequence = sequence_in(scheduler.state, row)
        if sequence is None:
            continue
        position = cache.row_tables.column_of(row, block)
        request = sequence.request
        details["rows"].append({"id": request.request_id, "label": request.label, "row": row, "position": position})
        if position is None:
            details["tokens"] = [0, int(rows.computed[row])]
            continue
        first = position * cache.block_size
        last = min(first + cache.block_size, int(rows.computed[row]))
        details["tokens"] = [first, max(first, last)]
        details["text"] = rows.tokens[row, first:last].tolist()
    found = cache.index.entry_in(block)
    if found is not None:
        first = found.depth * cache.block_size
        details |= {"hits": found.hits, "tokens": [first, first + cache.block_size], "text": found.tokens.tolist()}
    return details


def decisions_about(scheduler: Scheduler, request: str | None) -> list[Decision]:
    """The decisions that are kept, with their numbers and labels; of a `request` those that name its id or label."""
    told = with_labels(scheduler, scheduler.decisions.since(0))
    return told if request is None else [one for one in told if _concerns(one, request)]


def _concerns(decision: Decision, request: str) -> bool:
    names = [decision.get("request_id", ""), *decision.get("passed", ())]
    return decision["label"] == request or any(name.partition(".")[0] == request or name == request for name in names)


def decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """The function that turns token ids into text; None without a tokenizer."""
    return None if tokenizer is None else partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def with_text(details: dict[str, Any], decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """`details` of a block with its tokens as text; None without `decode`."""
    ids = details["text"]
    return {**details, "text": None if ids is None or decode is None else decode(ids)}

"""Events of a prefix cache in vLLM's form: what `KvEventPublisher` sends, as data for msgpack.

    batch   [seconds since 1970, [event, ...], data-parallel rank: 0]
    event   {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 16,
             "lora_id": None, "medium": "GPU", "lora_name": None}                         one chain of blocks, in its order
            {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU"}
            {"type": "AllBlocksCleared"}

These are the structs of vLLM's `vllm/distributed/kv_events.py` (0.24 and later: each event is a map since vLLM's pull request
42892). `extra_keys` stands only where the first block of a salted prefix is in the event, as [[salt], None, ...]. Hashes are
integers, the first 64 bits of our digests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from ..cache.cache_events import CacheEvents, StoredBlock
from .messages import encode

DEVICE, HOST = "GPU", "CPU"  # media, by vLLM's names
Event = dict[str, Any]
_Place = tuple[int | None, bool, bytes, bytes | None]  # parent, on_host, tokens, salt


class PublishedBlocks:
    """The blocks that consumers of the published events have: some 300 bytes each, so as to serve snapshots."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Place] = {}  # parents before children

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, changes: CacheEvents) -> list[Event]:
        """Follow the changes of the cache. Returns their events; changes that are known already have none."""
        events: list[Event] = []
        if changes.cleared:
            self._blocks.clear()
            events.append({"type": "AllBlocksCleared"})
        gone: dict[str, list[int]] = {}  # by medium
        for digest in changes.removed:
            before = self._blocks.pop(digest >> 64, None)
            if before is not None:
                gone.setdefault(_medium(before), []).append(digest >> 64)
        new = []
        for block in changes.stored:
            digest, place = _place(block)
            before = self._blocks.get(digest)
            if before is not None and before[1] == place[1]:
                continue
            if before is not None:
                gone.setdefault(_medium(before), []).append(digest)
            self._blocks[digest] = place
            new.append((digest, place))
        events += [{"type": "BlockRemoved", "block_hashes": hashes, "medium": where} for where, hashes in gone.items()]
        return [*events, *_stored(new)]

    def snapshot(self) -> list[Event]:
        """The events that give a consumer all blocks, whatever it had before."""
        return [{"type": "AllBlocksCleared"}, *_stored(self._by_chain())]

    def _by_chain(self) -> Iterator[tuple[int, _Place]]:
        """All blocks, each chain without a break where that can be: so a snapshot has few events."""
        children: dict[int | None, list[int]] = {}
        for digest, place in self._blocks.items():
            children.setdefault(place[0], []).append(digest)
        left = children.get(None, [])[::-1]
        while left:
            digest = left.pop()
            yield digest, self._blocks[digest]
            left += children.get(digest, [])[::-1]


def batch(ts: float, events: Iterable[Event]) -> bytes:
    """An encoded batch."""
    return encode([ts, list(events), 0])


def _place(block: StoredBlock) -> tuple[int, _Place]:
    parent = None if block.parent is None else block.parent >> 64
    return block.digest >> 64, (parent, block.on_host, array("i", block.tokens).tobytes(), block.salt)


def _medium(place: _Place) -> str:
    return HOST if place[1] else DEVICE


def _stored(blocks: Iterable[tuple[int, _Place]]) -> Iterator[Event]:
    """Events of `blocks`, one for each stretch of a chain in one medium."""
    chain: list[tuple[int, _Place]] = []
    for digest, place in blocks:
        if chain and (place[0], place[1]) != (chain[-1][0], chain[-1][1][1]):
            yield _chain_stored(chain)
            chain = []
        chain.append((digest, place))
    if chain:
        yield _chain_stored(chain)


def _chain_stored(chain: list[tuple[int, _Place]]) -> Event:
    first = chain[0][1]
    tokens = array("i")
    for _, place in chain:
        tokens.frombytes(place[2])
    event: Event = {
        "type": "BlockStored",
        "block_hashes": [digest for digest, _ in chain],
        "parent_block_hash": first[0],
        "token_ids": tokens.tolist(),
        "block_size": len(first[2]) // tokens.itemsize,
        "lora_id": None,
        "medium": _medium(first),
        "lora_name": None,
    }
    if first[3] is not None:
        event["extra_keys"] = [[first[3].decode("utf-8", "replace")], *[None] * (len(chain) - 1)]
    return event

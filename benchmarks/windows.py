"""KV memory of a model with sliding windows: groups of layers share one pool of equal pages.

python -m benchmarks.windows [--json FILE] [--context 32768]

The model has the shape of Gemma 3 4B: 34 layers, 29 of which read the last 1,024 tokens only; 4 KV heads of 256 in bfloat16,
blocks of 16 tokens. A page holds 5 layers: a sequence has 1 table of full layers and 6 tables of windows. One sequence of
32,768 tokens is in the cache manager, its prompt computed in chunks, against the layer-tokens that it needs; and as many of
them as a pool holds, against one group (all layers keep all tokens, in blocks of 34 layers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import Gemma3TextConfig

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, report
from benchmarks.modelled_clock import GEMMA_4B as MODEL
from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.geometry import Geometry
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_index import NO_HIT
from pagetide.cache.state_tables import tables_for

BLOCK_SIZE, WINDOW = 16, 1_024
CONTEXT, DECODED, CHUNK = 32_768, 256, 8_192  # tokens
MEMORY_POOL_BYTES = 16e9


def geometry(windows: bool) -> Geometry:
    """Of the model, with its windows or as if all layers read all tokens."""
    config = Gemma3TextConfig(
        num_hidden_layers=MODEL.layers, hidden_size=MODEL.hidden, intermediate_size=MODEL.ffn, head_dim=MODEL.head_dim,
        num_attention_heads=MODEL.heads, num_key_value_heads=MODEL.kv_heads, vocab_size=MODEL.vocab, sliding_window=WINDOW,
        layer_types=None if windows else ["full_attention"] * MODEL.layers,
    )  # fmt: skip
    return Geometry.from_config(config, block_size=BLOCK_SIZE, dtype="bfloat16")


def memory(context: int, pool_bytes: float) -> list[Figure]:
    """What sequences of `context` tokens hold in a pool of `pool_bytes`."""
    of_layers = [WINDOW if layer.window else context for layer in geometry(True).layers]
    needed = sum(min(context, tokens) for tokens in of_layers) * MODEL.kv_bytes // MODEL.layers
    (held, count), (held_by_all, count_by_all) = (filled(geometry(windows), context, pool_bytes) for windows in (True, False))
    at = f"at {context:,} tokens"
    return [
        Figure(f"KV bytes of a sequence {at}, of those needed", held / needed, "x", 1.05),
        Figure(f"KV bytes of a sequence {at}, one group / windows", held_by_all / held, "x"),
        Figure(f"sequences {at} in {pool_bytes / 1e9:g} GB, windows", count, "sequences"),
        Figure(f"sequences {at} in {pool_bytes / 1e9:g} GB, one group", count_by_all, "sequences"),
        Figure(f"sequences {at}, windows / one group", count / max(1, count_by_all), "x", 4.0, "higher"),
    ]


def filled(by: Geometry, context: int, pool_bytes: float) -> tuple[int, int]:
    """(bytes that the first sequence holds, sequences that the pool holds)."""
    num_blocks = int(pool_bytes // by.block_stride)
    most = num_blocks * BLOCK_SIZE // min(context, WINDOW) + 1
    cache = CacheManager(tables_for(by.groups, BlockAllocator(num_blocks), BLOCK_SIZE, most, context + 1))
    held, row = 0, 0
    while compute(cache, row, context):
        held = held or int(cache.row_tables.held_blocks(np.array([row]))[0])
        row += 1
    cache.check_invariants()
    return held * by.block_stride, row


def compute(cache: CacheManager, row: int, context: int) -> bool:
    """Compute a sequence of `context` tokens in `row`: a prompt in chunks, then decodes. False if blocks are short."""
    rows, prompt = np.array([row]), context - min(DECODED, context // 2)
    computed = np.zeros(row + 1, np.int64)
    if cache.admit(row, prompt, NO_HIT) is None:
        return False
    done = 0
    while done < prompt:
        computed[row] = done
        cache.release_passed(rows, computed.take)
        reached, _ = cache.reach(row, done, min(done + CHUNK, prompt), cache.pool.available)
        if reached == done:
            return False
        done = reached
    for known in range(prompt + 1, context + 1):
        computed[row], upto = known - 1, np.array([known])
        if len(cache.row_tables.short(rows, upto)) and cache.advance(rows, upto, computed.take) is None:
            return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=whole, default=CONTEXT, metavar="TOKENS", help="of a sequence in `memory`")
    args = parser.parse_args(argv)
    report("Windows: groups of layers in one pool", memory(args.context, MEMORY_POOL_BYTES), 0, args.json)


if __name__ == "__main__":
    main()

"""Runs a model over paged blocks without a scheduler: ragged sequences in chunks, and what is not written is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from families import VOCAB, tiny

from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import PAGE_BYTES, Geometry
from pagetide.cache.storage import Storage
from pagetide.engine.attention.context import AttentionKernel, StepContext, lengths_on, running
from pagetide.engine.attention.interface import register
from pagetide.engine.attention.latent import attend_to_latents
from pagetide.engine.attention.torch_kernel import TorchKernel


def eager_logits(model, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [len(tokens), vocabulary]: the model by itself."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


class PagedDriver:
    """A model over a pool of its own, with the sequences' blocks scattered.

    Args:
        chunk: Most tokens of a sequence in a step; None is all of them.
        dtype: Of K and V in the pool.
    """

    def __init__(
        self, model, block_size: int, chunk: int | None, *, kernel: AttentionKernel | None = None, dtype: str = "float32"
    ) -> None:
        self.model = model
        self.chunk = chunk
        self.kernel = kernel or TorchKernel()
        self.geometry = Geometry.from_config(model.config, block_size=block_size, dtype=dtype, extent_target_bytes=PAGE_BYTES)
        attend_to_latents(model, self.geometry)

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Per sequence float32 [tokens, vocabulary]. Sequence i joins at step i, so that steps mix kinds of chunks."""
        self.model.set_attn_implementation(register())
        storage, tables = self._pool([len(s) for s in sequences])
        done = [0] * len(sequences)
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        for number in range(sum(len(s) for s in sequences)):
            chunks = [
                (i, min(self.chunk or len(s), len(s) - done[i]))
                for i, s in enumerate(sequences)
                if i <= number and done[i] < len(s)
            ]
            if not chunks:
                break
            chunks.sort(key=lambda c: c[1] != 1)  # chunks of one token come first
            step = self._step(chunks, done, tables, storage)
            places = [(i, p) for i, n in chunks for p in range(done[i], done[i] + n)]
            positions = torch.tensor([[p for _, p in places]])
            tokens = torch.tensor([[sequences[i][p] for i, p in places]])
            with running(step), torch.inference_mode():
                logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False, step=step).logits[0]
            for (i, n), start in zip(chunks, step.q_starts, strict=True):
                rows[i].append(logits[start : start + n])
                done[i] += n
        return [torch.cat(r) for r in rows]

    def _pool(self, lengths: Sequence[int]) -> tuple[Storage, list[list[np.ndarray]]]:
        """Blocks full of NaN, but for the null block, and tables of scattered ids per sequence."""
        counts = [self.geometry.columns_for_tokens(n) for n in lengths for _ in range(self.geometry.num_tables)]
        num_extents = self.geometry.extents_for_blocks(sum(counts) + 4)
        arena = HostArena(num_extents, self.geometry.extent_bytes)
        arena.map(range(num_extents))
        storage = Storage(self.geometry, arena)
        storage.blocks.fill_(0xFF)  # NaN in floating types, scales among them
        storage.clear([0])
        ids = np.random.default_rng(3).permutation(np.arange(1, storage.num_blocks))
        ends = np.cumsum(counts)
        tables = [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
        number = self.geometry.num_tables
        return storage, [tables[first : first + number] for first in range(0, len(tables), number)]

    def _step(self, chunks, done, tables, storage) -> StepContext:
        size = self.geometry.block_size
        q_lens = np.array([n for _, n in chunks], np.int32)
        kv_lens = np.array([done[i] + n for i, n in chunks], np.int32)
        width = self.geometry.columns_for_tokens(int(kv_lens.max()))
        read = np.zeros((self.geometry.num_tables, len(chunks), width), np.int64)
        for row, ((i, _), tokens) in enumerate(zip(chunks, kv_lens.tolist(), strict=True)):
            for number, table in enumerate(tables[i]):
                used = table[: self.geometry.columns_for_tokens(tokens)]
                read[number, row, : len(used)] = used
        places = [(i, p) for i, n in chunks for p in range(done[i], done[i] + n)]
        return StepContext(
            layers=tuple(storage.layer(i) for i in range(len(self.geometry.layers))), kernel=self.kernel,
            q_starts=(np.cumsum(q_lens) - q_lens).astype(np.int32), q_lens=q_lens, kv_lens=kv_lens,
            num_decodes=int((q_lens == 1).sum()), **lengths_on("cpu", q_lens, kv_lens),
            tables=tuple(torch.from_numpy(read)),
            write_blocks=tuple(
                torch.tensor([int(tables[i][number][p // size]) for i, p in places]) for number in range(len(read))
            ),
            write_offsets=torch.tensor([p % size for _, p in places]), block_size=size,
        )  # fmt: skip


LONGEST = 256 + 14

model_of = cache(tiny)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


@cache
def right(family: str, seed: int) -> torch.Tensor:
    """Eager logits of `tokens(LONGEST, seed)`; those of its prefixes too, since all models here are causal."""
    return eager_logits(model_of(family), tokens(LONGEST, seed))


def worst_error(family: str, driver: PagedDriver, lengths: tuple[int, ...]) -> float:
    """The largest difference to eager logits at any position of sequences that run together."""
    got = driver.logits([tokens(LONGEST, seed)[:n] for seed, n in enumerate(lengths)])
    errors = [(g - right(family, seed)[: len(g)]).abs().max() for seed, g in enumerate(got)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())


def paged_error(family: str, block_size: int, chunk: int | None) -> float:
    """`worst_error` of three sequences, the longest of more than a block."""
    longest = 21 if chunk == 1 else max(37, block_size + 14)
    driver = PagedDriver(model_of(family), block_size, chunk)
    return worst_error(family, driver, (longest, 23 if chunk != 1 else 13, 9))


def check_chunks_hardly_matter(family: str, dtype: str) -> None:
    """K and V whose last bits differ, as sums in another order do, may be rounded to neighbours: so not to the last bit."""
    sequences, model = [tokens(n, seed) for seed, n in enumerate((37, 23, 9))], model_of(family)
    whole = torch.cat(PagedDriver(model, 16, None, dtype=dtype).logits(sequences))
    plain = torch.cat([eager_logits(model, sequence) for sequence in sequences])
    for block_size, chunk in ((16, 1), (4, 7)):
        chunked = torch.cat(PagedDriver(model, block_size, chunk, dtype=dtype).logits(sequences))
        assert (chunked - whole).abs().mean() < 0.25 * (whole - plain).abs().mean(), (block_size, chunk)

"""What attention kernels must do, in torch, native and in Triton, interpreted or on a device: random cases against float64."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import example
from hypothesis import strategies as st

from pagetide.engine.attention.context import AttentionCall, LayerCache, StepContext, lengths_on
from pagetide.engine.attention.torch_kernel import TorchKernel

BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of what is above 1 relative
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # of elements with scales
LEAD = 16  # items before K
POISON = 0x7F  # in each byte: a NaN of float8_e4m3fn and of float16, and the largest int8


@dataclass(frozen=True)
class Case:
    """One step over a layer, and how the layer attends. Chunks with one token are decodes, and come first."""

    chunks: tuple[tuple[int, int], ...]  # (query tokens, all tokens); (1, 0) is a padding row of decodes
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    dims: tuple[int, int] = (16, 16)  # of K and V
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    padding: int = 0  # tokens behind the chunks
    aliased: bool = False
    seed: int = 0
    stored: torch.dtype | None = None  # elements of one byte, with scales; None: as `dtype`
    v_in_k: bool = False

    @property
    def num_decodes(self) -> int:
        return sum(n == 1 for n, _ in self.chunks)


def cases(longest: int, *, splits: bool = False, scaled: bool = False) -> st.SearchStrategy[Case]:
    """Random cases with up to `longest` tokens a sequence. Lengths like to lie at block borders.

    `scaled`: over caches of one-byte elements, or of V in K, or of both.
    """
    kinds = [(stored, v_in_k) for stored in (None, *MOST) for v_in_k in (False, True)]
    block_sizes = st.sampled_from([4, 16, 24, 32, 100])

    def lengths(size: int) -> st.SearchStrategy[int]:
        border = st.builds(
            lambda n, by: max(1, min(longest, n * size + by)), st.integers(0, longest // size), st.integers(-1, 1)
        )
        return st.one_of(st.integers(1, longest), border)

    def chunk(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(2, longest // 2), lengths(size)).map(lambda c: (c[0], c[0] + c[1] * (c[1] % 3 > 0)))

    def case(size: int) -> st.SearchStrategy[Case]:
        decodes = st.lists(st.one_of(lengths(size), lengths(size), st.just(0)).map(lambda n: (1, n)), max_size=4)
        prefills = st.lists(chunk(size), max_size=0 if splits else 2)
        return st.builds(
            Case,
            chunks=st.builds(lambda a, b: (*a, *b), decodes, prefills).filter(bool),
            dtype=st.sampled_from(list(BOUNDS)),
            block_size=st.just(size),
            kv_heads=st.integers(1, 2),
            group=st.sampled_from([1, 2, 3, 4, 7]),
            dims=st.tuples(st.sampled_from([8, 16, 24, 64]), st.sampled_from([8, 16, 40])),
            window=st.one_of(st.none(), st.integers(1, longest)),
            softcap=st.sampled_from([None, None, 5.0, 30.0]),
            sinks=st.booleans(),
            padding=st.sampled_from([0, 0, 3]),
            aliased=st.booleans(),
            seed=st.integers(0, 1000),
        )

    def of_kind(case: Case, kind: tuple[torch.dtype | None, bool]) -> Case:
        stored, v_in_k = kind
        return replace(case, stored=stored, v_in_k=v_in_k, dims=(max(case.dims), min(case.dims)) if v_in_k else case.dims)

    if scaled:
        return st.builds(of_kind, block_sizes.flatmap(case), st.sampled_from(kinds[1:]))
    return block_sizes.flatmap(case)


def with_fresh_chunks(**others: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Examples of a property of a `case` and `others`: chunks without a past, of every element, aliased and not."""
    elements = [*((dtype, None) for dtype in BOUNDS), *((torch.bfloat16, stored) for stored in MOST)]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        for (dtype, stored), aliased, v_in_k in itertools.product(elements, (False, True), (False, True)):
            case = Case(((1, 1), (2, 2), (20, 20)), dtype, padding=3, aliased=aliased, stored=stored, v_in_k=v_in_k)
            test = example(case=case, **others)(test)
        return test

    return decorate


@dataclass(frozen=True, eq=False)
class Built:
    """A case in memory. Every slot that no token owns is NaN, block 0 and the tables' other group too."""

    case: Case
    arena: torch.Tensor  # [num_blocks, items], of which K and V have a part; bytes if these have scales
    call: AttentionCall  # with a query strided as models hand it over; the batch's own K and V are still to be written
    keys: list[torch.Tensor]  # per chunk, of the whole sequence, as they are read from the arena
    values: list[torch.Tensor]


def quantized(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales of rows `[..., dim]`, computed on the CPU, where torch divides by numbers exactly."""
    rows, most = rows.cpu().float(), MOST[dtype]
    scales = (rows.abs().amax(-1) / most).clamp(max=65504).half()
    divisors = torch.where(scales > 0, scales.float(), 1.0)[..., None]
    elements = (rows / divisors).clamp(-most, most)
    return (elements.round() if dtype == torch.int8 else elements).to(dtype), scales


def put(cache: LayerCache, places: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
    """Write K and V of some tokens as the kernels have to."""
    pieces = [(cache.key, cache.key_scale, key), (cache.value, cache.value_scale, value)]
    for view, scales, rows in pieces[:1] if cache.v_in_k else pieces:
        if scales is not None:
            rows, row_scales = (part.to(view.device) for part in quantized(rows, view.dtype))
            scales.index_put_(places, row_scales)
        bits(view).index_put_(places, bits(rows.contiguous()))


def as_stored(rows: torch.Tensor, case: Case) -> torch.Tensor:
    """What is read after a write of `rows`."""
    if case.stored is None:
        return rows
    elements, scales = quantized(rows, case.stored)
    return elements.float() * scales.float()[..., None]


def views(case: Case, arena: torch.Tensor) -> LayerCache:
    """The layer's part of an arena, between foreign items."""
    size, (dim, v_dim), heads, typed = case.block_size, case.dims, case.kv_heads, arena.view(case.stored or arena.dtype)

    def view(typed: torch.Tensor, offset: int, width: int) -> torch.Tensor:
        return typed.as_strided((len(arena), size, heads, width), (typed.stride(0), heads * width, width, 1), offset)

    k_items, v_items = size * heads * dim, 0 if case.v_in_k else size * heads * v_dim
    key = view(typed, LEAD, dim)
    value = key[..., :v_dim] if case.v_in_k else view(typed, LEAD + k_items, v_dim)
    cache = LayerCache(key, value, table=1, aliased=case.aliased, v_in_k=case.v_in_k)
    if case.stored is None:
        return cache
    start, halves = (LEAD + k_items + v_items) // 2, arena.view(torch.float16)
    offsets = start, start if case.v_in_k else start + size * heads
    key_scale, value_scale = (view(halves, offset, 1)[..., 0] for offset in offsets)
    return replace(cache, key_scale=key_scale, value_scale=value_scale)


def layer_items(case: Case) -> int:
    """Items of a block up to the end of the layer's part."""
    rows, (dim, v_dim), scales = case.block_size * case.kv_heads, case.dims, 0 if case.stored is None else 2
    return LEAD + rows * (dim + scales + (0 if case.v_in_k else v_dim + scales))


def build(case: Case, device: str = "cpu", arena: torch.Tensor | None = None, ids: np.ndarray | None = None) -> Built:
    """All but the batch's own K and V lie in the arena. `ids` are the blocks to use; by default few, in random order."""
    rng = np.random.default_rng(case.seed)
    size, (dim, v_dim), heads = case.block_size, case.dims, case.kv_heads

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(case.dtype).to(device)

    counts = [-(-kv // size) for _, kv in case.chunks]
    ids = rng.permutation(np.arange(1, sum(counts) + 4)) if ids is None else ids
    tables = np.zeros((len(case.chunks), max(counts) + 1), np.int64)
    if arena is None:
        shape, poison = (len(ids) + 1, layer_items(case) + 24), torch.nan if case.stored is None else POISON
        arena = torch.full(shape, poison, dtype=case.dtype if case.stored is None else torch.uint8, device=device)
    cache = views(case, arena)
    keys, values, own, owners, used = [], [], [], [], 0
    for i, ((n, kv), count) in enumerate(zip(case.chunks, counts, strict=True)):
        tables[i, :count] = ids[used : used + count]
        used += count
        key = drawn(kv, heads, dim)
        value = key[..., :v_dim] if case.v_in_k else drawn(kv, heads, v_dim)
        keys.append(as_stored(key, case))
        values.append(keys[-1][..., :v_dim] if case.v_in_k else as_stored(value, case))
        slots = np.arange(kv)
        old = slots[: kv if case.aliased else max(0, kv - n)]
        places = [torch.from_numpy(index).to(device) for index in (tables[i][old // size], old % size)]
        put(cache, (places[0], places[1]), key[: len(old)], value[: len(old)])
        if kv:
            own.append((key[kv - n :], value[kv - n :]))
            owners += [(tables[i, p // size], p % size) for p in range(kv - n, kv)]
        else:
            own.append((drawn(n, heads, dim) * torch.nan, drawn(n, heads, v_dim) * torch.nan))
            owners.append((0, 0))
    own.append((drawn(case.padding, heads, dim) * torch.nan, drawn(case.padding, heads, v_dim) * torch.nan))
    owners += [(0, 0)] * case.padding
    q_lens = np.array([n for n, _ in case.chunks], np.int32)
    kv_lens = np.array([kv for _, kv in case.chunks], np.int32)
    wrong = torch.zeros(tables.shape, dtype=torch.int64, device=device)
    write = torch.tensor(owners, dtype=torch.int64, device=device)
    step = StepContext(
        layers=(),
        kernel=TorchKernel(),
        q_starts=np.cumsum(q_lens) - q_lens,
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_decodes=case.num_decodes,
        **lengths_on(device, q_lens, kv_lens),
        tables=(wrong, torch.from_numpy(tables).to(device)),
        write_blocks=(wrong[:, 0], write[:, 0].contiguous()),
        write_offsets=write[:, 1].contiguous(),
        block_size=size,
    )
    key, value = (torch.cat(parts).transpose(0, 1).contiguous().transpose(0, 1) for parts in zip(*own, strict=True))
    value = key[..., :v_dim] if case.v_in_k else value
    query = drawn(heads * case.group, len(owners), dim).transpose(0, 1)
    sinks = drawn(heads * case.group) if case.sinks else None
    call = AttentionCall(query, key, value, cache, step, 0.3, case.window, case.softcap, sinks)
    return Built(case, arena, call, keys, values)


def reference(built: Built) -> torch.Tensor:
    """Attention in float64, query by query, as it is written in books; zeros for padding."""
    case, call, (_, v_dim) = built.case, built.call, built.case.dims
    out = torch.zeros(*call.query.shape[:2], v_dim, dtype=torch.float64)
    for (n, kv), start, keys, values in zip(case.chunks, call.step.q_starts, built.keys, built.values, strict=True):
        for j in range(n if kv else 0):
            at = kv - n + j
            first = 0 if case.window is None else max(0, at - case.window + 1)
            k, v = (x[first : at + 1].double().cpu().repeat_interleave(case.group, 1) for x in (keys, values))
            scores = torch.einsum("hd,khd->hk", call.query[start + j].double().cpu(), k) * 0.3
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = scores.exp()
            total = weights.sum(1) + (call.sinks.double().cpu().exp() if call.sinks is not None else 0)
            out[start + j] = torch.einsum("hk,khd->hd", weights, v) / total[:, None]
    return out


def assert_near(got: torch.Tensor, built: Built) -> None:
    case = built.case
    assert got.dtype == case.dtype
    expected = reference(built)
    error = (got.double().cpu() - expected).abs() / expected.abs().clamp(min=1)
    half_rounds_as_brain = case.stored is not None and case.dtype == torch.float16  # scaled weights do
    bound = BOUNDS[torch.bfloat16 if half_rounds_as_brain else case.dtype]
    assert error.nan_to_num(nan=torch.inf).max() < bound, error.max()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.itemsize])


def check_write(kernel, built: Built) -> None:
    """The batch's own K and V arrive; not a bit of anything else changes. The null block's K and V may."""
    expected = built.arena.clone()
    call, step = built.call, built.call.step
    real = step.write_blocks[1] != 0
    places = step.write_blocks[1][real], step.write_offsets[real]
    ours = views(built.case, expected)
    put(ours, places, call.key[real], call.value[real])
    kernel.write(call)
    for name in ("key", "value", "key_scale", "value_scale"):
        if getattr(ours, name) is not None:
            bits(getattr(ours, name))[0] = bits(getattr(call.cache, name))[0]
    assert torch.equal(bits(built.arena), bits(expected))


def check_attention(kernel, case: Case, device: str = "cpu", *, reads_own: bool = False) -> None:
    """Write, then attend twice, as two layers would; nothing is written but the result.

    All is read from the arena. With `reads_own` the batch's own K and V may be read instead, where the same lie there.
    """
    built = build(case, device)
    if not case.aliased:
        check_write(kernel, built)
    before = built.arena.clone()
    call = built.call
    if not reads_own or case.aliased or case.stored is not None:
        call = replace(call, key=call.key * torch.nan, value=call.value * torch.nan)
    for _ in range(2):
        got = kernel.attend(call)
        assert_near(got, built)
        real = call.step.q_lens.sum()
        assert not got[real:].any() and len(got) == real + case.padding
    assert torch.equal(bits(built.arena), bits(before))


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux; in Python's mmap from 3.13 on
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


FAR_BLOCKS, FAR_STRIDE = 20, (1 << 28) + 64  # elements 2^31 and 2^32 lie in blocks 7 and 15


def check_far_blocks(kernel, arena: torch.Tensor) -> None:
    """Of an arena of zeros [FAR_BLOCKS, FAR_STRIDE] blocks behind 2^31 elements are written and read, and nothing else."""
    ids = np.array([19, 9, 17, 10, 18, 16, 8, 15, 7])
    case = Case(((1, 40), (1, 5), (17, 60)), dtype=arena.dtype)
    if arena.dtype == torch.uint8:
        case = replace(case, dtype=torch.bfloat16, stored=torch.int8)
    items = layer_items(case)
    for block in (0, *ids.tolist()):
        arena[block, : items + 24] = POISON if case.stored is not None else torch.nan
    built = build(case, str(arena.device), arena, ids)
    call, step, cache = built.call, built.call.step, built.call.cache
    kernel.write(call)
    for view, scales, rows in ((cache.key, cache.key_scale, call.key), (cache.value, cache.value_scale, call.value)):
        got = view[step.write_blocks[1], step.write_offsets]
        if scales is not None:
            rows, row_scales = (part.to(arena.device) for part in quantized(rows, view.dtype))
            assert torch.equal(scales[step.write_blocks[1], step.write_offsets], row_scales)
        assert torch.equal(got, rows)
    assert_near(kernel.attend(call), built)
    flat = arena.view(-1)
    for block in ids.tolist():
        at = block * FAR_STRIDE
        for wrapped in {at % (1 << 31), at % (1 << 32)} - {at}:  # where 32 bits would point
            there = flat[wrapped : wrapped + items]
            assert not torch.where(there == POISON, 0, there.nan_to_num()).any()


def check_copies(
    ids: list[int], num_bytes: int, beyond: tuple[int, int], offset: int, num_programs: int, device: str = "cpu",
    pinned: bool = False,
) -> None:  # fmt: skip
    """Blocks of `num_bytes`, `beyond` more behind each in either pool, `offset` before the first: to other places, and back."""
    from pagetide.engine.attention.triton_gather import copy_blocks  # which needs triton; all else here does not

    def pool(behind: int, where: str) -> torch.Tensor:
        memory = torch.randint(0, 256, (offset + 12 * (num_bytes + behind),), dtype=torch.uint8)
        return memory.pin_memory() if where == "pinned" else memory.to(where)

    def rows(memory: torch.Tensor) -> torch.Tensor:
        return memory[offset:].view(12, -1)

    ours, theirs = pool(beyond[0], device), pool(beyond[1], "pinned" if pinned else device)
    index = torch.tensor(ids, dtype=torch.int64)
    there, back = (index * 5 + 3) % 12, 11 - index
    expected = theirs.to("cpu", copy=True)
    rows(expected)[there, :num_bytes] = rows(ours).cpu()[index, :num_bytes]
    ids_there, ids_back = (torch.stack(pair).to(device) for pair in ((index, there), (there, back)))
    copy_blocks(rows(ours), rows(theirs), ids_there, num_bytes, num_programs=num_programs)
    if device != "cpu":
        torch.cuda.synchronize()  # host memory is compared at once
    assert torch.equal(theirs.cpu(), expected), "these bytes, and no others"
    again = ours.to("cpu", copy=True)
    rows(again)[back, :num_bytes] = rows(expected)[there, :num_bytes]
    copy_blocks(rows(theirs), rows(ours), ids_back, num_bytes, num_programs=num_programs)
    assert torch.equal(ours.cpu(), again)

"""The Triton kernels in Triton's interpreter: every one against float64, 64-bit offsets, and whole models."""

from __future__ import annotations

import importlib.util
import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  before all that has kernels
from engines import TinyEngine, prompts
from families import VOCAB, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_checks import (
    FAR_BLOCKS,
    FAR_STRIDE,
    MOST,
    Built,
    Case,
    assert_near,
    build,
    cases,
    check_attention,
    check_far_blocks,
    check_write,
)

from pagetide.engine.attention import triton_base, triton_decode, triton_kernel, triton_prefill
from pagetide.engine.attention.context import AttentionKernel, lengths_on
from pagetide.engine.attention.triton_base import (
    DECODE_TILINGS,
    PREFILL_TILINGS,
    ScoreTransform,
    Tiling,
    padded,
    tiling,
)
from pagetide.engine.attention.triton_kernel import TritonKernel
from pagetide.engine.execution.graphs import CaptureCheck
from pagetide.scheduler.request import Sampling

SMALL = Tiling(16, 16, 4, 3)
MAP_NORESERVE = 0x4000  # of Linux; in Python's mmap from 3.13 on


def small_kernel(**over) -> TritonKernel:
    """Of small tiles, so that small cases have many."""
    return TritonKernel(**{"decode": SMALL, "prefill": Tiling(16, 32, 4, 3), **over})


@settings(max_examples=25, deadline=None)
@given(cases(48))
def test_random_steps(case: Case) -> None:
    check_attention(small_kernel(), case)


@settings(max_examples=25, deadline=None)
@given(cases(48, scaled=True))
def test_random_steps_over_one_byte_elements_and_latents(case: Case) -> None:
    check_attention(small_kernel(), case)


@pytest.mark.stress
@settings(max_examples=150, deadline=None)
@given(st.one_of(cases(200), cases(200, scaled=True)))
def test_many_random_steps(case: Case) -> None:
    check_attention(small_kernel(), case)


def decode_in(built: Built, num_splits: int) -> torch.Tensor:
    """The decodes' part alone, in as many splits as one likes; the room for partial results is NaN, or 7 behind its end."""
    case = built.case
    heads, (_, v_dim) = case.kv_heads * case.group, case.dims
    items = triton_decode.partial_items(case.num_decodes, heads, v_dim) * num_splits
    partials = torch.full((items + 16,), torch.nan)
    partials[items:] = 7
    call = built.call
    out = torch.zeros(len(call.query), heads, v_dim, dtype=case.dtype)
    scores = ScoreTransform.of(call)
    lens = torch.from_numpy(call.step.kv_lens)
    triton_decode.decode(call.query, call.cache, call.step.tables[1], lens, out, partials, num_splits, scores, SMALL)
    assert (partials[items:] == 7).all()
    return out


@settings(max_examples=20, deadline=None)
@given(st.one_of(cases(80, splits=True), cases(80, splits=True, scaled=True)), st.integers(1, 7))
def test_any_number_of_splits(case: Case, num_splits: int) -> None:
    """Also more than there are tiles of keys: so a number that was chosen once serves rows of any length."""
    built = build(case)
    if not case.aliased:
        check_write(small_kernel(), built)
    assert_near(decode_in(built, num_splits), built)


def test_splits_of_several_merges() -> None:
    built = build(Case(((1, 560), (1, 3)), dtype=torch.float32, block_size=100, kv_heads=1, sinks=True, aliased=True))
    assert_near(decode_in(built, 35), built)


# --- elements of one byte, and wide heads


@pytest.mark.parametrize("stored", list(MOST))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_rounded_to_the_bit(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Rows of any size: zeros, rows whose scales are too small or too large for float16, and numbers halfway between two."""
    built = build(Case(((1, 5), (8, 30)), dtype=dtype, kv_heads=3, dims=(40, 24), stored=stored))
    rows = [*built.call.key, *built.call.value]
    sizes = [0.0, -0.0, 1e-7, 3e-6, 1e-4, 1.0, 3e4, torch.finfo(dtype).max / 8]
    for i, row in enumerate(rows):
        row.mul_(sizes[i % len(sizes)])
    halves = torch.arange(-20, 20) + 0.5
    built.call.key[3, 1] = torch.cat((torch.tensor([127.0]), halves[1:])).to(dtype)  # a scale of 1 over int8
    check_write(small_kernel(), built)


def test_scaled_elements_hold_every_value_of_one_byte() -> None:
    """A conversion that is wrong for some of them would show in few random cases."""
    for stored in MOST:
        built = build(
            Case(((1, 16),), dtype=torch.float32, kv_heads=1, group=1, dims=(16, 256), aliased=True, stored=stored)
        )
        cache, values = built.call.cache, torch.arange(256, dtype=torch.uint8).view(stored)
        values = torch.where(values.float().isnan(), 0.0, values.float()).to(stored)
        rows = cache.value[built.call.step.tables[1][0, 0]]
        rows.view(torch.uint8).copy_(values.view(torch.uint8))
        cache.value_scale[built.call.step.tables[1][0, 0]] = 0.25
        exact = replace(built, values=[(values.float() * 0.25).expand(16, 1, 256)])
        assert_near(small_kernel().attend(built.call), exact)


@pytest.mark.parametrize(
    ("stored", "v_in_k", "group"),
    [(None, False, 2), (None, True, 16), (torch.int8, True, 40), (torch.float8_e4m3fn, False, 3)],
)
def test_latents_of_real_size(stored: torch.dtype | None, v_in_k: bool, group: int) -> None:
    """K of 576 elements, V of 512, also of more query heads than one program takes; with the tables' own tiles."""
    chunks = ((1, 70), (1, 0), (3, 20))
    case = Case(chunks, kv_heads=1, group=group, dims=(576, 512), stored=stored, v_in_k=v_in_k, sinks=group == 40)
    check_attention(TritonKernel(num_sms=10), case)


@pytest.mark.parametrize(
    ("group", "rows"), [(71, (64, 2)), (16, (16, 1)), (17, (32, 1)), (64, (64, 1)), (128, (64, 2))]
)
def test_query_heads_are_divided_where_results_exceed_the_registers(group: int, rows: tuple[int, int]) -> None:
    heads, programs = triton_base.split_heads(group, 256)
    assert (padded(heads), programs) == rows and heads * programs >= group
    assert triton_base.split_heads(group, 512, 128) == (group, 1)


def test_divided_query_heads_of_several_kv_heads() -> None:
    """A program's last heads may be none, and their places in sinks, queries and results belong to the next KV head."""
    for chunks in (((1, 90), (1, 3), (2, 20)), ((3, 3),)):
        built = build(Case(chunks, kv_heads=2, group=35, dims=(24, 512), sinks=True, aliased=True))
        for num_sms in (1, 132):
            assert_near(TritonKernel(decode=SMALL, prefill=SMALL, num_sms=num_sms).attend(built.call), built)


# --- offsets


def sparse(num_blocks: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_blocks, stride] of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, num_blocks * stride * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(num_blocks, stride)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_arenas_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    check_far_blocks(small_kernel(num_sms=10), sparse(FAR_BLOCKS, FAR_STRIDE, dtype))


@pytest.mark.parametrize("far", ["tokens", "heads"])
def test_batches_beyond_two_to_the_31_elements(far: str) -> None:
    built = build(Case(((1, 20), (1, 20), (3, 20)), group=3))

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """The same, its tokens or heads 2^30 elements apart."""
        tokens, heads, dim = tensor.shape
        count, strides = (tokens, (1 << 30, dim, 1)) if far == "tokens" else (heads, (dim, 1 << 30, 1))
        return sparse(count, 1 << 30, tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)

    call = built.call
    wide = replace(call, query=spread(call.query), key=spread(call.key), value=spread(call.value))
    check_write(small_kernel(), replace(built, call=wide))
    assert_near(small_kernel().attend(wide), built)


# --- what a step has in common


def test_rows_that_are_split_beside_longer_chunks() -> None:
    kernel = TritonKernel(decode=SMALL, prefill=SMALL, num_sms=132)
    for chunks in (((1, 200), (1, 70)), ((1, 150),), ((1, 200), (2, 5))):
        built = build(Case(chunks, aliased=True))
        assert_near(kernel.attend(built.call), built)
        assert max(kernel._plan.splits.values())[0] > 1
    kernel.release_buffers()
    assert_near(kernel.attend(built.call), built)


def test_what_a_step_has_in_common_is_made_once_and_of_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = small_kernel()
    built = build(Case(((1, 9), (4, 8)), aliased=True))
    made, real = [], triton_kernel.list_tiles
    monkeypatch.setattr(triton_kernel, "list_tiles", lambda step, size: made.append(real(step, size)) or made[-1])
    with CaptureCheck():  # asks the device nothing, and sends it nothing
        for window in (None, 3, None, 3):
            kernel.attend(replace(built.call, window=window))
    assert [tiles.tolist() for tiles in made] == [[[1, 1, 4, 4]]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 50), max_size=3),
    st.lists(st.tuples(st.integers(2, 40), st.integers(0, 60)), min_size=1, max_size=5),
    st.integers(1, 17),
)
def test_tiles_are_all_queries_once_those_with_most_keys_first(decodes, prefills, size) -> None:
    q_lens = np.array([1] * len(decodes) + [n for n, _ in prefills])
    kv_lens = np.array(decodes + [n + before for n, before in prefills])
    starts = np.cumsum(q_lens) - q_lens
    step = SimpleNamespace(num_decodes=len(decodes), q_lens=q_lens, **lengths_on("cpu", q_lens, kv_lens))
    tiles = triton_prefill.list_tiles(step, size)
    assert tiles.dtype == torch.int32
    listed = [
        (chunk, token - starts[chunk] + i, position + i)
        for chunk, token, position, queries in tiles.tolist()
        for i in range(queries)
        if 1 <= queries <= size
    ]
    assert sorted(listed) == [
        (chunk, i, kv_lens[chunk] - q_lens[chunk] + i)
        for chunk in range(len(decodes), len(q_lens))
        for i in range(q_lens[chunk])
    ]
    keys = (tiles[:, 2] + tiles[:, 3]).tolist()
    assert keys == sorted(keys, reverse=True)


def test_what_is_launched_depends_on_bounds_and_the_lengths_are_read_on_the_device() -> None:
    """As replays of a captured graph need it: the host says how long rows may be, not how long they are."""
    kernel = small_kernel(num_sms=132)
    built = build(Case(((1, 77), (1, 0), (1, 16)), kv_heads=1, aliased=True))
    for bounded in (False, True):
        step = replace(built.call.step, kv_lens=np.full(3, 320), bounded=bounded)
        out = kernel.attend(replace(built.call, step=step))
        assert max(kernel._plan.splits.values())[0] > 4
        assert_near(out, built)


def test_a_long_row_among_short_ones_is_split_where_nobody_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured step has to: rows that fill the card together, for which there is no other reason to be split."""
    monkeypatch.setattr(triton_decode, "UNKNOWN_SPLIT_KEYS", 64)
    kernel = small_kernel(num_sms=1)
    built = build(Case(((1, 500), (1, 3), (1, 64), (1, 65), (1, 0), (1, 129)), kv_heads=1, aliased=True, sinks=True))
    step = replace(built.call.step, kv_lens=np.full(6, 600), bounded=True)
    out = kernel.attend(replace(built.call, step=step))
    assert list(kernel._plan.splits.values()) == [(8, 4)]
    assert_near(out, built)


@pytest.mark.parametrize(
    ("rows", "reach", "most", "expected"),
    [
        (1, 100_000, 1000, (66, 1)),  # does not fill the card
        (64, 131_072, 31, (8, 32)),
        (64, 2048, 31, (1, 1)),
        (256, 131_072, 7, (1, 1)),  # no room for partial results
        (16, 131_072, 100, (8, 4)),
    ],
)
def test_splits_of_rows_whose_lengths_nobody_knows(rows: int, reach: int, most: int, expected: tuple[int, int]) -> None:
    assert triton_decode.splits_of_unknown(rows, reach, 8, Tiling(64, 16, 4, 3), 132, most) == expected


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "splits"),
    [
        ([4096] * 64, 8, 1),  # fills 132 multiprocessors
        ([4096] * 8, 8, 8),
        ([4096], 8, 16),  # parts of less than 256 keys are not worth it
        ([100_000], 8, 66),
        ([100] * 32, 8, 1),
        ([100_000] + [100] * 63, 8, 62),  # one long row among short ones
        ([0, 0], 8, 1),
    ],
)
def test_rows_are_split_until_the_card_is_full(lengths: list[int], kv_heads: int, splits: int) -> None:
    seen = np.array(lengths)
    assert triton_decode.choose_splits(seen, kv_heads, Tiling(64, 16, 4, 3), 132, 1000) == splits
    assert triton_decode.choose_splits(seen, kv_heads, Tiling(64, 16, 4, 3), 132, 5) == min(splits, 5)
    assert triton_decode.choose_splits(seen, kv_heads, Tiling(64, 16, 4, 3), 132, 0) == 1


# --- refusals


def test_refusals() -> None:
    kernel: AttentionKernel = small_kernel()
    built = build(Case(((1, 9), (2, 8)), aliased=True))
    with pytest.raises(ValueError, match="at least 1 token"):
        kernel.attend(replace(built.call, window=0))
    object.__setattr__(built.call.step, "q_starts", np.array([2, 0]))
    with pytest.raises(ValueError, match="first 1 tokens of a batch"):
        small_kernel().attend(built.call)
    for table in (DECODE_TILINGS, PREFILL_TILINGS):
        assert tiling(table, 2, 512) and tiling(table, 4, 3)
        with pytest.raises(ValueError, match="head dims up to 512, got 576"):
            tiling(table, 2, 576)
    wide = build(Case(((1, 9),), dims=(592, 16), aliased=True))
    with pytest.raises(ValueError, match="keys of up to 576 elements, got 592"):
        small_kernel().attend(wide.call)
    wide = build(Case(((1, 9),), dims=(16, 576), aliased=True))
    with pytest.raises(ValueError, match="head dims up to 512, got 576"):
        TritonKernel().attend(wide.call)


def test_without_triton_the_import_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("pagetide.engine.attention.once_more", triton_base.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"not installed: pip install pagetide\[triton\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_one_module_alone_imports_triton() -> None:
    folder = Path(triton_base.__file__).parents[1]
    asks = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
    assert [path.name for path in folder.rglob("*.py") if asks.search(path.read_text())] == ["triton_base.py"]


# --- models


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_models_give_the_same_tokens(family: str) -> None:
    model = tiny(family)
    inputs = prompts([1, 17], VOCAB)
    tokens = []
    for kernel in (None, small_kernel(num_sms=8)):
        engine = TinyEngine(model, usable=12, block_size=16, max_chunk_tokens=9)
        if kernel is not None:
            engine.core.runner.kernel = kernel
        tokens.append(engine.generate(inputs, Sampling(3)))
    assert tokens[0] == tokens[1]
    assert kernel._plan is not None, "it was this kernel"

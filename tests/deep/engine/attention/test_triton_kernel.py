"""The Triton kernels in Triton's interpreter: every one against float64, 64-bit offsets, and whole models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  before all that has kernels
from hypothesis import given
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
    sparse,
    with_fresh_chunks,
)

from pagetide.engine.attention import triton_base, triton_decode, triton_kernel
from pagetide.engine.attention.context import AttentionKernel
from pagetide.engine.attention.triton_base import DECODE_TILINGS, PREFILL_TILINGS, ScoreTransform, Tiling, tiling
from pagetide.engine.attention.triton_kernel import TritonKernel
from pagetide.engine.execution.graphs import CaptureCheck

SMALL = Tiling(16, 16, 4, 3)


def small_kernel(**over) -> TritonKernel:
    """Of small tiles, so that small cases have many."""
    return TritonKernel(**{"decode": SMALL, "prefill": Tiling(16, 32, 4, 3), **over})


@with_fresh_chunks()
@given(case=st.one_of(cases(48), cases(48, scaled=True)))
def test_random_steps(case: Case) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_rounded_to_the_bit(dtype: torch.dtype) -> None:
    """Rows of any size: zeros, rows whose scales are too small or too large for float16, and numbers halfway between two."""
    for stored in list(MOST):
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
        built = build(Case(((1, 16),), dtype=torch.float32, kv_heads=1, group=1, dims=(16, 256), aliased=True, stored=stored))
        cache, values = built.call.cache, torch.arange(256, dtype=torch.uint8).view(stored)
        values = torch.where(values.float().isnan(), 0.0, values.float()).to(stored)
        rows = cache.value[built.call.step.tables[1][0, 0]]
        rows.view(torch.uint8).copy_(values.view(torch.uint8))
        cache.value_scale[built.call.step.tables[1][0, 0]] = 0.25
        exact = replace(built, values=[(values.float() * 0.25).expand(16, 1, 256)])
        assert_near(small_kernel().attend(built.call), exact)


@pytest.mark.parametrize(
    ("stored", "v_in_k", "group"), [(None, False, 2), (None, True, 16), (torch.int8, True, 40), (torch.float8_e4m3fn, False, 3)]
)
def test_latents_of_real_size(stored: torch.dtype | None, v_in_k: bool, group: int) -> None:
    """K of 576 elements, V of 512, also of more query heads than one program takes; with the tables' own tiles."""
    chunks = ((1, 70), (1, 0), (3, 20))
    case = Case(chunks, kv_heads=1, group=group, dims=(576, 512), stored=stored, v_in_k=v_in_k, sinks=group == 40)
    check_attention(TritonKernel(num_sms=10), case)


def test_divided_query_heads_of_several_kv_heads() -> None:
    """A program's last heads may be none, and their places in sinks, queries and results belong to the next KV head."""
    for chunks in (((1, 90), (1, 3), (2, 20)), ((3, 3),)):
        built = build(Case(chunks, kv_heads=2, group=35, dims=(24, 512), sinks=True, aliased=True))
        for num_sms in (1, 132):
            assert_near(TritonKernel(decode=SMALL, prefill=SMALL, num_sms=num_sms).attend(built.call), built)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_arenas_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    check_far_blocks(small_kernel(num_sms=10), sparse((FAR_BLOCKS, FAR_STRIDE), dtype))


@pytest.mark.parametrize("far", ["tokens", "heads"])
def test_batches_beyond_two_to_the_31_elements(far: str) -> None:
    built = build(Case(((1, 20), (1, 20), (3, 20)), group=3))

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """The same, its tokens or heads 2^30 elements apart."""
        tokens, heads, dim = tensor.shape
        count, strides = (tokens, (1 << 30, dim, 1)) if far == "tokens" else (heads, (dim, 1 << 30, 1))
        return sparse((count, 1 << 30), tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)

    call = built.call
    wide = replace(call, query=spread(call.query), key=spread(call.key), value=spread(call.value))
    check_write(small_kernel(), replace(built, call=wide))
    assert_near(small_kernel().attend(wide), built)


def test_what_a_step_has_in_common_is_made_once_and_of_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = small_kernel()
    built = build(Case(((1, 9), (4, 8), (20, 50)), aliased=True))
    made, real = [], triton_kernel.list_tiles
    monkeypatch.setattr(triton_kernel, "list_tiles", lambda step, size: made.append(real(step, size)) or made[-1])
    with CaptureCheck():  # asks the device nothing, and sends it nothing
        for window in (None, 3, None, 3):
            kernel.attend(replace(built.call, window=window))
    assert [tiles.tolist() for tiles in made] == [[[2, 21, 46, 4], [2, 5, 30, 16], [1, 1, 4, 4]]], "most keys first"


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


def test_splits_of_rows_whose_lengths_nobody_knows() -> None:
    for rows, reach, most, expected in [
        (1, 100_000, 1000, (66, 1)),  # does not fill the card
        (64, 131_072, 31, (8, 32)),
        (64, 2048, 31, (1, 1)),
        (256, 131_072, 7, (1, 1)),  # no room for partial results
        (16, 131_072, 100, (8, 4)),
    ]:
        assert triton_decode.splits_of_unknown(rows, reach, 8, Tiling(64, 16, 4, 3), 132, most) == expected


def test_rows_are_split_until_the_card_is_full() -> None:
    for lengths, kv_heads, splits in [
        ([4096] * 64, 8, 1),  # fills 132 multiprocessors
        ([4096] * 8, 8, 8),
        ([4096], 8, 16),  # parts of less than 256 keys are not worth it
        ([100_000], 8, 66),
        ([100] * 32, 8, 1),
        ([100_000] + [100] * 63, 8, 62),  # one long row among short ones
        ([0, 0], 8, 1),
    ]:
        seen = np.array(lengths)
        assert triton_decode.choose_splits(seen, kv_heads, Tiling(64, 16, 4, 3), 132, 1000) == splits
        assert triton_decode.choose_splits(seen, kv_heads, Tiling(64, 16, 4, 3), 132, 5) == min(splits, 5)
        assert triton_decode.choose_splits(seen, kv_heads, Tiling(64, 16, 4, 3), 132, 0) == 1


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


def test_one_module_alone_imports_triton() -> None:
    folder = Path(triton_base.__file__).parents[1]
    asks = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
    assert [path.name for path in folder.rglob("*.py") if asks.search(path.read_text())] == ["triton_import.py"]

"""Paged attention against plain attention: the kernel by itself, and whole models of many families."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, attention_matters, tiny
from paged_driver import PagedDriver, eager_logits

from pagetide.engine.attention import torch_kernel
from pagetide.engine.attention.context import AttentionCall, LayerCache, StepContext, lengths_on
from pagetide.engine.attention.interface import NAME, paged_attention, register
from pagetide.engine.attention.torch_kernel import TorchKernel

TOLERANCE = 1e-4  # of logits with a standard deviation of about 3
WINDOWED = [name for name, config in FAMILIES.items() if config.get("sliding_window")]
LONGEST = 256 + 14

model_of = cache(tiny)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


@cache
def right(family: str, seed: int) -> torch.Tensor:
    """Eager logits of `tokens(LONGEST, seed)`; those of its prefixes too, since all models here are causal."""
    return eager_logits(model_of(family), tokens(LONGEST, seed))


def worst_error(family: str, driver: PagedDriver, lengths: tuple[int, ...]) -> float:
    got = driver.logits([tokens(LONGEST, seed)[:n] for seed, n in enumerate(lengths)])
    errors = [(g - right(family, seed)[: len(g)]).abs().max() for seed, g in enumerate(got)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())


# --- models


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_decides_the_tokens(family: str) -> None:
    assert attention_matters(model_of(family), torch.tensor(tokens(48, 9))) >= 0.5


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("block_size", [4, 16, 100, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_logits_are_eager_logits(family: str, block_size: int, chunk: int | None) -> None:
    """At every position of three sequences that run together, whatever the chunks."""
    longest = 21 if chunk == 1 else max(37, block_size + 14)
    driver = PagedDriver(model_of(family), block_size, chunk)
    assert worst_error(family, driver, (longest, 23 if chunk != 1 else 13, 9)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_gathered_in_one_tile_or_row_by_row(family: str) -> None:
    for tile_bytes in (1, 1 << 30):
        driver = PagedDriver(model_of(family), 16, 1, kernel=TorchKernel(tile_bytes))
        assert worst_error(family, driver, (20, 19, 18, 3)) < TOLERANCE


# --- faults that the tests above must see


def shifted(table: np.ndarray, tokens: int) -> np.ndarray:
    return np.roll(table, 1)


def without_last(table: np.ndarray, tokens: int) -> np.ndarray:
    return np.append(table[:-1], 0)


class WrongWindow(TorchKernel):
    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def attend(self, call):
        wrong = None if call.window is None else call.window + self.by
        return super().attend(replace(call, window=wrong))


@pytest.mark.parametrize("fault", [shifted, without_last])
@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_block_table_is_seen(family: str, chunk: int, fault) -> None:
    driver = PagedDriver(model_of(family), 4, chunk, read_fault=fault)
    assert worst_error(family, driver, (21, 13, 9)) > 100 * TOLERANCE


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_wrong_window_is_seen(family: str, chunk: int | None, by: int) -> None:
    driver = PagedDriver(model_of(family), 4, chunk, kernel=WrongWindow(by))
    assert worst_error(family, driver, (21, 13, 9)) > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_positions_are_seen(family: str) -> None:
    driver = PagedDriver(model_of(family), 4, 7, position_fault=1)
    assert worst_error(family, driver, (21, 13, 9)) > 100 * TOLERANCE


# --- the kernel by itself


def random_step(rng: np.random.Generator, q_lens, kv_lens, heads: int, dims: tuple[int, int], block_size: int, dtype):
    """(step, layer cache, own K, own V, all K per chunk, all V per chunk); whatever holds no token is NaN."""
    counts = -(-np.array(kv_lens) // block_size)
    num_blocks, num_tokens, width = counts.sum() + 3, sum(q_lens), counts.max()
    arena = torch.full((num_blocks, 2, block_size * heads * sum(dims)), float("nan"), dtype=dtype)  # layer 1 is ours
    key, value = arena[:, 1].split([block_size * heads * dim for dim in dims], dim=-1)
    key, value = (v.unflatten(-1, (block_size, heads, dim)) for v, dim in zip((key, value), dims, strict=True))
    ids, tables = rng.permutation(np.arange(1, num_blocks)), np.zeros((len(q_lens), width), np.int64)
    everything, own = ([], []), ([], [])
    for i, (q_len, kv_len, count) in enumerate(zip(q_lens, kv_lens, counts, strict=True)):
        tables[i, :count] = ids[counts[:i].sum() : counts[: i + 1].sum()]
        slots = np.arange(kv_len)
        places = (torch.from_numpy(tables[i, slots // block_size]), torch.from_numpy(slots % block_size))
        for target, all_of, own_of, dim in zip((key, value), everything, own, dims, strict=True):
            drawn = torch.from_numpy(rng.standard_normal((kv_len, heads, dim))).to(dtype)
            target.index_put_(places, drawn)
            all_of.append(drawn)
            own_of.append(drawn[kv_len - q_len :])
    lens = np.array(q_lens, np.int32)
    step = StepContext(
        layers=(),
        kernel=TorchKernel(),
        q_starts=(np.cumsum(lens) - lens).astype(np.int32),
        q_lens=lens,
        kv_lens=np.array(kv_lens, np.int32),
        num_decodes=next((i for i, n in enumerate(q_lens) if n > 1), len(q_lens)),
        **lengths_on("cpu", lens, np.array(kv_lens)),
        tables=(torch.from_numpy(tables),),
        write_blocks=(torch.zeros(num_tokens, dtype=torch.int64),),
        write_offsets=torch.zeros(num_tokens, dtype=torch.int64),
        block_size=block_size,
    )
    return step, LayerCache(key, value), torch.cat(own[0]), torch.cat(own[1]), *everything


def exact(query, step, keys, values, scaling, window, softcap, sinks) -> torch.Tensor:
    """Attention in float64, chunk by chunk, as it is written in books."""
    out = []
    for start, n, key, value in zip(step.q_starts, step.q_lens, keys, values, strict=True):
        repeat = query.shape[1] // key.shape[1]
        k, v = (t.double().repeat_interleave(repeat, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start : start + n].double(), k) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at, keys_at = torch.arange(len(k) - n, len(k))[:, None], torch.arange(len(k))
        seen = keys_at <= at if window is None else (keys_at <= at) & (keys_at > at - window)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(out)


BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("seed", range(120))
def test_kernel_is_exact_on_random_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    if seed % 3 == 0:  # many query tiles, many decode tiles
        monkeypatch.setattr(torch_kernel, "QUERY_TILE", 5)
        monkeypatch.setattr(torch_kernel, "SCORE_BYTES", 4096)
    num_decodes = int(rng.integers(0, 9))
    kv_lens = rng.integers(1, pick(8, 40, 300), num_decodes).tolist()
    q_lens = [1] * num_decodes
    for _ in range(rng.integers(not num_decodes, 4)):
        q_lens.append(int(rng.integers(2, 60)))
        kv_lens.append(q_lens[-1] + pick(0, 0, 1, 5, 33, 200))
    heads, group, dtype = pick(1, 2, 3), pick(1, 2, 4), pick(*BOUNDS)
    step, cache, key, value, keys, values = random_step(
        rng, q_lens, kv_lens, heads, (pick(8, 16), pick(8, 16)), pick(1, 4, 16, 100), dtype
    )
    if seed % 2:
        cache = LayerCache(cache.key, cache.value, aliased=True)
        key, value = key * float("nan"), value * float("nan")  # an aliased layer's own are none of our business
    shape = (heads * group, sum(q_lens), cache.key.shape[-1])
    query = torch.from_numpy(rng.standard_normal(shape)).to(dtype).transpose(0, 1)
    window, softcap = pick(None, None, 1, 7, 50), pick(None, None, 20.0)
    sinks = pick(None, torch.from_numpy(rng.standard_normal(heads * group)).to(dtype))
    kernel = TorchKernel(pick(None, 1, 1 << 14, 1 << 22))
    for _ in range(2):  # the second layer uses what the first one made
        got = kernel.attend(AttentionCall(query, key, value, cache, step, 0.3, window, softcap, sinks))
        error = (got.double() - exact(query, step, keys, values, 0.3, window, softcap, sinks)).abs().max()
        assert got.dtype == dtype and error < BOUNDS[dtype]


def attend(kernel: TorchKernel, step, cache, key, value, *, group: int = 2, **over) -> torch.Tensor:
    query = torch.ones(len(key), key.shape[1] * group, key.shape[2], dtype=key.dtype)
    return kernel.attend(AttentionCall(query, key, value, cache, step, 0.1, **over))


def test_a_window_gathers_only_its_blocks() -> None:
    rng = np.random.default_rng(0)
    step, cache, key, value, *_ = random_step(rng, [1] * 4 + [3], [2000] * 5, 2, (8, 8), 16, torch.float32)
    kernel = TorchKernel()
    attend(kernel, step, cache, key, value, window=20)
    assert kernel.buffer_bytes <= 4 * (3 * 16) * 2 * (8 + 8) * 4 * 1.25  # 20 tokens touch 2 or 3 blocks
    attend(kernel, step, cache, key, value)
    assert kernel.buffer_bytes >= 2000 * 2 * (8 + 8) * 4


def test_rows_of_very_different_length_are_not_padded_to_the_longest() -> None:
    rng = np.random.default_rng(0)
    step, cache, key, value, *_ = random_step(rng, [1] * 64, [4000] + [20] * 63, 2, (8, 8), 16, torch.float32)
    kernel = TorchKernel(1 << 30)
    attend(kernel, step, cache, key, value)
    assert kernel.buffer_bytes <= 4000 * 2 * (8 + 8) * 4 * 1.3


def test_buffers_are_reused_until_they_are_released() -> None:
    rng = np.random.default_rng(0)
    kernel = TorchKernel()
    for length in (100, 60, 100):
        step, cache, key, value, *_ = random_step(rng, [1] * 3, [length] * 3, 2, (8, 8), 16, torch.float32)
        attend(kernel, step, cache, key, value)
        buffers = {name: b.data_ptr() for name, b in kernel._buffers.items()}
        size = kernel.buffer_bytes
        if length == 100:
            first = buffers
        assert buffers == first
    kernel.release_buffers()
    assert size > 0 and kernel.buffer_bytes == 0
    attend(kernel, step, cache, key, value)


def test_what_a_step_has_in_common_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        TorchKernel,
        "_plan_decodes",
        lambda self, *a, real=TorchKernel._plan_decodes: made.append(a[1]) or real(self, *a),
    )
    rng = np.random.default_rng(0)
    step, cache, key, value, *_ = random_step(rng, [1, 1, 4], [9, 5, 8], 2, (8, 8), 4, torch.float32)
    kernel = TorchKernel()
    for window in (None, 3, None, 3, None):
        attend(kernel, step, cache, key, value, window=window)
    assert [shape.window for shape in made] == [None, 3]


def test_padding_behind_the_chunks_gets_zeros() -> None:
    rng = np.random.default_rng(0)
    step, cache, key, value, *_ = random_step(rng, [1, 4], [9, 8], 2, (8, 8), 4, torch.float32)
    padded = attend(TorchKernel(), step, cache, torch.cat((key, key)), torch.cat((value, value)))
    assert torch.equal(padded[:5], attend(TorchKernel(), step, cache, key, value)) and not padded[5:].any()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_half_precision_on_a_cpu_has_few_shapes(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each of which torch keeps a compiled kernel."""
    rng, inner = np.random.default_rng(1), torch.nn.functional.scaled_dot_product_attention
    seen: dict[torch.dtype, set[tuple[int, int]]] = {torch.bfloat16: set(), torch.float32: set()}

    def recorded(query, key, *args, **kwargs):
        seen[query.dtype].add((query.shape[-2], key.shape[-2]))
        return inner(query, key, *args, **kwargs)

    monkeypatch.setattr(torch_kernel.F, "scaled_dot_product_attention", recorded)
    for number in range(40):
        q_lens = [1] * number + rng.integers(2, 400, 3).tolist()
        kv_lens = [q + int(more) for q, more in zip(q_lens, rng.integers(0, 300, len(q_lens)), strict=True)]
        for dtype in seen:
            step, cache, key, value, *_ = random_step(rng, q_lens, kv_lens, 2, (16, 16), 16, dtype)
            query = torch.zeros(sum(q_lens), 4, 16, dtype=dtype)
            own = torch.zeros(4, dtype=dtype) if sinks else None
            TorchKernel().attend(AttentionCall(query, key, value, cache, step, 0.3, window, sinks=own))
    assert all((n % 32 == 0 or n <= 2) and span % 64 == 0 for n, span in seen[torch.bfloat16])
    assert len(seen[torch.bfloat16]) < 100 < len(seen[torch.float32])


def test_scores_keep_within_their_bytes() -> None:
    shape = torch_kernel._Shape(0, 32, 8, 128, 128, torch.bfloat16, None, softcap=True, sinks=False)
    tiles = torch_kernel._query_tiles(8192, 100_000, shape)
    assert tiles[0][0] == 0 and tiles[-1][1] == 8192 and all(one[1] == next_[0] for one, next_ in pairwise(tiles))
    assert max(high - low for low, high in tiles) * 32 * 100_000 * 4 <= torch_kernel.SCORE_BYTES


# --- the interface


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def call(module=None, tokens: int = 2, **over):
    q = torch.zeros(1, 4, tokens, 8)
    arguments = {"attention_mask": None, "scaling": 1.0, **over}
    return paged_attention((module or Layer()).eval(), q, q[:, :2], q[:, :2], **arguments)


def test_registering_adds_no_mask_function() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert register() == NAME == register()
    assert AttentionInterface()[NAME] is paged_attention and NAME not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention mask"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_wishes_beyond_causal_attention_are_refused(over: dict, said: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"layer 0 \(Layer\).*{said}"):
        call(**over)


def test_dropout_is_refused_in_training_mode_only() -> None:
    module = Layer().train()
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"dropout 0\.1: call model\.eval\(\)"):
        paged_attention(module, q, q, q, None, dropout=0.1)
    with pytest.raises(RuntimeError, match="outside of a pagetide step"):
        paged_attention(module.eval(), q, q, q, None, dropout=0.1)


def test_bidirectional_modules_and_calls_outside_of_a_step_are_refused() -> None:
    module = Layer()
    module.is_causal = False
    with pytest.raises(NotImplementedError, match="not causal"):
        call(module)
    with pytest.raises(RuntimeError, match="outside of a pagetide step"):
        call()


def test_calls_over_other_tokens_than_the_steps_are_refused() -> None:
    rng = np.random.default_rng(0)
    step, cache, *_ = random_step(rng, [2], [2], 2, (8, 8), 4, torch.float32)
    with pytest.raises(NotImplementedError, match="caches for 0 layers"):
        call(step=step)
    object.__setattr__(step, "layers", (cache,))
    assert call(step=step)[0].shape == (1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="in a step of 2 tokens"):
        call(step=step, tokens=3)
    with pytest.raises(ValueError, match="at least 1 token"):
        call(step=step, sliding_window=0)

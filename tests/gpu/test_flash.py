"""The attention libraries that are installed, on a CUDA device: strided views amid NaN, against the torch kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from families import tiny

from pagetide import LLM
from pagetide.engine.attention import trial
from pagetide.engine.attention.backends import BACKENDS, AttentionSpec
from pagetide.engine.attention.choose import MAKERS, Site, choose
from pagetide.engine.attention.context import AttentionKernel, LayerCache

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
HALF, BRAIN = torch.float16, torch.bfloat16
LIBRARIES = [name for name in BACKENDS if name not in ("torch", "triton")]
FAR_STRIDE = (1 << 28) + 64  # elements: 2^31 lies in block 7
SHAPES = [(32, 8, 128), (4, 2, 64), (14, 2, 64), (8, 1, 256), (4, 4, 80)]


def site(dtype: torch.dtype, block_size: int) -> Site:
    return Site(CUDA, dtype, block_size, torch.cuda.get_device_capability(CUDA))


def kernel_of(name: str, where: Site, spec: AttentionSpec) -> AttentionKernel:
    """Skips where it is not installed, or says itself that it cannot."""
    obstacle = where.obstacle(name, [spec])
    if obstacle is not None:
        pytest.skip(f"{name}: {obstacle}")
    try:
        return MAKERS[name]()
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


def block_sizes(name: str) -> tuple[int, ...]:
    multiple = BACKENDS[name].block_multiple
    return (multiple, 2 * multiple) if multiple > 1 else (16, 24, 256)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LIBRARIES)
def test_it_passes_the_trial(name: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    needs = BACKENDS[name]
    for dtype in (BRAIN, HALF):
        for block_size in block_sizes(name):
            plain = AttentionSpec(heads, kv_heads, dim, dim)
            kernel = kernel_of(name, site(dtype, block_size), plain)
            specs = [plain, AttentionSpec(heads, kv_heads, dim, dim, 1000)]
            if needs.softcap:
                specs.append(AttentionSpec(heads, kv_heads, dim, dim, None, 50.0))
            if needs.sinks:
                specs.append(AttentionSpec(heads, kv_heads, dim, dim, 1000, None, True))
            assert trial.fault(kernel, specs, block_size, dtype, CUDA) is None


@pytest.mark.parametrize("name", LIBRARIES)
def test_ragged_batches_of_real_length(name: str) -> None:
    """Windows and chunks across many blocks; the pool stays as it is to the bit."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        window = [None, 1, 100, 1000][seed]
        spec = AttentionSpec(32, 8, 128, 128, window, 20.0 if BACKENDS[name].softcap and seed == 2 else None)
        block_size = block_sizes(name)[0]
        kernel = kernel_of(name, site(BRAIN, block_size), spec)
        chunks = [(1, int(n)) for n in rng.integers(1, 4000, 9)]
        chunks += [(int(n), int(n + rng.integers(0, 3000))) for n in rng.integers(2, 700, 3)]
        scratch = trial.build(spec, chunks, block_size, BRAIN, CUDA)
        call, right = scratch.call, scratch.call.step.kernel
        right.write(call)
        expected = right.attend(call)
        before = scratch.pool.clone()
        for _ in range(2):
            got = kernel.attend(call)
            error = (got.float() - expected.float()).abs().nan_to_num(nan=torch.inf).max()
            assert error < trial.TOLERANCES[BRAIN], (seed, error)
        assert torch.equal(scratch.pool, before)


@pytest.mark.parametrize("name", LIBRARIES)
def test_beyond_two_to_the_31_elements(name: str) -> None:
    spec = AttentionSpec(4, 2, 64, 64)
    block_size = block_sizes(name)[0]
    kernel = kernel_of(name, site(BRAIN, block_size), spec)
    near = trial.build(spec, [(1, 9 * block_size + 3), (7, 9 * block_size)], block_size, BRAIN, CUDA)
    if torch.cuda.mem_get_info()[0] < len(near.pool) * 2 * FAR_STRIDE + (2 << 30):
        pytest.skip("needs 12 GB of device memory")
    arena = torch.zeros(len(near.pool), FAR_STRIDE, dtype=BRAIN, device=CUDA)
    items = near.pool.view(BRAIN)
    arena[:, : items.shape[1]] = items
    key, value = (
        arena.as_strided(view.shape, (FAR_STRIDE, *view.stride()[1:]), view.storage_offset())
        for view in (near.call.cache.key, near.call.cache.value)
    )
    far = replace(near.call, cache=LayerCache(key, value))
    for call in (near.call, far):
        kernel.write(call)
    expected = near.call.step.kernel.attend(near.call)
    assert (kernel.attend(far).float() - expected.float()).abs().max() < trial.TOLERANCES[BRAIN]
    del arena, far, key, value
    torch.cuda.empty_cache()


def test_the_choice_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagetide")
    torch.cuda.empty_cache()
    reserved_bytes = torch.cuda.memory_reserved()
    kernel = choose("auto", site(BRAIN, 16), Counter([AttentionSpec(32, 8, 128, 128)]))
    assert f"attention by {kernel.name}: " in caplog.text
    assert torch.cuda.memory_reserved() - reserved_bytes < trial.POOL_BYTES // 2, "the pool it measured over went back"


@pytest.mark.parametrize("name", ["auto", "triton", *LIBRARIES])
def test_an_engine_attends_by_it(name: str) -> None:
    model = tiny("llama").to(CUDA, BRAIN)
    config = model.config
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
    if name in LIBRARIES:
        kernel_of(name, site(BRAIN, BACKENDS[name].block_multiple * 16), spec)
    elif name == "triton":
        pytest.importorskip("triton")
    with LLM(model, attention=name, kv_memory="64MiB", max_model_len=512, share=False) as llm:
        assert name in ("auto", llm.stats()["attention"])
        assert len(llm.generate([[1, 2, 3]])[0].completions[0].token_ids) > 0

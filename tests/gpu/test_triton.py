"""The Triton kernels, compiled, on a CUDA device: what the interpreter checks elsewhere, at sizes of real models too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before anything has kernels: there they are interpreted
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: pip install pagetide[triton]")

from engines import TinyEngine, plain, prompts
from families import FAMILIES, VOCAB, tiny
from triton_checks import FAR_BLOCKS, FAR_STRIDE, Case, assert_near, build, check_attention, check_copies, check_far_blocks

from pagetide.engine.attention.triton_kernel import TritonKernel
from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.gpu

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
SHAPES = [  # dtype, block size, KV heads, query heads of each, dims of K and V
    (BRAIN, 16, 8, 4, (128, 128)),
    (HALF, 24, 2, 3, (64, 64)),
    (FULL, 16, 2, 2, (32, 16)),
    (BRAIN, 256, 1, 7, (256, 256)),
    (BRAIN, 100, 2, 1, (80, 80)),
    (BRAIN, 16, 2, 8, (192, 128)),
    (HALF, 16, 1, 71, (64, 64)),
    (BRAIN, 16, 1, 4, (512, 512)),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("dtype", "block_size", "kv_heads", "group", "dims"), SHAPES)
def test_random_steps(dtype, block_size, kv_heads, group, dims, special: bool) -> None:
    kernel = TritonKernel()
    for seed in range(3):  # each compiles what none before had
        rng = np.random.default_rng(seed)
        most = int(rng.choice([20, 300, 3000]))
        decodes = [(1, int(n)) for n in rng.integers(0, most, rng.integers(0, 9))]
        prefills = [(int(n), int(n + rng.integers(0, most))) for n in rng.integers(2, 70, rng.integers(not decodes, 3))]
        window = [None, None, 1, 50, 1000][rng.integers(5)]
        check_attention(
            kernel,
            Case(
                (*decodes, *prefills), dtype, block_size, kv_heads, group, dims, window, 20.0 if special else None, special,
                padding=int(rng.integers(0, 3)), aliased=seed == 2, seed=seed,
            ),
            "cuda",
        )  # fmt: skip


SCALED = [  # of K and V, dtype, block size, KV heads, query heads of each, dims, V within K
    (torch.int8, BRAIN, 16, 8, 4, (128, 128), False),
    (torch.int8, HALF, 24, 2, 3, (64, 64), False),
    (torch.int8, FULL, 16, 2, 2, (32, 16), False),
    (torch.int8, BRAIN, 16, 1, 7, (256, 256), False),
    (torch.float8_e4m3fn, BRAIN, 16, 8, 4, (128, 128), False),
    (torch.float8_e4m3fn, HALF, 16, 2, 8, (192, 128), False),
    (None, BRAIN, 16, 1, 16, (576, 512), True),
    (torch.int8, BRAIN, 16, 1, 128, (576, 512), True),
]


@pytest.mark.parametrize(("stored", "dtype", "block_size", "kv_heads", "group", "dims", "v_in_k"), SCALED)
def test_elements_of_one_byte_and_latents(stored, dtype, block_size, kv_heads, group, dims, v_in_k: bool) -> None:
    if stored == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8_e4m3fn needs compute capability 8.9")
    for seed, (window, special) in enumerate([(None, False), (50, True)]):
        chunks = ((1, 1500), (1, 0), (1, 33), (40, 700), (7, 7))
        check_attention(
            TritonKernel(),
            Case(
                chunks, dtype, block_size, kv_heads, group, dims, window, 20.0 if special else None, special, padding=2,
                seed=seed, stored=stored, v_in_k=v_in_k,
            ),
            "cuda",
        )  # fmt: skip


def test_rows_of_real_length() -> None:
    chunks = (*[(1, 4096 - i) for i in range(4)], (64, 2048))
    check_attention(TritonKernel(), Case(chunks, BRAIN, 16, 8, 4, (128, 128)), "cuda")


@pytest.mark.parametrize("dtype", [BRAIN, FULL, torch.uint8])
def test_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    num_bytes = FAR_BLOCKS * FAR_STRIDE * dtype.itemsize
    if torch.cuda.mem_get_info()[0] < num_bytes + (2 << 30):
        pytest.skip(f"needs {num_bytes:,} bytes of device memory")
    check_far_blocks(TritonKernel(), torch.zeros(FAR_BLOCKS, FAR_STRIDE, dtype=dtype, device="cuda"))
    torch.cuda.empty_cache()


def test_a_captured_decode_serves_rows_of_any_length() -> None:
    shape = {"kv_heads": 8, "group": 4, "dims": (128, 128), "aliased": True}
    first = build(Case(((1, 3000),) * 4, **shape), "cuda")
    kernel = TritonKernel()

    def run() -> torch.Tensor:
        return kernel.attend(first.call)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, lengths in enumerate([(3000, 1, 17, 16), (5, 0, 2999, 0), (1, 1, 1, 1)]):
        first.arena.fill_(torch.nan)
        ids = np.random.default_rng(seed).permutation(np.arange(1, len(first.arena)))
        case = Case(tuple((1, n) for n in lengths), **shape, seed=seed)
        built = build(case, "cuda", first.arena, ids)
        table = built.call.step.tables[1]
        first.call.step.tables[1].zero_()[:, : table.shape[1]] = table
        first.call.query.copy_(built.call.query)
        first.call.step.lens.copy_(built.call.step.lens)
        graph.replay()
        assert_near(out, built)


@pytest.mark.parametrize("pinned", [False, True])
def test_blocks_go_out_and_come_back(pinned: bool) -> None:
    for num_bytes, beyond, offset in [(1, (0, 0), 0), (37, (3, 8), 1), (4100, (8, 0), 4), (1 << 21, (64, 0), 8)]:
        check_copies([3, 0, 11, 7], num_bytes, beyond, offset, 64, "cuda", pinned)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_give_the_same_tokens(family: str) -> None:
    model = tiny(family).to("cuda")
    inputs = prompts([1, 15, 17, 100, 300], VOCAB)
    engine = TinyEngine(model, usable=200, block_size=16, max_chunk_tokens=70, device="cuda")
    engine.core.runner.kernel = TritonKernel()
    assert engine.generate(inputs, Sampling(20)) == plain(model, inputs, 20)

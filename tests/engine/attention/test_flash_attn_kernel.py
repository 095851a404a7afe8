"""The backends on attention libraries: what they hand to stand-ins that check it, against the torch kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from attention_fakes import Library
from hypothesis import given
from hypothesis import strategies as st

from pagetide.engine.attention import library_kernel as library_base
from pagetide.engine.attention import trial
from pagetide.engine.attention.backends import BACKENDS, AttentionSpec
from pagetide.engine.attention.choose import MAKERS
from pagetide.engine.attention.context import LayerCache, lengths_on
from pagetide.engine.attention.flash_attn_kernel import Flash3Kernel, Flash4Kernel, FlashKernel, VarlenKernel
from pagetide.engine.attention.flashinfer_kernel import FlashInferKernel

CPU = torch.device("cpu")
KERNELS = {
    "flash-attn": (FlashKernel, Library.flash2),
    "flash-attn-3": (Flash3Kernel, Library.flash3),
    "flash-attn-4": (Flash4Kernel, Library.flash4),
    "flashinfer": (FlashInferKernel, Library.flashinfer),
    "varlen": (VarlenKernel, Library.varlen),
}


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.engine.attention.flashinfer_kernel.WORKSPACE_BYTES", 64)


def kernel_of(name: str, library: Library):
    kind, module = KERNELS[name]
    return kind(module(library))


def worst_error(kernel, scratch: trial.Scratch, padding: int = 0) -> float:
    """Over what the torch kernel gives, for the batch written by this one; twice, as two layers would."""
    call, right = scratch.call, scratch.call.step.kernel
    right.write(call)
    before = scratch.pool.clone()
    kernel.write(call)
    filler = torch.full((padding, *call.query.shape[1:]), torch.nan, dtype=call.query.dtype)
    padded = replace(call, query=torch.cat((call.query, filler)))
    expected, worst = right.attend(call), 0.0
    for _ in range(2):
        got = kernel.attend(padded)
        assert not got[len(expected) :].any() and len(got) == len(expected) + padding and got.dtype == expected.dtype
        worst = max(worst, float((got[: len(expected)] - expected).abs().nan_to_num(nan=torch.inf).max()))
    assert torch.equal(scratch.pool, before)
    return worst


@given(st.integers(0, 2**32 - 1))
def test_ragged_batches_are_as_the_torch_kernel_has_them(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagetide.engine.attention.flashinfer_kernel.WORKSPACE_BYTES", 64)
        for name in KERNELS:
            check_ragged_batch(name, seed)


def check_ragged_batch(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block_size = 256 if name == "flash-attn" else int(rng.choice([4, 16, 100]))
    longest = 3 * block_size if block_size < 100 else block_size + 50
    chunks = [(1, int(n)) for n in rng.integers(1, longest, rng.integers(0, 5))]
    for n in rng.integers(2, 40, rng.integers(not chunks, 4)):
        chunks.append((int(n), int(n + rng.integers(0, longest) * rng.integers(2))))
    needs, (heads, group) = BACKENDS[name], rng.integers(1, 4, 2)
    spec = AttentionSpec(
        int(heads * group), int(heads), 16, 16,
        window=[None, 1, 7, 50][rng.integers(4)],
        softcap=3.0 if needs.softcap and rng.integers(2) else None,
        sinks=bool(needs.sinks and rng.integers(2)),
    )  # fmt: skip
    scratch = trial.build(spec, chunks, block_size, torch.float32, CPU)
    assert worst_error(kernel_of(name, Library()), scratch, int(rng.integers(3))) < 1e-5


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_pass_the_trial(name: str, dtype: torch.dtype) -> None:
    needs = BACKENDS[name]
    specs = [AttentionSpec(4, 2, 16, 16), AttentionSpec(4, 2, 16, 16, 900, 50.0 if needs.softcap else None, needs.sinks)]
    assert trial.fault(kernel_of(name, Library()), specs, needs.block_multiple, dtype, CPU) is None


def test_decodes_and_chunks_are_calls_of_their_own_and_metadata_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = library_base._parts
    monkeypatch.setattr(library_base, "_parts", lambda step: made.append(1) or real(step))
    library = Library()
    kernel = kernel_of("flash-attn", library)
    call = trial.build(AttentionSpec(2, 1, 8, 8), [(1, 3), (1, 300), (4, 9)], 256, torch.float32, CPU).call
    call.step.kernel.write(call)
    for _ in range(3):
        kernel.attend(call)
    assert library.called == ["with_kvcache", "varlen"] * 3 and len(made) == 1
    kernel.release_buffers()
    kernel.attend(call)
    assert len(made) == 2


def test_flashinfer_plans_once_a_step_for_each_kind_of_layer() -> None:
    library = Library()
    kernel = kernel_of("flashinfer", library)
    call = trial.build(AttentionSpec(2, 1, 16, 16), [(1, 3), (1, 30), (4, 9)], 16, torch.float32, CPU).call
    call.step.kernel.write(call)
    for window in (None, 5, None, 5):
        kernel.attend(replace(call, window=window))
    assert library.planned == 4, "decodes and chunks, with a window and without"
    kernel.attend(replace(call, step=replace(call.step)))
    assert library.planned == 6
    kernel.release_buffers()
    kernel.attend(call)
    assert library.planned == 8


def test_padding_rows_of_no_tokens_get_zeros() -> None:
    for name in KERNELS:
        block_size = BACKENDS[name].block_multiple
        call = trial.build(AttentionSpec(2, 1, 16, 16), [(1, 3), (1, 5)], block_size, torch.float32, CPU).call
        call.step.kernel.write(call)
        kv_lens = np.array([3, 0], np.int32)
        step = replace(call.step, kv_lens=kv_lens, **lengths_on(CPU, call.step.q_lens, kv_lens))
        got = kernel_of(name, Library()).attend(replace(call, step=step))
        assert got[0].all() and not got[1].any()


def test_refusals() -> None:
    call = trial.build(AttentionSpec(2, 1, 8, 8, window=4), [(1, 3), (4, 9)], 16, torch.float32, CPU).call
    kernel = kernel_of("flash-attn-3", Library())
    with pytest.raises(ValueError, match="at least 1 token"):
        kernel.attend(replace(call, window=0))
    with pytest.raises(ValueError, match="must lie behind each other"):
        kernel.attend(replace(call, step=replace(call.step, q_starts=np.array([1, 0]))))
    shifted = torch.zeros(100)[1:65].view(2, 4, 1, 8)
    with pytest.raises(ValueError, match="flash-attn-4 takes K and V in rows that begin at multiples of 16 bytes"):
        kernel_of("flash-attn-4", Library()).attend(replace(call, cache=LayerCache(shifted, shifted)))


class Faulty(FlashKernel):
    """flash-attn 2 with one argument wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__(Library().flash2())
        self.fault = fault

    def write(self, call) -> None:
        if self.fault == "write":
            call = replace(call, key=call.key.clone())
            call.key[0, 0, 0] += 1
        super().write(call)

    def attend_part(self, call, part, query):
        if self.fault == "window":
            call = replace(call, window=call.window and call.window + 1)
        elif self.fault == "softcap":
            call = replace(call, softcap=None)
        elif self.fault == "scaling":
            call = replace(call, scaling=1.0)
        elif self.fault == "foreign bytes":
            call.cache.key.as_strided((1,), (1,), 1).fill_(0)
        out = super().attend_part(call, part, query)
        return out.float() if self.fault == "dtype" else out


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("window", "differ from the torch kernel's"), ("softcap", "differ from the torch kernel's"),
        ("scaling", "differ from the torch kernel's"), ("write", "writes other bytes"),
        ("foreign bytes", "changes the pool"), ("dtype", "answers torch.float32"),
    ],
)  # fmt: skip
def test_the_trial_sees_faults(fault: str, said: str) -> None:
    specs = [AttentionSpec(4, 2, 64, 64, 4096, 50.0)]
    assert trial.fault(FlashKernel(Library().flash2()), specs, 256, torch.bfloat16, CPU) is None
    assert said in str(trial.fault(Faulty(fault), specs, 256, torch.bfloat16, CPU))


def test_what_is_not_installed_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in KERNELS:
        with pytest.raises(ImportError):
            MAKERS[name]()


def test_another_package_of_the_same_name_is_not_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # as flash-attn-4 alone makes it
    with pytest.raises(ImportError, match="flash_attn has no flash_attn_with_kvcache"):
        MAKERS["flash-attn"]()
    functions = {"flash_attn_with_kvcache": None, "flash_attn_varlen_func": None}
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(**functions))
    assert MAKERS["flash-attn"]().name == "flash-attn"


def test_varlen_needs_an_active_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"no flash-attn 3 or 4 is active|takes no block tables"):
        MAKERS["varlen"]()
    import torch.nn.attention.varlen as varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda query: None)
    with pytest.raises(ImportError, match="takes no block tables"):
        MAKERS["varlen"]()

"""The gated delta rule and causal convolutions by the native kernels, against transformers' own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from pagetide import native
from pagetide.engine.layers import recurrences

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")
RULE, CONV = recurrences._GatedDelta, recurrences._Conv


def own(name: str, module: Any = modeling_qwen3_5) -> Any:
    function = getattr(module, name)
    return getattr(function, "_original", function)


class Blocks:
    """States of `shape` for some sequences, in parts of a first dimension that lie anywhere in blocks full of NaN."""

    def __init__(self, kind: str, sequences: int, shape: tuple[int, ...], parts: int, dtype: torch.dtype) -> None:
        self.kind, self.shape, self.parts, self.dtype = kind, (shape[0] // parts, *shape[1:]), parts, dtype
        self.bytes = torch.empty(self.shape, dtype=dtype).nbytes
        stride = 2 * self.bytes + 64
        self.memory = torch.full((sequences * parts + 1, stride), 0xFF, dtype=torch.uint8)
        self.tables = torch.randperm(sequences * parts).view(sequences, parts) + 1
        self.places = torch.stack((torch.randperm(parts), torch.randint(0, 2, (parts,)) * self.bytes))

    def over(self, chunks: list[tuple[int, int, bool]]) -> Any:
        packed = torch.tensor(chunks).T.contiguous().long()
        blocks = recurrences.StatesInBlocks(self.memory, self.tables[: len(chunks)], packed, {self.kind: self.places})
        return recurrences.over(blocks)

    def of(self, sequence: int) -> torch.Tensor:
        parts = []
        for column, offset in self.places.T.tolist():
            row = self.memory[self.tables[sequence, column], offset : offset + self.bytes]
            parts.append(row.clone().view(self.dtype).view(self.shape))
        return torch.cat(parts)


def rows(tokens: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(tokens)
    shapes = {"query": (k_heads, k_dim), "key": (k_heads, k_dim), "value": (v_heads, v_dim)}
    of_heads = {name: torch.randn((1, tokens, *shape), generator=random) for name, shape in shapes.items()}
    gates = {name: torch.rand((1, tokens, v_heads), generator=random) for name in ("g", "beta")}
    return {**of_heads, "g": -gates["g"], "beta": gates["beta"]}


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_gated_delta_rule_of_a_packed_row(normalizes: bool) -> None:
    """Three chunks, and a token between them that is of none; then one more token of each of two sequences."""
    for k_heads, v_heads, k_dim, v_dim, parts in ((2, 4, 8, 8, 2), (2, 2, 20, 37, 1), (4, 8, 128, 128, 4), (1, 1, 33, 100, 1)):
        blocks = Blocks("recurrent", 3, (v_heads, k_dim, v_dim), parts, torch.float32)
        given, rule = rows(20, k_heads, v_heads, k_dim, v_dim), RULE(own("torch_chunk_gated_delta_rule"))
        first, then = [(0, 1, False), (1, 7, False), (9, 11, False)], [(0, 1, True), (3, 4, True)]
        for chunks in (first, then):
            before = [blocks.of(i)[None] if continues else None for i, (*_, continues) in enumerate(chunks)]
            with blocks.over(chunks):
                got, none = rule(**given, use_qk_l2norm_in_kernel=normalizes)
            assert none is None
            covered = torch.zeros(20, dtype=torch.bool)
            for i, (at, length, _) in enumerate(chunks):
                part = {name: one[:, at : at + length] for name, one in given.items()}
                right, state = own("torch_recurrent_gated_delta_rule")(
                    **part, initial_state=before[i], output_final_state=True, use_qk_l2norm_in_kernel=normalizes
                )
                assert (got[:, at : at + length] - right).abs().max() < 1e-5 * right.abs().max()
                assert (blocks.of(i) - state[0]).abs().max() < 1e-5 * state.abs().max()
                covered[at : at + length] = True
            assert not got[:, ~covered].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_convolution_of_a_packed_row(dtype: torch.dtype) -> None:
    for channels, kernel, parts in ((8, 4, 2), (37, 3, 1), (600, 4, 2), (70, 2, 1)):
        blocks = Blocks("conv", 3, (channels, kernel), parts, dtype)
        weight, bias = torch.randn(channels, kernel).to(dtype), torch.randn(channels).to(dtype)
        x = torch.randn(1, 30, channels + 3).to(dtype)[..., :channels]  # rows that are not dense
        conv = CONV(own("causal_conv1d_fn", modeling_lfm2))
        pasts: list[torch.Tensor] = [torch.zeros(channels, kernel - 1, dtype=dtype)] * 3
        for chunks in ([(0, 1, False), (2, 9, False), (11, 19, False)], [(0, 1, True), (1, 2, True), (9, 3, True)]):
            with blocks.over(chunks):
                got = conv(x.transpose(1, 2), weight, bias=bias, activation="silu")
            for i, (at, length, _) in enumerate(chunks):
                row = torch.cat((pasts[i], x[0, at : at + length].T), 1)
                pasts[i] = row[:, 1 - kernel :]
                right = functional.silu(
                    functional.conv1d(row[None].float(), weight.float()[:, None], bias.float(), groups=channels)
                )
                error = (got[..., at : at + length].float() - right).abs().max()
                assert error < {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype] * right.abs().max()
            assert not got[..., 25:].any() or chunks[-1][0] == 11


def test_a_sequence_has_the_same_results_however_it_is_cut() -> None:
    given, rule = rows(40, 2, 4, 16, 24), RULE(own("torch_chunk_gated_delta_rule"))
    x, weight, conv = torch.randn(1, 40, 40), torch.randn(40, 4), CONV(own("causal_conv1d_fn"))
    found = []
    for cuts in ((40,), (1,) * 40, (3, 20, 1, 16)):
        states, window = Blocks("recurrent", 1, (4, 16, 24), 2, torch.float32), Blocks("conv", 1, (40, 4), 2, torch.float32)
        at, out = 0, torch.zeros(())
        for size in cuts:
            with states.over([(at, size, at > 0)]):
                one = rule(**given)[0].flatten(2)
            with window.over([(at, size, at > 0)]):
                out = out + torch.cat((one, conv(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)), 2)
            at += size
        found.append((out, states.of(0), window.of(0)[:, :3]))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(other[:2], found[0][:2], strict=True))


def test_only_functions_that_compute_the_same_are_replaced_and_only_over_states() -> None:
    def other(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return value, None

    module = SimpleNamespace(causal_conv1d_fn=own(CONV.name), torch_chunk_gated_delta_rule=other)
    for _ in range(2):
        assert recurrences.install(module) == {"conv"}  # type: ignore[arg-type]
    assert module.causal_conv1d_fn._original is own(CONV.name) and module.torch_chunk_gated_delta_rule is other
    x = torch.randn(1, 6, 5, requires_grad=True)  # as in another's training
    assert module.causal_conv1d_fn(x, torch.randn(6, 4)).requires_grad


def test_states_that_are_left_or_taken_twice_are_errors() -> None:
    blocks, conv = Blocks("conv", 1, (8, 4), 1, torch.float32), CONV(own(CONV.name))
    with pytest.raises(RuntimeError, match="does not compute with its states"), blocks.over([(0, 1, False)]):
        pass
    with blocks.over([(0, 1, False)]):
        conv(torch.randn(1, 8, 1), torch.randn(8, 4))
        with pytest.raises(RuntimeError, match="twice"):
            conv(torch.randn(1, 8, 1), torch.randn(8, 4))
    with pytest.raises(RuntimeError, match="leaves the 1 tokens"), blocks.over([(0, 2, False)]):
        conv(torch.randn(1, 8, 1), torch.randn(8, 4))
    with pytest.raises(RuntimeError, match="no kernel computes"), blocks.over([(0, 1, False)]):
        conv(torch.randn(1, 8, 1), torch.randn(8, 4), activation="gelu")

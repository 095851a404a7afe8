"""The gated delta rule by the native kernel, against transformers' own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from pagetide import native
from pagetide.engine.layers import gated_delta

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")


def inputs(batch: int, tokens: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(tokens)
    shapes = {"query": (k_heads, k_dim), "key": (k_heads, k_dim), "value": (v_heads, v_dim)}
    rows = {name: torch.randn((batch, tokens, *shape), generator=random) for name, shape in shapes.items()}
    gates = {name: torch.rand((batch, tokens, v_heads), generator=random) for name in ("g", "beta")}
    states = torch.randn((batch, v_heads, k_dim, v_dim), generator=random)
    return {**rows, "g": -gates["g"], "beta": gates["beta"], "initial_state": states}


def own(name: str) -> Any:
    rule = getattr(modeling_qwen3_5, name)
    return getattr(rule, "_original", rule)


@pytest.mark.parametrize("normalizes", [True, False])
def test_it_computes_what_transformers_does(normalizes: bool) -> None:
    for shape in ((3, 1, 2, 4, 8, 8), (1, 7, 2, 4, 8, 8), (2, 5, 2, 2, 20, 37), (1, 70, 4, 8, 128, 128), (1, 9, 1, 1, 33, 100)):
        given = inputs(*shape)
        more = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalizes}
        right, states = own("torch_recurrent_gated_delta_rule")(**given, **more)
        before = given["initial_state"].clone()
        got, ours = gated_delta._GatedDelta(own("torch_chunk_gated_delta_rule"), lambda: True)(**given, **more)
        assert (got - right).abs().max() < 1e-5 * right.abs().max() and (ours - states).abs().max() < 1e-5 * states.abs().max()
        assert not torch.equal(before, given["initial_state"]), "the state is updated where it is"


def test_a_sequence_has_the_same_results_however_it_is_cut() -> None:
    given, rule = inputs(1, 40, 2, 4, 16, 24), gated_delta._GatedDelta(own("torch_chunk_gated_delta_rule"), lambda: True)
    states = given.pop("initial_state")
    whole, last = rule(**given, initial_state=states.clone())
    for cuts in ((1,) * 40, (3, 20, 1, 16)):
        now, parts, at = states.clone(), [], 0
        for size in cuts:
            part, now = rule(**{name: one[:, at : at + size] for name, one in given.items()}, initial_state=now)
            parts.append(part)
            at += size
        assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(now, last)


def test_only_functions_that_compute_it_are_replaced_and_only_in_steps() -> None:
    def other(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return value, kwargs["initial_state"]

    names = gated_delta._NAMES
    module = SimpleNamespace(**{names[0]: own(names[0]), names[1]: other})
    for _ in range(2):
        gated_delta.install(module, lambda: False)  # type: ignore[arg-type]
    replaced = getattr(module, names[0])
    assert replaced._original is own(names[0]) and getattr(module, names[1]) is other
    given = inputs(1, 3, 2, 4, 8, 8)
    given["initial_state"].requires_grad_()  # as in another's training
    out, _ = replaced(**given, output_final_state=True)
    assert out.requires_grad

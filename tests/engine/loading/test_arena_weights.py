"""Weights in a CUDA arena over a driver that is not there: the same bytes at the same addresses, whatever fails in between."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from arena_rig import Rig, checked_rig
from fake_cuda_driver import INVALID_VALUE, Fault
from torch import nn

from pagetide import AsyncLLM, EngineClosed, SamplingParams
from pagetide.allocator.errors import AllocatorError, DriverError
from pagetide.engine import async_llm, executor
from pagetide.engine.errors import NotEnoughMemory
from pagetide.engine.layers.merged_linears import MergedLinears
from pagetide.engine.layers.quantization import QuantizedWeight
from pagetide.engine.layers.torch_linears import TorchLinear, TorchWeight
from pagetide.engine.loading import arena_weights
from pagetide.engine.memory import planning


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Rig]:
    yield from checked_rig(monkeypatch, caplog)


def merged_and_quantized(rig: Rig) -> None:
    """Let the model have what layers on CUDA hold: a joined weight that no module has, a quantized head, a view of a weight."""
    weight = QuantizedWeight("fp8", torch.ones(8, 32).to(torch.float8_e4m3fn).view(torch.int8), torch.rand(8))
    rig.model.model.layers[0].fp8 = TorchLinear(TorchWeight.of("fp8", (8, 32), 0, [(0, weight)], torch.device("cpu")), None)
    attention = rig.model.model.layers[0].self_attn
    assert MergedLinears.of([attention.q_proj, attention.k_proj, attention.v_proj]) is not None
    rig.model.view = rig.model.model.layers[1].mlp.up_proj.weight[3:].t()
    with torch.inference_mode():
        rig.model.model.norm.weight = nn.Parameter(rig.model.model.norm.weight + 1, requires_grad=False)


@pytest.mark.parametrize("level", [1, 2])
def test_what_was_unmapped_is_there_again(rig: Rig, level: int) -> None:
    merged_and_quantized(rig)
    expected, content = rig.logits(), rig.content()
    weights = rig.sleepers()
    assert torch.equal(rig.logits(), expected) and rig.content() == content
    places, view = rig.places(), rig.model.view.clone()
    assert all(rig.within(place) for place in places) and rig.within(rig.model.view.data_ptr())
    assert weights.uncounted_bytes == weights.num_bytes == rig.driver.taken_bytes
    for _ in range(2):
        weights.drop(level)
        weights.drop(1)
        assert weights.uncounted_bytes == rig.driver.taken_bytes == 0
        assert bool(rig.driver.locked) is (level == 1) and rig.leased == [weights.num_bytes] * (level == 1)
        weights.fill()
        assert torch.equal(rig.logits(), expected) and rig.content() == content and rig.places() == places
        assert torch.equal(rig.model.view, view) and rig.leased == [weights.num_bytes]
        assert not rig.hooks(), "each waits once"


def test_weights_move_that_the_collector_does_not_list(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists nothing that was there at a `gc.freeze`."""
    expected = rig.logits()
    with monkeypatch.context() as frozen:
        frozen.setattr(gc, "get_objects", list)
        weights = rig.sleepers()
    assert all(rig.within(place) for place in rig.places())
    weights.drop(1)
    weights.fill()
    assert torch.equal(rig.logits(), expected)


def test_a_layer_waits_for_its_own_copy_alone(rig: Rig) -> None:
    layers, seen = rig.model.model.layers, list[bool]()
    weights = rig.sleepers()
    before = [layer.mlp.up_proj.weight.clone() for layer in layers]
    weights.drop(1)
    weights.fill()

    def look(module: nn.Module, inputs: object) -> None:
        seen.extend(torch.equal(layer.mlp.up_proj.weight, right) for layer, right in zip(layers, before, strict=True))

    with layers[0].register_forward_pre_hook(look):
        rig.logits()
    assert seen == [True] + [False] * (len(layers) - 1)
    weights.drop(1)
    weights.fill()
    weights.wait()
    assert all(torch.equal(layer.mlp.up_proj.weight, right) for layer, right in zip(layers, before, strict=True))
    weights.stop()
    assert not rig.hooks()


def test_a_wait_that_fails_is_asked_for_again(rig: Rig) -> None:
    """Else the layer would compute with what is not there."""
    expected = rig.logits()
    weights = rig.sleepers()
    weights.drop(1)
    weights.fill()
    rig.driver.faults = [Fault(0, 0, INVALID_VALUE, "cuStreamWaitEvent")]
    with pytest.raises(DriverError):
        rig.logits()
    assert torch.equal(rig.logits(), expected) and not rig.hooks()


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemCreate", "cuMemMap", "cuMemcpyHtoDAsync", "cuStreamSynchronize"])
def test_a_model_that_cannot_move_stays_as_it_was(rig: Rig, call: str) -> None:
    """At the first of such calls, and at one when a part of it has moved. tests/deep tries them all."""
    merged_and_quantized(rig)
    expected, up = rig.logits(), rig.model.model.layers[1].mlp.up_proj
    for number in (0, 2) if call != "cuMemHostRegister" else (0,):
        rig.fail(number, call)
        with pytest.raises(AllocatorError):
            rig.sleepers()
        gc.collect()
        assert torch.equal(rig.logits(), expected) and rig.driver.leaks() == [] and rig.leased == []
        assert torch.equal(rig.model.view, up.weight[3:].t())
        assert rig.model.view.untyped_storage().data_ptr() == up.weight.untyped_storage().data_ptr(), "it is held once"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_wake_that_fails_at_any_call_leaves_the_model_asleep(rig: Rig, level: int, goes_on: bool) -> None:
    """That call alone fails, or every one from it on, so that nothing can be undone before the device answers again."""
    expected, weights = rig.logits(), rig.sleepers()
    failed = 0
    for number in itertools.count():
        rig.driver.faults = []
        weights.drop(level)
        rig.fail(number, goes_on=goes_on)
        try:
            weights.fill()
        except AllocatorError:
            failed += 1
            assert not rig.hooks()
            if not goes_on and rig.driver.calls[-1] != "cuCtxPopCurrent":
                assert rig.leased == [weights.num_bytes] * (level == 1), number
            rig.driver.faults = []
            if number % 2:  # else it wakes up from whatever is left
                weights.drop(level)
                assert rig.driver.taken_bytes == 0, number
            weights.fill()
        else:
            if not rig.failed:
                break
        assert torch.equal(rig.logits(), expected), number
    rig.driver.faults = []
    assert failed > 30


def test_an_engine_sleeps_and_wakes_with_its_weights_in_an_arena(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights and steps of an engine: the same tokens after each sleep. Where waking fails, it sleeps on."""
    monkeypatch.setattr(executor, "is_cpu", lambda device: False)
    monkeypatch.setattr(planning, "_host_copy_bytes", lambda config, device, weights, free: weights)
    rig.model.save_pretrained(tmp_path)
    params = SamplingParams(max_new_tokens=6, temperature=0)

    async def run() -> None:
        async with AsyncLLM(str(tmp_path), device="cpu", kv_memory="1MiB", share=False) as llm:

            async def tokens() -> list[list[int]]:
                return [list(one.token_ids) for one in await llm.generate([[5, 6, 7], [8, 9]], params)]

            expected, first = await tokens(), weakref.ref(llm._engine_thread.open().kept)
            await llm.sleep(1)
            assert rig.driver.taken_bytes == 0 and len(rig.driver.locked) == 1
            await llm.wake_up()
            assert await tokens() == expected and llm._engine_thread.open().kept is first()
            with monkeypatch.context() as no_file:
                no_file.setenv("PAGETIDE_CACHE_SIZE", "0")
                await llm.sleep(2)
                assert first() is None and rig.driver.leaks() == [], "the model is let go, and loaded again"
                await llm.wake_up()
            kept, weights = llm._engine_thread.open().kept, llm.facts.weights_bytes
            assert kept is not None and kept.asleep_bytes == kept.uncounted_bytes == rig.driver.taken_bytes >= weights
            for fault, error in (("cuMemcpyHtoDAsync", DriverError), ("cuMemCreate", NotEnoughMemory)):
                await llm.sleep(2)
                assert rig.driver.taken_bytes == 0 and not rig.driver.locked
                rig.fail(2, fault)
                with pytest.raises(error):
                    await llm.wake_up()
                with pytest.raises(EngineClosed, match="asleep"):
                    await tokens()
                assert rig.driver.taken_bytes == 0
                await llm.wake_up()
                assert await tokens() == expected and llm._engine_thread.open().kept is kept
                assert llm._manager.open().plan.host_copy_bytes == kept.asleep_bytes
            await llm.sleep(1)
            with monkeypatch.context() as broken:
                broken.setattr(async_llm, "warm_up", lambda *_: raise_out_of_memory(torch.device("cpu")))
                with pytest.raises(torch.OutOfMemoryError):
                    await llm.wake_up()
            assert llm._engine_thread.ended and rig.driver.taken_bytes == 0, "no thread may use them any more"
            with pytest.raises(EngineClosed, match="asleep"):
                await tokens()
            await llm.wake_up()
            assert await tokens() == expected and llm._engine_thread.open().kept is kept

    asyncio.run(run())


def raise_out_of_memory(device: torch.device) -> None:
    raise torch.OutOfMemoryError("a fault of the device")


@pytest.mark.parametrize("why", ["no room", "faults", "refused", "torch"])
def test_where_weights_cannot_sleep_the_log_says_why(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The model is as it was, and is loaded again after a sleep."""
    plan: Any = SimpleNamespace(model="demo", device="cpu", host_copy_bytes=0 if why == "no room" else 1)
    config: Any = SimpleNamespace(sleeps=True, share=False)
    if why == "refused":
        rig.driver.foreign_bytes = rig.driver.total_bytes
    if why == "torch":
        monkeypatch.setattr(arena_weights, "trim", raise_out_of_memory)
    with caplog.at_level(logging.INFO, "pagetide.engine.executor"):
        assert executor.arena_of(rig.model, config, plan, ["pool", "triton"] if why == "faults" else []) is None
    (record,) = caplog.records
    said = {"no room": "more than half of the host's", "faults": "pool failed in the device's", "refused": "asked for"}
    said["torch"] = "a fault of the device"
    assert record.getMessage().startswith("demo is loaded again after a sleep: ") and said[why] in record.getMessage()
    caplog.clear()
    config.sleeps = False
    assert executor.arena_of(rig.model, config, plan, []) is None and not caplog.records

"""Which attention kernel an engine gets: capabilities, refusals in words, the trial, the measurement, the APIs."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from attention_fakes import Library
from families import tiny

from pagetide import LLM, native
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.engine.attention import choose as choosing
from pagetide.engine.attention import trial
from pagetide.engine.attention.backends import BACKENDS, NAMES, AttentionSpec, block_multiple, buffer_bytes
from pagetide.engine.attention.choose import Site, WatchedKernel, choose
from pagetide.engine.attention.flash_attn_kernel import Flash3Kernel, FlashKernel
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError
from pagetide.engine.loading.models import loaded_spec
from pagetide.engine.loading.probe import probe

HALF, EIGHT = torch.bfloat16, torch.float8_e4m3fn
PLAIN = AttentionSpec(4, 2, 16, 16)
CALLS = Counter({PLAIN: 3, replace(PLAIN, window=5): 1})
CPU = Site(torch.device("cpu"), torch.float32, 16, None)
CARD = Site(torch.device("cpu"), HALF, 256, (9, 0))  # its memory is the host's: kernels really run


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the kernels let Triton interpret, for the whole process."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def absent() -> TorchKernel:
    raise ImportError("no module")


def named(name: str, kind: type[TorchKernel] = TorchKernel):
    """Makes torch kernels of another name."""
    return type("Named", (kind,), {"name": name})


NONE = dict.fromkeys(BACKENDS, absent) | {"torch": TorchKernel}
LIBRARIES = NONE | {
    "triton": named("triton"),
    "flash-attn": lambda: FlashKernel(Library().flash2()),
    "flash-attn-3": lambda: Flash3Kernel(Library().flash3()),
}


def noting():
    """Names of the kernels of LIBRARIES that were made, and what makes them."""
    made: set[str] = set()
    return made, {name: lambda name=name: made.add(name) or LIBRARIES[name]() for name in BACKENDS}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "POOL_BYTES", 1 << 16)
    monkeypatch.setattr(trial, "DECODES", 2)


def measuring(*seconds: float):
    """A measurement that gives these, one after the other, and makes no call."""
    left = list(seconds)
    return lambda call: left.pop(0)


@pytest.mark.parametrize(("kv_dtype", "made"), [(torch.int8, "native"), (EIGHT, "torch"), (None, "native")])
def test_on_a_cpu_native_kernels_take_int8_and_no_float8(kv_dtype: torch.dtype | None, made: str) -> None:
    site = replace(CPU, kv_dtype=kv_dtype)
    assert type(choose("auto", site, CALLS, makers={}, measure=measuring())) is TorchKernel
    assert choose("auto", site, CALLS, makers=NONE | {"native": named("native")}, measure=measuring()).name == made


def test_the_fastest_is_taken_and_named_with_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagetide")
    measure = measuring(0.9e-3, 1e-3, 0.11e-3, 0.1e-3, 0.2e-3, 0.05e-3, 1.0, 0.7e-3)  # decodes and a chunk of each
    assert choose("auto", CARD, CALLS, makers=LIBRARIES, measure=measure).name == "triton"
    assert caplog.messages == [
        "attention by triton: 0.21 ms a layer; flash-attn 0.25; torch 1.9; flash-attn-3 1e+03"
        " (2 decodes of 256 tokens and a chunk of 256)"
    ]
    assert choose("auto", CARD, CALLS, makers=LIBRARIES, measure=measuring(*[1] * 4, 0, 0, 1, 1)).name == "flash-attn"
    assert type(choose("auto", CARD, CALLS, makers=NONE, measure=measuring())) is TorchKernel  # nothing to compare


def test_kernels_are_really_run_over_the_pool_that_they_are_timed_with() -> None:
    shapes = []
    measure = lambda call: shapes.append(call().shape) or 1.0  # noqa: E731
    kernel = choose("auto", CARD, CALLS, makers=LIBRARIES, measure=measure)
    assert kernel.name == "torch", "the first of the equally fast"
    assert shapes == [(2, 4, 16), (256, 4, 16)] * 4


def test_candidates_are_those_that_can() -> None:
    for site, names in [
        (CARD, {"torch", "triton", "flash-attn", "flash-attn-3"}),
        (replace(CARD, block_size=16), {"torch", "triton", "flash-attn-3"}),
        (replace(CARD, capability=(8, 6)), {"torch", "triton", "flash-attn"}),
        (replace(CARD, capability=(12, 0)), {"torch", "triton", "flash-attn"}),
        (replace(CARD, capability=(7, 5)), {"torch"}),
        (replace(CARD, dtype=torch.float32), {"torch", "triton"}),
        (replace(CARD, kv_dtype=torch.int8), {"torch", "triton"}),
        (replace(CARD, kv_dtype=EIGHT), {"torch", "triton"}),
        (replace(CARD, capability=(8, 6), kv_dtype=torch.int8), {"torch", "triton"}),
        (replace(CARD, capability=(8, 6), kv_dtype=EIGHT), {"torch"}),
    ]:
        made, makers = noting()
        choose("auto", site, CALLS, makers=makers, measure=lambda call: 1.0)
        assert made & set(LIBRARIES) - {"varlen"} | {"torch"} == names


class Raises(TorchKernel):
    def attend(self, call):
        raise RuntimeError("no kernel image")


class Wrong(TorchKernel):
    def attend(self, call):
        return super().attend(call) * 1.5


class RaisesLater(TorchKernel):
    def attend(self, call):
        if len(call.query) == 2:  # the timed decodes
            raise RuntimeError("out of it")
        return super().attend(call)


@pytest.mark.parametrize(
    ("triton", "said"),
    [
        (Raises, "attention by triton is left out, as it fails: RuntimeError: no kernel image"),
        (Wrong, "attention by triton is left out: its results differ from the torch kernel's"),
        (RaisesLater, "attention by triton is left out, as it fails: RuntimeError: out of it"),
    ],
)
def test_unasked_what_fails_is_left_out_with_a_warning(triton, said: str, caplog: pytest.LogCaptureFixture) -> None:
    makers = NONE | {"triton": named("triton", triton)}
    kernel = choose("auto", CARD, CALLS, makers=makers, measure=lambda call: call() is None or 1.0)
    assert type(kernel) is TorchKernel
    assert [record.levelname for record in caplog.records] == ["WARNING"] and said in caplog.text


def test_what_failed_in_the_self_check_is_not_even_made(caplog: pytest.LogCaptureFixture) -> None:
    made, makers = noting()
    faults = {"triton": "SIGSEGV", "pool": "no"}
    assert choose("auto", CARD, CALLS, faults=faults, makers=makers, measure=lambda call: 1.0).name == "torch"
    assert "triton" not in made and "flash-attn" in made
    assert caplog.messages == []  # whoever ran the check has said it


def test_asked_for_by_name_what_failed_in_the_self_check_is_refused_first() -> None:
    geometry = Geometry((LayerShape(2, 16, 16),), 16, "bfloat16")
    faults = {"triton": "its process was killed by SIGSEGV"}
    said = "attention='triton' failed in the self-check of cpu: its process was killed by SIGSEGV; use attention='auto'"
    with pytest.raises(ConfigError, match=re.escape(said)):
        choosing.check("triton", CARD, geometry, faults)
    choosing.check("auto", CARD, geometry, faults)
    choosing.check("torch", CARD, geometry, faults)


def test_a_broken_installation_and_a_pool_that_does_not_fit_stop_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> TorchKernel:
        raise OSError("undefined symbol")

    makers = LIBRARIES | {"flash-attn": broken}
    monkeypatch.setattr(trial, "seconds", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    assert choose("auto", CARD, CALLS, makers=makers).name == "triton"
    assert "flash-attn is left out, as it fails: OSError: undefined symbol" in caplog.text
    assert "attention by triton, unmeasured: OutOfMemoryError: no room" in caplog.text


def test_what_compiles_for_long_is_taken_only_when_asked_for() -> None:
    assert {name for name, needs in BACKENDS.items() if needs.compiles} == {"flash-attn-4", "flashinfer"}
    makers = NONE | {"flashinfer": named("flashinfer")}
    wide = Counter([replace(PLAIN, head_dim=64, v_head_dim=64)])
    assert choose("auto", CARD, wide, makers=makers, measure=lambda call: 0.0).name == "torch"
    assert choose("flashinfer", CARD, wide, makers=makers).name == "flashinfer"


@pytest.mark.parametrize(
    ("name", "site", "spec", "said"),
    [
        ("flash-attn", CPU, PLAIN, "'flash-attn' cannot serve this model: it needs a CUDA device, and the engine runs on"
         " cpu; use 'auto', or 'torch'"),
        ("triton", CPU, PLAIN, "'triton' cannot serve .* needs a CUDA device, and the engine runs on cpu"),
        ("flash-attn", replace(CARD, dtype=torch.float32), PLAIN, "takes float16 and bfloat16, and the model runs in"
         " float32; use 'auto', or 'triton' or 'torch'"),
        ("flash-attn", replace(CARD, block_size=16), PLAIN, "blocks of multiples of 256 tokens, and they have 16"),
        ("flash-attn-3", replace(CARD, capability=(8, 0)), PLAIN, "runs on compute capabilities 9.x, and cpu has 8.0"),
        ("flash-attn-4", replace(CARD, capability=(12, 0)), PLAIN, r"capabilities 9.x, 10.x, 11.x, and cpu has 12\.0"),
        ("flash-attn", CARD, replace(PLAIN, sinks=True), "knows no attention sinks, and a layer has them"),
        ("varlen", CARD, replace(PLAIN, softcap=30.0), "knows no softcap, and a layer caps its scores at 30"),
        ("flash-attn", CARD, replace(PLAIN, head_dim=320, v_head_dim=320), "head dims up to 256, and a layer has 320"),
        ("flash-attn", CARD, replace(PLAIN, head_dim=20, v_head_dim=20), "multiples of 8, and a layer has 20"),
        ("flash-attn", CARD, replace(PLAIN, head_dim=24), "K and V of one head dim, and a layer has 24 and 16"),
        ("flashinfer", CARD, PLAIN, "takes head dims of 64, 128, 256, and a layer has 16"),
        ("flash-attn", replace(CARD, kv_dtype=torch.int8), PLAIN, "it takes no K and V in int8 with scales; use 'auto', or"
         " 'triton' or 'torch'"),
        ("native", replace(CPU, kv_dtype=EIGHT), PLAIN, "no K and V in float8_e4m3fn with scales; use 'auto', or 'torch'"),
        ("triton", replace(CARD, capability=(8, 6), kv_dtype=EIGHT), PLAIN,
         r"K and V in float8_e4m3fn from compute capability 8\.9 on, and cpu has 8\.6; use 'auto', or 'torch'"),
        ("triton", CARD, replace(PLAIN, head_dim=592), "up to 576, and a layer has 592; use 'auto', or 'torch'"),
        ("triton", CARD, replace(PLAIN, head_dim=576, v_head_dim=576), "V of head dims up to 512, and a layer has 576"),
    ],
)  # fmt: skip
def test_what_cannot_serve_is_refused_with_the_reason(name: str, site: Site, spec: AttentionSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(name, site, Counter([spec]), makers=LIBRARIES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flash-attn", r"attention='flash-attn' is not there \(no module\): pip install -e '/.*\[flash\]'; or use"),
        ("triton", r"pip install -e '/.*\[triton\]'"),
        ("flash-attn-4", "pip install flash-attn-4"),
        ("varlen", r"call torch.nn.attention.activate_flash_attention_impl\('FA3'\) first"),
    ],
)
def test_what_is_not_installed_says_how_to_get_it(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(name, CARD, CALLS, makers=NONE)


def test_what_is_asked_for_is_tried_too() -> None:
    for kind, said in (
        (Raises, r"attention='triton' fails here \(RuntimeError: no kernel image\); use attention='auto'"),
        (Wrong, "attention='triton' cannot be trusted here: its results differ"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose("triton", CARD, CALLS, makers=NONE | {"triton": named("triton", kind)})
    assert choose("flash-attn", CARD, CALLS, makers=LIBRARIES).name == "flash-attn"
    assert type(choose("torch", CARD, CALLS, makers=NONE)) is TorchKernel


def test_every_backend_has_a_maker_and_buffers_are_those_of_what_may_be_chosen() -> None:
    assert set(choosing.MAKERS) == set(BACKENDS) == set(NAMES) - {"auto"}
    assert [block_multiple(name) for name in ("auto", "triton", "flash-attn")] == [1, 1, 256]
    assert buffer_bytes("torch") == 0 and buffer_bytes("auto") == buffer_bytes("triton") < buffer_bytes("flashinfer")


def test_the_timed_pool_keeps_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    llama = AttentionSpec(32, 8, 128, 128)
    assert trial.longest_context(llama, 16, HALF) == 512
    assert trial.longest_context(PLAIN, 16, HALF) == 1024
    assert trial.longest_context(AttentionSpec(64, 64, 256, 256), 256, torch.float32) == 256, "one block at least"


def test_the_probe_tells_how_layers_attend() -> None:
    for family in ("gemma2", "gpt_oss"):
        model, watched = tiny(family), WatchedKernel()
        config = model.config
        probe(model, Geometry.from_config(config, block_size=16, dtype="float32"), kernel=watched)
        windows = {spec.window for spec in watched.specs}
        assert windows == {None, config.sliding_window}
        assert {spec.softcap for spec in watched.specs} == {getattr(config, "attn_logit_softcapping", None)}
        assert {spec.sinks for spec in watched.specs} == {family == "gpt_oss"}
        shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in watched.specs}
        assert shapes == {(config.num_attention_heads, config.num_key_value_heads, config.head_dim)}


def options(**over):
    return {"device": "cpu", "kv_memory": "4MiB", "max_model_len": 64, "share": False, **over}


def test_an_engine_on_a_cpu_attends_by_native_kernels_else_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with LLM("demo", **options()) as llm:
        assert llm.stats()["attention"] == ("torch" if native.instructions() is None else "native")
        assert llm.stats()["block_size"] == 16
        assert llm.stats()["fused_layers"] == (0 if native.instructions() is None else 8)
    monkeypatch.setattr(native, "instructions", lambda: None)
    with LLM("demo", **options()) as llm:
        assert llm.stats()["attention"] == "torch" and llm.stats()["fused_layers"] == 0
    with pytest.raises(ConfigError, match=r"attention='native' is not there .* install g\+\+ or clang"):
        LLM("demo", **options(attention="native"))
    with pytest.raises(ConfigError, match="attention='triton' cannot serve this model: it needs a CUDA device"):
        LLM("demo", **options(attention="triton"))
    with pytest.raises(ConfigError, match=r"block_size 16 does not suit flash-attn, .* multiples of 256; use 256, or"):
        LLM("demo", **options(attention="flash-attn", block_size=16))
    with pytest.raises(ConfigError, match=r"attention must be one of auto, torch, native, triton, .* got 'fast'"):
        LLM("demo", **options(attention="fast"))


def test_triton_on_a_cpu_serves_where_it_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", CPU, CALLS, makers=NONE | {"triton": named("triton")}).name == "triton"
    monkeypatch.setitem(sys.modules, "triton", None)
    ours = ("pagetide.engine.attention.triton_", "pagetide.engine.layers.triton_")
    for name in [n for n in sys.modules if n.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"not installed: pip install -e '/.*\[triton\]'"):
        choose("triton", CPU, CALLS)


def test_buffers_count_in_the_working_reserve_of_a_device() -> None:
    from pagetide.engine.loading.checkpoint import Checkpoint
    from pagetide.engine.memory.planning import plan_memory

    model = tiny("llama")
    checkpoint = Checkpoint.open(loaded_spec(model))
    reserves = {}
    for name in ("torch", "triton", "flash-attn"):
        config = EngineConfig.resolve(model, attention=name, kv_memory="8MiB", device="cpu")
        for device in ("cpu", "cuda"):
            bytes_free = lambda asked: 1 << 40  # noqa: E731
            plan = plan_memory(config, checkpoint, torch.device(device), torch.float32, free=bytes_free, total=bytes_free)
            reserves[name, device] = plan.reserve_bytes
            assert plan.block_size == (256 if name == "flash-attn" else 16)
    for name in ("triton", "flash-attn"):
        assert reserves[name, "cpu"] == reserves["torch", "cpu"]
        assert reserves[name, "cuda"] == reserves["torch", "cuda"] + buffer_bytes(name)

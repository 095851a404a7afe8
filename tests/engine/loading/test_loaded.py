"""Models and tokenizers that are loaded already: served from the same tensors, and left as they were."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, tiny
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import pagetide
from pagetide import LLM, ConfigError, ModelNotFound, SamplingParams, UnsupportedModel, native
from pagetide.engine.layers import quantized_linears
from pagetide.engine.layers.packing import packs
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loaded import Loaded
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import ModelSpec, loaded_spec, resolve_tokenizer

DEMO = Path(pagetide.__file__).resolve().parents[1] / "engine" / "demo_model"
PROMPT = [5, 17, 99, 4, 63]
CPU = torch.device("cpu")


def make(model: Any, **options: Any) -> LLM:
    return LLM(model, kv_memory="1MiB", max_seqs=4, share=False, **options)


def plainly(model: PreTrainedModel) -> list[int]:
    """What transformers itself makes of the model."""
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def ours(llm: LLM) -> list[int]:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_new_tokens=8))
    return output.token_ids


def state(model: PreTrainedModel) -> list[Any]:
    """What would show that somebody worked on the model."""
    tensors = [(name, id(p), p.data_ptr(), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    modules = [(name, id(m), type(m), m.training) for name, m in model.named_modules()]
    config = model.config
    return [*tensors, *modules, config.to_dict(), config._attn_implementation, model.generation_config.to_dict()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_model_is_served_and_left_as_it_is(family: str) -> None:
    packed = {"hidden_size": 288, "intermediate_size": 320, "tie_word_embeddings": True}  # some layers are
    model = tiny(family, **({} if family == "gpt2" else packed)).requires_grad_(True).train()
    before, alone = state(model), plainly(model.eval())
    model.train()
    with make(model) as llm:
        assert ours(llm) == alone
        assert state(model) == before, "while it is served"
        assert plainly(model.eval()) == alone
        model.train()
        assert ours(llm) == alone
    assert state(model) == before, "afterwards"
    loss = model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
    loss.backward()  # it can still be trained
    assert all(p.grad is not None for name, p in model.named_parameters() if "norm" in name)


def test_a_copy_shares_the_tensors_and_nothing_else() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    copied = Loaded.of(model).copied(CPU, torch.float32)
    theirs, own = dict(model.named_parameters()), dict(copied.named_parameters())
    assert {name: p.data_ptr() for name, p in own.items()} == {name: p.data_ptr() for name, p in theirs.items()}
    assert all(own[name] is not theirs[name] and not own[name].requires_grad for name in theirs)
    assert [b.data_ptr() for b in copied.buffers()] == [b.data_ptr() for b in model.buffers()]
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    assert copied.config is not model.config
    assert copied.generation_config is not model.generation_config


def test_another_type_is_a_conversion_of_the_weights_alone() -> None:
    model = tiny("llama")
    model.generation_config.max_new_tokens = 3
    copied = Loaded.of(model).copied(CPU, torch.bfloat16)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers()} == {torch.float32}, "rotary frequencies"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with make(model.to(torch.bfloat16)) as llm:
        assert (llm.stats()["dtype"], llm.stats()["device"]) == ("bfloat16", "cpu")
        assert len(llm.generate(PROMPT)[0].token_ids) == 3, "its generation_config counts"
    with make(model, dtype="float32") as llm:
        assert llm.stats()["dtype"] == "float32"
    assert model.dtype == torch.bfloat16


def test_what_transformers_keeps_in_float32_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 1)
    tiny("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    types = {name: p.dtype for name, p in theirs.named_parameters()}
    assert set(types.values()) == {torch.float16, torch.float32}
    assert {name: p.dtype for name, p in Loaded.of(theirs).copied(CPU, torch.float16).named_parameters()} == types
    stored = tiny("gpt_oss").to(torch.bfloat16)
    converted = Loaded.of(stored).copied(CPU, torch.float16)
    assert {name: p.dtype for name, p in converted.named_parameters()} == types
    checkpoint = Checkpoint.open(ModelSpec("tiny", tmp_path, "a test"))
    for options in ({"pack": True}, {"quantization": "int8"} if native.instructions() else {}):
        model = load_model(checkpoint, CPU, torch.float16, **options)
        assert {name: p.dtype for name, p in model.named_parameters()} == types


def hook_output(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda layer, args, out: out * -2)


def hook_input(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda layer, args: (args[0].flip(-1),))


def replace_forward(model: Any) -> None:
    layer = model.model.layers[1].mlp.gate_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight) * -3  # as some adapters do


@pytest.mark.parametrize(
    ("change", "kernels"),
    [(hook_output, "native"), (hook_input, "native"), (replace_forward, "native"), (hook_output, "torch")],
)
def test_layers_with_hooks_and_forwards_of_their_own_keep_them(
    change: Callable[[Any], None], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(native, "instructions", lambda: None)
    model = tiny("llama", hidden_size=288, intermediate_size=320).eval()
    alone = plainly(model)
    change(model)
    changed = plainly(model)
    assert changed != alone
    with make(model) as llm:
        assert ours(llm) == changed


class Direct(LlamaModel):
    """Reads the weight of its embedding by itself."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = torch.nn.functional.embedding(input_ids, self.embed_tokens.weight)
        return super().forward(inputs_embeds=inputs_embeds, **more)


def test_models_that_read_weights_by_themselves_are_served(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama", hidden_size=288, intermediate_size=320, tie_word_embeddings=True).eval()
    model.model.__class__ = Direct
    with make(model) as llm:
        assert ours(llm) == plainly(model)
    assert ("are not packed" in caplog.text) == (native.instructions() is not None)


@pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")
def test_quantized_models_keep_hooks_too() -> None:
    model = tiny("llama", hidden_size=288, intermediate_size=320).eval()
    with make(model, quantization="int8") as llm:
        alone = ours(llm)  # from now on in the disk cache, if at all
    hook_output(model)
    with make(model, quantization="int8") as llm:
        assert ours(llm) != alone


def test_weights_that_are_shared_are_not_counted_again() -> None:
    model = tiny("llama", hidden_size=288, num_attention_heads=6)
    loaded = Loaded.of(model)
    whole = sum(p.nbytes for p in model.parameters())
    layers = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    packed = sum(weight.nbytes for weight in layers if packs(weight.numel(), torch.float32))
    assert 0 < packed < whole
    assert loaded.added_bytes(CPU, torch.float32) == packed
    assert loaded.added_bytes(CPU, torch.bfloat16) == whole // 2
    assert loaded.added_bytes(torch.device("cuda", 0), torch.float32) == whole
    half = sum(weight.numel() * 2 for weight in layers if packs(weight.numel(), torch.float16))
    assert Loaded.of(model.half()).added_bytes(CPU, torch.float16) == half, "as `pack_linears` packs them on this CPU"
    with make(model.float()) as llm:
        assert llm.stats()["weights_bytes"] == packed
    tied = tiny("llama", hidden_size=512, num_attention_heads=8, tie_word_embeddings=True)
    head, layers = tied.lm_head.weight, [m.weight for m in tied.modules() if isinstance(m, torch.nn.Linear)]
    large = [weight for weight in layers if packs(weight.numel(), torch.float32)]
    assert any(weight is head for weight in large)
    kept = head if native.instructions() is None else None  # by an embedding, which `planning` counts
    assert Loaded.of(tied).added_bytes(CPU, torch.float32) == sum(w.nbytes for w in large if w is not kept)


def test_the_owner_may_let_go_of_the_model() -> None:
    model = tiny("llama")
    alone, gone = plainly(model), weakref.ref(model)
    with make(model) as llm:
        del model
        gc.collect()
        assert gone() is None
        assert ours(llm) == alone
    spec = loaded_spec(tiny("llama"))
    gc.collect()
    with pytest.raises(ConfigError, match="the loaded model is gone"):
        make(spec)


def test_what_is_no_causal_model_on_one_device_is_refused() -> None:
    class Adapted:
        def merge_and_unload(self) -> None: ...

    locked = tiny("llama")
    locked.lock = threading.Lock()
    with torch.device("meta"):
        absent = type(tiny("llama"))(tiny("llama").config)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=16))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    for given, error, said in (
        (5, ConfigError, "a loaded transformers model, got 5"),
        (Adapted(), ConfigError, "merge the adapter first"),
        (locked, UnsupportedModel, "LlamaForCausalLM cannot be copied"),
        (absent, ConfigError, "lies on meta"),
        (bert, UnsupportedModel, "does not continue text"),
        (t5, UnsupportedModel, "decoder-only"),
    ):
        with pytest.raises(error, match=said):
            make(given)


def test_a_tokenizer_is_a_name_a_folder_or_an_object(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.save_pretrained(tmp_path)
    model = tiny("llama", vocab_size=4096)
    with make(model) as llm:
        assert llm.tokenizer is None
    expected = tokenizer("Once upon")["input_ids"]
    for given in ("demo", tmp_path, str(tmp_path), tokenizer):
        with make(model, tokenizer=given) as llm:
            assert llm.tokenize("Once upon") == expected
            assert (llm.tokenizer is tokenizer) == (given is tokenizer)


def test_a_loaded_model_finds_the_tokenizer_of_where_it_came_from(tmp_path: Path) -> None:
    tiny("llama", vocab_size=4096).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path)
    model = type(tiny("llama")).from_pretrained(tmp_path)
    with make(model) as llm:
        assert llm.tokenizer is not None
        assert llm.config.model.name == str(tmp_path)
    assert loaded_spec(tiny("llama")).name == "LlamaForCausalLM"


def test_a_tokenizer_of_the_hub_cache_is_found(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer("org/name", cache_dir=tmp_path) == snapshot


def test_a_tokenizer_that_is_not_there_or_none_is_refused() -> None:
    for given in ("nobody/here", "/nowhere", "no:id", Path("nowhere"), ""):
        with pytest.raises(ModelNotFound, match="there is no tokenizer"):
            make("demo", tokenizer=given)
    with pytest.raises(ConfigError, match="tokenizer must be a name, a folder, a hub id or a loaded"):
        make("demo", tokenizer=str.split)

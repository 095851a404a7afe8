"""Loading of models and tokenizers from files: what the files say, what is refused, and that nothing else changes."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import to_pytorch
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from pagetide import LLM
from pagetide.api.sampling_params import SamplingParams
from pagetide.common.host_memory import free_address_bytes
from pagetide.engine.errors import (
    CheckpointError,
    ConfigError,
    DeviceNotFound,
    ModelNotFound,
    NotEnoughMemory,
    UnsupportedModel,
)
from pagetide.engine.loading.loader import Checkpoint, address_remedy, choose_device, choose_dtype, load_model, load_tokenizer
from pagetide.engine.loading.models import ModelSpec
from pagetide.engine.loading.weight_cache import WeightCache
from pagetide.engine.process.log_suppression import quiet_transformers

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_network")
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32, as transformers saves it; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def spec_of(path: Path, **options: Any) -> ModelSpec:
    return ModelSpec("tiny", path, "a test", **options)


def opened(path: Path, **options: Any) -> Checkpoint:
    return Checkpoint.open(spec_of(path, **options))


def loaded_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())  # parameters() counts tied ones once


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loads_what_was_saved(saved: Path, dtype: torch.dtype) -> None:
    checkpoint = opened(saved)
    model = load_model(checkpoint, CPU, dtype)
    stored = load_file(saved / "model.safetensors")
    assert {name: p.dtype for name, p in model.named_parameters()} == dict.fromkeys(stored, dtype)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, stored[name].to(dtype), rtol=0, atol=0)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert checkpoint.weights_bytes(dtype) == loaded_bytes(model)
    assert checkpoint.converts(dtype) == (dtype != torch.float32)


@pytest.mark.parametrize("kind", ["tied", "gpt2", "sharded", "stored twice", "pytorch", "pytorch sharded"])
def test_weights_bytes_is_what_loading_takes(tmp_path: Path, kind: str) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=kind in ("tied", "stored twice")))
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64))
    model.save_pretrained(tmp_path, max_shard_size="10KB" if "sharded" in kind else "1GB")
    tolerance = 0
    if "pytorch" in kind:
        to_pytorch(tmp_path)
        tolerance = 1500 * len(list(model.parameters()))  # the zip files' own bytes
    if kind == "stored twice":
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = opened(tmp_path)
    assert len(checkpoint.weights.paths) > 1 or "sharded" not in kind
    for dtype in (torch.float32, torch.bfloat16):
        actual = loaded_bytes(load_model(checkpoint, CPU, dtype))
        assert actual <= checkpoint.weights_bytes(dtype) <= actual + tolerance
        assert checkpoint.weights_bytes(str(dtype).removeprefix("torch.")) == checkpoint.weights_bytes(dtype)


def test_pickled_code_is_not_run(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "owned"),)

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(opened(folder), CPU, torch.float32)
    assert not (folder / "owned").exists()


def settings() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled),
        "random": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
        "verbosity": transformers_logging.get_verbosity(),
        "handlers": (list(logging.getLogger("transformers").handlers), logging.getLogger("transformers").propagate),
        "bars": (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()),
        "environment": dict(os.environ),
    }


def test_global_settings_stay(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(opened(saved), CPU, torch.float32)  # imports the model's module, once
    capfd.readouterr()
    before = settings()
    load_model(opened(saved), CPU, torch.bfloat16)
    assert load_tokenizer(spec_of(saved)) is None
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_overlapping_suppressions_of_log_lines_leave_the_logger_as_it_was() -> None:
    logger = logging.getLogger("transformers")
    before = logger.handlers[:], logger.propagate
    first, second = quiet_transformers(), quiet_transformers()
    one = first.__enter__()
    logger.warning("to the first")
    two = second.__enter__()
    logger.warning("to both")
    first.__exit__(None, None, None)
    assert not logger.propagate, "the second context is open"
    logger.warning("to the second")
    second.__exit__(None, None, None)
    assert (one, two) == (["to the first", "to both"], ["to both", "to the second"])
    assert (logger.handlers[:], logger.propagate) == before


def test_others_settings_are_heeded(saved: Path) -> None:
    torch.set_default_dtype(torch.float64)
    transformers_logging.disable_progress_bar()
    try:
        model = load_model(opened(saved), CPU, torch.bfloat16)
        assert torch.get_default_dtype() == torch.float64
        assert not transformers_logging.is_progress_bar_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        transformers_logging.enable_progress_bar()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_weights_that_do_not_fit_are_not_read(folder: Path) -> None:
    checkpoint = opened(folder)
    (folder / "model.safetensors").unlink()  # reading would fail otherwise
    need = checkpoint.weights_bytes(torch.float32)
    with pytest.raises(NotEnoughMemory) as caught:
        load_model(checkpoint, CPU, torch.float32, free=lambda device: need - 1)
    assert (caught.value.asked_bytes, caught.value.free_bytes) == (need, need - 1)
    assert str(caught.value).startswith("the weights of tiny as float32 on cpu: asked for ")
    assert "dtype='bfloat16' would need" in str(caught.value)
    with pytest.raises(NotEnoughMemory) as caught:
        load_model(checkpoint, CPU, torch.bfloat16, free=lambda device: 10)
    assert "bfloat16'" not in str(caught.value)


def test_a_limit_of_address_space_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(folder)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, 8 << 20))
    for build in (lambda: LLM(str(folder), share=False), lambda: load_model(checkpoint, CPU, torch.float32)):
        with pytest.raises(NotEnoughMemory, match=r"is limited \(ulimit -v\), and 0 bytes of it are left: raise or"):
            build()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert free_address_bytes() is None and address_remedy(1 << 60, CPU) is None


def test_conversion_for_a_gpu_needs_the_host_too(saved: Path) -> None:
    checkpoint, gpu = opened(saved), torch.device("cuda", 0)
    with pytest.raises(NotEnoughMemory, match="bfloat16 on cpu"):
        load_model(checkpoint, gpu, torch.bfloat16, free=lambda device: 10 if device.type == "cpu" else 1 << 30)
    with pytest.raises(NotEnoughMemory, match="float32 on cuda:0"):
        load_model(checkpoint, gpu, torch.float32, free=lambda device: 10 if device.type == "cuda" else 1 << 30)


def test_files_that_are_damaged(folder: Path) -> None:
    """Cut off, longer, with another header, a pointer of Git LFS; then in the form of PyTorch."""
    file = folder / "model.safetensors"
    good = file.read_bytes()
    cut = r"model\.safetensors (is not a complete safetensors file|has .* bytes, its header)"
    for content, said in (
        *((good[:keep], cut) for keep in (0, 5, 100, -1)),
        (good + b"more", "written over"),
        (good[:8] + b"\0" * 16 + good[24:], "not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a complete safetensors file"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            opened(folder)
    file.write_bytes(good)
    to_pytorch(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(opened(folder), CPU, torch.float32)


def test_tensors_that_are_missing_or_have_no_place_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is made up, and global settings stay also when loading fails."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.extra.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    load_model(opened(folder), CPU, torch.float32)
    assert "no place for 1 tensors: model.extra.weight" in caplog.text
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint, before = opened(folder), settings() | {"random": None}
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=r"2 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm"):
        load_model(checkpoint, CPU, torch.float32)
    assert settings() | {"random": None} == before
    edit_json(folder / "config.json", intermediate_size=40)
    shapes = r"do not fit its config\.json: .*down_proj\.weight is \[32, 48\], the model has \[32, 40\]"
    with pytest.raises(CheckpointError, match=shapes):
        load_model(opened(folder), CPU, torch.float32)
    assert capfd.readouterr() == ("", "")


def test_quantized_weights_that_nothing_reads_are_refused(folder: Path) -> None:
    """Each error says why, and what to take instead."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.float8_e4m3fn) if "proj" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"by a method that config\.json does not name, which neither pagetide nor"):
        opened(folder)
    for config, said in (
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"modelopt form with quant_algo 'NVFP4', which is not read: take a v",
        ),
        (
            {"quant_method": "bitsandbytes"},
            r"bitsandbytes form, which only its own library for GPUs reads: take a version of the",
        ),
        ({"quant_method": "exotic"}, r"quantized by exotic, which neither pagetide nor transformers 5.* reads: take a version"),
    ):
        edit_json(folder / "config.json", quantization_config=config)
        with pytest.raises(UnsupportedModel, match=said):
            opened(folder)


def test_configurations_that_are_refused(folder: Path) -> None:
    file = folder / "config.json"
    right = json.loads(file.read_text())
    for content, kind, said in (
        (right | {"model_type": "llama99"}, UnsupportedModel, "model_type 'llama99', which transformers 5.* does not know"),
        ({"hidden_size": 32}, UnsupportedModel, "no model_type"),
        (right | {"hidden_size": "wide"}, CheckpointError, r"config\.json is not a configuration"),
        ("{", CheckpointError, r"config\.json is not valid JSON"),
        ("\ufeff{}", CheckpointError, r"config\.json begins with a byte-order mark, which .* cannot read: remove it"),
        ([], CheckpointError, "must hold a JSON object, got list"),
        (T5Config(num_layers=1).to_dict(), UnsupportedModel, "encoder and a decoder"),
        ({"model_type": "vit"}, UnsupportedModel, "does not continue text"),
    ):
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(kind, match=said):
            opened(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="has no weights"):
        opened(folder)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_the_folder_runs_only_when_trusted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(os.sys.path))  # type: ignore[attr-defined]
    (folder / "own.py").write_text(CODE)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(folder / "config.json", model_type="own", auto_map=names)
    with pytest.raises(ConfigError, match=r"runs by Python code in its own folder .* set trust_remote_code to true"):
        LLM(folder, device="cpu")
    assert not (tmp_path / "modules").exists(), "the code was neither copied nor run"
    edit_json(folder / "config.json", auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"})
    with pytest.raises(UnsupportedModel, match=r"does not continue text: .* nor has the code in its folder"):
        opened(folder, trust_remote_code=True)
    edit_json(folder / "config.json", auto_map=names)
    model = load_model(opened(folder, trust_remote_code=True), CPU, torch.float32)
    assert type(model).__name__ == "OwnModel"
    row = torch.tensor([[7, 3, 9, 11]])
    with LLM(folder, device="cpu", trust_remote_code=True, kv_memory="4MiB", max_model_len=32, share=False) as llm:
        (output,) = llm.generate([row[0].tolist()], SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True))
    with torch.inference_mode():
        for token in output.token_ids:
            assert token == int(model(input_ids=row, use_cache=False).logits[0, -1].argmax())
            row = torch.cat([row, torch.tensor([[token]])], 1)
    digests = WeightCache(tmp_path / "digests").digests(trusted := opened(folder, trust_remote_code=True))
    stamps = trusted.stamps()
    (folder / "own.py").write_text(CODE + "# computes something else")
    assert trusted.stamps() != stamps, "a model that sleeps is loaded again"
    assert WeightCache(tmp_path / "digests").digests(trusted) != digests, "what the disk tier keeps is of other code"


def test_ids_and_sizes(saved: Path) -> None:
    checkpoint = opened(saved)
    assert checkpoint.eos_token_ids == (2, 5)  # the list of generation_config.json, not the one id of config.json
    assert (checkpoint.bos_token_id, checkpoint.pad_token_id, checkpoint.vocab_size) == (1, None, 64)
    assert (checkpoint.context_length, checkpoint.dtype, checkpoint.quantized) == (128, "float32", False)
    assert str(checkpoint).startswith("tiny: llama, ")


def test_end_ids(saved: Path) -> None:
    checkpoint = opened(saved)
    for given, expected in ((7, (7,)), ([7, 8, 7], (7, 8)), (-1, ()), ([3, 2**40], (3,))):
        assert replace(checkpoint, generation={"eos_token_id": given}).eos_token_ids == expected
    for generation in ({"eos_token_id": None}, {"eos_token_id": []}, {}):
        assert replace(checkpoint, generation=generation).eos_token_ids == (2,), "config.json's"


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 5}, SamplingParams(temperature=0.0)),
        ({"do_sample": False, "repetition_penalty": 1.1}, SamplingParams(temperature=0.0, repetition_penalty=1.1)),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),  # and no top_k of 50
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 99,
             "max_length": 20},
            SamplingParams(temperature=0.6, top_k=50, top_p=0.9, min_p=0.1, max_new_tokens=99),
        ),
        (
            {"max_new_tokens": 9, "min_new_tokens": 3},
            SamplingParams(temperature=0.0, max_new_tokens=9, min_new_tokens=3),
        ),
        (
            {"bad_words_ids": [[5, 6], [7], [8, 64]], "suppress_tokens": [9, 64]},  # of 64 tokens
            SamplingParams(temperature=0.0, bad_words_ids=[[5, 6], [7], [9]]),
        ),
        (
            {"sequence_bias": [[[5], -2], [[64], 1.0]], "length_penalty": 0.5, "early_stopping": "never"},
            SamplingParams(temperature=0.0, logit_bias={5: -2.0}, length_penalty=0.5, early_stopping="never"),
        ),
        ({"sequence_bias": [[[5], -2.0], [[6, 7], 1.0]], "num_beams": 4}, SamplingParams(temperature=0.0)),
    ],
)  # fmt: skip
def test_sampling_defaults(saved: Path, generation: dict[str, Any], expected: SamplingParams) -> None:
    assert replace(opened(saved), generation=generation).default_sampling == expected


def test_explicit_over_models_file_over_generation_config(saved: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99}
    spec = spec_of(saved, sampling=SamplingParams(top_p=0.5, max_new_tokens=7))
    defaults = replace(opened(saved), generation=generation, spec=spec).default_sampling
    assert defaults == SamplingParams(temperature=0.6, top_p=0.5, max_new_tokens=7)
    assert SamplingParams(temperature=0.0, max_new_tokens=1).over(defaults).resolve().temperature == 0.0


def test_bad_generation_config(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / "generation_config.json"
    for content, said in (
        ('{"do_sample": true, "top_p": 7}', r"generation_config\.json: top_p must be in"),
        ('{"eos_token_id": "</s>"}', "eos_token_id must be an id or a list"),
        ("{,", r"generation_config\.json is not valid JSON"),
        ('{"bad_words_ids": [3]}', r"generation_config\.json: .*correct it there"),
    ):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=said):
            opened(folder)
    file.unlink()
    assert opened(folder).eos_token_ids == (2,)
    assert not caplog.records


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"typical_p": 0.5, "guidance_scale": 2}, "sets typical_p=0.5, guidance_scale=2, which this engine does not support"),
        ({"num_beams": 4}, "asks for num_beams=4: a pipeline does so, every other request only if its SamplingParams say it"),
        ({"sequence_bias": [[[5, 6], 1.0]]}, "asks for sequence_bias=[[[5, 6], 1.0]]: a pipeline does so"),
        ({"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [3], "sequence_bias": [[[5], 1.0]]}, None),
    ],
)
def test_what_is_not_taken_from_a_generation_config_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, generation: dict[str, Any], said: str | None
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    opened(folder)
    assert [said in record.getMessage() for record in caplog.records] == [True] * (said is not None)


LLAMA3 = {"original_max_position_embeddings": 500, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"original_max_position_embeddings": 400, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


def rope(**parameters: Any) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=1000, rope_parameters={"rope_theta": 1e4, **parameters})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=1000), 1000),
        (GPT2Config(n_positions=77), 77),
        (MambaConfig(num_hidden_layers=1), None),
        (Gemma3TextConfig(max_position_embeddings=1000, sliding_window=64), 1000),
        (rope(rope_type="linear", factor=4.0), 4000),
        (rope(rope_type="dynamic", factor=4.0), 1000),
        (rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=250), 1000),
        (rope(rope_type="llama3", factor=8.0, **LLAMA3), 1000),
        (rope(rope_type="longrope", **LONGROPE), 400),
    ],
)
def test_context_length(saved: Path, config: Any, expected: int | None) -> None:
    assert replace(opened(saved), config=config).context_length == expected


def test_devices_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == choose_device("cpu") == choose_device(CPU) == CPU
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DeviceNotFound, match=f"device '{name}' is not available; .*use device='cpu'"):
            choose_device(name)
    for name in ("gpu", "mps", "meta", "cuda:x", ""):
        with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N"):
            choose_device(name)


def test_devices_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cuda:0") == choose_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert choose_device("cpu") == CPU
    with pytest.raises(DeviceNotFound, match="'cuda:2' is not available; torch sees cuda:0, cuda:1 and cpu"):
        choose_device("cuda:2")


def test_automatic_dtype(folder: Path) -> None:
    for stored, device, expected in (
        ("float32", "cpu", "float32"), ("bfloat16", "cpu", "bfloat16"), ("float16", "cpu", "float32"),
        ("float16", "cuda", "float16"), ("float64", "cpu", "float32"),
    ):  # fmt: skip
        edit_json(folder / "config.json", dtype=stored)
        assert choose_dtype("auto", opened(folder), torch.device(device)) == getattr(torch, expected), (stored, device)


def test_dtype(folder: Path) -> None:
    checkpoint = opened(folder)
    assert choose_dtype("float16", checkpoint, CPU) == choose_dtype(torch.float16, checkpoint, CPU) == torch.float16
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, float16, bfloat16, got 'int8'"):
        choose_dtype("int8", checkpoint, CPU)
    edit_json(folder / "config.json", dtype=...)  # then the weights say it
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert opened(folder).dtype == "bfloat16"


@pytest.fixture
def with_tokenizer(folder: Path) -> Path:
    words = Tokenizer(WordLevel({"<unk>": 0, "the": 1, "tide": 2, "rises": 3, "</s>": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


def test_tokenizer_and_its_options(with_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(spec_of(with_tokenizer, tokenizer={"padding_side": "left", "model_max_length": 9}))
    assert tokenizer is not None
    assert tokenizer.encode("the tide rises") == [1, 2, 3]
    assert (tokenizer.padding_side, tokenizer.model_max_length, tokenizer.eos_token_id) == ("left", 9, 4)


def test_the_chat_template_of_a_processor(with_tokenizer: Path) -> None:
    (with_tokenizer / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    tokenizer = load_tokenizer(spec_of(with_tokenizer))
    assert tokenizer is not None
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    (with_tokenizer / "chat_template.jinja").write_text("the tokenizer's own")
    tokenizer = load_tokenizer(spec_of(with_tokenizer))
    assert tokenizer is not None
    assert tokenizer.chat_template == "the tokenizer's own"


def test_broken_tokenizers(with_tokenizer: Path) -> None:
    (with_tokenizer / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* \(tokenizer\.json, .* cannot be loaded: .*token ids only"):
        load_tokenizer(spec_of(with_tokenizer))
    (with_tokenizer / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(spec_of(with_tokenizer))

"""What a model's config.json may not say: counts that make transformers work without end, and code of the hub."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config
from transformers.integrations import hub_kernels as theirs

import pagetide
from pagetide import LLM
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import CheckpointError, EngineError, UnsupportedModel
from pagetide.engine.loading import model_config
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.hub_kernels import no_hub_kernels
from pagetide.engine.loading.loader import load_model, load_tokenizer
from pagetide.engine.loading.models import ModelSpec
from pagetide.engine.memory.planning import plan_memory

DEMO = Path(pagetide.__file__).resolve().parents[1] / "engine" / "demo_model"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_network")
Edited = Callable[..., Path]


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """A folder of the demo model, with other fields in its config.json."""

    def edit(**changes: Any) -> Path:
        for name in ("config.json", "model.safetensors"):
            shutil.copy(DEMO / name, tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return tmp_path

    return edit


LONG = {"rope_type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16, "rope_theta": 1e4}
LONG["original_max_position_embeddings"] = 256


def plan(folder: Path) -> None:
    config = EngineConfig.resolve(folder)
    plan_memory(config, Checkpoint.open(config.model), CPU, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4,096, got 1000000000"),
        ({"text_config": {"parts": [{"num_layers": 5000}]}}, "num_layers must be at most 4,096, got 5000"),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types must be at most 4,096, got [[['global'], 1000000000]]"),
        ({"num_hidden_layers": math.inf}, "num_hidden_layers must be at most 4,096, got inf"),
        ({"num_labels": 10**9}, "num_labels must be at most 100,000"),
        ({"head_dim": math.nan}, "head_dim must be finite, got nan"),
        ({"model_type": ["llama"]}, "model_type must be a text, got ['llama']"),
        ({"hidden_size": 2**40}, "hidden_size must be at most 268,435,456, got 1099511627776"),
        ({"max_position_embeddings": 2**100}, "max_position_embeddings must be at most 1,099,511,627,776"),
        ({"rope_parameters": LONG | {"short_factor": [1.0] * 5}}, "each pair of dimensions, got {'long_factor': 16, 's"),
        ({"rope_parameters": LONG | {"short_factor": [1.0], "long_factor": [1.0]}}, "dimensions, got {'long_factor': 1, "),
        ({"rope_parameters": LONG | {"short_factor": "x"}}, "short_factor must be a list of numbers above 0, got 'x'"),
        ({"rope_scaling": {"full": {"long_factor": [math.nan]}}}, "long_factor must be a list of numbers above 0, got "),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta must be a number above 0, got 'x'"),
    ],
)
def test_wild_numbers_are_refused_before_transformers_sees_them(
    edited: Edited, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers has read it"))
    folder = edited(**changes)
    with pytest.raises(CheckpointError) as refused:
        plan(folder)
    assert str(refused.value).startswith(f"{folder / 'config.json'}: ") and message in str(refused.value)


@pytest.mark.parametrize(
    ("layers", "error", "said"),
    [
        (-1, UnsupportedModel, "num_hidden_layers must be .*, got -1"),
        (0, UnsupportedModel, "num_hidden_layers must be .*, got 0"),
        # before a module is made
        (4000, CheckpointError, r"config.json says that there are 4,000 layers, and the weights have \d+ t"),
    ],
)
def test_a_model_has_as_many_layers_as_tensors_for_them(edited: Edited, layers: int, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        plan(edited(num_hidden_layers=layers))


def test_rotary_scaling_that_is_no_number(edited: Edited) -> None:
    right = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    for name, value in (("factor", math.nan), ("factor", -1.0), ("original_max_position_embeddings", math.inf)):
        with pytest.raises(CheckpointError, match=f"the rope parameter {name} must be a number above 0, got {value}"):
            plan(edited(rope_parameters=right | {name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"num_key_value_heads": -1},
        {"rope_parameters": {"rope_type": "yarn", "factor": [4]}},
        {"model_type": "deepseek_v3", "head_dim": math.nan},
    ],
)
def test_whatever_is_wrong_is_told_as_an_error_of_the_engine(edited: Edited, changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        plan(edited(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 2**20}, "describes a model of .* parameters, and its weights have 6,951,168: "),
        ({"vocab_size": -1}, r"describes no model that transformers can make \(RuntimeError: "),
        ({"hidden_act": "__import__"}, r"describes no model that transformers can make \(KeyError: '__import__'"),
        ({"rope_parameters": LONG | dict.fromkeys(("long_factor", "short_factor"), [1.0] * 5)}, "describes no"),
    ],
)
def test_other_sizes_are_refused_before_they_take_memory(edited: Edited, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json {said}"):
        load_model(Checkpoint.open(ModelSpec("demo", edited(**changes), "a test")), CPU, torch.float32)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "generation_config.json", "tokenizer.json", "additional_chat_templates/a.jinja"]
)
def test_files_of_other_folders_are_not_read(edited: Edited, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder, other = edited(), tmp_path_factory.mktemp("other")
    (other / "secret").write_text("{}")
    (folder / "vocab.json").write_text("{}")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(other / "secret")
    for read in (plan, lambda one: load_tokenizer(ModelSpec("demo", DEMO, "a test", tokenizer_from=one))):
        with pytest.raises(CheckpointError, match=f"{name} is a link to {other}/secret, outside of its folder, and is"):
            read(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        plan(folder)


@pytest.mark.parametrize("store", ["models--a--b/blobs", "blobs/0a"])
def test_links_within_the_hubs_cache_are_read(edited: Edited, tmp_path: Path, store: str) -> None:
    snapshot, blobs = tmp_path / "hub/models--a--b/snapshots/0f", tmp_path / "hub" / store
    for made in (snapshot, blobs):
        made.mkdir(parents=True)
    for file in edited().glob("*.*"):
        file.rename(blobs / file.stem)
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / file.stem, snapshot))
    plan(snapshot)


def test_a_tokenizers_folder_is_looked_at_too(edited: Edited) -> None:
    folder = edited(num_labels=10**9)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    with pytest.raises(CheckpointError, match="num_labels must be at most 100,000"):
        load_tokenizer(ModelSpec("demo", DEMO, "a test", tokenizer_from=folder))


def test_an_endless_file_is_not_read_to_its_end(edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "MOST_JSON_BYTES", 1 << 12)
    folder = edited()
    (folder / "config.json").write_text(" " * (1 << 13))
    with pytest.raises(CheckpointError, match=r"config.json: more than 0 MiB"):
        plan(folder)


class Kernels:
    """Stands in for the `kernels` package: takes down what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def fetch(self, name: str, **_: Any) -> Any:
        self.fetched.append(name)
        raise OSError("there is no network")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """As on a machine where `kernels` is installed and flash-attn is not."""
    made = Kernels()
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformers.") and "is_kernels_available" in vars(module):
            monkeypatch.setattr(module, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(theirs, "get_kernel_hub", made.fetch, raising=False)
    return made


def test_the_stand_in_is_asked_by_transformers_itself(edited: Edited, kernels: Kernels) -> None:
    """Else the tests below would show nothing."""
    config = AutoConfig.from_pretrained(edited(_attn_implementation="kernels-community/flash-attn2"))
    for implementation in ("someone/kernel", "flash_attention_2"):
        config._attn_implementation = implementation
        with pytest.raises((ValueError, ImportError)):
            AutoModelForCausalLM.from_config(config)
    assert kernels.fetched == ["someone/kernel", "kernels-community/flash-attn2"]


def test_attention_from_the_hub_is_refused(edited: Edited, kernels: Kernels) -> None:
    parts = Gemma3Config().to_dict()
    parts["text_config"]["experts_implementation"] = "someone/experts"
    for changes, said in (
        ({"_attn_implementation": "someone/kernel"}, "_attn_implementation names 'someone/kernel"),
        ({"attn_implementation": "someone/kernel@main:attend"}, "attn_implementation names 'someone/kernel"),
        ({"_attn_implementation_internal": {"": "eager", "text_config": "a/b"}}, "_internal names 'a/b"),
        (parts, "experts_implementation names 'someone/experts'"),
    ):
        with pytest.raises(UnsupportedModel, match=f"{said}.*pagetide never downloads code; remove"):
            plan(edited(**changes))
    assert kernels.fetched == []


@pytest.mark.parametrize("value", ["flash_attention_2", "paged|flash_attention_2"])
def test_whatever_attention_is_named_none_is_fetched(edited: Edited, value: str, kernels: Kernels) -> None:
    """transformers takes "flash_attention_2" from the hub where the package of that name is not installed."""
    checkpoint = Checkpoint.open(ModelSpec("demo", edited(_attn_implementation=value), "a test"))
    model = load_model(checkpoint, CPU, torch.float32)
    assert (model.config._attn_implementation, kernels.fetched) == ("eager", [])


def test_whatever_computes_experts_none_is_fetched(tmp_path: Path, kernels: Kernels) -> None:
    tiny("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_implementation": "sonicmoe"}))
    model = load_model(Checkpoint.open(ModelSpec("tiny", tmp_path, "a test")), CPU, torch.float32)
    assert model.config._experts_implementation in ("grouped_mm", "eager")
    model(torch.tensor([[1, 2, 3]]))
    assert kernels.fetched == []


def test_a_loaded_model_is_served_without_the_kernel_it_was_loaded_with(kernels: Kernels) -> None:
    model = tiny("llama")
    model.config._attn_implementation_internal = "someone/kernel"
    with LLM(model, kv_memory="1MiB", max_seqs=4, share=False) as llm:
        assert len(llm.generate([5, 17, 99])[0].token_ids) > 0
    assert (model.config._attn_implementation, kernels.fetched) == ("someone/kernel", [])


def test_while_an_engine_is_built_no_kernel_is_to_be_had(kernels: Kernels) -> None:
    """Neither for what no field names, such as a form of quantization."""
    with no_hub_kernels(), pytest.raises(UnsupportedModel, match="needs the kernel 'a/b' from the hub, and pagetide never"):
        theirs.get_kernel("a/b", version=1)
    assert kernels.fetched == []
    with pytest.raises(OSError):
        theirs.get_kernel("a/b", version=1)
    assert kernels.fetched == ["a/b"]


def test_an_engine_is_built_so(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def planned(*_: object) -> None:
        asked.append("a/b")
        theirs.get_kernel("a/b", version=1)

    monkeypatch.setattr("pagetide.engine.build._planned", planned)
    with pytest.raises(UnsupportedModel, match="a/b"):
        LLM("demo", share=False)
    assert (asked, kernels.fetched) == (["a/b"], [])


def test_other_threads_get_theirs(kernels: Kernels) -> None:
    with no_hub_kernels(), ThreadPoolExecutor(1) as other, pytest.raises(OSError):
        other.submit(theirs.get_kernel, "a/b", version=1).result()
    assert kernels.fetched == ["a/b"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(theirs, "get_kernel_hub")
        with no_hub_kernels():  # `kernels` is not installed
            assert not hasattr(theirs, "get_kernel_hub")

"""Engine arguments, the models file, and how a name becomes a folder. No model is loaded here."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pagetide.engine.config import EngineConfig, KvMemory, ModelSpec, read_models, resolve_model
from pagetide.engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    ModelNotFound,
    NotEnoughMemory,
    UnsupportedModel,
)
from pagetide.engine.loading.models import BUILT_IN_FILE, CONFIG_VARIABLE, resolve_tokenizer, user_file
from pagetide.scheduler.request import SamplingParams


@pytest.fixture(autouse=True)
def _no_network_and_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def make_model(folder: Path) -> Path:
    """A folder that looks like a model, for whoever does not read the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def make_cached(cache: Path, hub_id: str, commit: str = "a1b2c3") -> Path:
    """A model in a hub cache, laid out as huggingface_hub does. Returns its snapshot."""
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return make_model(repository / "snapshots" / commit)


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


# -- errors


def test_error_tree_and_pickling() -> None:
    error = NotEnoughMemory(3 << 30, 1 << 30, "the weights of demo on cpu", "take another device")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error) == (
        "the weights of demo on cpu: asked for 3.00 GiB (3,221,225,472 bytes), 1.00 GiB (1,073,741,824 bytes) are "
        "free; take another device"
    )
    assert pickle.loads(pickle.dumps(UnsupportedModel("has state"))).reason == "has state"
    assert all(issubclass(kind, EngineError) for kind in (ModelNotFound, CheckpointError, ConfigError))
    assert issubclass(ConfigError, ValueError)


# -- the models file


def test_built_in_file_names_demo() -> None:
    entry = read_models()["demo"]
    assert entry.file == BUILT_IN_FILE
    folder = (entry.file.parent / entry.path).resolve()
    assert folder.name == "demo_model"
    assert (folder / "__init__.py").is_file()  # the package that the model's files lie in, in a checkout and in a wheel


def test_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "models" / "tiny")
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    file = write(
        tmp_path / "mine.yaml",
        """
short: models/tiny
variable: $MODELS/tiny
long:
  path: ./models/../models/tiny
  dtype: bfloat16
  device: cuda:1
  tokenizer: {padding_side: left}
  trust_remote_code: true
  sampling: {temperature: 0.7, top_k: 20, stop: [END], stop_token_ids: [3, 4], max_tokens: 9}
""",
    )
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    for name in ("short", "variable"):
        assert resolve_model(name).path == tmp_path / "models" / "tiny"
    assert resolve_model("long") == ModelSpec(
        name="long",
        path=tmp_path / "models" / "tiny",
        source=f"{file}:4",
        dtype="bfloat16",
        device="cuda:1",
        tokenizer={"padding_side": "left"},
        trust_remote_code=True,
        sampling=SamplingParams(temperature=0.7, top_k=20, stop=("END",), stop_token_ids=(3, 4), max_new_tokens=9),
    )
    assert resolve_model("short").trust_remote_code is False
    assert list(read_models()) == ["demo", "short", "variable", "long"]  # laid over the built-in file


def test_home_is_expanded_and_own_demo_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_model(tmp_path / "m")
    monkeypatch.setenv(CONFIG_VARIABLE, str(write(tmp_path / "mine.yaml", "demo: ~/m")))
    assert resolve_model("demo").path == tmp_path / "m"


def test_empty_file_adds_nothing(tmp_path: Path) -> None:
    assert list(read_models(write(tmp_path / "mine.yaml", "# nothing yet\n"))) == ["demo"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: [1\nb: 2", 2, "not valid YAML"),
        ("a: x\n\tb: y", 2, "not valid YAML"),
        ("- a\n- b", None, "must hold `name: path` entries, got list"),
        ("ok: x\na:\n  dtype: float32", 2, "needs a `path`"),
        (
            "a:\n  path: x\n  dytpe: float32",
            1,
            "unknown key 'dytpe'; did you mean 'dtype'?",
        ),
        (
            "\n\na:\n  path: x\n  dtype: float8",
            3,
            "dtype must be one of auto, float32, float16, bfloat16, got 'float8'",
        ),
        ("a: {path: x, device: gpu}", 1, "device must be auto, cpu, cuda or cuda:N"),
        ("a: {path: x, trust_remote_code: 'yes'}", 1, "trust_remote_code must be true or false, got 'yes'"),
        ("a: {path: x, tokenizer: fast}", 1, "tokenizer must map options"),
        ("a: {path: x, tokenizer: {local_files_only: false}}", 1, "'local_files_only' is not free"),
        ("a: {path: x, zzz: y}", 1, "unknown key 'zzz'; the known ones are path, dtype, device, tokenizer"),
        (
            "a: {path: x, sampling: {temprature: 1}}",
            1,
            "sampling: unknown key 'temprature'; did you mean 'temperature'?",
        ),
        ("a: {path: x, sampling: {ignore_eos: true}}", 1, "unknown key 'ignore_eos': it belongs to a request"),
        ("a: {path: x, sampling: {do_sample: true}}", 1, "unknown key 'do_sample': write temperature=0, or a temp"),
        ("a: {path: x, sampling: {max_tokens: 3, max_new_tokens: 4}}", 1, "max_new_tokens is 4 and max_tokens 3"),
        ("a: {path: x, sampling: {top_p: 2}}", 1, "top_p must be in"),
        ("a: {path: 7}", 1, "needs a `path`"),
        ("a: 7", 1, "must be a path, or a mapping of path"),
        ("a:", 1, "must be a path"),
        ("1: x", 1, "must be text, got '1'"),
        ("a: x\nb: y\na: z", 3, "'a' stands there twice, first in line 1"),
        ("a:\n  path: x\n  path: y", 3, "'path' stands there twice, first in line 2"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path: Path, text: str, line: int | None, words: str) -> None:
    file = write(tmp_path / "mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        read_models(file)
    assert str(caught.value).startswith(f"{file}:{line}: " if line else f"{file}: ")
    assert words in str(caught.value)


def test_aliases_of_aliases_are_refused_with_file_and_line(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"mine\.yaml:\d+: not valid YAML: it stands for more than 100,000 values"):
        read_models(tmp_path / "mine.yaml")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"mine\.yaml: not valid YAML"):
        read_models(file)


def test_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigError, match=r"gone\.yaml; PAGETIDE_CONFIG names it"):
        resolve_model("demo")


def test_the_users_file_lies_between_the_built_in_one_and_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = user_file({"XDG_CONFIG_HOME": str(tmp_path)})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert list(read_models()) == ["demo"]  # it need not exist
    file.parent.mkdir()
    write(file, "demo: mine\nalpha: mine\nbeta: mine")
    named = write(tmp_path / "named.yaml", "beta: named\ngamma: named")
    assert {name: entry.where for name, entry in read_models().items()} == {
        "demo": f"{file}:1", "alpha": f"{file}:2", "beta": f"{file}:3",
    }  # fmt: skip
    monkeypatch.setenv(CONFIG_VARIABLE, str(named))
    files = {name: entry.file for name, entry in read_models().items()}
    assert files == {"demo": file, "alpha": file, "beta": named, "gamma": named}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"XDG_CONFIG_HOME": "/etc/alice"}, "/etc/alice/pagetide/models.yaml"),
        ({"XDG_CONFIG_HOME": "not/absolute"}, "/srv/alice/.config/pagetide/models.yaml"),
        ({}, "/srv/alice/.config/pagetide/models.yaml"),
    ],
)
def test_the_place_of_the_users_file(environ: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/alice")
    assert user_file(environ) == Path(place)


@pytest.mark.parametrize("kind", ["folder", "no YAML", "no permission", "a link to itself"])
def test_a_users_file_that_is_there_and_cannot_be_read_is_an_error_that_names_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = user_file()
    file.parent.mkdir()
    if kind == "folder":
        file.mkdir()
    elif kind == "a link to itself":
        file.symlink_to(file)
    else:
        write(file, "a: [" if kind == "no YAML" else "a: x").chmod(0o600 if kind == "no YAML" else 0)
    if kind == "no permission" and os.access(file, os.R_OK):
        pytest.skip("root may read everything")
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        resolve_model("demo")
    assert resolve_model(BUILT_IN_FILE.parent.parent / "engine" / "demo_model").path.is_dir()  # a folder needs no names


def test_a_home_that_the_system_cannot_look_into_has_no_models_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 300)  # too long a name
    assert list(read_models()) == ["demo"]


# -- from a name to a folder


def test_unknown_name_says_which_exist_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "mine.yaml", "beta: x\nalpha: y")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("gamma!", cache_dir=tmp_path)
    assert f"{BUILT_IN_FILE} names demo; {file} names alpha, beta" in str(caught.value)
    assert "hf download" not in str(caught.value)  # it cannot be a hub id
    with pytest.raises(ModelNotFound, match=r"hf download gamma$"):
        resolve_model("gamma", cache_dir=tmp_path)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "here" / "demo")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("here/demo").path == folder
    assert resolve_model(Path("here/demo")).path == folder
    assert resolve_model(str(folder)) == ModelSpec(str(folder), folder, "a folder")
    monkeypatch.chdir(tmp_path / "here")
    assert resolve_model("./demo").path == folder
    assert resolve_model(Path("demo")).path == folder  # a Path is never a name
    monkeypatch.setenv(CONFIG_VARIABLE, str(write(tmp_path / "mine.yaml", f"demo: {make_model(tmp_path / 'named')}")))
    assert resolve_model("demo").path == tmp_path / "named"  # a name goes before a folder


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("a" * 5000, "File name too long"),
        ("/" + "a" * 300, "File name too long"),
        ("~nobody-of-that-name/model", "home directory"),
        (Path("b/" * 3000), "File name too long"),
    ],
)
def test_names_that_no_folder_can_have(reference: str | Path, said: str) -> None:
    for resolve in (resolve_model, resolve_tokenizer):
        with pytest.raises(ModelNotFound, match=f"cannot be looked for as a folder: .*{said}") as refused:
            resolve(reference)
        assert len(str(refused.value)) < 500
    with pytest.raises(ModelNotFound, match=r"'a/\\x00b' is not a known name or a folder"):
        resolve_model("a/\0b")


def test_so_are_they_in_a_models_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(f"long: {'a' * 5000}\nhome: ~nobody-of-that-name/x\n")
    monkeypatch.setenv("PAGETIDE_CONFIG", str(tmp_path / "mine.yaml"))
    with pytest.raises(ModelNotFound, match=r"model 'long' \(.*mine.yaml:1\): .*File name too long"):
        resolve_model("long")
    with pytest.raises(ModelNotFound, match=r"model 'home' \(.*mine.yaml:2\)"):
        resolve_model("home")


@pytest.mark.parametrize("reference", ["./gone", "/gone/away", "~/gone", Path("gone")])
def test_missing_folder(reference: str | Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no folder /.*gone") as caught:
        resolve_model(reference)
    assert "hf download" not in str(caught.value)


def test_incomplete_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(tmp_path)
    assert "looked for model.safetensors, model.safetensors.index.json, pytorch_model.bin, " in str(caught.value)
    assert "found config.json." in str(caught.value)
    with pytest.raises(ModelNotFound, match="is a file; name the folder"):
        resolve_model(tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(tmp_path).path == tmp_path


def test_missing_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}))
    (tmp_path / "1.safetensors").write_bytes(b"")
    with pytest.raises(
        ModelNotFound, match=r"1 of the 2 files that model\.safetensors\.index\.json lists .*2\.safetensors"
    ):
        resolve_model(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json is no index of shards"):
        resolve_model(tmp_path)


def test_entry_with_a_bad_path_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "mine.yaml", "# mine\na: gone/for/good")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("a")
    assert str(caught.value) == f"model 'a' ({file}:2): there is no folder {tmp_path / 'gone/for/good'}"


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_cached(tmp_path / "hub", "org/name")
    spec = resolve_model("org/name", cache_dir=tmp_path / "hub")
    assert (spec.name, spec.path, spec.source) == ("org/name", snapshot, "the local hub cache")
    monkeypatch.setenv(CONFIG_VARIABLE, str(write(tmp_path / "mine.yaml", "a: org/name\nb: org/other")))
    assert resolve_model("a", cache_dir=tmp_path / "hub").path == snapshot
    with pytest.raises(ModelNotFound, match=r"mine\.yaml:2\).*hf download org/other$"):
        resolve_model("b", cache_dir=tmp_path / "hub")
    with pytest.raises(ModelNotFound, match=r"hf download org/other$"):
        resolve_model("org/other", cache_dir=tmp_path / "hub")


def test_half_cached(tmp_path: Path) -> None:
    (make_cached(tmp_path, "org/name") / "model.safetensors").unlink()
    with pytest.raises(
        ModelNotFound, match=r"not all of it; fetch the rest with: hf download org/name .*has no weights"
    ):
        resolve_model("org/name", cache_dir=tmp_path)


def test_hub_cache_follows_hf_home_without_torch(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path / "hub", "org/name")
    program = (
        "import sys; from pagetide.engine.config import EngineConfig\n"
        "print(EngineConfig.resolve('org/name').model.path)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**keep, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{snapshot}\n", "")


def test_the_fetching_command_exists() -> None:
    from huggingface_hub.cli.download import download  # what `hf download` runs

    assert callable(download)


# -- engine arguments


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_defaults(model: Path) -> None:
    config = EngineConfig.resolve(model)
    assert (config.device, config.dtype, config.kv_memory, config.block_size) == ("auto", "auto", KvMemory(), None)
    assert (config.max_seqs, config.max_step_tokens, config.max_model_len, config.max_chunk_tokens) == (
        256,
        2048,
        None,
        None,
    )
    assert config.model.path == model
    assert EngineConfig.resolve(model, device="auto", dtype="auto", kv_memory="auto", block_size="auto") == config


def test_given_arguments(model: Path) -> None:
    config = EngineConfig.resolve(
        model, device="cuda:1", dtype="bfloat16", kv_memory="1.5G", block_size=32, max_seqs=8, max_step_tokens=64,
        max_model_len=100, max_chunk_tokens=16, trust_remote_code=True,
    )  # fmt: skip
    assert config == EngineConfig(
        config.model, "cuda:1", "bfloat16", None, "auto", KvMemory(3 << 29, 3 << 29), 32, 8, 64, 100, 16
    )
    assert config.model.trust_remote_code


def test_models_file_gives_way_to_arguments(model: Path) -> None:
    spec = ModelSpec("m", model, "a test", dtype="float16", device="cpu")
    config = EngineConfig.resolve(spec, dtype="float32")
    assert (config.device, config.dtype) == ("cpu", "float32")
    assert EngineConfig.resolve(spec, dtype="auto").dtype == "float16"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("device", "gpu", "device must be auto, cpu, cuda or cuda:N"),
        ("device", "cuda:-1", "device must be"),
        ("dtype", "fp64", "dtype must be one of"),
        ("kv_memory", "much", "kv_memory: cannot read 'much'"),
        ("kv_memory", 0, "kv_memory: .*at least 1 byte"),
        ("kv_memory", 1.5, "kv_memory"),
        ("kv_memory", {"min": "2GiB", "max": "1GiB"}, "min of 2,147,483,648 bytes is above its max of 1,073,741,824"),
        ("kv_memory", {"mim": 1}, "unknown key 'mim'; did you mean min"),
        ("kv_memory", "min=1GiB,weigth=2", "unknown key 'weigth'; did you mean weight"),
        ("kv_memory", {"weight": 0}, "weight must be a number from 0.001 to 1000, got 0"),
        ("kv_memory", {"weight": "x"}, "weight must be a number"),
        ("kv_memory", {"priority": 1.5}, "priority must be an integer"),
        ("kv_memory", {"priority": 5000}, "priority must be -1000 to 1000, got 5,000"),
        ("kv_memory", "min=1MiB,min=2MiB", "names a key twice: min, min"),
        ("kv_memory", {"min": "many"}, "kv_memory's min: cannot read 'many'"),
        ("idle_s", -1, "idle_s must be a number of seconds of at least 0, got -1"),
        ("idle_s", "soon", "idle_s must be a number"),
        ("share", 1, "share must be True or False, got 1"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("block_size", "big", "block_size must be an integer, got 'big'"),
        ("max_seqs", 0, "max_seqs must be at least 1, got 0"),
        ("max_seqs", 1_048_577, "max_seqs must be at most 1,048,576, got 1,048,577"),
        ("max_seqs", "8", "max_seqs must be an integer"),
        ("max_seqs", True, "max_seqs must be an integer, got True"),
        ("max_step_tokens", 0, "max_step_tokens must be at least 1"),
        ("max_step_tokens", 2.0, "max_step_tokens must be an integer"),
        ("max_model_len", 1, "max_model_len must be at least 2"),
        ("max_chunk_tokens", -1, "max_chunk_tokens must be at least 1"),
        ("trust_remote_code", "yes", "trust_remote_code must be True or False"),
    ],
)
def test_bad_arguments(model: Path, name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.resolve(model, **{name: value})  # type: ignore[arg-type]


def test_bad_references(model: Path) -> None:
    with pytest.raises(ConfigError, match="model must be a name"):
        EngineConfig.resolve(None)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound, match="name is empty"):
        EngineConfig.resolve("")


def test_block_size_for_a_backend(model: Path) -> None:
    def blocks(attention: str, block_size: int | str) -> int:
        return EngineConfig.resolve(model, attention=attention, block_size=block_size).tokens_per_block()

    assert [blocks(name, "auto") for name in ("auto", "torch", "triton", "flash-attn")] == [16, 16, 16, 256]
    assert [blocks(name, 24) for name in ("auto", "torch", "triton")] == [24] * 3 and blocks("flash-attn", 512) == 512
    said = "block_size 300 does not suit flash-attn, which takes multiples of 256; use 512, or block_size='auto'"
    with pytest.raises(ConfigError, match=said):
        blocks("flash-attn", 300)


def test_attention_is_a_known_backend(model: Path) -> None:
    spec = ModelSpec("m", model, "a test", attention="triton")
    assert [EngineConfig.resolve(spec, attention=name).attention for name in (None, "auto", "torch")] == [
        "triton", "triton", "torch",
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"attention must be one of auto, torch, native, triton, flash-attn, .*, got 'flash'"
    ):
        EngineConfig.resolve(model, attention="flash")


def test_kv_memory_may_be_bounds(model: Path) -> None:
    bounds = {"min": "64MiB", "max": "1GiB", "weight": 2, "priority": -1}
    expected = KvMemory(64 << 20, 1 << 30, 2.0, -1)
    assert EngineConfig.resolve(model, kv_memory=bounds).kv_memory == expected
    as_text = "min=64MiB,max=1GiB,weight=2,priority=-1"
    assert EngineConfig.resolve(model, kv_memory=as_text).kv_memory == expected
    assert EngineConfig.resolve(model, kv_memory={"max": "2GB"}).kv_memory == KvMemory(None, 2_000_000_000)

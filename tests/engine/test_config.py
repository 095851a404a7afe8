"""Engine arguments, the models file, and how a name becomes a folder. No model is loaded here."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import write as write_gguf

from pagetide.api.sampling_params import SamplingParams
from pagetide.engine import errors
from pagetide.engine.config import EngineConfig, KvMemory, ModelSpec, read_models, resolve_model
from pagetide.engine.errors import CheckpointError, ConfigError, ModelNotFound
from pagetide.engine.loading.models import BUILT_IN_FILE, CONFIG_VARIABLE, resolve_tokenizer, user_file


@pytest.fixture(autouse=True)
def _no_network_and_no_settings(no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_error_tree_and_pickling() -> None:
    error = errors.NotEnoughMemory(3 << 30, 1 << 30, "the weights of demo on cpu", "take another device")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error) == (
        "the weights of demo on cpu: asked for 3.00 GiB (3,221,225,472 bytes), 1.00 GiB (1,073,741,824 bytes) are "
        "free; take another device"
    )
    assert pickle.loads(pickle.dumps(errors.UnsupportedModel("has state"))).reason == "has state"
    assert all(issubclass(kind, errors.EngineError) for kind in (ModelNotFound, CheckpointError, ConfigError))
    assert issubclass(ConfigError, ValueError)


def test_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "models" / "tiny")
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(
        tmp_path / "mine.yaml",
        """
short: models/tiny
variable: $MODELS/tiny
demo: ~/models/tiny
long:
  path: "./models/../models/tiny "
  dtype: bfloat16
  device: cuda:1
  tokenizer: {padding_side: left}
  trust_remote_code: true
  sampling: {temperature: 0.7, top_k: 20, stop: [END], stop_token_ids: [3, 4], max_tokens: 9}
""",
    )
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    for name in ("short", "variable", "demo"):
        assert resolve_model(name).path == tmp_path / "models" / "tiny"
    sampling = SamplingParams(temperature=0.7, top_k=20, stop=("END",), stop_token_ids=(3, 4), max_new_tokens=9)
    assert resolve_model("long") == ModelSpec(
        "long", tmp_path / "models" / "tiny", f"{file}:5", dtype="bfloat16", device="cuda:1", sampling=sampling,
        tokenizer={"padding_side": "left"}, trust_remote_code=True,
    )  # fmt: skip
    assert resolve_model("short").trust_remote_code is False
    assert list(read_models()) == ["demo", "short", "variable", "long"]  # laid over the built-in file


BAD_FILES = [
    ("a: [1\nb: 2", 2, "not valid YAML"),
    ("a: &a [*a]", 1, "not valid YAML: an alias stands within what it repeats"),
    ("- a\n- b", None, "must hold `name: path` entries, got list"),
    ("ok: x\na:\n  dtype: float32", 2, "needs a `path`"),
    ("a:\n  path: x\n  dytpe: float32", 1, "unknown key 'dytpe'; did you mean 'dtype'?"),
    ("\n\na:\n  path: x\n  dtype: float8", 3, "dtype must be one of auto, float32, float16, bfloat16, got 'float8'"),
    ("a: {path: x, device: gpu}", 1, "device must be auto, cpu, cuda or cuda:N"),
    ("a: {path: x, trust_remote_code: 'yes'}", 1, "trust_remote_code must be true or false, got 'yes'"),
    ("a: {path: x, tokenizer: fast}", 1, "tokenizer must map options"),
    ("a: {path: x, tokenizer: {local_files_only: false}}", 1, "'local_files_only' is not free"),
    ("a: {path: x, zzz: y}", 1, "unknown key 'zzz'; the known ones are path, dtype, device, tokenizer"),
    ("a: {path: x, sampling: {temprature: 1}}", 1, "unknown key 'temprature'; did you mean 'temperature'?"),
    ("a: {path: x, sampling: {ignore_eos: true}}", 1, "unknown key 'ignore_eos': it belongs to a request"),
    ("a: {path: x, sampling: {do_sample: true}}", 1, "unknown key 'do_sample': write temperature=0, or a temp"),
    ("a: {path: x, sampling: {max_tokens: 3, max_new_tokens: 4}}", 1, "max_new_tokens is 4 and max_tokens 3"),
    ("a: {path: x, sampling: {top_p: 2}}", 1, "top_p must be in"),
    ("a: {path: 7}", 1, "needs a `path`"),
    ("a: 7", 1, "must be a path, or a mapping of path"),
    ("1: x", 1, "must be text, got '1'"),
    ("a: x\nb: {0x1: y, <<: {}, =: 1, 1.0: z}", 2, "'1.0' appears twice, first in line 2 (as '0x1')"),
    ("a:\n  path: x\n  path: y", 3, "'path' appears twice, first in line 2"),
]


def test_bad_files_name_file_and_line(tmp_path: Path) -> None:
    for text, line, words in BAD_FILES:
        file = write(tmp_path / "mine.yaml", text)
        with pytest.raises(ConfigError) as caught:
            read_models(file)
        assert str(caught.value).startswith(f"{file}:{line}: " if line else f"{file}: "), text
        assert words in str(caught.value)


def test_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigError, match=r"gone\.yaml; PAGETIDE_CONFIG names it"):
        resolve_model("demo")


def test_the_users_file_lies_between_the_two_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = user_file({"XDG_CONFIG_HOME": str(tmp_path)})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert list(read_models()) == ["demo"]  # it need not exist
    file.parent.mkdir()
    write(file, "demo: mine\nalpha: mine\nbeta: mine")
    named = write(tmp_path / "named.yaml", "beta: named\ngamma: named")
    assert {name: entry.where for name, entry in read_models().items()} == {
        "demo": f"{file}:1",
        "alpha": f"{file}:2",
        "beta": f"{file}:3",
    }
    monkeypatch.setenv(CONFIG_VARIABLE, str(named))
    files = {name: entry.file for name, entry in read_models().items()}
    assert files == {"demo": file, "alpha": file, "beta": named, "gamma": named}


def test_a_file_of_the_current_folder_names_paths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whoever wrote the folder who says what stands there: settings could run code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    (tmp_path / "configs").mkdir()
    file = write(tmp_path / "configs" / "model_paths.yaml", 'alpha: "mine "\nbeta: ./models/b')
    found = {name: (entry.file, entry.path) for name, entry in read_models().items()}
    assert (found.pop("demo")[0], found) == (BUILT_IN_FILE, {"alpha": (file, "mine"), "beta": (file, "./models/b")})
    write(file, "alpha: {path: mine, trust_remote_code: true}")
    with pytest.raises(ConfigError, match=r"model_paths\.yaml:1: may hold `name: path` entries alone"):
        read_models()


def test_the_place_of_the_users_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/alice")
    assert user_file({"XDG_CONFIG_HOME": "/etc/alice"}) == Path("/etc/alice/pagetide/models.yaml")
    for environ in ({"XDG_CONFIG_HOME": "not/absolute"}, {}):
        assert user_file(environ) == Path("/srv/alice/.config/pagetide/models.yaml"), environ
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 300)  # a home that the system cannot look into has no file
    assert list(read_models()) == ["demo"]


@pytest.mark.parametrize("kind", ["folder", "no YAML", "no permission", "a link to itself"])
def test_a_users_file_that_cannot_be_read_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unknown_name_says_which_exist_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "mine.yaml", "beta: x\nalpha: gone/for/good")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("alpha")
    assert str(caught.value) == f"model 'alpha' ({file}:2): there is no folder {tmp_path / 'gone/for/good'}"
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("gamma!", cache_dir=tmp_path)
    assert f"{BUILT_IN_FILE} names demo; {file} names alpha, beta" in str(caught.value)
    assert "hf download" not in str(caught.value)  # it cannot be a hub id
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("bet", cache_dir=tmp_path)
    said = "'bet' is neither a known name nor a folder, nor a repository in the local hub cache - did you mean beta? "
    assert str(caught.value).startswith(said) and "hf download" not in str(caught.value)  # the hub's have owners
    assert str(caught.value).endswith("; a model of the Hugging Face hub goes by its owner and name, as in Qwen/Qwen3-0.6B")


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


def test_names_that_no_folder_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for reference, said in [
        ("a" * 5000, "File name too long"),
        ("/" + "a" * 300, "File name too long"),
        ("~nobody-of-that-name/model", "home directory"),
        (Path("b/" * 3000), "File name too long"),
    ]:
        for resolve in (resolve_model, resolve_tokenizer):
            with pytest.raises(ModelNotFound, match=f"cannot be looked for as a folder: .*{said}") as refused:
                resolve(reference)
            assert len(str(refused.value)) < 500
        with pytest.raises(ModelNotFound, match=r"'a/\\x00b' is neither a known name nor a folder;"):
            resolve_model("a/\0b")
        write(tmp_path / "mine.yaml", f"# mine\ngiven: {reference}")
        monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "mine.yaml"))
        beside = "there is no folder" if str(reference).startswith("~") else said
        with pytest.raises(ModelNotFound, match=rf"model 'given' \(.*mine.yaml:2\): .*{beside}"):
            resolve_model("given")


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
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf has not the beginning of a GGUF file; fetch it again"):
        resolve_model(tmp_path / "model.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(tmp_path).path == tmp_path


def test_missing_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}))
    (tmp_path / "1.safetensors").write_bytes(b"")
    missing = r"1 of the 2 files that model\.safetensors\.index\.json lists .*2\.safetensors"
    with pytest.raises(ModelNotFound, match=missing):
        resolve_model(tmp_path)
    for text, said in (("{", "is not valid JSON"), ('{"weight_map": 1}', "is not an index of shards")):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=rf"index\.json {said}"):
            resolve_model(tmp_path)


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_cached(tmp_path / "hub", "org/name")
    spec = resolve_model("org/name", cache_dir=tmp_path / "hub")
    assert (spec.name, spec.path, spec.source) == ("org/name", snapshot, "the local hub cache")
    monkeypatch.setenv(CONFIG_VARIABLE, str(write(tmp_path / "mine.yaml", "a: org/name\nb: org/other")))
    assert resolve_model("a", cache_dir=tmp_path / "hub").path == snapshot
    with pytest.raises(ModelNotFound, match=r"mine\.yaml:2\).*hf download org/other \(a gated one: .*hf auth login\)$"):
        resolve_model("b", cache_dir=tmp_path / "hub")
    with pytest.raises(ModelNotFound, match=r"did you mean org/name\? .*hf download org/nmae \(a gated one: "):
        resolve_model("org/nmae", cache_dir=tmp_path / "hub")
    (snapshot / "model.safetensors").unlink()
    half = r"not all of it; fetch the rest{} with: hf download org/name .*has no weights"
    with pytest.raises(ModelNotFound, match=half.format("")):
        resolve_model("org/name", cache_dir=tmp_path / "hub")
    sizes = {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1 << 20,
        "max_position_embeddings": 64, "dtype": "bfloat16", "tie_word_embeddings": True, "model_type": "llama",
    }  # fmt: skip
    (snapshot / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ModelNotFound, match=half.format(r", 1\.01 GiB of weights in all,")):
        resolve_model("org/name", cache_dir=tmp_path / "hub")
    assert resolve_model("org/name", cache_dir=tmp_path / "hub", needs_weights=False) == spec
    index = {"metadata": {"total_size": 3 << 30}, "weight_map": {"a": "1.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match=r"the rest, 3\.00 GiB of weights in all, with: hf download org/name "):
        resolve_model("org/name", cache_dir=tmp_path / "hub")


def test_hub_ids_of_gguf_files(tmp_path: Path) -> None:
    """As they lie in repositories: one file of each quantization, some split and in folders, and perhaps a configuration."""
    hub = tmp_path / "hub"
    snapshot = make_cached(hub, "org/name-GGUF")
    (snapshot / "model.safetensors").unlink()

    def add(*names: str) -> None:
        for name in names:
            (snapshot / name).parent.mkdir(exist_ok=True)
            split = {"split.count": 2} if "-of-" in name else {}
            write_gguf(snapshot / name, {"general.architecture": "qwen3", **split}, {})

    def found(text: str) -> str:
        return str(resolve_model(text, cache_dir=hub).path.relative_to(snapshot))

    add("name-Q8_0.gguf", "mmproj-name-F16.gguf")
    assert found("org/name-GGUF") == found("org/name-GGUF:q8_0") == found("hf.co/org/name-GGUF:Q8_0") == "name-Q8_0.gguf"
    there = (
        r"with GGUF files of Q8_0, and Q4_K_M is none of them; fetch it with: hf download org/name-GGUF --include .\*Q4_K_M\*"
    )
    with pytest.raises(ModelNotFound, match=there):
        found("org/name-GGUF:Q4_K_M")
    add("F16/name-F16-00001-of-00002.gguf")
    with pytest.raises(ModelNotFound, match="has GGUF files of F16, Q8_0 here: name one of them, as in org/name-GGUF:F16"):
        found("org/name-GGUF")
    with pytest.raises(
        ModelNotFound, match=r"not all of it; fetch the rest with: .*\*F16\*.* 2 files of a model, and name-F16-00002"
    ):
        found("org/name-GGUF:F16")
    add("F16/name-F16-00002-of-00002.gguf", "name-Q4_K_M.gguf")
    assert found("org/name-GGUF:F16") == "F16/name-F16-00001-of-00002.gguf"
    assert found("org/name-GGUF") == "name-Q4_K_M.gguf"
    assert resolve_tokenizer("org/name-GGUF:Q8_0", cache_dir=hub).name == "name-Q8_0.gguf"
    (snapshot / "model.safetensors").write_bytes(b"")  # a repository of both
    assert found("org/name-GGUF") == "."
    with pytest.raises(
        ModelNotFound, match=r"fetch it first with: hf download org/other-GGUF --include .*huggingface\.co/org/other-GGUF,"
    ):
        found("org/other-GGUF:Q4_0")


def test_hub_cache_follows_hf_home_without_torch(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path / "hub", "org/name")
    program = (
        "import sys; from pagetide.engine.config import EngineConfig\n"
        "print(EngineConfig.resolve('org/name').model.path)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {**keep, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{snapshot}\n", "")


def test_the_commands_of_the_hub_exist() -> None:
    from huggingface_hub.cli.auth import auth_login  # what `hf auth login` runs
    from huggingface_hub.cli.download import download  # what `hf download` runs

    assert callable(download) and callable(auth_login)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_given_arguments(model: Path) -> None:
    assert EngineConfig.resolve(model) == EngineConfig.resolve(
        model, device="auto", dtype="auto", kv_memory="auto", block_size="auto"
    )
    config = EngineConfig.resolve(
        model, device="cuda:1", dtype="bfloat16", kv_memory="1.5G", block_size=32, max_seqs=8, max_step_tokens=64,
        max_model_len=100, max_chunk_tokens=16, trust_remote_code=True,
    )  # fmt: skip
    default = EngineConfig.resolve(model, trust_remote_code=True)
    assert config == replace(
        default, device="cuda:1", dtype="bfloat16", kv_memory=KvMemory(3 << 29, 3 << 29), block_size=32, max_seqs=8,
        max_step_tokens=64, max_model_len=100, max_chunk_tokens=16,
    )  # fmt: skip
    assert config.model.trust_remote_code


def test_models_file_gives_way_to_arguments(model: Path) -> None:
    spec = ModelSpec("m", model, "a test", dtype="float16", device="cpu")
    config = EngineConfig.resolve(spec, dtype="float32")
    assert (config.device, config.dtype) == ("cpu", "float32")
    assert EngineConfig.resolve(spec, dtype="auto").dtype == "float16"


def test_bad_arguments(model: Path) -> None:
    for name, value, words in [
        ("device", "gpu", "device must be auto, cpu, cuda or cuda:N"),
        ("device", "cuda:-1", "device must be"),
        ("dtype", "fp64", "dtype must be one of"),
        ("kv_memory", "much", "kv_memory: cannot read 'much'"),
        ("kv_memory", 0, "kv_memory: .*at least 1 byte"),
        ("kv_memory", {"min": "2GiB", "max": "1GiB"}, "min of 2,147,483,648 bytes is above its max of 1,073,741,824"),
        ("kv_memory", {"mim": 1}, "unknown setting 'mim'; did you mean min"),
        ("kv_memory", "min=1GiB,weigth=2", "unknown setting 'weigth'; did you mean weight"),
        ("kv_memory", {"weight": 0}, "weight must be a number from 0.001 to 1,000, got 0"),
        ("kv_memory", {"weight": "x"}, "weight must be a number"),
        ("kv_memory", {"priority": 1.5}, "priority must be an integer"),
        ("kv_memory", {"priority": 5000}, "priority must be an integer from -1,000 to 1,000, got 5000"),
        ("kv_memory", "min=1MiB,min=2MiB", "names a key twice: min, min"),
        ("kv_memory", {"min": "many"}, "kv_memory's min: cannot read 'many'"),
        ("idle_s", -1, "idle_s must be a number of seconds of at least 0, got -1"),
        ("idle_s", "soon", "idle_s must be a number"),
        ("share", 1, "share must be true or false, got 1"),
        ("overlap", 1, "overlap must be true or false, got 1"),
        ("cuda_graphs", None, "cuda_graphs must be true or false, got None"),
        ("self_check", 0, "self_check must be true or false, got 0"),
        ("block_size", 0, "block_size must be an integer of at least 1, or auto, got 0"),
        ("block_size", "big", "block_size must be an integer of at least 1, or auto, got 'big'"),
        ("max_seqs", 0, "max_seqs must be an integer from 1 to 1,048,576, got 0"),
        ("max_seqs", 1_048_577, "max_seqs must be an integer from 1 to 1,048,576, got 1048577"),
        ("max_seqs", True, "max_seqs must be an integer from 1 to 1,048,576, got True"),
        ("max_step_tokens", 0, "max_step_tokens must be an integer of at least 1, got 0"),
        ("max_model_len", 1, "max_model_len must be an integer of at least 2, got 1"),
        ("max_chunk_tokens", -1, "max_chunk_tokens must be an integer of at least 1, got -1"),
        ("trust_remote_code", "yes", "trust_remote_code must be true or false, got 'yes'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            EngineConfig.resolve(model, **{name: value})  # type: ignore[arg-type]
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
        "triton",
        "triton",
        "torch",
    ]
    known = "attention must be one of auto, torch, native, triton, flash-attn, .*, got 'flash'"
    with pytest.raises(ConfigError, match=known):
        EngineConfig.resolve(model, attention="flash")


def test_kv_memory_may_be_bounds(model: Path) -> None:
    bounds = {"min": "64MiB", "max": "1GiB", "weight": 2, "priority": -1}
    expected = KvMemory(64 << 20, 1 << 30, 2.0, -1)
    assert EngineConfig.resolve(model, kv_memory=bounds).kv_memory == expected
    as_text = "min=64MiB,max=1GiB,weight=2,priority=-1"
    assert EngineConfig.resolve(model, kv_memory=as_text).kv_memory == expected
    assert EngineConfig.resolve(model, kv_memory={"max": "2GB"}).kv_memory == KvMemory(None, 2_000_000_000)

"""Quantized weights on disk: the same weights come back, and nothing that goes wrong there is noticed but in the log."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from families import tiny
from torch import nn

from pagetide import ConfigError, native
from pagetide.cli import main
from pagetide.engine.layers import quantized_linears
from pagetide.engine.layers.linears import NativeLinear
from pagetide.engine.layers.quantization import Method
from pagetide.engine.layers.quantized_linears import quantize_linear
from pagetide.engine.loading import quantized_cache, quantized_model
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import loaded_spec, resolve_model
from pagetide.engine.loading.quantized_cache import DEFAULT_MOST_BYTES, QuantizedCache, cache_dir, most_bytes

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

CPU = torch.device("cpu")


def weights(seed=0, n=40, in_scales=True):
    generator = torch.Generator().manual_seed(seed)

    def one(form, columns, rows_in_int8):
        factors = torch.rand(columns, generator=generator) + 0.5 if in_scales else None
        linear = nn.Linear(columns, n).requires_grad_(False)
        linear.weight.copy_(torch.randn(n, columns, generator=generator))
        return quantize_linear(linear, Method(form, factors, rows_in_int8, 0.0), torch.float32).packed

    return {"model.a": one("int8", 33, True), "model.b": one("int4", 130, False)}


def assert_same(found, expected):
    assert found is not None and list(found) == list(expected)
    for name, one in found.items():
        other = expected[name]
        for field in ("type", "n", "k", "rows_in_int8"):
            assert getattr(one, field) == getattr(other, field)
        assert torch.equal(one.packed, other.packed) and torch.equal(one.scales, other.scales)
        assert (one.in_scales is None) == (other.in_scales is None)
        assert one.in_scales is None or torch.equal(one.in_scales, other.in_scales)
        assert one.packed.data_ptr() % 64 == 0


KEY = "0123456789abcdef" * 2


@pytest.fixture
def cache(tmp_path):
    return QuantizedCache(tmp_path / "cache", 1 << 20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny("llama", hidden_size=96).save_pretrained(folder)
    return folder


def test_what_is_kept_comes_back(cache):
    assert cache.read(KEY) is None
    for in_scales in (True, False):
        cache.write(KEY, weights(in_scales=in_scales))
        assert_same(cache.read(KEY), weights(in_scales=in_scales))
    assert [file.path.name for file in cache.files()] == [f"{KEY}.weights"]


def test_weights_in_use_outlive_their_file(cache):
    cache.write(KEY, weights())
    found = cache.read(KEY)
    assert cache.clear() > 0 and cache.files() == []
    assert_same(found, weights())
    assert cache.read(KEY) is None


def test_a_damaged_file_is_deleted(cache, caplog):
    """A file that is cut off, or has a wrong byte anywhere but in its padding, is deleted, and made again."""
    cache.write(KEY, weights())
    path = cache.files()[0].path
    right = path.read_bytes()
    line = right.index(b"\n") + 1
    header = json.loads(right[:line].rstrip().rpartition(b" ")[0])
    arrays = [one[part] for one in header["weights"].values() for part in ("packed", "scales", "in_scales")]
    places = [0, 5, line // 3, *(line + array["offset"] + i for array in arrays for i in (0, 40))]
    damaged = {place: right[:place] + bytes([right[place] ^ 0x10]) + right[place + 1 :] for place in places}
    damaged |= {f"up to {length}": right[:length] for length in (0, 1, 100, -1, -64, -5000)}
    for what, content in damaged.items():
        path.write_bytes(content)
        caplog.clear()
        assert cache.read(KEY) is None, what
        assert "deleted" in caplog.text and not path.exists()
    path.write_bytes(right)
    assert_same(cache.read(KEY), weights())


def test_a_full_disk_leaves_nothing(cache, monkeypatch, caplog):
    def full(fd):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(quantized_cache.os, "fsync", full)
    cache.write(KEY, weights())
    assert "no space left" in caplog.text and list(cache.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    cache = QuantizedCache(tmp_path / "cache", 1 << 20)
    cache.write(KEY, weights())
    assert "not kept" in caplog.text and cache.read(KEY) is None and cache.files() == []


def test_a_folder_of_others_is_not_used(saved, tmp_path, monkeypatch, caplog):
    folder, checkpoint = tmp_path / "others", Checkpoint.open(resolve_model(saved))
    folder.mkdir()
    cache = QuantizedCache(folder, 1 << 30)
    for mode in (0o770, 0o707, 0o1777):
        folder.chmod(mode)
        caplog.clear()
        assert cache.key(checkpoint, "int8", torch.float32) is None
        assert "others can write to it" in caplog.text and list(folder.iterdir()) == [], oct(mode)
    folder.chmod(0o755)
    assert cache.key(checkpoint, "int8", torch.float32) is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.key(checkpoint, "int8", torch.float32) is None
    assert "belongs to another user" in caplog.text


def test_the_least_recently_used_go_first(tmp_path):
    one = QuantizedCache(tmp_path, 1 << 20)
    one.write("a" * 32, weights())
    size = one.files()[0].num_bytes
    cache = QuantizedCache(tmp_path, 3 * size)
    for key in "bc":
        cache.write(key * 32, weights())
    for age, key in enumerate("cba"):
        os.utime(tmp_path / f"{key * 32}.weights", (1000 - age, 1000 - age))
    assert cache.read("a" * 32) is not None  # used now
    cache.write("d" * 32, weights())
    assert {file.path.stem[0] for file in cache.files()} == {"a", "c", "d"}
    assert sum(file.num_bytes for file in cache.files()) <= cache.most_bytes


def test_what_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out(tmp_path):
    cache = QuantizedCache(tmp_path, 1 << 20)
    cache.write("a" * 32, weights())
    QuantizedCache(tmp_path, 1000).write("b" * 32, weights())
    assert [file.path.stem for file in cache.files()] == ["a" * 32]


def test_half_a_file_of_a_writer_that_is_gone_is_deleted(cache):
    cache.write("a" * 32, weights())
    old, new = cache.folder / f"{KEY}old.tmp", cache.folder / f"{KEY}new.tmp"
    old.write_bytes(b"half"), new.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    cache.write("b" * 32, weights())
    assert not old.exists() and new.exists()


def test_writers_and_readers_at_the_same_time(cache):
    """Each reader gets a whole file or none, whoever writes."""
    expected = weights()

    def work(number):
        if number % 2:
            cache.write(KEY, expected)
        elif (found := cache.read(KEY)) is not None:
            assert_same(found, expected)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(80)))
    assert_same(cache.read(KEY), expected)
    assert [file.path.suffix for file in cache.files()] == [".weights"]


def test_a_writer_that_is_killed_leaves_no_file_under_the_key(cache, monkeypatch):
    made = weights()
    child = os.fork()
    if not child:
        monkeypatch.setattr(quantized_cache.os, "fsync", lambda fd: os._exit(9))
        cache.write(KEY, made)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.suffix for path in cache.folder.iterdir()] == [".tmp"]
    assert cache.read(KEY) is None
    cache.write(KEY, made)
    assert_same(cache.read(KEY), made)


def test_the_key_depends_on_content_and_on_what_is_computed(saved, cache, tmp_path, monkeypatch):
    def key(form="int8", dtype=torch.float32, folder=saved):
        return cache.key(Checkpoint.open(resolve_model(folder)), form, dtype)

    first = key()
    assert first == key() and len({first, key("int4"), key(dtype=torch.bfloat16)}) == 3
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in saved.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert key(folder=copy) == first
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert key(folder=copy) != first
    monkeypatch.setattr(quantized_cache, "VERSION", quantized_cache.VERSION + 1)
    assert key() != first


def test_content_is_read_once_until_it_changes(saved, cache, monkeypatch):
    read, digest = [], quantized_cache.hashlib.file_digest
    monkeypatch.setattr(
        quantized_cache.hashlib, "file_digest", lambda file, kind: (read.append(file.name), digest(file, kind))[1]
    )
    checkpoint = Checkpoint.open(resolve_model(saved))
    key = cache.key(checkpoint, "int8", torch.float32)
    assert len(read) == 2
    assert cache.key(checkpoint, "int8", torch.float32) == key and len(read) == 2
    os.utime(saved / "model.safetensors")
    assert cache.key(checkpoint, "int8", torch.float32) == key and len(read) == 3
    for content in ('["no digests"]', "[" * 200_000, "[]", '{"a": 1}', "\0"):
        (cache.folder / "digests.json").write_text(content)
        before = len(read)
        assert cache.key(checkpoint, "int8", torch.float32) == key and len(read) == before + 2


def test_loaded_models_and_a_cache_of_no_size_have_no_key(saved, tmp_path):
    model = tiny("llama")
    loaded = Checkpoint.open(loaded_spec(model))
    assert QuantizedCache(tmp_path, 1 << 20).key(loaded, "int8", torch.float32) is None
    assert QuantizedCache(tmp_path, 0).key(Checkpoint.open(resolve_model(saved)), "int8", torch.float32) is None


def test_place_and_bound_come_from_the_environment():
    assert str(cache_dir({"XDG_CACHE_HOME": "/var/tmp/x"})) == "/var/tmp/x/pagetide/quantized"
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == cache_dir({})
    assert most_bytes({}) == DEFAULT_MOST_BYTES and most_bytes({"PAGETIDE_CACHE_SIZE": "0"}) == 0
    assert most_bytes({"PAGETIDE_CACHE_SIZE": "2GiB"}) == 2 << 30
    with pytest.raises(ConfigError, match="PAGETIDE_CACHE_SIZE"):
        most_bytes({"PAGETIDE_CACHE_SIZE": "much"})


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 1)
    return tmp_path / "pagetide" / "quantized"


def quantized(folder):
    return load_model(Checkpoint.open(resolve_model(folder)), CPU, torch.float32, quantization="int8")


def test_a_second_load_is_the_same_and_quantizes_nothing(saved, own_folder, monkeypatch):
    ids = torch.arange(2, 30)[None]
    with torch.inference_mode():
        first = quantized(saved)(ids).logits
        monkeypatch.setattr(quantized_model, "quantize_linears", None)
        second = quantized(saved)(ids).logits
    assert torch.equal(first, second)
    assert len(list(own_folder.glob("*.weights"))) == 1


def test_a_file_for_other_layers_is_not_used(saved, own_folder):
    quantized(saved)
    cache, file = QuantizedCache(), next(own_folder.glob("*.weights"))
    kept = cache.read(file.stem)
    name = next(iter(kept))
    cache.write(file.stem, {**kept, name: replace(kept[name], n=kept[name].n + 1)})
    model = quantized(saved)
    assert sum(isinstance(module, NativeLinear) for module in model.modules()) == len(kept)
    assert cache.read(file.stem)[name].n == kept[name].n


def test_the_command_shows_and_clears(saved, own_folder, capsys):
    quantized(saved)
    size = next(own_folder.glob("*.weights")).stat().st_size
    assert main(["cache", "info", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bytes"] == size and shown["folder"] == str(own_folder) and len(shown["files"]) == 1
    assert main(["cache", "info"]) == 0
    text = capsys.readouterr().out
    assert shown["files"][0]["name"] in text and "of at most 20.00 GiB" in text
    assert main(["cache", "clear"]) == 0 and "freed" in capsys.readouterr().out
    assert list(own_folder.iterdir()) == []
    assert main(["cache", "clear", "--json"]) == 0 and json.loads(capsys.readouterr().out) == {"freed_bytes": 0}


def test_what_is_no_regular_file_is_not_read_and_does_not_hang(cache, caplog):
    cache.folder.mkdir()
    path = cache.folder / f"{KEY}.weights"
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), path.mkdir):
        make()
        caplog.clear()
        assert cache.read(KEY) is None
        assert "is not used" in caplog.text
        assert cache.clear() == 0


def test_a_file_whose_times_cannot_be_set_is_used(cache, monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EPERM, "not yours")

    cache.write(KEY, weights())
    monkeypatch.setattr(quantized_cache.os, "utime", refuse)
    assert_same(cache.read(KEY), weights())
    assert cache.files()


def test_only_files_of_the_cache_are_deleted(cache):
    cache.write(KEY, weights())
    others = [cache.folder / name for name in ("model.weights", "notes.tmp", "notes.txt")]
    for path in others:
        path.write_text("of the user")
    (cache.folder / "digests.json").mkdir()
    assert cache.clear() > 0
    assert sorted(path.name for path in cache.folder.iterdir()) == sorted(["digests.json", *(p.name for p in others)])

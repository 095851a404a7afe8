"""Packed weights on disk: the same weights come back, and nothing that goes wrong there is noticed but in the log."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from families import tiny
from state_families import STATE_FAMILIES, tiny_with_states
from torch import nn

from pagetide import ConfigError, native
from pagetide.cli import main
from pagetide.engine.layers import quantized_linears
from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.linears import NativeLinear, PackedWeight
from pagetide.engine.layers.quantization import Method
from pagetide.engine.layers.quantized_linears import quantize_linear
from pagetide.engine.loading import loader, quantized_model, weight_cache
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import loaded_spec, resolve_model
from pagetide.engine.loading.packed_model import free_merged
from pagetide.engine.loading.weight_cache import DEFAULT_MOST_BYTES, WeightCache, cache_dir, most_bytes

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

CPU = torch.device("cpu")


def weights(seed=0, n=40, in_scales=True):
    generator = torch.Generator().manual_seed(seed)

    def one(form, columns, rows_in_int8):
        factors = torch.rand(columns, generator=generator) + 0.5 if in_scales else None
        linear = nn.Linear(columns, n).requires_grad_(False)
        linear.weight.copy_(torch.randn(n, columns, generator=generator))
        return quantize_linear(linear, Method(form, factors, rows_in_int8, 0.0), torch.float32).packed

    def plain(dtype):
        return NativeLinear.of(nn.Linear(48, n).requires_grad_(False), dtype).packed

    torch.manual_seed(seed)
    kinds = {"model.a": one("int8", 33, True), "model.b": one("int4", 130, False)}
    return kinds | {f"model.{dtype}": plain(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def assert_same(found, expected):
    assert found is not None and list(found) == list(expected)
    for name, one in found.items():
        other = expected[name]
        for field in ("type", "n", "k", "rows_in_int8"):
            assert getattr(one, field) == getattr(other, field)
        for field in ("packed", "scales", "in_scales"):
            there, expected_there = getattr(one, field), getattr(other, field)
            assert (there is None) == (expected_there is None)
            assert there is None or torch.equal(there, expected_there)
        assert one.packed.data_ptr() % 64 == 0


KEY = "0123456789abcdef" * 2


@pytest.fixture
def cache(tmp_path):
    return WeightCache(tmp_path / "cache", 1 << 20)


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
    arrays = [one[part] for one in header["weights"].values() for part in ("packed", "scales", "in_scales") if part in one]
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


def test_what_cannot_be_read_now_is_kept(cache, monkeypatch, caplog):
    """No descriptors, memory or threads: the file is whole, and is read the next time."""
    cache.write(KEY, weights())
    for place, error in (
        (weight_cache.mmap, OSError(errno.ENOMEM, "no memory")),
        (weight_cache, RuntimeError("can't start new thread")),
    ):
        name = "mmap" if place is weight_cache.mmap else "ThreadPoolExecutor"

        def refuse(*args, error=error, **options):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(place, name, refuse)
            assert cache.read(KEY) is None
        assert str(error) in caplog.text
        assert_same(cache.read(KEY), weights())


def test_a_file_of_another_layout_is_deleted(cache):
    """Its weights have another size than the kernels would read."""
    one = weights()["model.a"]
    cache.write(KEY, {"model.a": replace(one, packed=one.packed[:-64])})
    assert cache.read(KEY) is None and cache.files() == []


def test_a_full_disk_leaves_nothing(cache, monkeypatch, caplog):
    def full(fd):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(weight_cache.os, "fsync", full)
    cache.write(KEY, weights())
    assert "no space left" in caplog.text and list(cache.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    cache = WeightCache(tmp_path / "cache", 1 << 20)
    cache.write(KEY, weights())
    assert "not kept" in caplog.text and cache.read(KEY) is None and cache.files() == []


def test_a_folder_of_others_is_not_used(saved, tmp_path, monkeypatch, caplog):
    folder, checkpoint = tmp_path / "others", Checkpoint.open(resolve_model(saved))
    folder.mkdir()
    cache = WeightCache(folder, 1 << 30)
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
    one = WeightCache(tmp_path, 1 << 20)
    one.write("a" * 32, weights())
    size = one.files()[0].num_bytes
    cache = WeightCache(tmp_path, 3 * size)
    for key in "bc":
        cache.write(key * 32, weights())
    for age, key in enumerate("cba"):
        os.utime(tmp_path / f"{key * 32}.weights", (1000 - age, 1000 - age))
    assert cache.read("a" * 32) is not None  # used now
    cache.write("d" * 32, weights())
    assert {file.path.stem[0] for file in cache.files()} == {"a", "c", "d"}
    assert sum(file.num_bytes for file in cache.files()) <= cache.most_bytes


def test_what_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out(tmp_path):
    cache = WeightCache(tmp_path, 1 << 20)
    cache.write("a" * 32, weights())
    WeightCache(tmp_path, 1000).write("b" * 32, weights())
    assert [file.path.stem for file in cache.files()] == ["a" * 32]


def test_plain_weights_drive_no_file_out_that_was_used_today(tmp_path):
    """Models that do not fit together would be written at each start of either."""
    WeightCache(tmp_path, 1 << 20).write("a" * 32, weights())
    path = tmp_path / f"{'a' * 32}.weights"
    cache = WeightCache(tmp_path, path.stat().st_size * 3 // 2)
    cache.write("b" * 32, weights(), is_plain=True)
    assert [file.path for file in cache.files()] == [path]
    cache.write("a" * 32, weights(seed=1), is_plain=True)  # its own place counts as free
    assert_same(cache.read("a" * 32), weights(seed=1))
    os.utime(path, (1000, 1000))
    cache.write("b" * 32, weights(), is_plain=True)
    assert [file.path.stem for file in cache.files()] == ["b" * 32]
    cache.write("c" * 32, weights())
    assert [file.path.stem for file in cache.files()] == ["c" * 32]


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
        monkeypatch.setattr(weight_cache.os, "fsync", lambda fd: os._exit(9))
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
    with monkeypatch.context() as patched:
        patched.setattr(weight_cache.native, "instructions", lambda: "another processor")
        assert key() not in (None, first)
        patched.setattr(weight_cache.native, "instructions", lambda: None)
        assert key() is None
    monkeypatch.setattr(weight_cache, "VERSION", weight_cache.VERSION + 1)
    assert key() != first


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_kept(own_folder, tmp_path, monkeypatch):
    """Neither are weights of the new files taken for those of the old ones."""
    monkeypatch.setenv("PAGETIDE_CACHE_SIZE", "1GiB")
    for name, seed in (("model", 0), ("new", 1)):
        tiny("llama", hidden_size=96, seed=seed).save_pretrained(tmp_path / name)
    file, new = (tmp_path / name / "model.safetensors" for name in ("model", "new"))
    read = loader._read_stored

    def replaced(*args):
        found = read(*args)
        os.replace(new, file)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(loader, "_read_stored", replaced)
        load_model(Checkpoint.open(resolve_model(tmp_path / "model")), CPU, torch.float32, pack=True)
    assert WeightCache().files() == []


def test_content_is_read_once_until_it_changes(saved, cache, monkeypatch):
    read, digest = [], weight_cache.hashlib.file_digest
    monkeypatch.setattr(weight_cache.hashlib, "file_digest", lambda file, kind: (read.append(file.name), digest(file, kind))[1])
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
    assert WeightCache(tmp_path, 1 << 20).key(loaded, "int8", torch.float32) is None
    assert WeightCache(tmp_path, 0).key(Checkpoint.open(resolve_model(saved)), "int8", torch.float32) is None


def test_weights_that_are_not_quantized_are_kept_only_in_a_bound_that_was_set(saved, own_folder, monkeypatch):
    load_model(Checkpoint.open(resolve_model(saved)), CPU, torch.float32, pack=True)
    assert not own_folder.exists()
    for size, number in (("0", 0), ("1GiB", 1)):
        monkeypatch.setenv("PAGETIDE_CACHE_SIZE", size)
        load_model(Checkpoint.open(resolve_model(saved)), CPU, torch.float32, pack=True)
        assert len(WeightCache().files()) == number


def test_place_and_bound_come_from_the_environment():
    assert str(cache_dir({"XDG_CACHE_HOME": "/var/tmp/x"})) == "/var/tmp/x/pagetide/weights"
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == cache_dir({})
    assert most_bytes({}) == DEFAULT_MOST_BYTES and most_bytes({"PAGETIDE_CACHE_SIZE": "0"}) == 0
    assert most_bytes({"PAGETIDE_CACHE_SIZE": "2GiB"}) == 2 << 30
    with pytest.raises(ConfigError, match="PAGETIDE_CACHE_SIZE"):
        most_bytes({"PAGETIDE_CACHE_SIZE": "much"})


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 1)
    return tmp_path / "pagetide" / "weights"


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


def layers_of(model):
    return {name: one for name, one in model.named_modules() if isinstance(one, NativeLinear)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_that_are_not_quantized_come_back_without_being_packed(own_folder, tmp_path, monkeypatch, dtype, tied):
    tiny("qwen2", tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("PAGETIDE_CACHE_SIZE", "1GiB")
    ids, checkpoint = torch.arange(2, 30)[None], Checkpoint.open(resolve_model(tmp_path / "model"))
    first = load_model(checkpoint, CPU, dtype, pack=True)
    file = next(own_folder.glob("*.weights"))
    inode, pack = file.stat().st_ino, NativeLinear.of
    monkeypatch.setattr(NativeLinear, "of", None)
    with torch.inference_mode():
        right = first(ids).logits
        assert torch.equal(load_model(checkpoint, CPU, dtype, pack=True)(ids).logits, right)
        assert file.stat().st_ino == inode, "it is not written again"
        # One that is not of its layer's size is packed again, alone, and the file is written again
        monkeypatch.setattr(NativeLinear, "of", pack)
        kept = WeightCache().read(file.stem)
        name = next(iter(kept))
        other = torch.float16 if dtype == torch.float32 else torch.float32
        for n, kind in ((kept[name].n + 1, dtype), (kept[name].n, other)):
            wrong = NativeLinear.of(nn.Linear(kept[name].k, n).requires_grad_(False), kind).packed
            WeightCache().write(file.stem, {**kept, name: wrong})
            third = load_model(checkpoint, CPU, dtype, pack=True)
            assert torch.equal(third(ids).logits, right)
            assert_same(WeightCache().read(file.stem), kept)
    assert len(layers_of(third)) == len(kept)
    assert list(own_folder.glob("*.tmp")) == []


def test_merged_layers_stay_where_they_are(saved, own_folder, monkeypatch):
    """q, k and v, and gate and up, lie one behind another, in memory and in a file: joining them copies nothing."""
    monkeypatch.setenv("PAGETIDE_CACHE_SIZE", "1GiB")
    checkpoint = Checkpoint.open(resolve_model(saved))
    for _ in ("packed", "mapped"):
        layers = layers_of(load_model(checkpoint, CPU, torch.float32, pack=True))
        for parent, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            parts = [layers[f"model.layers.1.{parent}.{name}_proj"].packed for name in names]
            for order in (1, -1):
                merged, starts = PackedWeight.joined(parts[::order])
                assert merged.packed.data_ptr() == parts[0].packed.data_ptr()
                for one, start in zip(parts[::order], starts, strict=True):
                    assert torch.equal(merged.outputs(start, one.n).packed, one.packed)
        copied, _ = PackedWeight.joined([layers[f"model.layers.1.self_attn.{name}_proj"].packed for name in "qo"])
        assert copied.packed.data_ptr() != layers["model.layers.1.self_attn.q_proj"].packed.packed.data_ptr()


def held(model):
    """(bytes of packed weights, bytes of the memory that they lie in)."""
    tensors = [one.packed.packed for one in layers_of(model).values()]
    spans = {(one.data_ptr(), one.nbytes) for one in tensors}
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for _, size in spans), sum(memory.values())


@pytest.mark.parametrize("family", ["opt", "minimax"])
def test_layers_that_are_merged_in_another_order_are_held_once(tmp_path, family):
    """OPT has k, v and q, and calls q, k and v. MiniMax merges layers that are not neighbours: these are copied."""
    model = tiny_with_states(family) if family in STATE_FAMILIES else tiny(family)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    model, plain = (load_model(checkpoint, CPU, torch.float32, pack=pack) for pack in (True, False))
    tokens = torch.arange(2, 14)
    kinds = fuse(model, tokens, kernels_on(CPU)).counts
    before = held(model)
    free_merged(model)
    weights, memory = held(model)
    assert kinds["products"] and weights == memory and (before[1] > memory) == (family == "minimax")
    with torch.inference_mode():
        found, right = (one(input_ids=tokens[None], use_cache=False).logits for one in (model, plain))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_a_file_for_other_layers_is_not_used(saved, own_folder):
    quantized(saved)
    cache, file = WeightCache(), next(own_folder.glob("*.weights"))
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
    monkeypatch.setattr(weight_cache.os, "utime", refuse)
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

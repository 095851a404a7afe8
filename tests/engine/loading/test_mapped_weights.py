"""Weights that lie in mapped files: the same bytes at the same addresses, whatever was given back in between."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

from benchmarks.loading import cached_bytes
from pagetide.engine.layers.linears import PackedWeight
from pagetide.engine.loading import mapped_weights, weight_cache
from pagetide.engine.loading.mapped_weights import LEAST_BYTES, MappedWeights
from pagetide.engine.loading.weight_cache import WeightCache

MIB = 1 << 20


class Model(nn.Module):
    """Weights of all kinds: a large one, views of one memory, one that is small, packed ones, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        random = torch.randn(1 << 19, generator=generator)
        self.large = nn.Parameter(random[: 1 << 18].clone(), requires_grad=False)
        whole = random[1 << 18 :].clone()
        self.first, self.second = (nn.Parameter(part, requires_grad=False) for part in whole.split(1 << 17))
        self.small = nn.Parameter(random[:8].clone(), requires_grad=False)
        packed, scales = (torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in (MIB, 1 << 17))
        self.experts = [PackedWeight("int8", 1, 1, packed, scales.view(torch.float32))]
        self.register_buffer("state", random[: 1 << 16].clone())

    def content(self) -> list[bytes]:
        (expert,) = self.experts
        tensors = [*self.parameters(), *self.buffers(), expert.packed, expert.scales]
        return [one.view(torch.uint8).numpy().tobytes() for one in tensors if one is not None]

    def places(self) -> list[int]:
        return [one.data_ptr() for one in (*self.parameters(), self.experts[0].packed)]


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", 16 * MIB)


@pytest.mark.parametrize("level", [1, 2])
def test_what_was_given_back_is_there_again(cache: WeightCache, level: Any) -> None:
    """With `fill` and without it."""
    model = Model()
    content, places = model.content(), model.places()
    weights = MappedWeights.of(model, cache)
    assert 3.1 * MIB - 5 * 4096 * 2 < weights.num_bytes <= 3.125 * MIB, "all but the small one and the buffer, in whole pages"
    assert cached_bytes(weights) == weights.num_bytes and weights.uncounted_bytes == 0
    for fills in (True, False):
        weights.drop(level)
        if level == 2:
            assert cached_bytes(weights) <= 0.05 * weights.num_bytes
        if fills:
            weights.fill()
            weights.wait()
            assert weights.uncounted_bytes == 0 and cached_bytes(weights) == weights.num_bytes
        assert model.content() == content and model.places() == places
    model.state.zero_()
    weights.drop(level)
    assert not model.state.any(), "a buffer may be written"
    assert list(cache.folder.iterdir()) == []


def test_weights_that_a_file_has_stay_in_it(cache: WeightCache, tmp_path: Path) -> None:
    """As a checkpoint's or the cache's. Where they were written to, or the file is another one by now, they do not."""

    def mapped(name: str) -> nn.Module:
        path = tmp_path / name
        path.write_bytes(bytes(range(256)) * 4096)
        module = nn.Module()
        storage = torch.UntypedStorage.from_file(str(path), False, MIB)  # private
        module.weight = nn.Parameter(torch.tensor([], dtype=torch.uint8).set_(storage), requires_grad=False)
        return module

    kept, written, gone = (mapped(name) for name in ("kept", "written", "gone"))
    written.weight[5] = 77
    (tmp_path / "gone").unlink()
    for module in (kept, written, gone):
        before = module.weight.clone()
        weights = MappedWeights.of(module, cache)
        weights.drop(1)
        assert torch.equal(module.weight, before) and weights.num_bytes == MIB
        assert (weights._own is None) == (module is kept)


@pytest.mark.parametrize("fault", ["full", "bound", "others", "in memory"])
def test_no_file_leaves_the_weights_as_they_are(cache: WeightCache, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    if fault == "full":
        monkeypatch.setattr(mapped_weights.os, "fsync", full)
    elif fault == "in memory":
        monkeypatch.setattr(weight_cache, "_lies_in_memory", lambda folder: folder == cache.folder)
    elif fault == "bound":
        cache.most_bytes = MIB
    else:
        cache.folder.mkdir(mode=0o777)
        os.chmod(cache.folder, 0o777)
    model = Model()
    content = model.content()
    with pytest.raises(OSError):
        MappedWeights.of(model, cache)
    assert model.content() == content and not (cache.folder.exists() and list(cache.folder.iterdir()))


def test_pages_without_tensors_are_plain_memory_again(cache: WeightCache) -> None:
    """Before an allocator gets them; what lies in one tensor is kept as long as it."""
    model = Model()
    weights = MappedWeights.of(model, cache)
    files, second, content = str(cache.folder), model.second, model.content()[2]
    assert Path("/proc/self/maps").read_text().count(files) >= 3
    del model, weights
    gc.collect()
    assert second.numpy().tobytes() == content and Path("/proc/self/maps").read_text().count(files) in (1, 2)
    del second
    gc.collect()
    assert files not in Path("/proc/self/maps").read_text()


def test_old_kernels_read_what_they_cannot_map_ahead(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_weights, "_MADV_POPULATE_READ", 4711)
    weights = MappedWeights.of(Model(), cache)
    weights.drop(2)
    weights.fill()
    weights.wait()
    assert cached_bytes(weights) == weights.num_bytes


def test_folders_in_memory_are_known_by_their_mounts(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    line = f"36 25 {os.major(device)}:{os.minor(device)} / /some/folder rw,nosuid shared:5 - {{}} tmpfs rw,size=4k\n"
    mounts = tmp_path / "mountinfo"
    for kinds, expected in ((("tmpfs",), True), (("ext4",), False), ((), False)):
        mounts.write_text("25 1 999:77 / / rw - tmpfs none rw\n" + "".join(map(line.format, kinds)))
        assert weight_cache._lies_in_memory(tmp_path, mounts) is expected


def test_filling_ends_when_it_is_told_to(cache: WeightCache) -> None:
    model = Model()
    weights = MappedWeights.of(model, cache)
    for _ in range(20):
        weights.drop(1)
        weights.fill()
        assert weights.uncounted_bytes <= weights.num_bytes
        weights.stop()
        assert weights.uncounted_bytes == 0
    assert weights.num_bytes >= LEAST_BYTES

"""Devices of a divided engine that make no sense are refused; a shard that hangs is told from those that wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagetide import LLM
from pagetide.engine.config import EngineConfig, ModelSpec
from pagetide.engine.errors import ConfigError, DeviceNotFound
from pagetide.engine.shards.pulse import PulseWatch, Sign


def test_devices_that_make_no_sense_are_refused() -> None:
    for options, message in (
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 to"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer"),
        ({"devices": []}, "devices must name 1 to"),
        ({"devices": ["cpu", "cuda:0"]}, "all be CUDA devices or all 'cpu'"),
        ({"devices": ["cuda", "cuda"]}, "must name each device"),
        ({"devices": ["cpu", "cpu"], "tensor_parallel_size": 3}, "tensor_parallel_size is 3, and devices names 2"),
        ({"devices": ["cpu", "cpu"], "device": "cuda"}, "devices or device, not both"),
        ({"devices": ["cuda:0", "cuda:1"], "device": "cuda:0"}, "devices or device, not both"),
        ({"device": "cuda:0", "tensor_parallel_size": 2}, "name them all"),
        ({"devices": 7}, "devices must be a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.resolve("demo", **options)


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="there are as many devices")
def test_devices_that_are_not_there_are_refused_with_what_is() -> None:
    with pytest.raises(DeviceNotFound, match=r"8 shards were asked for on cuda:0, .*torch sees .*device='cpu'"):
        LLM("demo", devices=[f"cuda:{i}" for i in range(8)])


def test_devices_go_before_what_the_models_file_says_and_may_agree_with_device(tmp_path: Path) -> None:
    spec = ModelSpec("m", tmp_path, "a test", device="cuda:0")
    assert EngineConfig.resolve(spec, devices="cpu, cpu").devices == ("cpu", "cpu")
    assert EngineConfig.resolve(spec, devices=["cpu", "cpu"], device="cpu").devices == ("cpu", "cpu")
    assert EngineConfig.resolve(spec, device="cpu", tensor_parallel_size=3).devices == ("cpu",) * 3


def test_a_shard_that_hangs_is_told_from_those_that_wait_for_it_and_from_one_with_much_to_do() -> None:
    waits = Sign(1, 0, 0, (5, 0, 0) * 3, progress=9, allowed_s=20.0, done=6)
    behind = waits._replace(collectives=(4, 0, 0) * 3)
    asleep = waits._replace(allowed_s=0.0)  # it has not read the newest message

    def given_up(seconds: float, *signs: Sign, is_loaded: bool = True, beats: bool = True, later: int = 0) -> object:
        """`later`: looks in which the last one still gets on."""
        watch = PulseWatch(2, silent_s=10.0)
        for look in range(round(seconds * 4)):
            said = [sign._replace(beats=1 + look * beats) for sign in signs]
            said[-1] = said[-1]._replace(progress=signs[-1].progress + max(0, later - look))
            assert watch.look(said, 7, is_loaded, look / 4) is None
        return watch.look(said, 7, is_loaded, seconds)

    hangs = "hangs: it is at work, and has come no further for 20 s"
    assert given_up(20.25, waits, behind) == ([1], hangs) == given_up(20.25, waits, behind, later=8)
    assert given_up(20.25, waits, waits) == ([0, 1], hangs) == given_up(20.25, asleep, asleep)
    assert given_up(100, *[waits._replace(allowed_s=900.0)] * 2) is None
    assert given_up(100, *[waits._replace(done=7)] * 2) is None, "there is nothing to do"
    assert given_up(100, waits, behind, is_loaded=False) is None
    assert given_up(10.25, waits, behind, beats=False) == ([0, 1], "gave no sign of life for 10 s")

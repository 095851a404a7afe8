"""The disk tier of a real engine: after a restart it gives the tokens of an engine without a cache."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from families import VOCAB, tiny
from state_families import STATE_FAMILIES, tiny_with_states

from pagetide import LLM, SamplingParams
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.retention import Retention
from pagetide.cli import main
from pagetide.engine.errors import ConfigError
from pagetide.engine.execution import disk_tier
from pagetide.engine.execution.disk_files import BlockKind, DiskFiles
from pagetide.engine.execution.disk_tier import DiskRead, DiskTier
from pagetide.scheduler.cost import SwapCost

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
PROMPT = [3 + (7 * i * i + i // 9) % (VOCAB - 3) for i in range(150)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def slow_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that reading is worth it, and is not abandoned, whatever the machine does."""
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)


def engine(saved: str, path: Path | None, **more: Any) -> LLM:
    more = {"kv_memory": "2MiB", **more}
    if path is not None:
        more = {"disk_kv_memory": "4MiB", "disk_kv_path": path, **more}
    return LLM(saved, device="cpu", dtype="float32", share=False, **more)


def told(llm: LLM, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    """The tokens for each prompt, one after the other."""
    return [list(llm.generate([{"prompt_token_ids": prompt, **more}], GREEDY)[0].token_ids) for prompt in prompts]


@pytest.mark.parametrize(
    "more",
    [{}, {"kv_cache_dtype": "int8", "host_kv_memory": "1MiB", "max_chunk_tokens": 40}],
    ids=["plain", "int8, host, chunks"],
)
def test_tokens_after_a_restart_are_those_without_a_cache(saved: str, tmp_path: Path, more: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT[:90] + PROMPT[:40]]
    with engine(saved, None, prefix_caching=False, kv_cache_dtype=more.get("kv_cache_dtype", "auto")) as plain:
        expected = told(plain, prompts)
    with engine(saved, tmp_path, **more) as first:
        assert told(first, prompts, retention=Retention(1e4, num_tokens=100)) == expected
        told(first, [PROMPT[50::-1]], retention=Retention(1e4, num_tokens=0))
    with engine(saved, tmp_path, **more) as second:
        assert second.stats()["disk_tier"]["retained_blocks"] == 6 + 1, "hints outlive the process"
        assert told(second, prompts, cache_salt="another") == expected
        assert second.stats()["disk_tier"]["hit_tokens"] == 0
        outputs = [second.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [output.token_ids for output in outputs] == expected
        assert [(output.num_cached_tokens, output.num_disk_tokens) for output in outputs] == [(144, 144), (128, 48)]
        assert second.stats()["disk_tier"]["hit_tokens"] == 144 + 48
        read = [one for one in second.explain() if one["what"] == "read"]
        assert [(one["found"], one["read"], one["why"]) for one in read] == [(0, 144, ""), (80, 48, "")]
        second.reset_prefix_cache()
        assert told(second, prompts) == expected
        assert second.stats()["disk_tier"]["hit_tokens"] == 144 + 48


@pytest.mark.parametrize(
    ("family", "at"), [("gemma3_text", [144, 112, 128]), ("qwen3_5_text", [144, 80, 48]), ("mistral", [144, 112, 128])]
)
def test_windows_and_states_are_read_where_all_layers_can_go_on(tmp_path: Path, family: str, at: list[int]) -> None:
    """Behind the end of a prompt, and where two have parted; what a flipped bit hits is computed."""
    model = tiny_with_states(family) if family in STATE_FAMILIES else tiny(family, sliding_window=40)
    model.save_pretrained(saved := str(tmp_path / "model"))
    prompts = [PROMPT, PROMPT[:90] + PROMPT[:40], PROMPT[:112] + PROMPT[:9]]
    with engine(saved, None, prefix_caching=False) as plain:
        expected = told(plain, prompts)
    with engine(saved, tmp_path, max_chunk_tokens=40) as first:
        assert told(first, prompts[:2]) == expected[:2]
    for damaged in (False, True):
        if damaged:
            (data,) = tmp_path.glob("*/0000.kv")
            raw = bytearray(data.read_bytes())
            raw[len(raw) // 2] ^= 1
            data.write_bytes(raw)
        with engine(saved, tmp_path) as second:
            outputs = [second.generate([prompt], GREEDY)[0] for prompt in (prompts[0], prompts[2], prompts[1])]
            assert [list(output.token_ids) for output in outputs] == [expected[0], expected[2], expected[1]]
            again = second.generate([prompts[0]], GREEDY)[0]
            assert (list(again.token_ids), again.num_cached_tokens, again.num_disk_tokens) == (expected[0], 144, 0)
            if not damaged:
                assert [output.num_disk_tokens for output in outputs] == at
            else:
                assert "damaged" in [one["why"] for one in second.explain()]
            with second.locked_engine() as parts:
                parts.core.scheduler.cache.check_invariants()
                parts.core.disk.index.check_invariants()


def test_reads_that_fail_stall_or_take_longer_than_computing_are_done_without(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(saved, tmp_path) as llm:
        expected = told(llm, [PROMPT])
    (data,) = tmp_path.glob("*/0000.kv")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with engine(saved, tmp_path) as llm:
        assert told(llm, [PROMPT]) == expected
        (decision,) = llm.explain()
        assert 0 < decision["read"] < 144
        assert decision["why"] == "damaged"
    with engine(saved, tmp_path) as llm:
        monkeypatch.setattr(DiskFiles, "read", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad sector")))
        assert told(llm, [PROMPT]) == expected
        monkeypatch.setattr(DiskRead, "run", lambda *_: None)
        monkeypatch.setattr(disk_tier, "LEAST_LIMIT_S", 0.01)
        monkeypatch.setattr(SwapCost, "tokens_per_s", 1e9)
        assert told(llm, [PROMPT[:64] + PROMPT[:30]]) == told(llm, [PROMPT[:64] + PROMPT[:30]])
        assert "bad sector" in llm.explain()[0]["why"]
        assert llm.stats()["disk_tier"]["hit_tokens"] == 0
    monkeypatch.undo()
    with engine(saved, tmp_path) as other, caplog.at_level(logging.WARNING):
        with engine(saved, tmp_path) as llm:
            assert llm.stats()["disk_tier"] is None
            assert told(llm, [PROMPT]) == expected
        assert "another engine uses" in caplog.text
        assert other.stats()["disk_tier"]["hit_tokens"] == 0


def test_reads_that_wait_for_others_count_not_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DiskFiles(tmp_path / "one", 64 << 10, BlockKind("model", 1000, 4))
    chain = files.index.chain(np.arange(8, dtype=np.int32), None)
    files.index.written(files.write(files.index.take(chain, 2), np.zeros((2, 1000), np.uint8)))
    began, go_on = threading.Event(), threading.Event()
    read_all = DiskFiles.read

    def read_late(self: DiskFiles, *args: Any) -> int:
        began.set()
        go_on.wait()
        return read_all(self, *args)

    monkeypatch.setattr(DiskFiles, "read", read_late)
    runner = Mock(put_s_per_byte=0.0)
    tier = DiskTier(files, runner, disk_tier.planned_bytes(1000, 1 << 20))  # for 4 blocks
    first, behind, third = (tier.begin(chain, 0, 8, 0.1) for _ in range(3))
    assert first is not None
    assert behind is not None
    assert third is not None
    assert (third.is_over, third.why) == (True, "reads for other requests take the memory for them")
    assert len(tier.finish(third)) == 0
    began.wait()
    assert len(tier.finish(behind)) == 0
    assert (behind.why, behind.seconds) == ("slower than computing", 0.0)
    assert tier.to_dict()["read_bytes_per_s"] is None
    go_on.set()
    first.wait(60)
    assert len(tier.finish(first)) == 2
    assert first.seconds > 0
    assert tier.to_dict()["read_bytes_per_s"] > 0
    tier.close()


def test_units_for_which_there_are_no_places_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine without requests would write a block and evict it again for ever."""
    monkeypatch.setattr(disk_tier, "MOST_WRITES_BYTES", 4000)
    files = DiskFiles(tmp_path / "one", 18 << 10, BlockKind("model", 1000, 4, (LayerGroup(3, window=9),)))
    chain, blocks, ends = PrefixHasher(4).chain(np.arange(24)), np.arange(6, dtype=np.int32), np.array([4, 5])
    runner, cache = Mock(), Mock(bytes_at=lambda blocks: blocks)
    runner.copy_blocks = lambda blocks: Mock(wait=lambda: np.zeros((len(blocks), 1000), np.uint8))
    cache.worth_keeping = lambda *_: (blocks, [(ends, np.stack([ends] * 3).astype(np.int32))])
    tier = DiskTier(files, runner)
    tier.committed(chain, 6)
    for _ in range(9):
        tier.save(cache, is_idle=True)
        tier.wait(60)
    assert files.index.num_places == 7
    assert not tier.is_behind
    tier.close()


def test_a_disk_that_cannot_be_written_costs_a_warning(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(DiskFiles, "write", full)
    with engine(saved, tmp_path) as llm:
        first = told(llm, [PROMPT])
        assert told(llm, [PROMPT]) == first
        assert llm.stats()["disk_tier"]["failures"] >= 1
        assert llm.stats()["disk_tier"]["used_blocks"] == 0


def test_a_tier_that_fails_is_not_used_and_costs_no_request(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(saved, tmp_path) as llm:
        expected = told(llm, [PROMPT])[0]
    failed, read_all = threading.Event(), DiskFiles.read

    def save(*_: Any, **__: Any) -> None:
        failed.set()
        raise RuntimeError("a fault")

    def read_late(self: DiskFiles, *args: Any) -> int:
        failed.wait()
        return read_all(self, *args)

    monkeypatch.setattr(DiskTier, "save", save)
    monkeypatch.setattr(DiskFiles, "read", read_late)
    with engine(saved, tmp_path) as llm:
        other, output = llm.generate([[5] * 40, PROMPT], GREEDY)
        assert list(output.token_ids) == expected
        assert other.finish_reason == output.finish_reason
        assert llm.stats()["disk_tier"] is None


def test_ends_are_delivered_before_the_engine_turns_to_the_disk(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended, save = threading.Event(), DiskTier.save

    def save_behind(self: DiskTier, cache: Any, is_idle: bool) -> None:
        assert not is_idle or has_ended.wait(60), "the caller waits for it"
        save(self, cache, is_idle)

    monkeypatch.setattr(DiskTier, "save", save_behind)
    with engine(saved, tmp_path) as llm:
        expected = told(llm, [PROMPT])
        has_ended.set()
    with engine(saved, tmp_path) as llm:
        assert told(llm, [PROMPT]) == expected
        assert llm.stats()["disk_tier"]["hit_tokens"] == 144, "and is not forgotten"


def test_the_command_shows_and_clears_what_no_engine_uses(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cache", "clear", "--kind", "kv", "--path", str(tmp_path)]
    with engine(saved, tmp_path) as llm:
        told(llm, [PROMPT])
        assert main(command) == 1
        assert "another engine uses" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert main(["cache", "info", "--kind", "kv", "--path", str(tmp_path)]) == 0
    assert folder.name in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > 9 * 1024
    assert not list(tmp_path.iterdir())


def test_what_is_not_kept_on_disk_is_refused(saved: str, tmp_path: Path) -> None:
    for more, match in (
        ({"prefix_caching": False}, "leave prefix_caching on"), ({"disk_kv_memory": "9KiB"}, "hold no block"),
        ({"disk_kv_path": 3}, "path of a folder"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            engine(saved, tmp_path, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "posix_fadvise")
        with pytest.raises(ConfigError, match="needs Linux"):
            engine(saved, tmp_path)
    with pytest.raises(ConfigError, match="its content has no name"):
        LLM(tiny("llama"), device="cpu", disk_kv_memory="1MiB")

"""The disk tier of processes that are killed at random instants, on disks that are full or change bits."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import VOCAB, tiny
from hypothesis import settings
from sharded_engines import saved
from state_families import STATE_FAMILIES, tiny_with_states

from pagetide import LLM, SamplingParams
from pagetide.cache.layer_groups import LayerGroup, state_group
from pagetide.cache.retention import Retention
from pagetide.engine.errors import EngineClosed, ShardLost
from pagetide.engine.execution.disk_files import BlockKind, DiskFiles, folder_bytes
from pagetide.scheduler.cost import SwapCost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it kills processes")

KIND, CAP = BlockKind("model", 3000, 4, (LayerGroup(2, window=9), state_group(3))), 256 << 10
KINDS = {"blocks and units": KIND, "units alone": replace(KIND, nodes_per_place=4)}
NUM_KILLS = 500 if not settings.default.derandomize else 50  # more in `make soak`
GREEDY = SamplingParams(max_new_tokens=5, temperature=0)


def content(path: tuple[int, ...], table: int = 0) -> np.ndarray:
    """The bytes that a table has of the last block of `path`."""
    return np.random.default_rng((*path, 9 + table)).integers(0, 256, 3000).astype(np.uint8)


def write_for_ever(folder: Path, kind: BlockKind, seed: int) -> None:
    """Write random prefixes, and hints for them, until killed; now and then the disk is full, also amid a write."""
    draw, real = random.Random(seed), os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if draw.random() < 0.05:
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(file, data[: draw.randint(1, len(data))] if draw.random() < 0.3 else data, offset)

    files = DiskFiles(folder, CAP, kind)
    os.pwrite = pwrite  # type: ignore[assignment]
    while True:
        path = tuple(draw.randint(0, 3) for _ in range(draw.randint(1, 8)))
        chain = files.index.chain(np.repeat(np.array(path, np.int32), 4), None)
        records = files.index.take(chain, len(path))
        if not len(records):
            with suppress(OSError):
                files.note(files.index.retain(chain, len(path), Retention(draw.choice((1.0, 9.0, 99.0))), time.time()))
            continue
        depths = np.flatnonzero(np.array([draw.random() < 0.5 for _ in path]))
        for number in (0, 1):
            lacking = files.index.lack_units(chain, number, depths)
            records = np.append(records, files.index.take_units(chain, number, depths[lacking])[0])
        with_bytes = records[files.index.have_bytes(records)]
        data = np.array([content(path[: int(record["depth"]) + 1], int(record["table"])) for record in with_bytes])
        try:
            files.index.written(files.write(records, data))
            files.tidy()
        except OSError:
            files.index.forget(records)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_kill_full_disk_or_flipped_bit_gives_a_wrong_block_or_more_than_the_cap(tmp_path: Path, kind: BlockKind) -> None:
    draw, num_read, num_of_units, num_damaged, num_retained = random.Random(7), 0, 0, 0, 0
    for kill in range(NUM_KILLS):
        child = os.fork()
        if not child:
            try:
                write_for_ever(tmp_path / "kv", kind, kill)
            finally:
                os._exit(1)
        time.sleep(draw.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself: a start was refused"
        if kill % 3 == 0 and (paths := [p for p in (tmp_path / "kv").glob("*") if p.stat().st_size]):
            with draw.choice(sorted(paths)).open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if kill % 2:
                    file.truncate(draw.randrange(size))
                else:
                    file.seek(draw.randrange(size))
                    file.write(bytes([draw.randrange(256)]))
        files = DiskFiles(tmp_path / "kv", CAP, kind)
        files.index.check_invariants()
        assert folder_bytes(tmp_path / "kv") <= CAP
        num_retained += files.index.num_retained
        records = files.index.live_records()
        for record in records[files.index.have_bytes(records)]:
            path = path_of(files, record)
            out = np.empty((1, 3000), np.uint8)
            if files.read(record[None], out, lambda _: True):
                assert (out[0] == content(path, int(record["table"]))).all(), "bytes of another block or table"
                num_read += 1
                num_of_units += record["table"] > 0
            else:
                num_damaged += 1
        files.close()
    assert num_of_units > 0
    assert (num_read > num_of_units) == (not kind.nodes_per_place)
    assert num_damaged
    assert num_retained


def path_of(files: DiskFiles, record: Any) -> tuple[int, ...]:
    by_digest = {one["digest"].tobytes(): one for one in files.index.live_records() if not one["table"]}
    path = [int(record["tokens"][0])]
    while record["depth"]:
        record = by_digest[record["parent"].tobytes()]
        path.append(int(record["tokens"][0]))
    return tuple(path[::-1])


SERVER = """
import sys
from pagetide import LLM, SamplingParams
options = {"kv_memory": "2MiB", "disk_kv_memory": "1MiB", "disk_kv_path": sys.argv[2]}
with LLM(sys.argv[1], device="cpu", dtype="float32", share=False, **options) as llm:
    print("ready", flush=True)
    for seed in range(10**9):
        llm.generate([[1 + (seed % 7 + i * i) % 90 for i in range(120)]], SamplingParams(max_new_tokens=5, temperature=0))
        print(seed, flush=True)
"""


def test_an_engine_that_is_killed_leaves_prefixes_with_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)
    tiny("llama").save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "share": False, "kv_memory": "2MiB"}
    prompts = [[1 + (seed + i * i) % min(90, VOCAB - 1) for i in range(120)] for seed in range(7)]
    with LLM(str(tmp_path / "model"), prefix_caching=False, **options) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    found = 0
    for kill in range(4):
        command = [sys.executable, "-P", "-c", SERVER, str(tmp_path / "model"), str(tmp_path / "kv")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            for _ in range(3 * kill):
                child.stdout.readline()
            child.kill()
        with LLM(str(tmp_path / "model"), disk_kv_memory="1MiB", disk_kv_path=tmp_path / "kv", **options) as llm:
            assert [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts] == expected
            found += llm.stats()["disk_tier"]["hit_tokens"]
    assert found > 0


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt_oss", {"max_chunk_tokens": 40}), ("gemma2", {"host_kv_memory": "1MiB", "kv_memory": "192KiB"}),
        ("gemma3_text", {"kv_cache_dtype": "int8"}), ("qwen3_5_text", {"max_chunk_tokens": 24}), ("lfm2", {}), ("jamba", {}),
        ("olmo_hybrid", {"kv_memory": "192KiB", "max_seqs": 3}), ("mistral", {"max_chunk_tokens": 40}),
        ("mamba2", {"kv_memory": "1MiB", "host_kv_memory": "1MiB"}), ("falcon_mamba", {}),
    ],
)  # fmt: skip
def test_turns_of_models_with_windows_and_states_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, more: dict[str, Any]
) -> None:
    """Conversations that share prefixes, each turn in a new process, with forks, several requests at a time."""
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)
    model = tiny_with_states(family) if family in STATE_FAMILIES else tiny(family, sliding_window=37)
    model.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "share": False, "kv_memory": "2MiB"}
    sampling = SamplingParams(max_new_tokens=21, temperature=0.7, seed=3, n=2)
    base = [3 + (7 * i * i + i // 9) % (VOCAB - 3) for i in range(150)]
    prompts, found = [base[:100] + base[at : at + 20] for at in range(5)], 0
    for _ in range(3):
        with LLM(
            str(tmp_path / "model"), prefix_caching=False, **{**options, "kv_cache_dtype": more.get("kv_cache_dtype", "auto")}
        ) as llm:
            expected = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, sampling)]
        with LLM(str(tmp_path / "model"), disk_kv_memory="8MiB", disk_kv_path=tmp_path / "kv", **{**options, **more}) as llm:
            outputs = llm.generate(prompts, sampling)
            assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
            found += llm.stats()["disk_tier"]["hit_tokens"]
            with llm.locked_engine() as parts:
                parts.core.scheduler.cache.check_invariants()
                parts.core.disk.index.check_invariants()
        prompts = [prompt + list(tokens[0]) + [5, 6, 7] for prompt, tokens in zip(prompts, expected, strict=True)]
    assert found > 2 * 100


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_shards_read_what_shards_of_the_same_number_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All of a block or nothing: a bit of one shard's part makes all compute; pins hold as on one device."""
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)
    saved(name, tmp_path / "model", max_position_embeddings=512)
    options: dict[str, Any] = {"dtype": "float32", "share": False, "kv_memory": "2MiB", "max_model_len": 400}
    two: dict[str, Any] = {**options, "devices": ["cpu", "cpu"], "disk_kv_memory": "8MiB", "disk_kv_path": tmp_path / "kv"}
    base = [3 + (7 * i * i + i // 9) % (VOCAB - 3) for i in range(150)]
    prompts = [base[:100] + base[at : at + 20] for at in range(3)]

    def told(llm: LLM) -> list[Any]:
        return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]

    with LLM(str(tmp_path / "model"), prefix_caching=False, **{**options, "devices": ["cpu", "cpu"]}) as llm:
        expected = told(llm)
    hits, block_bytes = [], 0
    for turn in ("write", "read", "damaged"):
        if turn == "damaged":
            (data,) = (tmp_path / "kv").glob("*/0000.kv")
            raw = bytearray(data.read_bytes())
            raw[block_bytes - 1 :: block_bytes] = bytes(byte ^ 1 for byte in raw[block_bytes - 1 :: block_bytes])  # of the last
            data.write_bytes(raw)
        with LLM(str(tmp_path / "model"), **two) as llm:
            if turn == "read":
                pinned = llm.pin_prefix(prompts[0])
                assert (pinned.num_tokens, llm.stats()["prefix_cache"]["pins"]) == (112, 1)
                assert llm.unpin_prefix(pinned)
            assert told(llm) == expected
            hits.append(llm.stats()["disk_tier"]["hit_tokens"])
            with llm.locked_engine() as parts:
                parts.core.scheduler.cache.check_invariants()
                parts.core.disk.index.check_invariants()
                block_bytes = 2 * parts.plan.geometry.payload_bytes
    assert hits[0] == hits[2] == 0 < hits[1], "no shard uses its part of a block without the others"
    with LLM(str(tmp_path / "model"), **{**two, "devices": ["cpu"]}) as llm:
        assert [len(tokens) for tokens in told(llm)] == [5] * 3
        assert llm.stats()["disk_tier"]["hit_tokens"] == 0


def test_a_shard_that_is_killed_leaves_prefixes_with_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)
    saved("llama", tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "share": False, "kv_memory": "2MiB", "devices": ["cpu", "cpu"]}
    kept: dict[str, Any] = {"disk_kv_memory": "8MiB", "disk_kv_path": tmp_path / "kv"}
    prompts = [[1 + (seed + i * i) % 90 for i in range(120)] for seed in range(4)]
    with LLM(str(tmp_path / "model"), prefix_caching=False, **options) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    for rank in (0, 1):
        with LLM(str(tmp_path / "model"), **options, **kept) as llm:
            assert llm.generate([prompts[rank]], GREEDY)[0].token_ids == expected[rank]
            os.kill(llm.stats()["shards"]["each"][rank]["pid"], signal.SIGKILL)
            with suppress(ShardLost, EngineClosed):
                llm.generate([prompts[2]], GREEDY)
    with LLM(str(tmp_path / "model"), **options, **kept) as llm:
        assert [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts] == expected

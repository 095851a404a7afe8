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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import VOCAB, tiny
from hypothesis import settings

from pagetide import LLM, SamplingParams
from pagetide.cache.retention import Retention
from pagetide.engine.execution.disk_files import BlockKind, DiskFiles, folder_bytes
from pagetide.scheduler.cost import SwapCost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it kills processes")

KIND, CAP = BlockKind("model", 3000, 4), 256 << 10
NUM_KILLS = 500 if not settings.default.derandomize else 50  # more in `make soak`
GREEDY = SamplingParams(max_new_tokens=5, temperature=0)


def content(path: tuple[int, ...]) -> np.ndarray:
    """The bytes of the last block of `path`."""
    return np.random.default_rng(path).integers(0, 256, 3000).astype(np.uint8)


def write_for_ever(folder: Path, seed: int) -> None:
    """Write random prefixes, and hints for them, until killed; now and then the disk is full, also amid a write."""
    draw, real = random.Random(seed), os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if draw.random() < 0.05:
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(file, data[: draw.randint(1, len(data))] if draw.random() < 0.3 else data, offset)

    files = DiskFiles(folder, CAP, KIND)
    os.pwrite = pwrite  # type: ignore[assignment]
    while True:
        path = tuple(draw.randint(0, 3) for _ in range(draw.randint(1, 8)))
        chain = files.index.chain(np.repeat(np.array(path, np.int32), 4), None)
        records = files.index.take(chain, len(path))
        if not len(records):
            with suppress(OSError):
                files.note(files.index.retain(chain, len(path), Retention(draw.choice((1.0, 9.0, 99.0))), time.time()))
            continue
        data = np.array([content(path[: int(record["depth"]) + 1]) for record in records])
        try:
            files.index.written(files.write(records, data))
            files.tidy()
        except OSError:
            files.index.forget(records)


def test_no_kill_full_disk_or_flipped_bit_gives_a_wrong_block_or_more_than_the_cap(tmp_path: Path) -> None:
    draw, num_read, num_damaged, num_retained = random.Random(7), 0, 0, 0
    for kill in range(NUM_KILLS):
        child = os.fork()
        if not child:
            try:
                write_for_ever(tmp_path / "kv", kill)
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
        files = DiskFiles(tmp_path / "kv", CAP, KIND)
        files.index.check_invariants()
        assert folder_bytes(tmp_path / "kv") <= CAP
        num_retained += files.index.num_retained
        for record in files.index.live_records():
            path = path_of(files, record)
            out = np.empty((1, 3000), np.uint8)
            if files.read(record[None], out, lambda _: True):
                assert (out[0] == content(path)).all(), "bytes of another block"
                num_read += 1
            else:
                num_damaged += 1
        files.close()
    assert num_read
    assert num_damaged
    assert num_retained


def path_of(files: DiskFiles, record: Any) -> tuple[int, ...]:
    by_digest = {one["digest"].tobytes(): one for one in files.index.live_records()}
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

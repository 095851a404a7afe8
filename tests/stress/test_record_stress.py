"""The record under a writer that does nothing but write, and under one that is killed over and over."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
from record_processes import STEADY, kill_one_while_it_writes, read_while_written

from pagetide.monitor.record import RecordReader, RecordWriter

pytestmark = pytest.mark.stress
DRAW = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same in every worker
SEEDS = [int(s) for s in os.environ.get("PAGETIDE_SEEDS", "").split(",") if s] or DRAW.sample(range(2**32), 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_four_readers_never_see_a_torn_record(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    for report in read_while_written(tmp_path / "record", seed, readers=4, seconds=4.0):
        print(report)
        assert report["records"] and report["details"] and report["gone"]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_writers_leave_whole_records_and_successors_are_picked_up(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    rng, path = random.Random(seed), tmp_path / "record"
    with RecordWriter.create(path, source="the first"):
        reader = RecordReader.open(path)
    for _ in range(25):
        kill_one_while_it_writes(path, reader, rng)
    assert os.listdir(tmp_path) == ["record"]


def test_a_thousand_rounds_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record"
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        with RecordWriter.create(path, source="test") as writer, RecordReader.open(path) as reader:
            writer.set_devices([STEADY])
            reader.memory(STEADY.uuid)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path) == []
    assert str(path) not in Path("/proc/self/maps").read_text()

"""The simulation of engines that share a device: the same figures each time, all requests served, no bytes twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.shared_device import Served
from benchmarks.sharing import MIXES, SliceOutcome, run

MIX = replace(MIXES["2x14b"], seconds=8)
# The second engine is idle but for one request: the first needs more than half of the memory.
BURST = [Served(0, 0.1 * i, 3_000, 60, np.empty(0, np.int64)) for i in range(24)]
LOAD = [*BURST, Served(1, 7.0, 500, 20, np.empty(0, np.int64))]
REPEATED = [Served(i % 2, 1.0 * i, 6_400, 10, (i % 2) * 1_000 + np.arange(100)) for i in range(12)]


def of(arrangement: str, load: list[Served]) -> SliceOutcome:
    return replace(run(MIX, load, arrangement), cpu_s=0.0)


def test_a_run_depends_on_its_arguments_alone() -> None:
    for arrangement in ("static", "leases", "first"):
        assert of(arrangement, LOAD) == of(arrangement, LOAD), arrangement


def test_an_engine_with_leases_takes_what_an_idle_one_leaves() -> None:
    static, leases, whole = (of(arrangement, LOAD) for arrangement in ("static", "leases", "whole"))
    assert static.first_s > leases.first_s >= whole.first_s
    assert leases.preemptions == 0


def test_prompts_that_come_again_are_found_in_each_arrangement() -> None:
    for arrangement in ("static", "pool", "leases", "whole"):
        assert of(arrangement, REPEATED).hits_each == (10 / 12 * 6_336 / 6_400,) * 2, arrangement

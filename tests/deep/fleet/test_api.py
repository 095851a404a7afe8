"""`Fleet` gives what an `AsyncLLM` gives, with all kinds of parameters; each worker has an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from output_cuts import CASES, Cutter, check_cut_after_every_record

from pagetide import AsyncLLM, Fleet
from tests.fleet_calls import PARAMETERS, check_a_death, check_chunks, check_outputs, talking_engines
from tests.fleet_rig import FleetRig, IdleRig


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AsyncLLM]]:
    """The oracle, and two engines for workers."""
    with talking_engines(tmp_path_factory.mktemp("models"), 3) as each:
        yield each


@pytest.fixture
def rig(engines: list[AsyncLLM], tmp_path: Path) -> FleetRig:
    return IdleRig(tmp_path, "talk", first=engines[1], second=engines[2])


@pytest.fixture
def fleet(rig: FleetRig) -> Fleet:
    return rig.fleet()


@pytest.mark.parametrize("name", PARAMETERS)
async def test_outputs_are_those_of_an_engine(name: str, fleet: Fleet, engines: list[AsyncLLM]) -> None:
    await check_outputs(fleet, engines[0], PARAMETERS[name])


@pytest.mark.parametrize("name", ["greedy", "n", "beams", "logprobs", "stop strings"])
async def test_chunks_add_up_to_the_output(name: str, fleet: Fleet, engines: list[AsyncLLM]) -> None:
    for interval in (1, 5):
        await check_chunks(fleet, engines[0], PARAMETERS[name], interval)


@pytest.mark.parametrize("name", ["sampled", "n", "best_of", "logprobs", "beams"])
async def test_requests_go_on_when_a_worker_dies(name: str, rig: FleetRig, fleet: Fleet, engines: list[AsyncLLM]) -> None:
    await check_a_death(rig, fleet, engines[0], name, 24 if name == "beams" else 60)


@pytest.mark.parametrize("case", CASES)
async def test_a_request_that_is_cut_after_every_record_goes_on_with_the_same_output(cutter: Cutter, case: str) -> None:
    await check_cut_after_every_record(cutter, case)

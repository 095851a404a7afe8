"""Six models that take turns in memory for two and a half: no request is lost, and each output is that of a model alone."""

from __future__ import annotations

from pathlib import Path

from models_in_turn import CLIENTS, Turns, arguments, make_models, outputs_alone
from servers import ServerProcess


def test_six_models_in_memory_for_two_and_a_half_lose_no_request(tmp_path: Path) -> None:
    make_models(tmp_path / "models")
    expected = outputs_alone(tmp_path / "models")
    assert len({one for some in expected.values() for one in some}) == sum(map(len, expected.values()))
    with ServerProcess(arguments(tmp_path / "models"), tmp_path / "log", OMP_NUM_THREADS="1") as server:
        turns = Turns(server, expected, 30.0)
        assert not turns.failures(), server.said[-4000:]
        assert turns.counts.total() >= CLIENTS

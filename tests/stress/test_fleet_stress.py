"""Kills of a real fleet's processes under load: the short form of `make soak`'s (tests/fleet_kills.py)."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install pagetide[ray]")

from fleet_kills import run

pytestmark = [pytest.mark.stress, pytest.mark.skipif(sys.platform != "linux", reason="kills by /proc")]

SEED = int(os.environ.get("PAGETIDE_SEEDS", "").split(",")[0] or random.randrange(2**32))


def test_every_accepted_request_ends_once_with_the_tokens_of_an_undisturbed_run(tmp_path: Path) -> None:
    wrong = run(requests=100, kills=10, workers=3, seed=SEED, pause_s=20.0, folder=tmp_path, every_s=5.0)
    assert not wrong, f"seed {SEED}: {wrong}"

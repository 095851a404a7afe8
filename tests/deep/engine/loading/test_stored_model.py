"""Engines over checkpoints in published quantized formats give the tokens of transformers over what these stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import stored_weights as made
from families import tiny


@pytest.mark.parametrize("name", made.FORMATS)
def test_tokens_of_each_format(name: str, tmp_path: Path) -> None:
    family, config, packer = made.FORMATS[name]
    plain_folder = made.checkpoint(tiny(family), tmp_path / "packed", config, packer)
    made.check_tokens(tmp_path / "packed", plain_folder)

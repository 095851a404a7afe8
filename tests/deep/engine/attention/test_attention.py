"""Paged attention of all families, with all sizes of blocks and chunks."""

from __future__ import annotations

import itertools

import pytest
import torch
from families import FAMILIES, attention_matters
from paged_driver import check_chunks_hardly_matter, model_of, paged_error, tokens

TOLERANCE = 1e-4  # of logits with a standard deviation of about 3


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_decides_the_tokens(family: str) -> None:
    model = model_of(family)
    model.set_attn_implementation("eager")
    assert attention_matters(model, torch.tensor(tokens(48, 9))) >= 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_paged_logits_are_eager_logits(family: str) -> None:
    for block_size, chunk in itertools.product((4, 16, 100, 256), (1, 7, None)):
        assert paged_error(family, block_size, chunk) < TOLERANCE, (block_size, chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_over_int8_hardly_depend_on_the_chunks(family: str) -> None:
    check_chunks_hardly_matter(family, "int8")

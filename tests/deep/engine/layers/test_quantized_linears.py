"""What the bounds of quantized layers rest on: without the choice of a method, outliers of inputs spoil plain rounding."""

from __future__ import annotations

import math

import pytest
import torch
from families import perplexity

from benchmarks.quantization import passages, with_outliers
from pagetide import native
from pagetide.engine.layers import quantized_linears
from pagetide.engine.layers.quantization import Method

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

TOKENS = torch.randint(2, 150, (2, 64), generator=torch.Generator().manual_seed(0))


def test_outliers_would_spoil_plain_rounding(monkeypatch):
    """The quick tier's bound rests on factors of input channels, and on leaving inputs alone where they fail."""
    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 1)
    model, texts = with_outliers(1), passages()
    plain = perplexity(model, texts)
    monkeypatch.setattr(quantized_linears, "choose", lambda weights, x, form: Method(form, None, True, math.nan))
    quantized_linears.quantize_linears(model, "int8", TOKENS)
    assert perplexity(model, texts) > plain * 1.03

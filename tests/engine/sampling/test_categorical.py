"""The draw: the inverse of a distribution function, at its edges too."""

from __future__ import annotations

import numpy as np
import torch

from pagetide.engine.sampling.categorical import invert


def test_inversion_at_its_edges() -> None:
    """Never an element of weight 0, even at shares of 0 and almost 1; small weights behind large ones count."""
    numbers = np.random.default_rng(0)
    shares = np.concatenate(([0.0, 2.0**-53, 1 - 2.0**-53], numbers.random(61)))
    for blocks in (1, 2, 9):
        weights = numbers.random((64, 128 * blocks)).astype(np.float32) ** 8
        weights[numbers.random(weights.shape) < 0.9] = 0
        weights[:, :5] = weights[:, -5:] = 0
        weights[:, 7] = 0.1
        ids = invert(torch.from_numpy(weights), torch.from_numpy(shares)).numpy()[:, None]
        assert (np.take_along_axis(weights, ids, 1) > 0).all()
        ends = weights.cumsum(1, dtype=np.float64) / weights.sum(1, dtype=np.float64)[:, None]
        end, weight = (np.take_along_axis(of, ids, 1)[:, 0] for of in (ends, weights / weights.sum(1)[:, None]))
        assert (shares < end + 1e-6).all()
        assert (shares > end - weight - 1e-6).all()
    tail = torch.full((1, 128 * 128), 1e-8)
    tail[0, :128] = 1.0
    halfway = (128 + 127 * 128 * 1e-8 / 2) / (128 + 127 * 128 * 1e-8)
    assert abs(int(invert(tail, torch.tensor([halfway], dtype=torch.float64))[0]) - (128 + 127 * 64)) < 130

"""Which tokens a mixer computes when a step is repeated, and which outputs it is spared."""

from __future__ import annotations

import numpy as np
import torch

from pagetide.engine.attention.undone_outputs import MixerOutput, Tokens, UndoneOutputs, joined


def tokens(*chunks: tuple[int, int, int]) -> Tokens:
    """(row, start, end) of each chunk, one after the other in the packed row."""
    rows, starts, ends = (np.array(column) for column in zip(*chunks, strict=True))
    return Tokens(rows, starts, np.cumsum(ends - starts) - (ends - starts), ends - starts)


def outputs(of: Tokens, layer: int) -> tuple[torch.Tensor, str]:
    """Of each token a number that tells layer, row and place; and something that is not of tokens."""
    numbers = [
        1e4 * layer + 1e2 * row + at
        for row, start, end in zip(of.rows.tolist(), of.starts, of.ends, strict=True)
        for at in range(start, end)
    ]
    return torch.tensor(numbers)[None, :, None], "other"


class Model:
    """Two layers. What a layer is not asked for twice is wrong."""

    def __init__(self) -> None:
        self.undone = UndoneOutputs()
        self.computed: list[tuple[int, int, int]] = []  # layer, row, place

    def run(self, step: Tokens, layers: int = 2) -> None:
        """A pass that raises behind `layers`."""
        repeats, number = self.undone.begin(step), int(step.lengths.sum())
        for layer in range(layers):
            places, left, pieces = self.undone.left(layer, step) if repeats else (np.arange(len(step.rows)), step, [])
            for place, row, start, end in zip(places, left.rows.tolist(), left.starts, left.ends, strict=True):
                assert row == step.rows[place]
                self.computed += [(layer, row, at) for at in range(start, end)]
            packed = Tokens(left.rows, left.starts, np.cumsum(left.lengths) - left.lengths, left.lengths)
            self.undone.add(layer, packed, outputs(left, layer), int(left.lengths.sum()))
            whole = joined([*pieces, MixerOutput(left.places, outputs(left, layer))], number)
            assert torch.equal(whole[0], outputs(step, layer)[0]) and whole[1] == "other"

    def done(self, *ends: tuple[int, int]) -> None:
        rows, upto = (np.array(column) for column in zip(*ends, strict=True))
        self.undone.done(rows, upto)


def test_a_step_that_is_repeated_in_parts() -> None:
    model = Model()
    model.run(tokens((3, 10, 11), (5, 4, 9), (7, 0, 3)), layers=1)
    model.run(tokens((3, 10, 11)))
    model.run(tokens((5, 4, 6)), layers=1)
    model.run(tokens((5, 4, 5)))
    model.run(tokens((5, 5, 6)))
    model.run(tokens((5, 6, 9), (7, 0, 3)))
    model.done((3, 11), (5, 9), (7, 3))
    again = [one for one in model.computed if one[1] == 7]
    assert again == [(0, 7, at) for at in range(3)] * 2 + [(1, 7, at) for at in range(3)], "it begins with zeros again"
    others = [one for one in model.computed if one[1] != 7]
    assert len(others) == len(set(others)) == 2 * 6
    assert not model.undone._kept


def test_a_chunk_that_is_planned_again_may_end_earlier() -> None:
    model = Model()
    model.run(tokens((3, 10, 14), (5, 2, 3)), layers=1)
    model.run(tokens((5, 2, 3)))
    model.done((5, 3))
    model.run(tokens((3, 10, 12), (5, 3, 4)))
    model.done((3, 12), (5, 4))
    assert model.undone._kept, "the first layer's state is two tokens further"
    model.run(tokens((3, 12, 16)))
    model.done((3, 16))
    assert not model.undone._kept and len(model.computed) == len(set(model.computed))


def test_rows_that_are_admitted_again_have_no_outputs() -> None:
    model = Model()
    model.run(tokens((3, 10, 11), (5, 2, 3)))
    model.undone.forget(np.array([3]))
    model.run(tokens((3, 10, 11), (5, 2, 3)))
    assert model.computed.count((0, 3, 10)) == 2 and model.computed.count((0, 5, 2)) == 1

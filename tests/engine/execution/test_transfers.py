"""What goes to the device beside a step, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagetide.engine.execution.transfers import Download, Stopwatch, Upload

CPU = torch.device("cpu")
TYPES = (np.int64, np.int32, np.float64, np.float32, np.bool_)

arrays = st.lists(
    st.builds(
        lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
        st.sampled_from(TYPES),
        st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple),
        st.integers(0, 99),
    ),
    max_size=8,
)


@given(st.lists(arrays, max_size=4), st.integers(0, 400))
def test_what_is_put_there_is_there(rounds: list[list[np.ndarray]], num_bytes: int) -> None:
    """Also what is more than the buffer holds."""
    upload = Upload(CPU, num_bytes)
    for each in rounds:
        there = upload.put(each)
        assert len(there) == len(each)
        for array, tensor in zip(each, there, strict=True):
            assert tensor.shape == array.shape and str(tensor.dtype) == f"torch.{array.dtype}"
            assert np.array_equal(tensor.numpy(), array)


def test_arrays_of_the_same_shapes_lie_where_they_lay_whatever_follows() -> None:
    upload = Upload(CPU, 1000)
    first = upload.put([np.zeros(3), np.arange(5, dtype=np.int32)])
    again = upload.put([np.ones(3), np.arange(5, 10, dtype=np.int32), np.ones(50)])
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in again[:2]]
    assert first[1].tolist() == [5, 6, 7, 8, 9], "what was there is gone"
    like = upload.like([np.empty(3), np.empty(5, np.int32)])
    assert [t.data_ptr() for t in like] == [t.data_ptr() for t in first] and like[0].tolist() == [1, 1, 1]
    assert all(t.data_ptr() % 16 == 0 for t in again)
    with pytest.raises(ValueError, match="816 bytes do not fit a buffer of 112"):
        Upload(CPU, 100).like([np.empty(101, np.int64)])


def test_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Download(torch.tensor([[1.5], [2.0]])).wait().tolist() == [[1.5], [2.0]]
    now = iter([10.0, 12.5, 99.0])
    monkeypatch.setattr("pagetide.engine.execution.transfers.time.perf_counter", lambda: next(now))
    watch = Stopwatch(CPU)
    assert watch.seconds() == 0
    watch.stop()
    assert watch.seconds() == 2.5

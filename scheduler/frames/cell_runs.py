"""Changed cells as text: runs of equal cells, each a record of 8 bytes (first block, length - 1, value), in base64."""

from __future__ import annotations

import binascii

import numpy as np

from ..snapshot import Cells

_RUN = np.dtype([("first", "<u4"), ("length", "<u2"), ("value", "<u2")])  # the length less 1
_MOST = 65_536  # cells of a run


def encode_changes(cells: Cells, before: Cells) -> str:
    """The runs of `cells` where they differ from `before`, both [num_blocks], lowest first."""
    changed = np.flatnonzero(cells != before)
    if not len(changed):
        return ""
    values = cells[changed]
    begins = np.empty(len(changed), np.bool_)
    begins[0] = True
    np.logical_or(changed[1:] != changed[:-1] + 1, values[1:] != values[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(changed))
    firsts, values = changed[starts], values[starts]
    if lengths.max() > _MOST:
        firsts, lengths, values = _split(firsts, lengths, values)
    runs = np.empty(len(firsts), _RUN)
    runs["first"], runs["length"], runs["value"] = firsts, lengths - 1, values
    return binascii.b2a_base64(runs.tobytes(), newline=False).decode("ascii")


def apply_runs(text: str, cells: Cells) -> None:
    """Write the runs of `text` into `cells`. Raises ValueError for what is no list of runs within it; changes nothing then."""
    data = binascii.a2b_base64(text, strict_mode=True)
    if len(data) % _RUN.itemsize:
        raise ValueError(f"cells of {len(data)} bytes are no whole number of runs")
    runs = np.frombuffer(data, _RUN)
    if not len(runs):
        return
    firsts, lengths = runs["first"].astype(np.int64), runs["length"].astype(np.int64) + 1
    ends = firsts + lengths
    if (ends[:-1] > firsts[1:]).any() or ends[-1] > len(cells):
        raise ValueError(f"runs of cells overlap, are out of order, or lie beyond the {len(cells)} blocks")
    ahead = np.cumsum(lengths)
    places = np.repeat(firsts - ahead + lengths, lengths) + np.arange(ahead[-1])
    cells[places] = np.repeat(runs["value"], lengths)


def _split(firsts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same runs, none longer than _MOST."""
    pieces = -(-lengths // _MOST)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a run
    lengths = np.minimum(np.repeat(lengths, pieces) - number * _MOST, _MOST)
    return np.repeat(firsts, pieces) + number * _MOST, lengths, np.repeat(values, pieces)

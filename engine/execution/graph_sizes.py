"""The batch sizes for which decode steps are captured in CUDA graphs. Imports no torch."""

from __future__ import annotations

# rows; padding costs little: the weights are read in any case
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def sizes_for(num_rows: int) -> tuple[int, ...]:
    """The sizes that `num_rows` rows can need. Batches larger than the largest size run without a graph."""
    below = tuple(size for size in SIZES if size < num_rows)
    return below + SIZES[len(below) : len(below) + 1]

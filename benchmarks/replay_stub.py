"""The stand-in for the model in a replay: returns the trace's tokens and records times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.replay_traces import Trace
from pagetide.cache.block_table import Index
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.plan import NO_ROWS, Plan, Result

Seconds = npt.NDArray[np.float64]


class ReplayStub:
    """Stands for the model, and takes the times. Rows are the scheduler's.

    While the same rows decode, step after step, all get a token at the same time: what a row has is written down only when
    that ends, and the time between tokens once for all of them.
    """

    def __init__(self, trace: Trace, num_rows: int) -> None:
        turns = trace.turns
        self._first = np.cumsum([0] + [turn.output_tokens for turn in turns])  # of each request, in `_outputs`
        self._outputs = np.zeros(self._first[-1], np.int32)
        self._number = np.zeros(num_rows, np.int64)  # by row: the number of its request
        self._next = np.zeros(num_rows, np.int64)  # by row: its next token in `_outputs`, but for those of `_decoding`
        self.ttft_s = np.full(len(turns), np.nan)
        self._last_s = np.array(
            [turn.at_s for turn in turns]
        )  # when each got its last token, or arrived; but for those
        self.ended = np.zeros(len(turns), np.bool_)  # by request: whether its output is complete
        self.cut_short = 0  # outputs for which there was no room in the pool
        self._lengths = np.diff(self._first)
        self._gaps: list[Seconds] = []
        self._decoding = NO_ROWS  # the rows of the last plan, if each computed and sampled one token
        self._places = NO_ROWS  # their next tokens in `_outputs`
        self._counts = NO_ROWS  # 1 for each of them
        self._decoded_s = 0.0  # when they got their last token
        self._equal_gaps: list[tuple[float, int]] = []  # a time between tokens, and how many rows it was

    def expect(self, number: int, output: npt.NDArray[np.int32]) -> None:
        """Request `number` will give `output`."""
        self._outputs[self._first[number] : self._first[number] + len(output)] = output

    def execute(self, plan: Plan, now: float, swapped: int = 0, swap_s: float = 0.0, compute_s: float = 0.0) -> Result:
        """The plan's tokens, which are there at `now`; of its seconds the result tells."""
        if (
            plan.rows is self._decoding and len(plan.rows) and not plan.admitted
        ):  # the very same array: plans' are never written again
            places = self._places
            self._places = places + 1
            self._equal_gaps.append((now - self._decoded_s, len(places)))
            self._decoded_s = now
        else:
            self._write_down()
            places = self._mixed(plan, now)
        resize = plan.resize
        return Result(
            plan.step_id, self._counts, self._outputs[places], (), resize.map, resize.unmap, swapped=swapped,
            swap_s=swap_s, compute_s=compute_s,
        )  # fmt: skip

    def _mixed(self, plan: Plan, now: float) -> Index:
        """A plan of any chunks. Returns the places of its tokens."""
        for new in plan.admitted:
            number = int(new.request_id)
            self._number[new.row] = number
            self._next[new.row] = self._first[number] + len(new.token_ids) - new.num_prompt
        self._counts = plan.samples.astype(np.int64)
        rows = plan.rows[plan.samples]
        places: Index = self._next[rows]
        numbers = self._number[rows]
        gaps = now - self._last_s[numbers]
        first = places == self._first[numbers]
        self.ttft_s[numbers[first]] = gaps[first]
        self._gaps.append(gaps[~first])
        self._next[rows] = places + 1
        self._last_s[numbers] = now
        if len(rows) == plan.num_tokens:
            self._decoding, self._places, self._decoded_s = plan.rows, places + 1, now
        return places

    def _write_down(self) -> None:
        """Those that decoded may not go on together."""
        rows = self._decoding
        self._next[rows] = self._places
        self._last_s[self._number[rows]] = self._decoded_s
        self._decoding = self._places = NO_ROWS

    def end(self, finished: Finished) -> None:
        """A request is over."""
        number = int(finished.request_id)
        self.ended[number] = len(finished.token_ids) == self._lengths[number]
        self.cut_short += not self.ended[number]

    def last_s(self) -> Seconds:
        """When each request got its last token, or arrived."""
        self._write_down()
        return self._last_s

    def gaps_s(self) -> Seconds:
        """All times between two tokens of a request."""
        gaps = np.array([gap for gap, _ in self._equal_gaps])
        times = np.array([rows for _, rows in self._equal_gaps], np.int64)
        return np.concatenate([np.repeat(gaps, times), *self._gaps])

"""What was decided lately when blocks ran short, with the numbers it was decided by: for people who ask why."""

from __future__ import annotations

from collections import deque
from typing import Any

from .length_forecast import ForecastPeak

_KEPT = 64

Decision = dict[str, Any]


class Decisions:
    """The last 64 decisions, oldest first. Costs nothing while there are none."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=_KEPT)

    def preempted(
        self, step: int, request_id: str, priority: int, blocks_won: int, tokens: int, swap_s: float | None,
        compute_s: float,
    ) -> None:  # fmt: skip
        """`request_id` gave its row up; nobody else has `blocks_won` of its blocks, in which `tokens` were computed.

        To swap these would take `swap_s`, None where that is no choice (no host tier, or it is too slow); to compute them
        again `compute_s`.
        """
        self._kept.append(
            {
                "step": step, "what": "preempt", "request_id": request_id, "priority": priority, "blocks_won": blocks_won,
                "tokens": tokens, "swap_s": swap_s, "compute_s": compute_s,
                "chosen": "compute" if swap_s is None else "swap",
            }
        )  # fmt: skip

    def returned(self, step: int, request_id: str, had: int, found: int) -> None:
        """`request_id`, preempted with `had` tokens computed, is seated again, with `found` of them."""
        self._kept.append({"step": step, "what": "return", "request_id": request_id, "had": had, "found": found})

    def waits(self, step: int, request_id: str, needed: int, room: int, peak: ForecastPeak | None, usable: int) -> None:
        """`request_id` was not seated: it needs so many blocks now and a newcomer can have `room`; or all that run and it are
        expected to come to more than the `usable` blocks (None: not asked), margin included, so many steps from now.
        """
        self._kept.append(
            {
                "step": step, "what": "wait", "request_id": request_id, "needed": needed, "room": room, "usable": usable,
                "expected": None if peak is None else peak.blocks,
                "margin": None if peak is None else round(peak.margin_blocks, 1),
                "in_steps": None if peak is None else peak.in_steps,
            }
        )  # fmt: skip

    def passed(self, step: int, request_id: str, needed: int, others: list[str]) -> None:
        """`request_id`, which needs so many blocks, was seated before `others`, who came first and do not fit."""
        self._kept.append({"step": step, "what": "pass", "request_id": request_id, "needed": needed, "passed": others})

    def gave_up(
        self, step: int, demoted: int, evicted: int, swap_s: float, compute_s: float, chances: tuple[float, float]
    ) -> None:
        """Of cached blocks so many were demoted and evicted, since nothing else was noted; a block takes `swap_s` out and in,
        and `compute_s` to compute.

        `chances` are those that a block is wanted again which no request has found, and one which some has.
        """
        since, last = step, self._kept[-1] if self._kept else None
        if last is not None and last["what"] == "give up":  # goes on: else nothing else would be left to read
            since, demoted, evicted = last["since_step"], demoted + last["demoted"], evicted + last["evicted"]
            self._kept.pop()
        self._kept.append(
            {
                "step": step, "what": "give up", "since_step": since, "demoted": demoted, "evicted": evicted,
                "swap_s": swap_s, "compute_s": compute_s, "chance_new": chances[0], "chance_found": chances[1],
            }
        )  # fmt: skip

    def cut(self, step: int, request_id: str, needed: int, limit: int) -> None:
        """`request_id` ended, alone, as it needs so many blocks and the pool may not come to more than `limit`."""
        self._kept.append({"step": step, "what": "cut", "request_id": request_id, "needed": needed, "limit": limit})

    def to_list(self) -> list[Decision]:
        """Plain data, oldest first."""
        return [dict(decision) for decision in self._kept]

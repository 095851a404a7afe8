"""Outputs of the scheduler: step outputs, finished requests, counters and the log of decisions."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..cache.block_table import Int32
from .forecast import ForecastPeak
from .plan import Candidates, ChunkLogprobs
from .request import FinishReason, Request

_KEPT = 64  # decisions
_KEPT_ENDS = 256
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper, of `Stats.step_tokens`

Decision = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """The end of a request: the reason, and all generated tokens.

    `num_cached_tokens` is the number of prompt tokens that the prefix cache had, on the device, the host or disk, when
    the request was first admitted; None if it was never admitted. All forks of a prompt have the number of the request
    admitted first. Tokens that the others share with it do not count as cached. Of them, `num_disk_tokens` were read from disk.

    `admitted_at` is the time of that first admission, as `Scheduler.schedule` was given it.
    """

    request_id: str
    reason: FinishReason
    token_ids: Int32
    num_preemptions: int
    error: str | None = None
    num_cached_tokens: int | None = None
    admitted_at: float | None = None
    num_disk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BeamMove:
    """How a beam continues: from the tokens of `source_id`, which may be itself, with `token`."""

    request_id: str
    source_id: str
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """Outputs of a step: request `request_ids[i]` got token `tokens[i]`; then the `finished` requests ended."""

    step_id: int
    request_ids: list[str]
    tokens: list[int]
    finished: tuple[Finished, ...] = ()
    scores: tuple[tuple[str, ChunkLogprobs], ...] = ()  # with their request ids
    candidates: tuple[tuple[str, Candidates], ...] = ()


@dataclass(slots=True)
class PrefixLookups:
    """Prefix lookups of admissions: their number, their tokens, and the tokens that were found."""

    number: int = 0
    tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True)
class Stats:
    """Counters since the start.

    Prefix lookups of new prompts count separately from resumed lookups (preempted requests, imported requests, and
    forks admitted without their leader). Resumed requests mostly find what they computed themselves, so they do not
    show how often prompts share prefixes.

    `prompt_tokens` and `cached_prompt_tokens` count prompts at their first admission, forks and beams of a prompt once.
    `step_tokens` has the number of steps by the tokens they compute: up to each of STEP_TOKEN_BOUNDS, and more.
    """

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    disk_tokens: int = 0  # from disk: of these, and for requests that went on after a sleep
    generated_tokens: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    preemptions: int = 0
    peak_used_blocks: int = 0
    grown_extents: int = 0
    given_back_extents: int = 0
    moved_blocks: int = 0
    refused_resizes: int = 0
    computing_s: float = 0.0  # that the steps' chunks took, as measured
    prefix_lookups: PrefixLookups = field(default_factory=PrefixLookups)
    resumed_lookups: PrefixLookups = field(default_factory=PrefixLookups)
    forks: int = 0  # sequences that started with another's blocks
    demoted_blocks: int = 0  # copied to the host tier
    promoted_blocks: int = 0  # copied back

    def planned(self, num_tokens: int) -> None:
        """Count a planned step that computes `num_tokens` tokens; 0 if it only moves memory."""
        self.computed_tokens += num_tokens
        if num_tokens:
            self.step_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def looked_up(self, num_tokens: int, num_hit: int, is_new: bool) -> None:
        """Count the prefix lookup of an admission: `num_hit` of `num_tokens` tokens were found. `is_new`: a new prompt."""
        lookups = self.prefix_lookups if is_new else self.resumed_lookups
        lookups.number += 1
        lookups.tokens += num_tokens
        lookups.hit_tokens += num_hit


class Decisions:
    """A log of the last 64 decisions made when blocks ran short, oldest first. Costs nothing while there are none.

    Each has a running number from 1 on. `num_changes` counts the decisions and their changes.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int, Decision]] = deque(maxlen=_KEPT)  # number; `num_changes` when it changed
        self._number = 0
        self.num_changes = 0

    def preempted(
        self, step: int, request_id: str, priority: int, blocks_won: int, tokens: int, swap_s: float | None, compute_s: float
    ) -> None:
        """`request_id` gave up its row. `blocks_won` of its blocks are in no other row; they held `tokens` computed
        tokens.

        Swapping these tokens takes `swap_s`, None if that is no option (no host tier, or too slow). Recomputing them
        takes `compute_s`.
        """
        self._keep(
            {
                "step": step,
                "what": "preempt",
                "request_id": request_id,
                "priority": priority,
                "blocks_won": blocks_won,
                "tokens": tokens,
                "swap_s": swap_s,
                "compute_s": compute_s,
                "chosen": "compute" if swap_s is None else "swap",
            }
        )

    def returned(self, step: int, request_id: str, had: int, found: int) -> None:
        """`request_id`, preempted with `had` computed tokens, is readmitted with `found` of them."""
        self._keep({"step": step, "what": "return", "request_id": request_id, "had": had, "found": found})

    def waits(
        self, step: int, request_id: str, needed: int, room: int, peak: ForecastPeak | None, usable: int, *, earlier: int = 0
    ) -> int:
        """`request_id` was not admitted: it needs `needed` blocks and `room` are available, or the forecast `peak`
        exceeds `usable`. Returns the number of the entry.

        `peak` (margin included) covers it and all running sequences; None if no forecast was made. With the number of
        an `earlier` refusal these figures replace those of that entry, if it is still kept.
        """
        decision = {
            "step": step,
            "what": "wait",
            "since_step": step,
            "request_id": request_id,
            "needed": needed,
            "room": room,
            "usable": usable,
            "expected": None if peak is None else peak.blocks,
            "margin": None if peak is None else round(peak.margin_blocks, 1),
            "in_steps": None if peak is None else peak.in_steps,
        }
        at = earlier - self._kept[0][0] if earlier and self._kept else -1
        if at < 0:
            self._keep(decision)
            return self._number
        decision["since_step"] = self._kept[at][2]["since_step"]
        self.num_changes += 1
        self._kept[at] = (earlier, self.num_changes, decision)
        return earlier

    def was_read(self, step: int, request_id: str, found: int, read: int, seconds: float, why: str) -> None:
        """`request_id` found `found` of its tokens in memory, and `read` more were read from disk in `seconds`.

        `why` not all that are there; empty if all were.
        """
        self._keep(
            {
                "step": step, "what": "read", "request_id": request_id, "found": found, "read": read,
                "seconds": round(seconds, 6), "why": why,
            }
        )  # fmt: skip

    def passed(self, step: int, request_id: str, needed: int, others: list[str]) -> None:
        """`request_id`, which needs `needed` blocks, was admitted before `others`, which came first and do not fit."""
        self._keep({"step": step, "what": "pass", "request_id": request_id, "needed": needed, "passed": others})

    def gave_up(
        self, step: int, demoted: int, evicted: int, swap_s: float, compute_s: float, chances: tuple[float, float]
    ) -> None:
        """Cached blocks were demoted and evicted; merges with the last entry if that is of the same kind.

        A block takes `swap_s` to swap out and in, and `compute_s` to compute. `chances` are the probabilities of reuse
        of a block that no request has found yet, and of one that some request has found.
        """
        since, last = step, self._kept[-1][2] if self._kept else None
        if last is not None and last["what"] == "give up":  # merge, or such entries would displace all others
            since, demoted, evicted = last["since_step"], demoted + last["demoted"], evicted + last["evicted"]
            self._number = self._kept.pop()[0] - 1  # it keeps its number
        self._keep(
            {
                "step": step, "what": "give up", "since_step": since, "demoted": demoted, "evicted": evicted,
                "swap_s": swap_s, "compute_s": compute_s, "chance_new": chances[0], "chance_found": chances[1],
            }
        )  # fmt: skip

    def cut(self, step: int, request_id: str, needed: int, limit: int) -> None:
        """`request_id` ended while running alone: it needs `needed` blocks and the pool may have at most `limit`."""
        self._keep({"step": step, "what": "cut", "request_id": request_id, "needed": needed, "limit": limit})

    def to_list(self) -> list[Decision]:
        """Plain data, oldest first."""
        return [dict(decision) for _, _, decision in self._kept]

    def since(self, num_changes: int) -> list[tuple[int, Decision]]:
        """The decisions that are kept, and were made or changed after `num_changes` of them, with their numbers."""
        return [(number, dict(decision)) for number, changed, decision in self._kept if changed > num_changes]

    def _keep(self, decision: Decision) -> None:
        self._number += 1
        self.num_changes += 1
        self._kept.append((self._number, self.num_changes, decision))


class Ends:
    """A log of the last 256 ends, oldest first, for watchers. Each has a running number from 1 on."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Request, Finished]] = deque(maxlen=_KEPT_ENDS)
        self.number = 0  # of the last one

    def add(self, request: Request, finished: Finished) -> None:
        """Record the end of `request`."""
        self.number += 1
        self._kept.append((request, finished))

    def since(self, number: int) -> list[tuple[Request, Finished]]:
        """The ends that are kept and came after `number`."""
        new = min(self.number - number, len(self._kept))
        return list(islice(reversed(self._kept), new))[::-1]

"""Who is admitted: whom to refuse for good, which of those that wait is seated next, and with what it begins.

- Who waits is asked in the order of the queue (waiting.py). One fits when the blocks of all its known tokens, less those it
  shares, can be had, and the forecast says the others can still grow (length_forecast.py).
- One that does not fit is passed by smaller ones, of the MOST_TRIED next, no more than MOST_PASSES times, so that it is not
  held up for good; who was preempted is not passed. Who waits does not push out who runs.
- A fork shares the prompt of another request, its leader. It waits until that is computed, and begins with its blocks.
- One that needs more than the pool may have at present is put aside, and holds nobody up.
- Who was refused is not asked again before something changed. Blocks that are to be given back no newcomer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..cache.manager import NO_HIT, CacheManager
from ..cache.prefix_index import PrefixHit
from .block_forecast import ExpectedBlocks
from .decisions import Decisions
from .errors import DuplicateRequest, PromptTooLong, RequestRejected
from .pool_size import PoolSize
from .request import Request
from .rows import Rows
from .sequence import Sequence
from .waiting import Waiting

MOST_TRIED = 8  # waiting sequences that may pass one that does not fit, of those next in order
MOST_PASSES = 16  # before nobody passes it any more


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionPlan:
    """What a sequence begins with: what was found, or the blocks of `leader_row`. It takes `num_blocks` of those available."""

    num_blocks: int
    hit: PrefixHit
    leader_row: int | None = None


class AdmissionController:
    """Lets sequences out of `waiting`; the scheduler seats them, in `running`, by row. What else it is given it only reads:
    of `size` the pool and its limit.

    Where it does not forecast whoever fits now comes in, whatever the others will need.
    """

    def __init__(
        self, size: PoolSize, rows: Rows, waiting: Waiting, running: Mapping[int, Sequence],
        expected: ExpectedBlocks, forecasts: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._size = size
        self._rows = rows
        self._waiting = waiting
        self._running = running
        self._expected = expected
        self._forecasts = forecasts
        self._blocked = False  # somebody was refused, and nothing changed since
        self._shut = False  # in the next step nobody comes in
        self._withheld = 0  # free blocks that no newcomer may have in the next step

    @property
    def has_candidates(self) -> bool:
        """Whether somebody waits for a row who was not refused as things stand. Read-only."""
        return bool(self._waiting.queue) and not self._blocked

    def add(self, sequence: Sequence) -> None:
        """A new one waits: a fork for its leader's prompt, unless that is computed, everybody else for a row."""
        leader = sequence.leader
        if leader is not None and not self._is_computed(leader):
            self._waiting.put_behind(sequence, leader)
            return
        if leader is not None:
            leader.forks[sequence] = None
        if self._waiting.add(sequence) <= MOST_TRIED:
            self._blocked = False

    def look_again(self) -> None:
        """Something changed: who was refused may fit now."""
        self._blocked = False

    def withhold(self, num_blocks: int) -> None:
        """Keep so many free blocks from newcomers in the next step: they are to be given back."""
        self._withheld = num_blocks

    def given_back(self, num_blocks: int) -> None:
        """So many of the blocks withheld are not free any more."""
        self._withheld = max(0, self._withheld - num_blocks)

    @property
    def is_shut(self) -> bool:
        """Whether nobody comes in in the next step. Read-only."""
        return self._shut

    def shut(self) -> None:
        """Let nobody in in the next step."""
        self._shut = True

    def lift(self) -> None:
        """What was withheld can be had, and the door is not shut any more."""
        if self._withheld:
            self._withheld, self._blocked = 0, False
        self._shut = False

    def open(self, step: int, decisions: Decisions) -> Iterator[tuple[Sequence, AdmissionPlan, list[str]]]:
        """Who comes in next, what it begins with, and the ids of those it passes, while seats and blocks last.

        Who is named waits no more, and is to be seated before the next one is asked for. A refusal is told to `decisions`,
        the first one since the sequence waits.
        """
        cache, queue = self._size.cache, self._waiting.queue
        refused: list[Sequence] = []
        least = cache.capacity + 1  # blocks that a refused one needs
        while not self._shut and self._may_pass(refused) and len(refused) < len(queue) and self._rows.num_free:
            sequence = queue[len(refused)]
            if cache.blocks_for(len(sequence.tokens)) > self._size.limit_blocks:
                self._waiting.put_aside(len(refused))  # nobody waits for what may not come
                continue
            start = self._start(sequence)
            if start is None:
                assert sequence.leader is not None
                self._waiting.remove(sequence)
                self._waiting.put_behind(sequence, sequence.leader)
            elif (not refused or start.num_blocks <= least // 2) and self._fits(sequence, start, step, decisions):
                self._waiting.remove(sequence)
                for other in refused:
                    other.passes += 1
                yield sequence, start, [other.request.request_id for other in refused]
            else:
                refused.append(sequence)
                least = min(least, start.num_blocks)
        self._blocked = bool(refused)  # not where the caller had enough before: others may still fit in the next step

    def hand_over_forks(self, leader: Sequence, here: Mapping[str, Sequence]) -> None:
        """`leader`, which is gone, had forks that were not seated: one of its family computes the prompt for them, or has."""
        for fork in [s for s in leader.forks if s.shares > len(s.request.prompt_token_ids)]:  # nobody else has as much
            self._waiting.remove(fork)
            fork.leader = None
            self._waiting.add(fork)
        if not leader.forks:
            return
        family = [s for s in self._running.values() if s.root is leader.root and self._is_computed(s)]
        heir = family[0] if family else leader.leader
        if heir is not None and here.get(heir.request.request_id) is not heir:
            heir = None
        self._waiting.hand_over_forks(leader, heir, bool(family))

    def _may_pass(self, refused: list[Sequence]) -> bool:
        """Whether another one may be let in before `refused`, who came first."""
        return len(refused) <= MOST_TRIED and not any(s.preemptions or s.passes >= MOST_PASSES for s in refused)

    def _start(self, sequence: Sequence) -> AdmissionPlan | None:
        """What a waiting sequence can begin with now; None for a fork that better waits for its leader's prompt."""
        cache = self._size.cache
        known, leader, most = len(sequence.tokens), sequence.leader, sequence.sharable
        if leader is not None and leader.row is not None and most == known - 1 <= sequence.shares:
            if not self._is_computed(leader):
                return None
            shared = (known - 1) // cache.block_size * len(cache.tables)
            return AdmissionPlan(cache.blocks_for(known) - shared, NO_HIT, leader.row)
        hit = cache.lookup(sequence.chain, most)
        return AdmissionPlan(cache.needed(known, hit), hit)

    def _is_computed(self, leader: Sequence) -> bool:
        """Whether `leader` runs and has a step's result behind its tokens, so that its blocks can be shared. Read-only."""
        return leader.row is not None and (leader.held or bool(self._rows.known[leader.row] > len(leader.tokens)))

    def _fits(self, sequence: Sequence, start: AdmissionPlan, step: int, decisions: Decisions) -> bool:
        """Whether the sequence fits now and, unless it would be alone, everybody's growth does as forecast."""
        cache, needed, room, peak = self._size.cache, start.num_blocks, self._room, None
        usable = min(cache.usable - self._withheld, self._size.limit_blocks)
        if needed <= room:
            goes_on = start.leader_row is not None and len(sequence.tokens) > len(sequence.request.prompt_token_ids)
            if not self._running or not self._forecasts() or goes_on:  # with a seat that it has just had
                return True
            shared = cache.blocks_for(len(sequence.tokens)) - needed
            peak = self._expected.peak(np.fromiter(self._running, np.int64, len(self._running)), [sequence])
            if peak.blocks - shared <= usable:
                return True
        if not sequence.refused:
            sequence.refused = True
            decisions.waits(step, sequence.request.request_id, needed, room, peak, usable)
        return False

    @property
    def _room(self) -> int:
        """Blocks that a newcomer can have: free ones that are not withheld, as far as the limit is above the blocks in use.

        Blocks in flight are not in use: they are free when the copies of this step are done.
        """
        cache = self._size.cache
        available = cache.available
        used = cache.usable - available - cache.pending_free_blocks
        return min(available - self._withheld, self._size.limit_blocks - used)


def check_request(request: Request, here: Mapping[str, Sequence], max_model_len: int, cache: CacheManager) -> None:
    """Raise RequestRejected, PromptTooLong or DuplicateRequest for what can never be admitted beside who is `here`, by id."""
    length = len(request.token_ids)
    if request.request_id in here:
        raise DuplicateRequest(f"request id {request.request_id!r} is in use")
    if request.fork_of is not None:
        _check_fork(request, request.fork_of, here)
    if len(request.generated):
        _check_generated(request)
    if not len(request.prompt_token_ids):
        raise RequestRejected("the prompt is empty: at least one token is needed to start from")
    also = f" ({len(request.generated):,} of them generated)" if len(request.generated) else ""
    if length >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {length:,} tokens{also}; with a context of {max_model_len:,} tokens it may have "
            f"{max_model_len - 1:,} at most: shorten it, or raise max_model_len where the model allows"
        )
    needed = cache.blocks_for(length)
    if needed > cache.capacity:
        raise PromptTooLong(
            f"the prompt's {length:,} tokens{also} need {needed:,} blocks of {cache.block_size} tokens, the whole pool "
            f"has {cache.capacity:,}: shorten it, or give the engine more kv_memory"
        )


def _check_generated(request: Request) -> None:
    """Raise RequestRejected where there is nothing left to do behind the tokens that were generated before."""
    sampling, count = request.sampling, len(request.generated)
    if count >= sampling.max_new_tokens:
        most = sampling.max_new_tokens
        raise RequestRejected(f"{count:,} tokens were generated, of at most {most:,}: it is at its end")
    last = int(request.generated[-1])
    if last in sampling.stop_token_ids and count >= sampling.min_new_tokens:
        raise RequestRejected(f"the last token that was generated, {last}, is one of its stop ids: it is at its end")


def _check_fork(request: Request, leader_id: str, here: Mapping[str, Sequence]) -> None:
    if len(request.generated):
        raise RequestRejected(
            f"{request.request_id!r} has tokens of its own: it finds the prompt where it is cached, and is no fork"
        )
    leader = here.get(leader_id)
    if leader is None:
        raise RequestRejected(f"{request.request_id!r} is to share the prompt of {leader_id!r}, which is not here")
    other = leader.request
    if request.cache_salt != other.cache_salt or not np.array_equal(request.prompt_token_ids, other.prompt_token_ids):
        raise RequestRejected(
            f"{request.request_id!r} is to share the prompt of {leader_id!r}, but has another prompt or cache_salt"
        )
    if request.priority != other.priority:
        raise RequestRejected(
            f"{request.request_id!r} is to share the prompt of {leader_id!r}, whose priority is {other.priority}, and not "
            f"{request.priority}: it waits for that one"
        )

"""Admission control: rejects requests that can never run, and picks the next waiting request and its first blocks.

- Requests are tried in queue order (waiting.py). A request fits if the blocks of its known tokens, less shared ones,
  are available, and the forecast leaves room for the others to grow (forecast.py).
- Smaller requests (at most half the blocks) may pass one that does not fit. The search ends at MOST_TRIED further
  refusals. A request is passed at most MOST_PASSES times, so that it does not starve; a preempted one never. Waiting
  requests do not preempt running ones, except beams that wait for a choice (scheduler.py).
- A fork shares the prompt of another request, its leader. It waits until that prompt is computed, and starts with its
  blocks.
- A request that needs more blocks than the current limit is put aside and delays no other request.
- A refused request is not retried before something changes. Blocks reserved for giving back are not available to
  admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..cache.manager import NO_HIT, CacheManager
from ..cache.prefix_index import PrefixHit
from .errors import DuplicateRequest, PromptTooLong, RequestRejected
from .forecast import ExpectedBlocks
from .outcome import Decisions
from .pool_size import PoolSize
from .request import Request
from .rows import Rows
from .sequence import Sequence
from .waiting import Waiting

MOST_TRIED = 8  # more refusals that end the search behind a sequence that does not fit
MOST_PASSES = 16  # times a sequence may be passed by later ones


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionPlan:
    """What a sequence starts with: a prefix-cache hit, or the blocks of `leader_row`. It uses `num_blocks` available
    blocks.
    """

    num_blocks: int
    hit: PrefixHit
    leader_row: int | None = None


class AdmissionController:
    """Selects sequences from `waiting`; the scheduler assigns rows to them.

    It only reads the other arguments: `running` by row, and the pool and limit of `size`. If `forecasts` returns False,
    every request that fits now is admitted, whatever the others will need.
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
        self._blocked = False  # a sequence was refused, and nothing changed since
        self._shut = False  # the next step admits no sequence
        self._withheld = 0  # free blocks that are not available to admission in the next step

    @property
    def has_candidates(self) -> bool:
        """Whether a sequence waits for a row and may fit, as far as is known. Read-only."""
        return bool(self._waiting.queue) and not self._blocked

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. A fork waits for its leader's prompt, unless that is computed."""
        leader = sequence.leader
        if leader is not None and not self._is_computed(leader):
            self._waiting.put_behind(sequence, leader)
            return
        if leader is not None:
            leader.forks[sequence] = None
        if self._waiting.add(sequence) <= MOST_TRIED:
            self._blocked = False

    def look_again(self) -> None:
        """Retry refused sequences: something changed, so they may fit now."""
        self._blocked = False

    def withhold(self, num_blocks: int) -> None:
        """Withhold `num_blocks` free blocks from admission in the next step, because they are to be given back."""
        self._withheld = num_blocks

    def given_back(self, num_blocks: int) -> None:
        """Reduce the withheld blocks by `num_blocks`, which are no longer free."""
        self._withheld = max(0, self._withheld - num_blocks)

    @property
    def is_shut(self) -> bool:
        """Whether the next step admits no sequence. Read-only."""
        return self._shut

    def shut(self) -> None:
        """Admit no sequence in the next step."""
        self._shut = True

    def lift(self) -> None:
        """Undo `withhold` and `shut`."""
        if self._withheld:
            self._withheld, self._blocked = 0, False
        self._shut = False

    def open(self, step: int, decisions: Decisions) -> Iterator[tuple[Sequence, AdmissionPlan, list[str]]]:
        """Yield each admitted sequence, its starting blocks, and the ids of the requests it passes, while rows and
        blocks last.

        A yielded sequence has left the queue; assign its row before the next iteration. The first refusal of a sequence
        since it began to wait is recorded in `decisions`.
        """
        cache, queue = self._size.cache, self._waiting.queue
        refused: list[Sequence] = []
        least = cache.capacity + 1  # fewest blocks that a refused sequence needs
        while not self._shut and self._may_pass(refused) and len(refused) < len(queue) and self._rows.num_free:
            sequence = queue[len(refused)]
            if cache.blocks_for(len(sequence.tokens)) > self._size.limit_blocks:
                self._waiting.put_aside(len(refused))  # the pool may not grow so far: delay no other sequence
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
        self._blocked = bool(refused)  # not reached if the caller stopped before: others may still fit in the next step

    def hand_over_forks(self, leader: Sequence, here: Mapping[str, Sequence]) -> None:
        """Reassign the waiting forks of `leader`, which has ended, to a family member for the prompt."""
        # no other sequence has as many tokens
        for fork in [s for s in leader.forks if s.shares > len(s.request.prompt_token_ids)]:
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
        """Whether a later sequence may be admitted before `refused`, which came first."""
        return len(refused) <= MOST_TRIED and not any(s.preemptions or s.passes >= MOST_PASSES for s in refused)

    def _start(self, sequence: Sequence) -> AdmissionPlan | None:
        """What a waiting sequence can start with now; None for a fork that should wait for its leader's prompt."""
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
        """Whether `leader` runs and has a step's result for its tokens, so that its blocks can be shared. Read-only."""
        return leader.row is not None and (leader.held or bool(self._rows.known[leader.row] > len(leader.tokens)))

    def _fits(self, sequence: Sequence, start: AdmissionPlan, step: int, decisions: Decisions) -> bool:
        """Whether the sequence fits now and, unless it runs alone, the forecast growth of all sequences too."""
        cache, needed, room, peak = self._size.cache, start.num_blocks, self._room, None
        usable = min(cache.usable - self._withheld, self._size.limit_blocks)
        if needed <= room:
            goes_on = start.leader_row is not None and len(sequence.tokens) > len(sequence.request.prompt_token_ids)
            # `goes_on`: a moved beam, which just gave up its row
            if not self._running or not self._forecasts() or goes_on:
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
        """Blocks available to a new sequence: free, not withheld, and within the limit.

        Blocks in flight do not count as used: they are free after this step's copies.
        """
        cache = self._size.cache
        available = cache.available
        used = cache.usable - available - cache.pending_free_blocks
        return min(available - self._withheld, self._size.limit_blocks - used)


def check_request(request: Request, here: Mapping[str, Sequence], max_model_len: int, cache: CacheManager) -> None:
    """Raise RequestRejected, PromptTooLong or DuplicateRequest if `request` can never run beside the requests `here`,
    by id.
    """
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
    """Raise RequestRejected if nothing is left to generate after the tokens generated before."""
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

"""Admission control: rejects requests that can never run, and picks the next waiting request and its first blocks.

- Requests are tried in queue order (waiting.py). A request fits if the blocks of its known tokens, less shared ones,
  are available, and the forecast leaves room for the others to grow (forecast.py).
- Smaller requests (at most half the blocks) may pass one that does not fit. The search ends at MOST_TRIED further
  refusals. A request is passed at most MOST_PASSES times, so that it does not starve; a preempted one never. Waiting
  requests do not preempt running ones, except beams that wait for a choice (scheduler.py).
- A fork shares the prompt of another request, its leader. It waits until that prompt is computed.
- A request that needs more blocks than the current limit is deferred and delays no other request.
- A refused request is not retried before something changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ..cache.manager import CacheManager
from ..cache.prefix_index import NO_HIT
from .errors import DuplicateRequest, PromptTooLong, RequestRejected
from .forecast import ExpectedBlocks
from .outcome import Decisions
from .pool import ElasticPool
from .request import Request
from .rows import Rows
from .running import AdmissionPlan, Running
from .sequence import Sequence
from .waiting import Waiting

MOST_TRIED = 8  # more refusals that end the search behind a sequence that does not fit
MOST_PASSES = 16  # times a sequence may be passed by later ones


class AdmissionController:
    """Selects sequences from `waiting`; the scheduler assigns rows to them.

    If `forecasts` returns False, every request that fits now is admitted.
    """

    def __init__(
        self, cache: CacheManager, pool: ElasticPool, rows: Rows, waiting: Waiting, running: Running,
        expected: ExpectedBlocks, forecasts: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._cache = cache
        self._pool = pool
        self._rows = rows
        self._waiting = waiting
        self._running = running
        self._expected = expected
        self._forecasts = forecasts

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. A fork waits for its leader's prompt, unless that is computed."""
        leader = sequence.leader
        if leader is not None and not leader.is_computed:
            self._waiting.wait_for_prompt(sequence, leader)
            return
        if leader is not None:
            leader.forks[sequence] = None
        if self._waiting.add(sequence) <= MOST_TRIED:
            self._waiting.look_again()

    def open(self, step: int, decisions: Decisions) -> Iterator[tuple[Sequence, AdmissionPlan, list[str]]]:
        """Yield each admitted sequence, its starting blocks, and the ids of the requests it passes, while rows and
        blocks last.

        A yielded sequence has left the queue; assign its row before the next iteration. The newest refusal of a sequence
        since it began to wait is in `decisions`.
        """
        cache, queue = self._cache, self._waiting.queue
        refused: list[Sequence] = []
        least = cache.pool.capacity + 1  # fewest blocks that a refused sequence needs
        while self._pool.admits and self._may_pass(refused) and len(refused) < len(queue) and self._rows.num_free:
            sequence = queue[len(refused)]
            if cache.blocks_for(len(sequence.tokens)) > self._pool.limit_blocks:
                self._waiting.defer(len(refused))  # the pool may not grow so far: delay no other sequence
                continue
            start = self._start(sequence)
            if start is None:
                assert sequence.leader is not None
                self._waiting.wait_for_prompt(sequence, sequence.leader)
            elif (not refused or start.num_blocks <= least // 2) and self._fits(sequence, start, step, decisions):
                self._waiting.remove(sequence)
                for other in refused:
                    other.passes += 1
                yield sequence, start, [other.request.request_id for other in refused]
            else:
                refused.append(sequence)
                least = min(least, start.num_blocks)
        self._waiting.is_blocked = bool(
            refused
        )  # not reached if the caller stopped before: others may still fit in the next step

    def _may_pass(self, refused: list[Sequence]) -> bool:
        """Whether a later sequence may be admitted before `refused`, which came first."""
        return len(refused) <= MOST_TRIED and not any(s.preemptions or s.passes >= MOST_PASSES for s in refused)

    def _start(self, sequence: Sequence) -> AdmissionPlan | None:
        """What a waiting sequence can start with now; None for a fork that should wait for its leader's prompt."""
        cache = self._cache
        known, leader, most = len(sequence.tokens), sequence.leader, sequence.sharable
        if leader is not None and leader.row is not None and most == known - 1 <= sequence.shares:
            if not leader.is_computed:
                return None
            if cache.row_tables.can_fork(leader.row, most):  # else it went on, and a window has passed
                return AdmissionPlan(
                    cache.blocks_for(known) - cache.row_tables.shared_by_fork(most), NO_HIT, leader.row
                )
        hit = cache.lookup(sequence.chain, most)
        return AdmissionPlan(cache.needed(known, hit), hit)

    def _fits(self, sequence: Sequence, start: AdmissionPlan, step: int, decisions: Decisions) -> bool:
        """Whether the sequence fits now and, unless it runs alone, the forecast growth of all sequences too."""
        cache, needed, room, peak = self._cache, start.num_blocks, self.room, None
        usable = min(cache.pool.usable - self._pool.withheld_blocks, self._pool.limit_blocks)
        if needed <= room:
            goes_on = start.leader_row is not None and len(sequence.tokens) > len(sequence.request.prompt_token_ids)
            # `goes_on`: a moved beam, which just gave up its row
            if not self._running or not self._forecasts() or goes_on:
                return True
            shared = cache.blocks_for(len(sequence.tokens)) - needed
            peak = self._expected.peak(self._running.rows, [sequence])
            if peak.blocks - shared <= usable:
                return True
        name = sequence.request.request_id
        sequence.refusal = decisions.waits(step, name, needed, room, peak, usable, earlier=sequence.refusal)
        return False

    @property
    def room(self) -> int:
        """Blocks available to a new sequence: free, not withheld, and within the limit.

        Blocks in flight do not count as used: they are free after this step's copies.
        """
        cache = self._cache
        available = cache.pool.available
        used = cache.pool.usable - available - cache.pool.pending_free_blocks
        return min(available - self._pool.withheld_blocks, self._pool.limit_blocks - used)


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
    if needed > cache.pool.capacity:
        number = cache.row_tables.num_tables
        tables = f" in {number} tables" if number > 1 else ""
        raise PromptTooLong(
            f"the prompt's {length:,} tokens{also} need {needed:,} blocks of {cache.block_size} tokens{tables}, the whole "
            f"pool has {cache.pool.capacity:,}: shorten it, or give the engine more kv_memory"
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

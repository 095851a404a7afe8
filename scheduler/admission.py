"""Admission control: rejects requests that can never run, and picks the next waiting request and its first blocks.

- Requests are tried in queue order (waiting.py). A request fits if the blocks of its known tokens, less shared ones,
  are available, and the forecast leaves room for the others to grow (forecast.py).
- Smaller requests (at most half the blocks) may pass one that does not fit. The search ends at MOST_TRIED further
  refusals. A request is passed at most MOST_PASSES times, so that it does not starve; a preempted one never. Waiting
  requests do not preempt running ones, except beams that wait for a choice (scheduler.py).
- A fork shares the prompt of another request, its leader. It waits until that prompt is computed, or all of it but the last
  token.
- A request that needs more blocks than the current limit is deferred and delays no other request.
- A refused request is not retried before something changes.
- What lies on disk of a new request's tokens is read before it is queued (disk_index.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..cache.prefix_index import NO_HIT
from .forecast import ForecastPeak
from .request import NOTHING, DuplicateRequest, PromptTooLong, Request, RequestRejected, Sequence
from .state import AdmissionPlan, SchedulerState

MOST_TRIED = 8  # more refusals that end the search behind a sequence that does not fit
MOST_PASSES = 16  # times a sequence may be passed by later ones


def check_request(state: SchedulerState, request: Request) -> None:
    """Raise RequestRejected, PromptTooLong or DuplicateRequest if `request` can never run beside those that are here."""
    cache, max_model_len, length = state.cache, state.limits.max_model_len, len(request.token_ids)
    if request.request_id in state.by_id:
        raise DuplicateRequest(f"request id {request.request_id!r} is in use")
    if request.fork_of is not None:
        _check_fork(request, request.fork_of, state.by_id.get(request.fork_of))
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
    if request.pin:
        _check_pin(state, request)


def _check_pin(state: SchedulerState, request: Request) -> None:
    """Raise RequestRejected if the prompt cannot be pinned. Pins leave room for one request of the greatest length."""
    cache, size, token_ids = state.cache, state.cache.block_size, request.prompt_token_ids
    if not cache.index.capacity:
        raise RequestRejected("a pin holds blocks of the prefix cache, which is off: leave prefix_caching on")
    least = size + any(group.is_state for group in cache.row_tables.window_groups)  # a state is kept before the last token
    if len(token_ids) < least:
        raise RequestRejected(
            f"a pin holds full blocks of {size} tokens, and the prefix has {len(token_ids)}, of at least {least}"
        )
    if not cache.pins.has_nodes_for(len(token_ids) // size, cache.index):
        raise RequestRejected(
            f"a pin of {len(token_ids):,} tokens: pins hold at most half of the {cache.index.capacity * size:,} tokens that "
            "the prefix cache can name; unpin a prefix, or pin a shorter one"
        )
    needed, promised = cache.blocks_to_pin(len(token_ids)), cache.pins.num_promised
    if not cache.row_tables.window_groups:
        needed -= cache.pins.num_among(cache.index.lookup(cache.chain(token_ids, request.cache_salt), len(token_ids)).nodes)
    if needed > (room := max(0, state.most_pinned - promised)):
        raise RequestRejected(
            f"a pin of {len(token_ids):,} tokens takes {needed:,} more blocks, and {room:,} may be pinned: of "
            f"{state.limit_blocks:,} blocks {promised:,} are pinned, and one request of {cache.max_tokens:,} tokens needs the "
            "others; unpin a prefix, give the engine more kv_memory, or a lower max_model_len"
        )


def add(state: SchedulerState, sequence: Sequence) -> None:
    """Queue a new sequence. A fork waits for its leader's prompt, unless that is computed."""
    leader, waiting, request = sequence.leader, state.waiting, sequence.request
    if request.pin:
        state.cache.open_pin(request.pin, len(request.prompt_token_ids))
    if leader is not None and not leader.is_computed:
        waiting.wait_for_prompt(sequence, leader)
        return
    if leader is not None:
        leader.forks[sequence] = None
    elif _begin_read(state, sequence):
        return
    if waiting.add(sequence) <= MOST_TRIED:
        waiting.look_again()


def begin_reads(state: SchedulerState) -> None:
    """Let sequences that were taken over wait for what lies on disk of their tokens."""
    for sequence in [one for one in state.waiting.queue if one.leader is None or one.shares == NOTHING]:
        _begin_read(state, sequence)


def _begin_read(state: SchedulerState, sequence: Sequence) -> bool:
    """Let a sequence wait for what lies on disk of its tokens, if reading that takes less time than computing it."""
    disk, cost, most = state.cache.disk, state.cost, sequence.sharable
    if disk is None or cost is None:
        return False
    found = state.cache.lookup(sequence.chain, most).num_tokens
    if sequence.kept is not None:
        found = max(found, len(sequence.kept.places) * state.cache.block_size)
    sequence.read = disk.begin(sequence.chain, found, most, cost.tokens_per_s)
    if sequence.read is not None:
        state.waiting.remove(sequence)
        state.waiting.wait_for_read(sequence)
    return sequence.read is not None


def admitted(state: SchedulerState) -> Iterator[tuple[Sequence, AdmissionPlan, list[str]]]:
    """Yield each admitted sequence, its starting blocks, and the ids of the requests it passes, while rows and
    blocks last.

    A yielded sequence has left the queue; assign its row before the next iteration. The newest refusal of a sequence
    since it began to wait is in the log of decisions.
    """
    cache, waiting, queue = state.cache, state.waiting, state.waiting.queue
    if not (state.admits and waiting.has_candidates):
        return
    refused: list[Sequence] = []
    least = cache.pool.capacity + 1  # fewest blocks that a refused sequence needs
    while _may_pass(refused) and len(refused) < len(queue) and state.rows.num_free:
        sequence = queue[len(refused)]
        if cache.blocks_for(len(sequence.tokens)) > state.limit_blocks:
            waiting.defer(len(refused))  # the pool may not grow so far: delay no other sequence
            continue
        start = _start(state, sequence)
        if start is None:
            assert sequence.leader is not None
            waiting.wait_for_prompt(sequence, sequence.leader)
        elif (not refused or start.num_blocks <= least // 2) and _fits(state, sequence, start):
            waiting.remove(sequence)
            for other in refused:
                other.passes += 1
            yield sequence, start, [other.request.request_id for other in refused]
        else:
            refused.append(sequence)
            least = min(least, start.num_blocks)
    # not reached if the caller stopped before: others may still fit in the next step
    waiting.is_blocked = bool(refused)


def room(state: SchedulerState) -> int:
    """Blocks available to a new sequence: free, not withheld, and within the limit.

    Blocks in flight do not count as used: they are free after this step's copies.
    """
    cache = state.cache
    available = cache.pool.available
    used = cache.pool.usable - available - cache.pool.pending_free_blocks
    return min(available - state.withheld_blocks, state.limit_blocks - used)


def expected_blocks(state: SchedulerState, newcomers: list[Sequence]) -> int:
    """The forecast, but at least the blocks of all tokens now, and at most the pool's capacity."""
    cache = state.cache
    known = np.append(state.rows.known[state.running_rows], np.array([len(s.tokens) for s in newcomers], np.int64))
    if not len(known):
        return 0
    now = int(cache.row_tables.blocks_for_each(known).sum()) + cache.pins.num_blocks - cache.row_tables.num_shared
    return min(max(now, expected_peak(state, newcomers).blocks), cache.pool.capacity)


def expected_peak(state: SchedulerState, newcomers: list[Sequence]) -> ForecastPeak:
    """Forecast peak of blocks for the running rows and the newcomers (at least one sequence), less shared blocks."""
    cache, rows, running = state.cache, state.rows, state.running_rows
    known = np.array([len(s.tokens) for s in newcomers], np.int64)
    prompt = np.array([len(s.request.prompt_token_ids) for s in newcomers], np.int64)
    limit = np.array([rows.limit_of(int(p), s.request.sampling) for p, s in zip(prompt, newcomers, strict=True)], np.int64)
    generated = np.append(rows.known[running] - rows.prompt[running], known - prompt)
    allowed = np.append(rows.limit[running] - rows.prompt[running], limit - prompt)
    known = np.append(rows.known[running], known)
    peak = state.forecast.peak(known, generated, allowed, cache.block_size)
    blocks = cache.row_tables.in_all_tables(peak.blocks, known, allowed - generated)
    return replace(peak, blocks=blocks + cache.pins.num_blocks - cache.row_tables.num_shared)


def _may_pass(refused: list[Sequence]) -> bool:
    """Whether a later sequence may be admitted before `refused`, which came first."""
    return len(refused) <= MOST_TRIED and not any(s.preemptions or s.passes >= MOST_PASSES for s in refused)


def _start(state: SchedulerState, sequence: Sequence) -> AdmissionPlan | None:
    """What a waiting sequence can start with now; None for a fork that should wait for its leader's prompt."""
    cache = state.cache
    known, leader, most = len(sequence.tokens), sequence.leader, sequence.sharable
    if leader is not None and leader.row is not None and most == known - 1 <= sequence.shares:
        if state.can_fork(leader, sequence):
            return AdmissionPlan(cache.blocks_for(known) - cache.row_tables.shared_by_fork(most), NO_HIT, leader.row)
        if not leader.is_computed:
            return None
        # It went on: a window has passed, or a state is behind more tokens.
    hit = cache.lookup(sequence.chain, most, sequence.request.request_id)
    needed = cache.needed(known, hit)
    if len(hit.nodes) and needed > room(state):
        without = cache.needed(known, NO_HIT)  # less where a found state is copied: there may be room for one only
        if without <= room(state):
            return AdmissionPlan(without, NO_HIT)
    return AdmissionPlan(needed, hit)


def _fits(state: SchedulerState, sequence: Sequence, start: AdmissionPlan) -> bool:
    """Whether the sequence fits now and, unless it runs alone, the forecast growth of all sequences fits the largest pool.

    Waiting until an elastic pool has grown so far costs more than the preemptions which that saves.
    """
    cache, needed, available, peak = state.cache, start.num_blocks, room(state), None
    usable = state.limit_blocks - state.withheld_blocks
    if needed <= available:
        goes_on = start.leader_row is not None and len(sequence.tokens) > len(sequence.request.prompt_token_ids)
        # `goes_on`: a moved beam, which just gave up its row
        if not state.by_row or not state.limits.forecast or goes_on:
            return True
        shared = cache.blocks_for(len(sequence.tokens)) - needed
        peak = expected_peak(state, [sequence])
        if peak.blocks - shared <= usable:
            return True
    name = sequence.request.request_id
    sequence.refusal = state.decisions.waits(state.stats.steps, name, needed, available, peak, usable, earlier=sequence.refusal)
    return False


def _check_generated(request: Request) -> None:
    """Raise RequestRejected if nothing is left to generate after the tokens generated before."""
    sampling, count = request.sampling, len(request.generated)
    if count >= sampling.max_new_tokens:
        most = sampling.max_new_tokens
        raise RequestRejected(f"{count:,} tokens were generated, of at most {most:,}: it is at its end")
    last = int(request.generated[-1])
    if last in sampling.stop_token_ids and count >= sampling.min_new_tokens:
        raise RequestRejected(f"the last token that was generated, {last}, is one of its stop ids: it is at its end")


def _check_fork(request: Request, leader_id: str, leader: Sequence | None) -> None:
    if len(request.generated):
        raise RequestRejected(
            f"{request.request_id!r} has tokens of its own: it finds the prompt where it is cached, and is no fork"
        )
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

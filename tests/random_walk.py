"""Random life of a scheduler: requests come, some with forks, steps run, some are aborted at any moment, some fail.

In an elastic walk the pool grows and gives back between steps, its limit moves, and the device refuses now and then. With
caching, prompts begin alike, some with what another request has generated; in half the walks what stays cached is bounded.
With a host tier, of 1 to 12 slots, what has to go is swapped out and in; now and then swapping is not worth it, or the host
has no memory. With a disk tier some prompts are read. With naps all requests are suspended now and then. Some cached prefixes
are pinned. With groups, some layers read only a part of each sequence. Ahead, a step is mostly planned while the one before is
out, and anything may happen in between. In a faulty walk some chunks are deferred and some copies fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fakes import VOCAB, FakeDisk, World, continuation, fake_logprob

from pagetide.cache.layer_groups import LayerGroup, most_columns_in, state_group
from pagetide.cache.retention import Retention
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.plan import InvalidCallOrder
from pagetide.scheduler.request import PromptTooLong, Request, RequestRejected, Sampling

VARIANTS = tuple(
    "-".join(words)
    for words in product(
        ("fixed", "elastic"),
        ("bare", "prefixes", "host", "disk"),
        ("alternate", "ahead"),
        ("sound", "faulty"),
        ("full", "groups", "states"),
    )
)

# Of any two of these words that go together, some variant has both.
PAIRWISE = (
    "fixed-bare-alternate-sound-full",
    "elastic-bare-ahead-faulty-groups",
    "fixed-prefixes-ahead-sound-groups",
    "elastic-prefixes-alternate-faulty-full",
    "fixed-host-alternate-faulty-groups",
    "elastic-host-ahead-sound-full",
    "fixed-bare-ahead-faulty-states",
    "elastic-prefixes-alternate-sound-states",
    "fixed-host-alternate-sound-states",
    "fixed-disk-alternate-faulty-full",
    "elastic-disk-alternate-faulty-groups",
    "fixed-disk-ahead-sound-states",
)


def walk(
    seed: int,
    variant: str,
    events: int,
    check_every: int = 1,
    look: Callable[[World], None] | None = None,
    *,
    naps: bool = False,
) -> World:
    """`events` random events in a random small world, then the rest is run to its end and everything is checked.

    `variant`, one of VARIANTS, says whether the pool is fixed or elastic; whether nothing is cached, prefixes are, or there is
    a host or a disk tier too, of odd seeds both; whether plans and results alternate or steps are planned ahead; whether chunks
    and copies fail; and whether all layers read all tokens, there are groups with windows, or layers with states too.
    Invariants are checked in one of `check_every` plans and results, and at the end; each time `look` is called too.
    """
    pool, kept, order, faults, layers = variant.split("-")
    rng = np.random.default_rng(seed)
    if pool == "fixed":
        usable = int(rng.integers(2, 24))
        shape = {"usable": usable, "host_slots": _slots(rng, kept)}
    else:
        slots = _slots(rng, kept)
        per, num_extents = int(rng.integers(1, 7)), int(rng.integers(3, 10))
        tides = float(rng.choice([0.03, 0.2, 0.6]))
        shape = {
            "usable": per * num_extents - 1, "tides": tides, "blocks_per_extent": per,
            "num_mapped": int(rng.integers(1, num_extents + 1)), "host_slots": slots,
        }  # fmt: skip
    apart = np.random.default_rng((seed, 1))
    bounded = kept != "bare" and apart.random() < 0.5
    max_cached = int(apart.choice([0, apart.integers(0, shape["usable"] + 1)])) if bounded else None
    disk = FakeDisk(np.random.default_rng((seed, 2))) if kept == "disk" else None
    if disk is not None and seed % 2:
        shape["host_slots"] = _slots(np.random.default_rng((seed, 3)), "host")
    of_naps = np.random.default_rng((seed, 4)) if naps else None
    return _walk(
        rng, events, of_naps, **shape, disk=disk, caching=kept != "bare", max_cached=max_cached, ahead=order == "ahead",
        faults=faults == "faulty", check_every=check_every, look=look, layers=layers,
    )  # fmt: skip


def capacity_of(world: World) -> int:
    """Tokens of the longest sequence that the whole pool holds; those of no window's pool have no end."""
    cache = world.cache
    return most_columns_in(cache.row_tables.groups, cache.pool.capacity, cache.block_size, 1 << 20) * cache.block_size


def _groups(rng: np.random.Generator, block_size: int) -> tuple[LayerGroup, ...]:
    """Layers that read all tokens, or none; layers with one or two windows, or chunks."""
    windows = sorted({int(rng.integers(1, 60)) for _ in range(int(rng.integers(1, 3)))}, reverse=True)
    groups = [LayerGroup(int(rng.integers(1, 3)), window) for window in windows]
    if rng.random() < 0.2:
        groups[-1] = LayerGroup(1, int(rng.integers(1, 6)) * block_size, chunked=True)
    if rng.random() < 0.75:
        groups.insert(0, LayerGroup(int(rng.integers(1, 3))))
    return tuple(groups)


def _slots(rng: np.random.Generator, kept: str) -> int:
    return int(rng.integers(1, 13)) if kept == "host" else 0


def _walk(
    rng: np.random.Generator, events: int, naps: np.random.Generator | None, usable: int, tides: float = 0.0,
    faults: bool = False, check_every: int = 1, look: Callable[[World], None] | None = None, layers: str = "full", **pool,
) -> World:  # fmt: skip
    block_size = int(rng.choice([1, 3, 4, 16]))
    groups = (LayerGroup(),) if layers == "full" or (layers == "states" and rng.random() < 0.5) else _groups(rng, block_size)
    if layers == "states":
        groups = () if rng.random() < 0.1 else groups
        groups += (state_group(int(rng.integers(1, 4))),)
    world = World(
        usable=usable, block_size=block_size, max_seqs=int(rng.integers(1, 13)),
        max_step_tokens=int(rng.choice([3, 30, 300])), max_model_len=2 + int(usable * block_size * rng.choice([0.3, 1.0, 2.0])),
        max_chunk_tokens=int(rng.integers(1, 30)) if rng.random() < 0.3 else None, forecast=bool(rng.random() < 0.3),
        cost=Whim(1, block_size), groups=groups, **pool,
    )  # fmt: skip
    world.rng = rng
    world.check_every = check_every
    world.look = look
    world.runner.faults = np.random.default_rng(rng.integers(1 << 30)) if faults else None
    capacity, num_mapped = capacity_of(world), len(world.cache.pool.mapped_extents)
    least = world.cache.pool.capacity  # the lowest limit there was
    for n in range(events):
        if world.cache.host.capacity and rng.random() < 0.05:
            turn_host(world, rng)
        if naps is not None and naps.random() < 0.03:
            end_step(world)
            world.nap(bool(naps.random() < 0.9))
        if rng.random() < tides:
            turn(world, rng)
            least = min(least, world.scheduler.pool.limit_blocks)
        kind = rng.random()
        live = sorted(set(world.requests) - set(world.finished))
        if kind < 0.2 and len(live) < 30:
            longest = (
                world.scheduler.state.limits.max_model_len + 2
                if rng.random() < 0.1
                else min(capacity, world.scheduler.state.limits.max_model_len) // 2
            )
            length = int(rng.integers(1, max(2, longest)))
            stops = tuple(rng.integers(0, VOCAB, int(rng.integers(0, 40))).tolist())
            new = int(rng.integers(1, 60)) if rng.random() < 0.9 else 10**6  # some run on to the end
            arrival, priority = float(rng.integers(0, n + 1)), int(rng.integers(3))
            before = 0 if rng.random() < 0.8 else int(rng.integers(1, 20))  # generated elsewhere
            try:
                world.add(
                    f"r{n}", _alike(world, length), max_new=new, arrival=arrival, priority=priority,
                    stop_token_ids=stops, min_new_tokens=int(rng.integers(0, 5)),
                    salt=None if rng.random() < 0.8 else b"tenant", num_generated=before, retention=_hint(rng), **_wishes(rng),
                )  # fmt: skip
                live.append(f"r{n}")
            except PromptTooLong:
                assert length + before >= world.scheduler.state.limits.max_model_len or length + before > capacity
            except RequestRejected:
                assert before, "only what was generated may leave nothing to do"
            if rng.random() < 0.25 and live:
                _fork(world, live[-1] if rng.random() < 0.7 else str(rng.choice(live)), n)
        elif kind < 0.21 and len(live) < 30:
            _family(world, n)
        elif kind < 0.25 and live:
            name = str(rng.choice(live))
            if rng.random() < 0.3:
                _withdraw(world, name)
            else:
                world.abort(name)
        elif kind < 0.255:
            world.cache.reset()
        elif kind < 0.27 and live:
            world.runner.fail.add(str(rng.choice(live)))
        elif kind < 0.31 and world.cache.index.capacity:
            _pin(world, n)
        else:
            begun = bool(world.begun)
            world.now += float(rng.random())
            plan = world.due()
            can = world.scheduler.num_running + world.scheduler.num_waiting - len(world.scheduler.state.waiting.reading)
            # Who is seated may have been told to wait for a copy that was called off: the next step computes its tokens.
            idle = not (len(plan.rows) or plan.moves_memory or plan.admitted)
            assert begun or not (idle and can) or waits_for_memory(world), "an idle step"
            if world.ahead and rng.random() < 0.9:
                world.go_ahead()
            if rng.random() < 0.1 and live:
                world.abort(str(rng.choice(live)))
            world.finish(plan)
    end_step(world)
    world.runner.refuses_map = world.runner.refuses_unmap = False
    world.runner.faults = None
    world.scheduler.pool.limit_blocks = world.cache.pool.capacity
    world.scheduler.pool.grow(world.cache.pool.capacity)
    world.run()
    for name in world.requests:
        world.cache.unpin(name)
    world.check_empty()
    assert world.cache.pool.usable == world.cache.pool.capacity
    stats, extents = world.scheduler.stats, len(world.cache.pool.mapped_extents)
    assert stats.grown_extents - stats.given_back_extents == extents - num_mapped, "what was refused is no growth"
    for name, request in world.requests.items():
        check_end(world, name, request, least)
    return world


def _hint(rng: np.random.Generator) -> Retention | None:
    """For one request in four, how long its prompt is worth keeping."""
    if rng.random() < 0.75:
        return None
    num_tokens, max_blocks = (None if rng.random() < 0.7 else int(rng.integers(1, 60)) for _ in range(2))
    return Retention(float(rng.choice([0.5, 5.0, 50.0])), num_tokens, str(rng.choice(["ann", "bob"])), max_blocks)


def _pin(world: World, n: int) -> None:
    """Pin the beginning of a prompt, or end a pin."""
    rng, pins = world.rng, sorted(name for name, request in world.requests.items() if request.pin)
    if pins and rng.random() < 0.4:
        world.cache.unpin(str(rng.choice(pins)))
        return
    room = world.scheduler.state.most_pinned - world.cache.pins.num_promised + 1  # sometimes too much
    most = min(max(2, room * world.cache.block_size), capacity_of(world))  # few blocks hold many tokens with windows alone
    tokens = _alike(world, int(rng.integers(1, max(2, most))))
    salt = None if rng.random() < 0.8 else b"tenant"
    with suppress(RequestRejected):
        world.add_request(Request(f"p{n}", tokens, Sampling(1), int(rng.integers(3)), float(n), salt, pin=f"p{n}"))


def _wishes(rng: np.random.Generator) -> dict[str, int]:
    """Some want log-probabilities."""
    return {name: 0 for name in ("logprobs", "prompt_logprobs") if rng.random() < 0.1}


def _alike(world: World, length: int) -> np.ndarray:
    """A prompt of so many tokens; where prefixes are cached, one that mostly begins as others do."""
    rng, prompt = world.rng, world.prompt(length)
    if not world.cache.index.capacity or rng.random() < 0.2:
        return prompt
    known = sorted(world.requests)[-6:]
    like = np.arange(length, dtype=np.int32) % VOCAB
    if known and rng.random() < 0.7:
        other = world.requests[str(rng.choice(known))]
        like = np.append(other.prompt_token_ids, np.array(world.emitted.get(other.request_id, []), np.int32))
    same = min(len(like), int(rng.integers(0, length + 1)), length)
    prompt[:same] = like[:same]
    return prompt


def end_step(world: World) -> None:
    """What is done between steps is refused while one is out, and waits until it is over."""
    if world.begun:
        scheduler, (row, *_) = world.scheduler, world.due().rows
        for refused in (
            lambda: scheduler.withdraw(scheduler.rows.request_ids[row]), lambda: scheduler.apply_beam_moves([]),
            lambda: scheduler.pool.grow(1), lambda: scheduler.pool.give_back(1), lambda: scheduler.pool.make_idle(1),
            scheduler.schedule,
        ):  # fmt: skip
            with pytest.raises(InvalidCallOrder):
                refused()
        world.finish(world.due())


def _withdraw(world: World, name: str) -> None:
    """Take a request out between two steps; sometimes it comes back with what it has, as one handed over would."""
    end_step(world)
    request, end = world.requests[name], world.scheduler.withdraw(name)
    if end is None:
        return
    world.scheduler.check_invariants()
    told = world.before[name] + world.emitted.get(name, [])
    assert end.token_ids.tolist() == told, "told tokens differ from the output"
    world.finished[name] = end
    world.aborted.add(name)
    if world.rng.random() < 0.5:
        world.add_request(replace(request, request_id=f"{name}'", generated=end.token_ids, fork_of=None, pin=""))


def _fork(world: World, leader: str, n: int) -> None:
    """Some more requests with the prompt of `leader`, which waits or runs, at whatever point it is."""
    rng, request = world.rng, world.requests[leader]
    if leader not in world.scheduler.state.by_id:
        return  # it ended between two steps, and is yet to be told
    for k in range(int(rng.integers(1, 4))):
        world.add(
            f"r{n}+{k}", request.prompt_token_ids, max_new=int(rng.integers(1, 60)), arrival=request.arrival,
            priority=request.priority, salt=request.cache_salt, fork_of=leader,
        )  # fmt: skip


def _family(world: World, n: int) -> None:
    """Some that tell candidates, and are steered."""
    rng, capacity = world.rng, capacity_of(world)
    longest = min(capacity, world.scheduler.state.limits.max_model_len)
    if longest > 2:
        prompt = _alike(world, int(rng.integers(1, max(2, longest // 2))))
        world.add_family(
            f"b{n}", prompt, int(rng.integers(2, 5)), int(rng.integers(2, 20)), arrival=float(rng.integers(0, n + 1))
        )


def turn(world: World, rng: np.random.Generator) -> None:
    """Something happens to the pool."""
    end_step(world)
    scheduler, kind, n = world.scheduler, rng.random(), int(rng.integers(1, 5))
    if kind < 0.3:
        before = scheduler.pool.num_extents
        assert scheduler.pool.grow(n) == scheduler.pool.num_extents - before <= n
    elif kind < 0.4:
        most = -(-(scheduler.pool.wanted_blocks() + 1) // world.cache.pool.blocks_per_extent)
        scheduler.pool.grow(max(0, most - scheduler.pool.num_extents))
    elif kind < 0.65:
        preemptions, idle = scheduler.stats.preemptions, scheduler.pool.idle_extents
        assert min(n, idle) <= scheduler.pool.give_back(n) <= n
        assert scheduler.stats.preemptions == preemptions
    elif kind < 0.8:
        before = scheduler.pool.num_extents
        scheduler.pool.make_idle(n)
        assert scheduler.pool.give_back(n) == before - scheduler.pool.num_extents <= n
    elif kind < 0.9:
        scheduler.pool.limit_blocks = int(rng.integers(0, world.cache.pool.capacity + 5))
    elif kind < 0.95:
        scheduler.pool.limit_blocks = world.cache.pool.capacity
    else:
        world.runner.refuses_map, world.runner.refuses_unmap = (bool(rng.random() < 0.3) for _ in range(2))


def turn_host(world: World, rng: np.random.Generator) -> None:
    """Something happens to the host tier."""
    world.scheduler.state.cost.share = float(rng.choice([0.0, 0.3, 0.8, 1e9], p=[0.5, 0.2, 0.2, 0.1]))
    world.runner.refuses_slots = bool(rng.random() < 0.02)


class Whim(SwapCost):
    """Swapping takes a share of what computing does: it is worth it, for what is likely to be wanted again, or not."""

    share = 0.0

    def swap_s(self, num_blocks: int) -> float:
        return self.share * self.compute_s(num_blocks * self.block_size)


def waits_for_memory(world: World) -> bool:
    """Whether nobody runs who is not held, and the first one that may run under the limit needs more blocks than there are."""
    needs = [world.cache.blocks_for(world.known(name)) for name in world.waiting_ids]
    allowed = [need for need in needs if need <= world.scheduler.pool.limit_blocks]
    if world.scheduler.num_running > len(world.scheduler.state.paused):
        return False
    return not allowed or allowed[0] > world.cache.pool.available


def check_scores(world: World, name: str, request) -> None:
    """What was asked for and no more came, without a gap, of all tokens of who ended by itself."""
    end, sampling, scored = world.finished[name], request.sampling, world.scored.get(name, {})
    prompt = request.prompt_token_ids
    tokens = np.append(prompt, end.token_ids)
    assert scored == {p: fake_logprob(tokens[:p]) for p in scored}, f"{name}: of other tokens"
    of_prompt = [p for p in range(1, len(prompt)) if p in scored]
    if sampling.prompt_logprobs is None:
        assert not of_prompt
    elif end.reason in ("stop", "length"):
        assert of_prompt == [*range(1, len(prompt))], f"{name}: the prompt's are not complete"
    else:
        assert of_prompt == [*range(1, len(of_prompt) + 1)]
    generated = [p for p in scored if p >= len(prompt)]
    assert generated == [*range(len(request.token_ids), len(tokens))] * (sampling.logprobs is not None)


def check_end(world: World, name: str, request, least: int) -> None:
    room = world.scheduler.state.limits.max_model_len - len(request.prompt_token_ids)
    check_scores(world, name, request)
    end, expected = world.finished[name], continuation(request.prompt_token_ids, request.sampling, room + 1)
    got = end.token_ids.tolist()
    assert got == expected[: len(got)], f"{name}: a token changed"
    if end.reason == "error":
        assert name in world.runner.fail
    elif end.reason == "aborted":
        assert name in world.aborted
    elif len(got) < len(expected):
        total = len(request.prompt_token_ids) + len(got)
        capacity = capacity_of(world)
        full = total in (world.scheduler.state.limits.max_model_len, capacity + 1)
        assert full or world.cache.blocks_for(total) > least, f"{name} ended early"
        assert end.reason == "length"

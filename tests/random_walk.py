"""Random life of a scheduler: requests come, steps run, some are aborted at any moment, some fail."""

from __future__ import annotations

import numpy as np
from fakes import VOCAB, World, continuation

from pagetide.scheduler.errors import PromptTooLong


def walk(seed: int, events: int) -> World:
    """`events` random events in a random small world, then the rest is run to its end and everything is checked."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 3, 4, 16]))
    usable = int(rng.integers(2, 24))
    world = World(
        usable=usable, block_size=block_size, max_seqs=int(rng.integers(1, 13)),
        max_step_tokens=int(rng.choice([3, 30, 300])), max_model_len=2 + int(usable * block_size * rng.choice([0.3, 1.0, 2.0])),
        max_chunk_tokens=int(rng.integers(1, 30)) if rng.random() < 0.3 else None, forecast=bool(rng.random() < 0.3),
    )  # fmt: skip
    world.rng = rng
    aborted: set[str] = set()
    capacity = world.cache.usable * block_size
    for n in range(events):
        kind = rng.random()
        live = sorted(set(world.requests) - set(world.finished))
        if kind < 0.2 and len(live) < 30:
            longest = (
                world.scheduler.limits.max_model_len + 2
                if rng.random() < 0.1
                else min(capacity, world.scheduler.limits.max_model_len) // 2
            )
            length = int(rng.integers(1, max(2, longest)))
            stops = tuple(rng.integers(0, VOCAB, int(rng.integers(0, 40))).tolist())
            new = int(rng.integers(1, 60)) if rng.random() < 0.9 else 10**6  # some run on to the end
            arrival, priority = float(rng.integers(0, n + 1)), int(rng.integers(3))
            try:
                world.add(
                    f"r{n}", length, max_new=new, arrival=arrival, priority=priority, stop_token_ids=stops,
                    min_new_tokens=int(rng.integers(0, 5)),
                )  # fmt: skip
            except PromptTooLong:
                assert length >= world.scheduler.limits.max_model_len or length > capacity
        elif kind < 0.25 and live:
            name = str(rng.choice(live))
            if world.scheduler.abort(name):
                aborted.add(name)
        elif kind < 0.27 and live:
            world.runner.fail.add(str(rng.choice(live)))
        else:
            plan = world.schedule()
            can = world.scheduler.num_running + world.scheduler.num_waiting
            assert len(plan.rows) or not can, "an idle step"
            if rng.random() < 0.1 and live and world.scheduler.abort(name := str(rng.choice(live))):
                aborted.add(name)
            world.finish(plan)
    world.run()
    world.check_empty()
    for name, request in world.requests.items():
        check_end(world, name, request, name in aborted)
    return world


def check_end(world: World, name: str, request, aborted: bool) -> None:
    room = world.scheduler.limits.max_model_len - len(request.prompt_token_ids)
    end, expected = world.finished[name], continuation(request.prompt_token_ids, request.sampling, room + 1)
    got = end.token_ids.tolist()
    assert got == expected[: len(got)], f"{name}: a token changed"
    if end.reason == "error":
        assert name in world.runner.fail
    elif end.reason == "aborted":
        assert aborted
    elif len(got) < len(expected):
        total = len(request.prompt_token_ids) + len(got)
        capacity = world.cache.usable * world.cache.block_size
        assert total in (world.scheduler.limits.max_model_len, capacity + 1), f"{name} ended early"
        assert end.reason == "length"

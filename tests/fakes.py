"""A runner without a model: it keeps token ids where a model keeps K and V, so that a wrong block shows as a wrong token.

The next token of a sequence is a hash of everything read through its block table; `continuation` computes the same from
the plain list of tokens. What was never written is poison.
"""

from __future__ import annotations

import zlib

import numpy as np

from pagetide.cache.manager import CacheManager
from pagetide.scheduler.plan import Failure, Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Emissions, Finished, Limits, Scheduler

POISON = -7
VOCAB = 997


def next_token(tokens) -> int:
    """The token after `tokens`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


def continuation(prompt, sampling: Sampling, most: int = 10_000) -> list[int]:
    """What the request gives when it is alone in the world, or the first `most` tokens of that."""
    tokens, new = list(prompt), []
    while len(new) < min(sampling.max_new_tokens, most):
        token = next_token(tokens)
        tokens.append(token)
        new.append(token)
        if token in sampling.stop_token_ids and len(new) >= sampling.min_new_tokens:
            break
    return new


class FakeRunner:
    """Executes plans over a pool of token ids. `fail` holds request ids whose chunks fail."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int) -> None:
        self.block_size = block_size
        self.pool = np.full((num_blocks, block_size), POISON, np.int32)
        self.tables = np.zeros((num_rows, -(-max_tokens // block_size)), np.int32)
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self.owner: dict[int, str] = {}
        self.fail: set[str] = set()

    def execute(self, plan: Plan) -> Result:
        for row in plan.released:
            del self.owner[int(row)]
        for new in plan.admitted:
            assert new.row not in self.owner, "a row was taken before it was released"
            self.owner[new.row] = new.request_id
            self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        for update in plan.tables:
            self.tables[update.rows, update.slots] = update.blocks
            self.pool[update.blocks] = POISON
        assert list(plan.lengths == 1) == sorted(plan.lengths == 1, reverse=True), "chunks of one token come first"
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in a step"
        return self._compute(plan)

    def _compute(self, plan: Plan) -> Result:
        sampled, failures = [], []
        counts = plan.samples.astype(np.int32)
        for i, (row, start, length) in enumerate(zip(plan.rows, plan.starts, plan.lengths, strict=True)):
            if self.owner[int(row)] in self.fail:
                counts[i] = 0
                failures.append(Failure(i, "planted"))
                continue
            for position in range(start, start + length):
                block, offset = self.tables[row, position // self.block_size], position % self.block_size
                assert block != 0, "wrote to the null block"
                self.pool[block, offset] = self.tokens[row, position]
            if plan.samples[i]:
                read = self.pool[self.tables[row, : -(-(start + length) // self.block_size)]].ravel()[: start + length]
                assert POISON not in read, "read what was never written"
                token = next_token(read)
                self.tokens[row, start + length] = token
                sampled.append(token)
        return Result(plan.step_id, counts, np.array(sampled, np.int32), tuple(failures))


class World:
    """Scheduler, manager and fake runner together; checks invariants around every step."""

    def __init__(
        self, usable: int, block_size: int = 16, *, max_seqs: int = 256, max_step_tokens: int = 8192,
        max_model_len: int = 4096, max_chunk_tokens: int | None = None, forecast: bool = False,
    ) -> None:  # fmt: skip
        self.cache = CacheManager(usable + 1, block_size, max_seqs, max_model_len)
        limits = Limits(max_seqs, max_step_tokens, max_model_len, max_chunk_tokens, forecast)
        self.scheduler = Scheduler(self.cache, limits)
        self.runner = FakeRunner(usable + 1, block_size, max_seqs, max_model_len)
        self.rng = np.random.default_rng(0)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Finished] = {}
        self.emitted: dict[str, list[int]] = {}
        self.started: list[str] = []
        self.plans: list[Plan] = []

    def prompt(self, length: int) -> np.ndarray:
        return self.rng.integers(0, VOCAB, length).astype(np.int32)

    def add(
        self, name: str, length: int, max_new: int = 16, *, priority: int = 0, arrival: float = 0.0, **more
    ) -> None:
        request = Request(name, self.prompt(length), Sampling(max_new, **more), priority, arrival)
        self.scheduler.add(request)
        self.requests[name] = request

    def schedule(self) -> Plan:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.check_invariants()
        self.plans.append(plan)
        self.started += [new.request_id for new in plan.admitted]
        return plan

    def finish(self, plan: Plan) -> Emissions:
        emissions = self.scheduler.apply(plan, self.runner.execute(plan))
        self.scheduler.check_invariants()
        for name, token in zip(emissions.request_ids, emissions.tokens, strict=True):
            self.emitted.setdefault(name, []).append(token)
        for end in emissions.finished:
            assert end.request_id not in self.finished, "a request ended twice"
            self.finished[end.request_id] = end
            assert end.token_ids.tolist() == self.emitted.get(end.request_id, []), "told tokens differ from the output"
        return emissions

    def step(self) -> Emissions:
        return self.finish(self.schedule())

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {most} steps")

    def lengths(self, plan: Plan) -> list[int]:
        """Tokens of the plan's chunks by age of their request."""
        ids = [self.scheduler.rows.request_ids[row] for row in plan.rows]
        order = sorted(range(len(ids)), key=lambda i: list(self.requests).index(ids[i]))
        return [int(plan.lengths[i]) for i in order]

    @property
    def used(self) -> int:
        return self.cache.counts().live

    def check_outputs(self, *, but: tuple[str, ...] = ()) -> None:
        """Every request but some gave what it gives alone."""
        for name, request in self.requests.items():
            if name not in but:
                expected = continuation(request.prompt_token_ids, request.sampling)
                assert self.finished[name].token_ids.tolist() == expected, name

    def check_empty(self) -> None:
        counts = self.cache.counts()
        assert (counts.live, counts.free) == (0, self.cache.usable)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

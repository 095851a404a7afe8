"""Continuations of one prompt by a tiny engine."""

from __future__ import annotations

from dataclasses import replace

from engines import TinyEngine, blocks_needed, prompts
from families import VOCAB, tiny

from pagetide.scheduler.request import Sampling

LENGTHS = [1, 17, 40]
NEW = 8
N = 3
DRAWN = Sampling(NEW, temperature=1.0, seed=7)


EACH = [replace(DRAWN, index=i) for i in range(N)]


def forked(engine: TinyEngine, inputs: list[list[int]]) -> list[list[int]]:
    """The tokens of N continuations of each prompt."""
    for p, prompt in enumerate(inputs):
        for i, sampling in enumerate(EACH):
            engine.add(f"r{p}.{i}", prompt, sampling, arrival=float(p), fork_of=f"r{p}.0" if i else None)
    ends = engine.run()
    assert {end.reason for end in ends.values()} == {"length"}
    return [ends[f"r{p}.{i}"].token_ids.tolist() for p in range(len(inputs)) for i in range(N)]


def check_forks(name: str) -> None:
    """They give what each gives alone, also where they are preempted."""
    model, inputs = tiny(name), prompts(LENGTHS, VOCAB)
    alone = TinyEngine(model, usable=200, max_seqs=1)
    expected = [alone.generate([prompt], one)[0] for prompt in inputs for one in EACH]
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "each draws for itself"
    preemptions = 0
    for caching, host_slots in ((False, 0), (True, 3)):
        usable = int(0.45 * N * blocks_needed(inputs, NEW, 4))
        engine = TinyEngine(model, usable=usable, block_size=4, max_chunk_tokens=20, caching=caching, host_slots=host_slots)
        assert forked(engine, inputs) == expected, (caching, host_slots)
        assert engine.core.scheduler.stats.forks > 0
        preemptions += engine.preemptions
    assert preemptions >= 2, "nothing was forced out"

"""What a scheduler tells to the outside: what a step gave, who ended, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.block_table import Int32
from .plan import Candidates, ChunkLogprobs
from .sequence import FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request's end: why, and everything it generated.

    `num_cached_tokens` is the number of the prompt's tokens that the prefix cache had, on the device or the host, when the
    request was first admitted; None if it was never admitted. All forks of a prompt have the same number: that of the one that
    was admitted first. What the others share with it does not count as cached.
    """

    request_id: str
    reason: FinishReason
    token_ids: Int32
    num_preemptions: int
    error: str | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BeamMove:
    """How a sequence goes on that somebody else chooses for: from the tokens of `source_id`, maybe its own, by `token`."""

    request_id: str
    source_id: str
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """What a step gave to the outside: request `request_ids[i]` got token `tokens[i]`; then some ended."""

    step_id: int
    request_ids: list[str]
    tokens: list[int]
    finished: tuple[Finished, ...] = ()
    scores: tuple[tuple[str, ChunkLogprobs], ...] = ()  # with the request that each is of
    candidates: tuple[tuple[str, Candidates], ...] = ()


@dataclass(slots=True)
class Stats:
    """Counters since the start. The scheduler mutates them.

    Prefix lookups are counted twice: those of new prompts, and as resumed lookups those of requests that had begun before
    (preempted requests, requests that were handed over, and forks that are admitted without their leader). Resumed requests
    find mostly what they computed themselves, so they say nothing about how often prompts begin alike.
    """

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    peak_used_blocks: int = 0
    grown_extents: int = 0
    given_back_extents: int = 0
    moved_blocks: int = 0
    refused_resizes: int = 0
    prefix_lookups: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_lookups: int = 0
    resumed_lookup_tokens: int = 0
    resumed_hit_tokens: int = 0
    forks: int = 0  # sequences that began with the blocks of another one
    demoted_blocks: int = 0  # copied to the host tier
    promoted_blocks: int = 0  # copied back

    def looked_up(self, num_tokens: int, num_hit: int, is_new: bool) -> None:
        """Count the admission of a sequence of `num_tokens` tokens, of which `num_hit` were found. `is_new`: its prompt is."""
        if is_new:
            self.prefix_lookups += 1
            self.prefix_lookup_tokens += num_tokens
            self.prefix_hit_tokens += num_hit
        else:
            self.resumed_lookups += 1
            self.resumed_lookup_tokens += num_tokens
            self.resumed_hit_tokens += num_hit

"""Outputs of the scheduler: step outputs, finished requests and counters."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.block_table import Int32
from .plan import Candidates, ChunkLogprobs
from .sequence import FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """The end of a request: the reason, and all generated tokens.

    `num_cached_tokens` is the number of prompt tokens that the prefix cache had, on the device or the host, when the
    request was first admitted; None if it was never admitted. All forks of a prompt have the number of the request
    admitted first. Tokens that the others share with it do not count as cached.
    """

    request_id: str
    reason: FinishReason
    token_ids: Int32
    num_preemptions: int
    error: str | None = None
    num_cached_tokens: int | None = None


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
class Stats:
    """Counters since the start. The scheduler mutates them.

    Prefix lookups of new prompts count separately from resumed lookups (preempted requests, imported requests, and
    forks admitted without their leader). Resumed requests mostly find what they computed themselves, so they do not
    show how often prompts share prefixes.
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
    forks: int = 0  # sequences that started with another's blocks
    demoted_blocks: int = 0  # copied to the host tier
    promoted_blocks: int = 0  # copied back

    def looked_up(self, num_tokens: int, num_hit: int, is_new: bool) -> None:
        """Count the prefix lookup of an admission: `num_hit` of `num_tokens` tokens were found. `is_new`: a new prompt."""
        if is_new:
            self.prefix_lookups += 1
            self.prefix_lookup_tokens += num_tokens
            self.prefix_hit_tokens += num_hit
        else:
            self.resumed_lookups += 1
            self.resumed_lookup_tokens += num_tokens
            self.resumed_hit_tokens += num_hit

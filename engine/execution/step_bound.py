"""How long a step may take on the slowest machine that is taken to be computing: for the judgement whether it hangs."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduler.plan import Plan

# A tenth of a slow core, and of a slow card: bytes of weights, or of K and V, that are multiplied with a token in a second.
_SLOWEST_ON_CPU, _SLOWEST_ON_DEVICE = 4e9, 4e11
_SLOWEST_MOVES = 1e8  # bytes a second that are mapped, unmapped, copied or swapped
_SLOWEST_SAMPLE_S = 0.1  # of a row: its constraint, its logits processors, its log-probabilities


@dataclass(frozen=True, slots=True)
class StepBound:
    """The seconds that plans announce, from the sizes of the model and of its pool, in bytes."""

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0
    block_bytes: int = 0
    extent_bytes: int = 0
    on_cpu: bool = True

    def seconds(self, plan: Plan) -> float:
        """How much longer than `Progress.base_s` a part of the step may take. No part takes longer than all of them."""
        ends = plan.starts + plan.lengths
        products = self.weights_bytes * plan.num_tokens + self.kv_bytes_per_token * int(plan.lengths @ ends)
        blocks = 0 if plan.copies is None else len(plan.copies.sources)
        if (swaps := plan.swaps) is not None:
            blocks += len(swaps.out_slots) + len(swaps.in_slots)
            blocks += 0 if swaps.back is None else len(swaps.back.sources)
        moved = self.block_bytes * blocks + self.extent_bytes * (len(plan.resize.map) + len(plan.resize.unmap))
        slowest = _SLOWEST_ON_CPU if self.on_cpu else _SLOWEST_ON_DEVICE
        return products / slowest + moved / _SLOWEST_MOVES + _SLOWEST_SAMPLE_S * int(plan.samples.sum())

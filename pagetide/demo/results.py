"""The result of the demo: four lines that end in the claim, a table, and JSON, all computed from the two runs."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..common.units import format_bytes

if TYPE_CHECKING:
    from ..engine.requests.outputs import RequestOutput
    from .recall import RecallResult


@dataclass
class DemoRun:
    """One pass over all prompts."""

    outputs: list[RequestOutput]
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)
    recall: RecallResult | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def num_failed(self) -> int:
        """Requests that were not served to their end."""
        return sum(output.finish_reason not in ("stop", "length") for output in self.outputs)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The run out of the small pool, and the same with room for all."""

    pressed: DemoRun
    free: DemoRun
    usable_blocks: int  # of the small pool
    needed_blocks: int  # by all prompts together

    @property
    def num_changed(self) -> int:
        """Tokens that differ between both runs, place by place; a missing token differs."""
        return changed_tokens(
            [output.token_ids for output in self.pressed.outputs], [output.token_ids for output in self.free.outputs]
        )

    @property
    def is_success(self) -> bool:
        """Whether all requests were served in both runs, with the same tokens."""
        return not (self.num_changed or self.pressed.num_failed or self.free.num_failed)

    def lines(self) -> list[str]:
        """Four lines; the last is the claim."""
        run, stats = self.pressed, self.pressed.stats
        speed = f"{run.num_tokens:,} tokens at {run.num_tokens / run.seconds:,.0f} tokens/s"
        return [
            f"{len(run.outputs)} prompts, {speed}, in {self.usable_blocks} blocks where {self.needed_blocks} are needed",
            self._recall_line(),
            f"{stats['recomputed_tokens']:,} tokens recomputed after preemptions; with room for all, "
            f"{counted(self.free.stats['preemptions'], 'preemption')}",
            self.claim(),
        ]

    def claim(self) -> str:
        """What the demo shows, as it was in this run."""
        parts = [
            counted(self.pressed.stats["preemptions"], "preemption"),
            taken(0.0 if self.pressed.recall is None else self.pressed.recall.share),
        ]
        if failed := self.pressed.num_failed + self.free.num_failed:
            parts.append(counted(failed, "request") + " failed")
        return ", ".join([*parts, counted(self.num_changed, "token") + " changed"])

    def table(self) -> dict[str, Any]:
        """All figures, by name."""
        run, stats = self.pressed, self.pressed.stats
        recall: dict[str, Any] = {}
        if run.recall is not None:
            recall = {
                "recalls of the pool's memory": run.recall.recalls,
                "pool, KiB before the recall": run.recall.before_bytes // 1024,
                "pool, KiB after it": run.recall.after_bytes // 1024,
                "given back, KiB": run.recall.given_back_bytes // 1024,
                "grown again, KiB": run.recall.grown_bytes // 1024,
            }
        return {
            "device": stats["device"],
            "prompts": len(run.outputs),
            "tokens generated": run.num_tokens,
            "tokens per second": round(run.num_tokens / run.seconds, 1),
            "steps": stats["steps"],
            "preemptions": stats["preemptions"],
            "tokens computed again": stats["recomputed_tokens"],
            "peak blocks used": stats["peak_used_blocks"],
            "blocks of the pool": self.usable_blocks,
            "blocks that all need together": self.needed_blocks,
            **recall,
            "preemptions with room for all": self.free.stats["preemptions"],
            "tokens changed": self.num_changed,
            "tokens equal to an unpressured run": self.num_changed == 0,
        }

    def to_dict(self) -> dict[str, Any]:
        """The table, the claim and the texts, for JSON."""
        texts = [
            {"prompt": output.prompt, "text": output.text, "finish_reason": output.finish_reason}
            for output in self.pressed.outputs
        ]
        return {**self.table(), "claim": self.claim(), "outputs": texts}

    def table_lines(self, width: int) -> list[str]:
        """The texts, wrapped to `width`, and the table."""
        lines = [line for output in self.pressed.outputs for line in _text_lines(output, width)]
        lines.append("")
        for name, value in self.table().items():
            shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            lines.append(f"  {name:<36}{shown:>12,}" if isinstance(shown, int | float) else f"  {name:<36}{shown:>12}")
        return lines

    def _recall_line(self) -> str:
        recall = self.pressed.recall
        if recall is None:
            return "the pool of this device is one allocation: no memory was recalled"
        before, after, again = (format_bytes(size) for size in (recall.before_bytes, recall.after_bytes, recall.grown_bytes))
        return f"{counted(recall.recalls, 'recall')}: the pool went from {before} to {after}, then grew by {again}"


def changed_tokens(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Tokens that differ, place by place; a missing token differs."""
    changed = 0
    for mine, other in zip(ours, theirs, strict=True):
        changed += abs(len(mine) - len(other)) + sum(a != b for a, b in zip(mine, other, strict=False))
    return changed


def counted(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def taken(share: float) -> str:
    """How much of the pool was taken, in words where it was half."""
    if share <= 0:
        return "no memory taken"
    return "half the pool taken" if 0.45 <= share < 0.55 else f"{share:.0%} of the pool taken"


def _text_lines(output: RequestOutput, width: int) -> list[str]:
    prompt, text = " ".join((output.prompt or "").split()), " ".join((output.text or "").split())
    head = textwrap.shorten(prompt[-40:], 40, placeholder="") if len(prompt) > 40 else prompt
    note = f", preempted {output.num_preemptions} x" if output.num_preemptions else ""
    return [
        "",
        f"... {head}  [{len(output.token_ids)} tokens, {output.finish_reason}{note}]"[:width],
        *textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    "),
    ]

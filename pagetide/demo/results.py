"""The results of the demo's two forms: four lines that end in the claim, a table or figures as JSON, computed from the runs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.units import MIB, format_bytes
from .engines import DemoOutput, changed_tokens


@dataclass
class EngineRun:
    """What an engine generated, and the same requests with room for all."""

    outputs: Sequence[DemoOutput]
    with_room: Sequence[DemoOutput]
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)
    arrivals: Sequence[float] = ()
    recalls: Sequence[tuple[float, int]] = ()  # when, and the bytes so far

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def num_failed(self) -> int:
        """Requests that were not served to their end, in either run."""
        return sum(output.is_failed for output in [*self.outputs, *self.with_room])

    @property
    def num_changed(self) -> int:
        """Tokens that differ between both runs, place by place; a missing token differs."""
        return changed_tokens(self.outputs, self.with_room)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        pairs = zip(self.outputs, self.with_room, strict=True)
        return {
            "requests": len(self.outputs),
            "seconds": self.seconds,
            "arrivals": list(self.arrivals),
            "recalls": [list(one) for one in self.recalls],
            "preemptions": self.stats["preemptions"],
            "tokens": self.num_tokens,
            "first_token_s": sorted(output.first_token_s for output in self.outputs),
            "memory": self.stats["memory"],
            "failed": self.num_failed,
            "equal": sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
            "changed_tokens": self.num_changed,
        }


@dataclass(frozen=True, slots=True)
class RecallResult:
    """Bytes of the pool before and after the recall, given back to the system in the run, and grown after the recall."""

    recalls: int
    before_bytes: int
    after_bytes: int
    given_back_bytes: int
    grown_bytes: int

    @property
    def share(self) -> float:
        """The share of the pool that was taken."""
        return 1 - self.after_bytes / self.before_bytes if self.before_bytes else 0.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Of the run out of a small pool."""

    run: EngineRun
    device: str
    usable_blocks: int  # of the small pool
    needed_blocks: int  # by all prompts together
    room_preemptions: int  # with room for all
    recall: RecallResult | None = None

    @property
    def is_success(self) -> bool:
        """Whether all requests were served in both runs, with the same tokens."""
        return not (self.run.num_changed or self.run.num_failed)

    def lines(self) -> list[str]:
        """Four lines; the last is the claim."""
        run, stats = self.run, self.run.stats
        speed = f"{run.num_tokens:,} tokens at {run.num_tokens / run.seconds:,.0f} tokens/s"
        return [
            f"{len(run.outputs)} prompts, {speed}, in {self.usable_blocks} blocks where {self.needed_blocks} are needed",
            self._recall_line(),
            f"{stats['recomputed_tokens']:,} tokens recomputed after preemptions; with room for all, "
            f"{counted(self.room_preemptions, 'preemption')}",
            self.claim(),
        ]

    def claim(self) -> str:
        """What the demo shows, as it was in this run."""
        parts = [counted(self.run.stats["preemptions"], "preemption"), taken(0.0 if self.recall is None else self.recall.share)]
        if failed := self.run.num_failed:
            parts.append(counted(failed, "request") + " failed")
        return ", ".join([*parts, counted(self.run.num_changed, "token") + " changed"])

    def table(self) -> dict[str, Any]:
        """All figures, by name."""
        run, stats = self.run, self.run.stats
        recall: dict[str, Any] = {}
        if self.recall is not None:
            recall = {
                "recalls of the pool's memory": self.recall.recalls,
                "pool, KiB before the recall": self.recall.before_bytes // 1024,
                "pool, KiB after it": self.recall.after_bytes // 1024,
                "given back, KiB": self.recall.given_back_bytes // 1024,
                "grown again, KiB": self.recall.grown_bytes // 1024,
            }
        return {
            "device": self.device,
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
            "preemptions with room for all": self.room_preemptions,
            "tokens changed": run.num_changed,
            "tokens equal to an unpressured run": run.num_changed == 0,
        }

    def to_dict(self) -> dict[str, Any]:
        """The table, the claim and the texts, for JSON."""
        texts = [
            {"prompt": output.prompt, "text": output.text, "finish_reason": output.finish_reason} for output in self.run.outputs
        ]
        return {**self.table(), "claim": self.claim(), "outputs": texts}

    def table_lines(self, width: int) -> list[str]:
        """The texts, wrapped to `width`, and the table."""
        lines = [line for output in self.run.outputs for line in _text_lines(output, width)]
        lines.append("")
        for name, value in self.table().items():
            shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            lines.append(f"  {name:<36}{shown:>12,}" if isinstance(shown, int | float) else f"  {name:<36}{shown:>12}")
        return lines

    def _recall_line(self) -> str:
        recall = self.recall
        if recall is None:
            return "the pool of this device is one allocation: no memory was recalled"
        before, after, again = (format_bytes(size) for size in (recall.before_bytes, recall.after_bytes, recall.grown_bytes))
        return f"{counted(recall.recalls, 'recall')}: the pool went from {before} to {after}, then grew by {again}"


@dataclass(frozen=True, slots=True)
class SharedResult:
    """Of engines and an external process on one device."""

    capacity_bytes: int
    most_held_bytes: int
    most_kv_bytes: tuple[int, ...]
    most_external_bytes: int
    pieces: int  # that the external process took
    waits: int  # how often one did not fit at once
    engines: tuple[dict[str, Any], ...]  # as `EngineRun.to_dict` gives them, with their names

    @property
    def is_success(self) -> bool:
        """Whether all requests were served with the same tokens, and memory stayed within the limit."""
        return not (self._sum("failed") or self._sum("changed_tokens") or self.is_above)

    @property
    def is_above(self) -> bool:
        """Whether more memory was held than the device has."""
        return self.most_held_bytes > self.capacity_bytes

    def lines(self) -> list[str]:
        """Four lines; the last is the claim."""
        pools = " and ".join(f"{most / MIB:,.0f} MiB" for most in self.most_kv_bytes)
        recalls = sum(one["memory"]["recalls"] for one in self.engines)
        returned = sum(one["memory"]["given_back_bytes"] for one in self.engines)
        return [
            f"{counted(self._sum('requests'), 'request')}, {self._sum('tokens'):,} tokens; the pools grew to {pools}",
            f"{counted(recalls, 'recall')}, {self._sum('preemptions')} preemptions, {returned / MIB:,.0f} MiB given back; "
            f"external: {self.most_external_bytes / MIB:,.0f} MiB",
            f"at most {self.most_held_bytes / MIB:,.0f} of {self.capacity_bytes / MIB:,.0f} MiB were held at any time",
            self.claim(),
        ]

    def claim(self) -> str:
        """What the demo shows, as it was in this run."""
        failed = self._sum("failed")
        served = f"{counted(self._sum('requests') - failed, 'request')} served, {failed or 'none'} failed"
        limit = "memory above the limit" if self.is_above else "memory never above the limit"
        return f"{served}, {counted(self._sum('changed_tokens'), 'token')} changed, {limit}"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "capacity_bytes": self.capacity_bytes,
            "most_held_bytes": self.most_held_bytes,
            "most_kv_bytes": list(self.most_kv_bytes),
            "external": {"most_bytes": self.most_external_bytes, "pieces": self.pieces, "waits": self.waits},
            "engines": list(self.engines),
            "claim": self.claim(),
        }

    def _sum(self, name: str) -> int:
        return sum(int(one[name]) for one in self.engines)


def counted(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def taken(share: float) -> str:
    """How much of the pool was taken, in words where it was half."""
    if share <= 0:
        return "no memory taken"
    return "half the pool taken" if 0.45 <= share < 0.55 else f"{share:.0%} of the pool taken"


def _text_lines(output: DemoOutput, width: int) -> list[str]:
    prompt, text = " ".join(str(output.prompt).split()), " ".join(output.text.split())
    head = textwrap.shorten(prompt[-40:], 40, placeholder="") if len(prompt) > 40 else prompt
    note = f", preempted {output.num_preemptions} x" if output.num_preemptions else ""
    return [
        "",
        f"... {head}  [{len(output.token_ids)} tokens, {output.finish_reason}{note}]"[:width],
        *textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    "),
    ]

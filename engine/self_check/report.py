"""What a self-check found: one outcome for each part of the engine that depends on the device, as plain data.

    pool            map and unmap extents                            without it: one allocation of fixed size
    triton, ...     the kernels that attention="auto" may choose     without one: another; torch is always there
    graphs          a captured CUDA graph against the same step      without it: steps are launched kernel by kernel
    swaps           blocks to pinned host memory and back            without it: plain copies of memory not pinned

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..attention.backends import BACKENDS

PASSED = "passed"
FAILED = "failed"  # it gave wrong results, raised, crashed its process or did not end
ABSENT = "absent"  # what it needs is not installed, or the device cannot do it: there is nothing to switch off
UNTRIED = "untried"  # it could not be tried now, for lack of memory say; tells nothing of the part
NOT_RUN = "not run"  # of a whole report: nothing is known

POOL, GRAPHS, SWAPS = "pool", "graphs", "swaps"
# Backends without a need of a device's capability run anywhere; those that compile for minutes are never chosen unasked.
PARTS = (
    POOL,
    *(name for name, needs in BACKENDS.items() if needs.majors is not None and not needs.compiles),
    GRAPHS,
    SWAPS,
)


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """What became of one part."""

    part: str
    state: str  # one of the four above
    reason: str | None = None  # None where it passed
    seconds: float = 0.0
    at: float = 0.0  # when, in seconds since 1970

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PartOutcome:
        """From what `asdict` gave. Raises ValueError, TypeError or KeyError for anything else."""
        outcome = cls(
            str(given["part"]),
            given["state"],
            None if given["reason"] is None else str(given["reason"]),
            float(given["seconds"]),
            float(given["at"]),
        )
        if outcome.state not in (PASSED, FAILED, ABSENT, UNTRIED):
            raise ValueError(f"{outcome.state!r} is no state of a part")
        return outcome


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcomes of all parts on one device.

    Args:
        device: As torch names it.
        identity: What the result holds for: the device, its driver, versions. See `identity`.
        cached: Whether every outcome is of an earlier run.
        file: Where the result is kept.
        kept: Whether it could be written there.
    """

    device: str
    identity: Mapping[str, Any]
    outcomes: tuple[PartOutcome, ...]
    cached: bool
    file: str
    kept: bool = True

    @property
    def faults(self) -> dict[str, str]:
        """Why, of each part that is switched off."""
        return {one.part: one.reason or "" for one in self.of(FAILED)}

    @property
    def state(self) -> str:
        """FAILED where a part is switched off; UNTRIED where one could not be tried; else PASSED. NOT_RUN without any."""
        if not self.outcomes:
            return NOT_RUN
        return next((state for state in (FAILED, UNTRIED) if self.of(state)), PASSED)

    def of(self, state: str) -> list[PartOutcome]:
        """The outcomes of this state."""
        return [one for one in self.outcomes if one.state == state]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `LLM.stats()` and `pagetide doctor --json`."""
        return {
            "state": self.state,
            "device": self.device,
            "cached": self.cached,
            "file": self.file if self.kept else None,
            "parts": {one.part: {k: v for k, v in asdict(one).items() if k != "part"} for one in self.outcomes},
        }


def without(part: str) -> str:
    """What the engine does without a part, as a sentence."""
    if part in BACKENDS:
        return f"attention is by another kernel than {part}"
    return {
        POOL: "the KV pool is one allocation, which does not grow and shrink",
        GRAPHS: "decode steps are launched kernel by kernel",
        SWAPS: "swaps are plain copies from and to host memory that is not pinned",
    }[part]


def in_order(outcomes: Iterable[PartOutcome]) -> tuple[PartOutcome, ...]:
    """The outcomes in the order of PARTS."""
    return tuple(sorted(outcomes, key=lambda one: PARTS.index(one.part)))

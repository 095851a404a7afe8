"""The result of a self-check: one outcome per device-dependent part of the engine, as plain data.

    pool            map and unmap extents                            without it: one allocation of fixed size
    triton, ...     the kernels that attention="auto" may choose     without one: another; torch is always available
    graphs          a captured CUDA graph against the same step      without it: steps are launched kernel by kernel
    swaps           blocks to pinned host memory and back            without it: plain copies of unpinned memory

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..attention.backends import BACKENDS

PASSED = "passed"
FAILED = "failed"  # it gave wrong results, raised, crashed its process or did not end
ABSENT = "absent"  # a requirement is not installed or not supported: there is nothing to switch off
# It could not be tested now (for lack of memory, for example): nothing is known
UNTRIED = "untried"
NOT_RUN = "not run"  # of a whole report: nothing is known

POOL, GRAPHS, SWAPS = "pool", "graphs", "swaps"
# Backends without required capabilities run anywhere; "auto" never chooses those that compile for minutes.
PARTS = (POOL, *(name for name, needs in BACKENDS.items() if needs.majors and not needs.compiles), GRAPHS, SWAPS)


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """The outcome of one part."""

    part: str
    state: str  # PASSED, FAILED, ABSENT or UNTRIED
    reason: str | None = None  # None if it passed
    seconds: float = 0.0
    at: float = 0.0  # time of the test, in seconds since 1970

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PartOutcome:
        """The inverse of `asdict`. Raises ValueError, TypeError or KeyError for invalid data."""
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
        identity: What the result is valid for: the device, its driver, versions. See `identity`.
        cached: Whether every outcome is from an earlier run.
    """

    device: str
    identity: Mapping[str, Any]
    outcomes: tuple[PartOutcome, ...]
    cached: bool
    file: str
    kept: bool = True

    @property
    def faults(self) -> dict[str, str]:
        """The parts that are switched off, with reasons."""
        return {one.part: one.reason or "" for one in self.of(FAILED)}

    @property
    def state(self) -> str:
        """FAILED if a part is switched off; UNTRIED if a part could not be tested; else PASSED. NOT_RUN without any outcome."""
        if not self.outcomes:
            return NOT_RUN
        return next((state for state in (FAILED, UNTRIED) if self.of(state)), PASSED)

    def of(self, state: str) -> list[PartOutcome]:
        """The outcomes with this state."""
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
    """The engine's behaviour without a part, as a sentence."""
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

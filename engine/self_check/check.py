"""The self-check of a device: combines cached results with new tests, and logs the outcome. Imports no torch.

Results are valid for one identity of device, driver and versions. A failure is only valid for a day: then all parts that did
not pass are tested again, since the cause may be gone. Reasons: docs/decisions/0036-self-check.md.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .cache import Cache
from .identity import identity_of
from .process import try_parts
from .report import FAILED, PARTS, PASSED, UNTRIED, CheckReport, PartOutcome, in_order, without

log = logging.getLogger(__name__)

FAILURES_HOLD_S = 24 * 3600.0

Try = Callable[[Sequence[str], Mapping[str, Any]], list[PartOutcome]]


def self_check(
    index: int,
    *,
    again: bool = False,
    tries: bool = True,
    cache: Cache | None = None,
    identify: Callable[[int], dict[str, Any]] = identity_of,
    attempt: Try | None = None,
    clock: Callable[[], float] = time.time,
) -> CheckReport:
    """Which parts of the engine work on CUDA device `index`, as torch counts.

    Args:
        tries: Test parts without a cached result; False: report cached results only.
        cache: The result cache.
        identify: The identity for which results are valid.
        attempt: Tests parts; None: in separate processes.
        clock: Seconds since 1970.
    """
    cache, identity = cache or Cache(), identify(index)
    known = {} if again else {one.part: one for one in _believed(cache.read(identity), clock())}
    todo = [part for part in PARTS if part not in known] if tries else []
    kept = True
    if todo:
        where = _format_device(f"cuda:{index}", identity)
        log.info("self-check of %s: %d parts are tried, once for this device, driver and versions", where, len(todo))
        faulty = [one.part for one in known.values() if one.state == FAILED]
        found = (attempt or partial(_in_processes, index, faulty))(todo, identity)
        known |= {one.part: one for one in found}
        kept = _keep(cache, identity, known.values())
    return CheckReport(f"cuda:{index}", identity, in_order(known.values()), not todo, str(cache.file(identity)), kept)


def at_start(index: int, check: Callable[[int], CheckReport] = self_check) -> CheckReport:
    """The self-check at engine start. Logs the findings. Its own errors do not stop the engine."""
    try:
        report = check(index)
    except Exception as error:  # the engine can start without a self-check
        log.exception("the self-check of cuda:%d raised an exception; all parts are used unchecked", index)
        outcomes = tuple(PartOutcome(part, UNTRIED, f"{type(error).__name__}: {error}") for part in PARTS)
        return CheckReport(f"cuda:{index}", {}, outcomes, cached=False, file="", kept=False)
    say(report)
    return report


def say(report: CheckReport) -> None:
    """Log a warning for each part that is switched off, and one for the untested parts."""
    where = _format_device(report.device, report.identity)
    for part, reason in report.faults.items():
        log.warning(
            "self-check of %s: %s failed and is disabled: %s. Without it %s. `pagetide doctor` shows the result, "
            "`pagetide doctor --refresh` repeats it",
            where,
            part,
            reason,
            without(part),
        )
    untried = report.of(UNTRIED)
    if untried:
        parts = ", ".join(one.part for one in untried)
        reasons = "; ".join(dict.fromkeys(str(one.reason) for one in untried))
        log.warning(
            "self-check of %s: %s could not be tried (%s) and is used unchecked; the next start tries again, "
            "self_check=False does not",
            where,
            parts,
            reasons,
        )
    if not report.faults and not untried and not report.cached:
        log.info("self-check of %s: all available parts work", where)


def _believed(kept: Iterable[PartOutcome], now: float) -> list[PartOutcome]:
    """The cached outcomes that need no new test."""
    known = [one for one in kept if one.part in PARTS]
    if all(0 <= now - one.at < FAILURES_HOLD_S for one in known if one.state == FAILED):
        return known
    return [one for one in known if one.state == PASSED]


def _keep(cache: Cache, identity: Mapping[str, Any], outcomes: Collection[PartOutcome]) -> bool:
    try:
        cache.write(identity, (one for one in in_order(outcomes) if one.state != UNTRIED))
    except OSError as error:
        log.warning("the result cannot be saved, so the next start repeats the self-check: %s", error)
        return False
    return True


def _format_device(device: str, identity: Mapping[str, Any]) -> str:
    return f"{device} ({identity['name']}, driver {identity['driver']})"


def _in_processes(index: int, faulty: Collection[str], parts: Sequence[str], identity: Mapping[str, Any]) -> list[PartOutcome]:
    def command(todo: Sequence[str], failed: Collection[str]) -> list[str]:
        request = json.dumps({"device": index, "parts": list(todo), "failed": [*faulty, *failed]})
        return ["-m", f"{__package__}.child", request]

    return try_parts(parts, command, identity)

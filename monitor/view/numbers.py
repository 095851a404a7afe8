"""Amounts, rates and times as the view formats them: short, of even width, "–" for unknown values."""

from __future__ import annotations

import math

from ...common.units import GIB, MIB, format_seconds

FULL_SOON_SECONDS = 3600  # longer predictions of a trend are not shown
URGENT_SECONDS = 300


def share_of(part: int | None, whole: int | None) -> float | None:
    """`part` of `whole`; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole else None


def percent(share: float | None, dash: str) -> str:
    """ "70%"."""
    return dash if share is None or not math.isfinite(share) else f"{share:.0%}"


def amount(num_bytes: int | None, dash: str) -> str:
    """ "98.2 GiB", "812 MiB"."""
    if num_bytes is None:
        return dash
    if abs(num_bytes) < 1000 * MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / GIB:.{0 if abs(num_bytes) >= 1000 * GIB else 1}f} GiB"


def used_of_total(used_bytes: int | None, total_bytes: int | None, dash: str) -> tuple[str, str, str]:
    """Both in the unit that suits the total: ("98.2", "140.4", "GiB")."""
    whole = total_bytes if total_bytes is not None else used_bytes
    unit, name = (MIB, "MiB") if whole is not None and abs(whole) < GIB else (GIB, "GiB")
    digits = 0 if whole is None or whole >= 1000 * unit or unit == MIB else 1
    used, total = (dash if num is None else f"{num / unit:.{digits}f}" for num in (used_bytes, total_bytes))
    return used, total, name


def rate(bytes_per_second: float | None) -> str:
    """ "+12.3 MiB/s", "steady", "" where it is not known."""
    if bytes_per_second is None or not math.isfinite(bytes_per_second):
        return ""
    if abs(bytes_per_second) < 0.05 * MIB:
        return "steady"
    if abs(bytes_per_second) < 1000 * MIB:
        return f"{bytes_per_second / MIB:+.1f} MiB/s"
    return f"{bytes_per_second / GIB:+.1f} GiB/s"


def full_in(seconds: float | None) -> str:
    """ "full in 4 min" where memory ends within the hour, else ""."""
    if seconds is None or not seconds <= FULL_SOON_SECONDS:
        return ""
    return "full now" if seconds < 1 else f"full in {format_seconds(seconds)}"


def brief(seconds: float) -> str:
    """Like `format_seconds`, but in milliseconds below a second: "12 ms"."""
    return f"{seconds * 1000:.0f} ms" if abs(seconds) < 1 else format_seconds(seconds)

"""Human-readable amounts: `parse_bytes("1.5G")`, `format_bytes(1610612736)`, `parse_seconds("2h")`, `format_seconds(7200)`."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

MOST_BYTES = 2**62  # fits every field that holds an amount
_MOST_DIGITS = 40

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)
# A bare letter is binary, as in torch, docker and numfmt's iec: "1.5G" is 1.5 GiB. Only "GB" is the decimal one.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


_TIME = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|m|h|d|)\s*")
_SECONDS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def parse_bytes(amount: int | str) -> int:
    """Bytes, at least 1, from an integer or from text such as "2GiB", "512 MiB", "1.5G" (GiB), "2GB" (10⁹ each).

    Raises:
        ValueError: not an amount, or less than one byte.
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        if amount > MOST_BYTES:
            raise ValueError("so many bytes are more memory than there is")
        if amount < 1:
            raise ValueError(f"an amount of memory must be at least 1 byte, got {amount}")
        return amount
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"cannot read {amount!r} as an amount of memory; write bytes (1073741824), or 1.5GiB, 512MiB, 2GB")
    if len(match[1]) > _MOST_DIGITS:
        raise ValueError(f"{match[0][:24]!r}... is more memory than there is")
    num_bytes = math.floor(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if num_bytes > MOST_BYTES:
        raise ValueError(f"{amount!r} is more memory than there is")
    if num_bytes < 1:
        raise ValueError(f"an amount of memory must be at least 1 byte, got {amount!r}")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for display: "512 bytes", "1.50 GiB", "-3.00 MiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes} byte" if num_bytes == 1 else f"{num_bytes} bytes"


def parse_seconds(time: float | str) -> float:
    """Seconds from a number or from text such as "2h", "1.5 min", "5m", "90s", "20ms". Raises ValueError for anything else."""
    if isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time <= 1e12:
        return float(time)
    match = _TIME.fullmatch(time) if isinstance(time, str) else None
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise ValueError(f"cannot read {time!r} as a time; write seconds (7200), or 2h, 30min, 90s")
    return float(match[1]) / 1000 if match[2] == "ms" else float(match[1]) * _SECONDS[match[2]]


def format_seconds(seconds: float) -> str:
    """`seconds` for display: "12 s", "4 min", "3 h", "5 d", rounded down: a time that runs out is not made longer."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{math.floor(seconds / unit)} {name}"
    return f"{math.floor(seconds)} s"

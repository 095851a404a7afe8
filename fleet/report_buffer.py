"""What a worker has generated and not reported: first tokens and ends are reported at once, others within 20 ms."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from ..server.choices import joined
from ..server.messages import Piece
from .messages import Record, encode_record

REPORT_EVERY_S = 0.02


class ReportBuffer:
    """Records by request, in order; pieces of a continuation are joined until they are taken."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, list[Piece]]] = {}  # by request and continuation
        self._ends: dict[int, Record] = {}
        self._released: list[int] = []
        self._faults: dict[int, str] = {}
        self._begun: dict[int, set[int]] = {}  # continuations of which a piece was reported, by request
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self._pieces or self._ends or self._released or self._faults)

    def add(self, record: Record) -> None:
        """Add a record of a request: a piece, or its end."""
        if isinstance(record, Piece):
            self._pieces.setdefault(record.number, {}).setdefault(record.index, []).append(record)
            begins = record.index not in self._begun.get(record.number, ())
        else:
            self._ends[record.number] = record
            begins = False
        self._changed.set()
        if begins or not isinstance(record, Piece):
            self._urgent.set()

    def add_all(self, records: Sequence[Record]) -> None:
        """Add several records of a request, in order."""
        for record in records:
            self.add(record)

    def release(self, number: int) -> None:
        """Say that a request was handed back, after its records."""
        self._released.append(number)
        self._changed.set()
        self._urgent.set()

    def fail(self, number: int, error: str) -> None:
        """Say that the engine failed on a request, after its records."""
        self._faults[number] = error
        self._changed.set()
        self._urgent.set()

    def wake(self) -> None:
        """End the wait for records: there is something else to report."""
        self._changed.set()
        self._urgent.set()

    def drop(self, number: int) -> None:
        """Forget what is not reported of a request that was cancelled."""
        self._pieces.pop(number, None)
        self._ends.pop(number, None)
        self._faults.pop(number, None)
        self._begun.pop(number, None)

    async def wait(self, timeout_s: float) -> None:
        """Wait until records are due, or for `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._changed.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_EVERY_S):
                        await self._urgent.wait()

    def take(self) -> tuple[list[bytes], list[int], dict[int, str]]:
        """The records as bytes, the requests that were handed back, and those on which the engine failed."""
        records = []
        for number, by_index in self._pieces.items():
            for index, pieces in by_index.items():
                records.append(encode_record(joined(pieces)))
                self._begun.setdefault(number, set()).add(index)
        records += [encode_record(record) for record in self._ends.values()]
        released, faults = self._released, self._faults
        for number in (*self._ends, *released, *faults):
            self._begun.pop(number, None)
        self._pieces, self._ends, self._released, self._faults = {}, {}, [], {}
        self._changed.clear()
        self._urgent.clear()
        return records, released, faults

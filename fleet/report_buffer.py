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
        self._begun: set[tuple[int, int]] = set()  # continuations of which a piece was reported
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self._pieces or self._ends or self._released)

    def add(self, record: Record) -> None:
        """Add a record of a request: a piece, or its end."""
        if isinstance(record, Piece):
            self._pieces.setdefault(record.number, {}).setdefault(record.index, []).append(record)
            begins = (record.number, record.index) not in self._begun
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

    def drop(self, number: int) -> None:
        """Forget what is not reported of a request that was cancelled."""
        self._pieces.pop(number, None)
        self._ends.pop(number, None)

    async def wait(self, timeout_s: float) -> None:
        """Wait until records are due, or for `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._changed.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_EVERY_S):
                        await self._urgent.wait()

    def take(self) -> tuple[list[bytes], list[int]]:
        """The records as bytes, and the requests that were handed back."""
        records = []
        for number, by_index in self._pieces.items():
            for index, pieces in by_index.items():
                records.append(encode_record(joined(pieces)))
                self._begun.add((number, index))
                if pieces[-1].finish_reason is not None:
                    self._begun.discard((number, index))
        records += [encode_record(record) for record in self._ends.values()]
        released = self._released
        self._pieces, self._ends, self._released = {}, {}, []
        self._changed.clear()
        self._urgent.clear()
        return records, released

"""The disk tier: writes what the prefix cache comes to hold, and reads it again for requests that wait.

Blocks are copied from the device between two steps, at most `MOST_WRITES_BYTES` at a time, and written by a thread. What does
not fit follows after later steps; what has left the device until then is not written. Another thread reads, in the order of
the requests. The engine's thread calls everything here, and waits for them only in a step with nothing else to do, some ms.

Reading must take less time than computing, by the rates measured so far. A read that takes longer is abandoned: the request
starts with the blocks that are there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from ...allocator.blocks import BlockIds
from ...cache.block_table import Int32
from ...cache.disk_index import DiskIndex, Records, joined
from ...cache.manager import CacheManager
from ...cache.prefix_hash import Chain
from ...cache.retention import Retention
from .disk_files import Bytes, DiskFiles

log = logging.getLogger(__name__)

MOST_WRITES_BYTES = 64 << 20  # copied from the device and not written yet
MOST_READS_BYTES = 2 << 30  # read, or being read, for requests that wait; less where the plan says so
_SEQUENCES = 4  # reads of so many of the greatest length
_ROOM_SHARE = 8  # of what weights leave, this part is for reads at most
LEAST_LIMIT_S = 0.25  # a read is not abandoned before
SAVE_S = 0.25  # that what may be written waits for more, while requests run
PAUSE_S = 60.0  # without writes, after one has failed
_MOST_FRESH = 1024  # sequences with blocks to write
_DAY_S = 86_400.0
_FORGET = 0.9  # factor on earlier measurements


def planned_bytes(sequence_bytes: int, room_bytes: int, unit_bytes: int = 0) -> int:
    """Host memory of a disk tier: for blocks on their way from disk, those of a few sequences of the greatest length at most,
    which take `sequence_bytes` each, and for blocks on their way to it, the largest unit of `unit_bytes` at least.
    `room_bytes`: what the weights leave of the host.
    """
    reads = min(MOST_READS_BYTES, _SEQUENCES * sequence_bytes, max(0, room_bytes) // _ROOM_SHARE)
    return reads + 2 * max(MOST_WRITES_BYTES, unit_bytes)


class DiskRead:
    """The read of the blocks `first` to `upto` (exclusive) of `chain`, perhaps still in progress: of the places of `records`
    (`DiskIndex.to_read`), in their order.

    `why`: why not all is read, if that is known before.
    """

    def __init__(self, chain: Chain, span: tuple[int, int], records: Records, limit_s: float, why: str = "") -> None:
        self.chain = chain
        self.first, self.upto = span
        self.records = records
        self.why = why  # why not all was read
        self.seconds = 0.0  # that it took, without the time in which others were read
        self._began: float | None = None
        self._until = time.monotonic() + limit_s
        self._num = 0
        self._out: Bytes | None = None
        self._over = threading.Event()
        self._stopped = False
        self._is_cut = False  # it did not go on, for it was stopped or took too long

    @property
    def has_begun(self) -> bool:
        """Whether the thread that reads came to it."""
        return self._began is not None

    @property
    def is_over(self) -> bool:
        """Whether all is read that will be: it is done, or took too long."""
        return self._over.is_set() or time.monotonic() >= self._until

    def wait(self, seconds: float) -> None:
        """Wait until it is over, at most so long."""
        self._over.wait(min(seconds, max(0.0, self._until - time.monotonic())))

    def stop(self) -> None:
        """End it soon: its blocks are not needed. No effect once it is over."""
        self._stopped = True

    def take(self) -> Bytes:
        """End the read. Returns the bytes of the first blocks [n, block_bytes], as many as were read."""
        done, num, began = self._over.is_set(), self._num, self._began
        self.stop()
        if began is not None:
            self.seconds = self.seconds or time.monotonic() - began
        if num < len(self.records) and not self.why:
            self.why = "damaged" if done and not self._is_cut else "slower than computing"
        return np.zeros((0, 0), np.uint8) if self._out is None else self._out[:num]

    def run(self, files: DiskFiles) -> None:
        """Read. Called in the thread that reads."""
        began = time.monotonic()
        try:
            if self._goes_on(0):
                self._began = began
                self._out = np.empty((len(self.records), files.block_bytes), np.uint8)
                files.read(self.records, self._out, self._goes_on)
        except (OSError, MemoryError) as error:
            self.why = f"{type(error).__name__}: {error}"
        finally:
            self.seconds = time.monotonic() - began
            self._over.set()

    def _goes_on(self, num: int) -> bool:
        self._num = num
        self._is_cut = self._stopped or time.monotonic() >= self._until
        return not self._is_cut


class BlocksOnTheirWay(Protocol):
    """Copies of blocks that have begun."""

    def wait(self) -> Bytes:
        """The bytes [n, block_bytes]. Called in another thread. Raises what copying them raises."""
        ...


class BlockCopier(Protocol):
    """What has the blocks in memory: a runner."""

    @property
    def put_s_per_byte(self) -> float:
        """Seconds that a byte of a block takes from this process to its place."""
        ...

    def copy_blocks(self, blocks: Int32) -> BlocksOnTheirWay:
        """Begin to copy `blocks`, between two steps."""
        ...


class DiskTier:
    """The blocks in `files`, which come from `runner` and go there. Not thread-safe.

    `host_bytes` bound what is read ahead: see `planned_bytes`.
    """

    def __init__(
        self,
        files: DiskFiles,
        runner: BlockCopier,
        host_bytes: int = MOST_READS_BYTES + 2 * MOST_WRITES_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._runner = runner
        unit_bytes = max([1, *(group.num_tables for group in files.index.groups)]) * files.block_bytes
        writes_bytes = max(MOST_WRITES_BYTES, unit_bytes)
        self._most_writes = writes_bytes // files.block_bytes  # blocks, and so are these:
        self._most_reads = max(1, (host_bytes - 2 * writes_bytes) // files.block_bytes)
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, "pagetide-disk-writes")
        self._reader = ThreadPoolExecutor(1, "pagetide-disk-reads")
        self._fresh: dict[int, tuple[Chain, int, Retention | None]] = {}  # by chain: blocks that may be written
        self._writes: deque[tuple[Future[Records], Records]] = deque()
        self._reads: WeakSet[DiskRead] = WeakSet()
        self._paused_until = self._next_save = 0.0
        self._measured = 0.0, 0.0  # bytes read, in so many seconds: recent ones weigh most
        self._days: dict[int, int] = {}  # bytes written in each
        self.read_blocks = self.written_blocks = self.hits = self.failures = 0

    @property
    def index(self) -> DiskIndex:
        """The blocks that are here."""
        return self._files.index

    @property
    def is_behind(self) -> bool:
        """Whether blocks are to be written, now or once others are."""
        return bool(self._fresh) and self._clock() >= self._paused_until

    # -- what the scheduler and the cache call -----------------------------------------------------------------------

    def begin(self, chain: Chain, num_found: int, most_tokens: int, tokens_per_s: float) -> DiskRead | None:
        """Begin to read the blocks of `chain` behind its first `num_found` tokens, up to `most_tokens`.

        None if there are none; a read of none if computing them, `tokens_per_s`, takes less time.
        """
        size = chain.hasher.block_size
        first, upto = num_found // size, most_tokens // size
        if upto <= first or not self.index.num_used:
            return None
        own = self.index.below(chain, upto * size)
        if len(self.index.find(own, upto)) <= first:
            return None
        none = (first, first), self.index.records[:0], 0.0
        upto, places = self.index.to_read(own, first, upto, self._most_reads - sum(len(read.records) for read in self._reads))
        if not len(places):
            return DiskRead(chain, *none, "reads for other requests take the memory for them")
        compute_s, (num_bytes, seconds) = (upto - first) * size / tokens_per_s, self._measured
        read_bytes = len(places) * self._files.block_bytes
        if num_bytes and read_bytes * (seconds / num_bytes + self._runner.put_s_per_byte) >= compute_s:
            self._measured = num_bytes, seconds * _FORGET  # so that it is tried again some time
            return DiskRead(chain, *none, "computing takes less time")
        self.hits += 1
        self.index.used(own, upto)
        read = DiskRead(chain, (first, upto), self.index.records[places], max(LEAST_LIMIT_S, compute_s))
        self._reads.add(read)
        self._reader.submit(read.run, self._files)
        return read

    def finish(self, read: DiskRead) -> Bytes:
        """End `read`. Returns the bytes [n, block_bytes] of its blocks, as many of the first as were read; with other groups of
        all, and behind them those of each group, or nothing.
        """
        data = read.take()
        if not len(read.records):
            return data
        if read.has_begun:
            num_bytes, seconds = self._measured
            self._measured = num_bytes * _FORGET + data.nbytes, seconds * _FORGET + read.seconds
        self.read_blocks += len(data)
        if read.why == "damaged":
            log.warning("a block of %s is not as it was written: it is forgotten, and computed again", self._files.folder)
            self.index.forget(read.records[len(data) : len(data) + 1])
        return data if len(data) == len(read.records) or not self.index.groups else data[:0]

    def committed(self, chain: Chain, num_blocks: int, retention: Retention | None = None) -> None:
        """The first `num_blocks` blocks of `chain` are findable in memory now; `retention`: a hint for them."""
        if not self._fresh:  # else some wait for room, or will have waited
            self._next_save = self._clock() + SAVE_S
        _, known, hint = self._fresh.pop(id(chain), (chain, 0, None))
        if retention is not None:
            most = num_blocks * chain.hasher.block_size
            retention = replace(retention, num_tokens=most if retention.num_tokens is None else min(most, retention.num_tokens))
        if len(self._fresh) < _MOST_FRESH:
            self._fresh[id(chain)] = chain, max(known, num_blocks), retention or hint

    def clear(self) -> None:
        """Forget all blocks."""
        self._fresh.clear()
        self.index.clear()
        self._writer.submit(self._files.rewrite)

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def save(self, cache: CacheManager, is_idle: bool) -> None:
        """Begin to write blocks that `cache` came to hold, between two steps: those of some time together, unless the engine
        `is_idle`.
        """
        self._settle()
        now = self._clock()
        if not is_idle and now < self._next_save:
            return
        self.index.expire(time.time())
        if now < self._paused_until:
            self._fresh.clear()
        if not self._fresh:
            return
        room, taken, sources = self._most_writes - self._num_in_flight, [self.index.records[:0]], [np.empty(0, np.int32)]
        while self._fresh and room > 0:
            key = next(iter(self._fresh))
            records, blocks, are_left = self._take(cache, room, *self._fresh[key])
            taken.append(records)
            sources.append(blocks)
            room -= len(blocks)
            if not are_left:
                del self._fresh[key]
            elif not len(records):  # for a unit that waits for room
                break
        records, at = joined(taken), cache.bytes_at(np.concatenate(sources))
        if len(records):
            copied = self._runner.copy_blocks(at) if len(at) else None  # else blocks without bytes alone
            self._writes.append((self._writer.submit(partial(_write, self._files, records, copied)), records))

    def wait(self, seconds: float) -> None:
        """Wait until a write is done, at most so long."""
        if self._writes:
            done = threading.Event()
            self._writes[0][0].add_done_callback(lambda _: done.set())
            done.wait(seconds)

    def to_dict(self) -> dict[str, Any]:
        """State and counters as plain data."""
        block_bytes, index = self._files.block_bytes, self.index
        return {
            "used_blocks": index.num_used,
            "total_blocks": index.num_places,
            "retained_blocks": index.num_retained,
            "bytes": index.num_used * block_bytes,
            "hits": self.hits,
            "read_bytes": self.read_blocks * block_bytes,
            "written_bytes": self.written_blocks * block_bytes,
            "written_today_bytes": self._days.get(self._today, 0),
            "read_bytes_per_s": round(self._measured[0] / self._measured[1]) if self._measured[1] else None,
            "failures": self.failures,
        }

    def close(self) -> None:
        """Wait for what is being written, and close the files. Idempotent."""
        self._fresh.clear()
        for read in list(self._reads):
            read.take()
        self._writer.shutdown()
        self._reader.shutdown()
        self._files.close()
        self.__dict__.pop("_runner", None)

    # -- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _num_in_flight(self) -> int:
        return sum(int(self.index.have_bytes(records).sum()) for _, records in self._writes)

    @property
    def _today(self) -> int:
        return int(time.time() // _DAY_S)

    def _take(
        self, cache: CacheManager, room: int, chain: Chain, num_blocks: int, retention: Retention | None
    ) -> tuple[Records, BlockIds, bool]:
        """Give places to blocks of `chain`, with units, up to `room` of those with bytes. Returns their records, the blocks of
        memory with these bytes, and whether some are left.
        """
        own = self.index.below(chain, num_blocks * chain.hasher.block_size)
        blocks, units = cache.worth_keeping(chain, num_blocks)
        records = self.index.take(own, len(blocks), room)
        first = int(records["depth"][0]) if len(records) else len(blocks)
        if retention is not None:
            noted = self.index.retain(own, num_blocks, retention, time.time())
            if len(noted):
                self._writer.submit(_note, self._files, noted)
            records = self.index.records[records["place"]]
        are_left = len(records) == room < len(blocks) - first
        taken, sources = [records], [blocks[first : first + len(records) * self.index.blocks_have_bytes]]
        for number, (depths, of_group) in enumerate(units):
            lacking = self.index.lack_units(own, number, depths)
            depths, of_group = depths[lacking], of_group[:, lacking]
            fitting = (room - sum(map(len, sources))) // len(of_group)
            records, num = self.index.take_units(own, number, depths[:fitting])
            are_left |= num == fitting < len(depths)  # else there are no places for them
            taken.append(records)
            sources.append(of_group[:, :num].ravel())
        return joined(taken), np.concatenate(sources), are_left

    def _settle(self) -> None:
        """Account for the writes that are over."""
        while self._writes and self._writes[0][0].done():
            future, records = self._writes.popleft()
            error = future.exception()
            if error is None:
                self.index.written(future.result())
                num_blocks = int(self.index.have_bytes(records).sum())
                self.written_blocks += num_blocks
                num_bytes = num_blocks * self._files.block_bytes
                self._days = {self._today: self._days.get(self._today, 0) + num_bytes}
                continue
            self.index.forget(records)
            self.failures += 1
            if self._clock() >= self._paused_until:
                log.warning(
                    "%s cannot be written, so no prefixes are kept there for %.0f s: %s", self._files.folder, PAUSE_S, error
                )
            self._paused_until = self._clock() + PAUSE_S


def _note(files: DiskFiles, records: Records) -> None:
    with suppress(OSError):  # the hint ends with this process then
        files.note(records)


def _write(files: DiskFiles, records: Records, copied: BlocksOnTheirWay | None) -> Records:
    data = np.empty((0, files.block_bytes), np.uint8) if copied is None else copied.wait()
    written = files.write(records, data)
    files.tidy()
    return written

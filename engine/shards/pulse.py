"""The signs of life of the shards: counts that go on, and bytes that they hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from ...common.frames import ChannelClosed, PickleChannel
from ...common.heartbeat import LOADING_S, STILL_S, Progress, SilenceWatch

BEAT_S = LOOK_S = 0.25  # intervals of the heartbeats, and of the looks at them
KINDS = ("all_reduce", "gather", "broadcast")
NO_COLLECTIVES = (0,) * (3 * len(KINDS))


class Sign(NamedTuple):
    """What a shard has said last; the message of its heartbeat.

    Attributes:
        beats: Of its heartbeat: the process lives.
        progress: Beats of the thread that computes, which may take `allowed_s` to the next one: see `Progress`.
        done: The newest message of the driver that is dealt with, as are all before it.
    """

    beats: int = 0
    base_bytes: int = 0  # held on its device besides K and V
    host_bytes: int = 0  # held by its part of the host tier
    collectives: tuple[int, ...] = NO_COLLECTIVES  # calls that began, bytes and nanoseconds of each of KINDS
    progress: int = 0
    allowed_s: float = 0.0
    done: int = 0

    @property
    def num_collectives(self) -> int:
        """Collectives that the shard has begun."""
        return sum(self.collectives[::3])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `LLM.stats`."""
        calls, sizes, times = self.collectives[::3], self.collectives[1::3], self.collectives[2::3]
        return {
            "base_bytes": self.base_bytes,
            "host_tier_bytes": self.host_bytes,
            "collectives": {
                kind: {"calls": calls[i], "bytes": sizes[i], "seconds": times[i] / 1e9} for i, kind in enumerate(KINDS)
            },
        }


class Heartbeat(threading.Thread):
    """A shard's thread that sends its sign four times a second, and ends the process if its driver is gone.

    Args:
        measure: base_bytes, host_bytes and the collectives so far.

    Attributes:
        progress: Of the thread that computes.
        done: See `Sign`; that thread sets it.
    """

    def __init__(self, channel: PickleChannel) -> None:
        super().__init__(name="pagetide-heartbeat", daemon=True)
        self.measure: Callable[[], tuple[int, int, tuple[int, ...]]] = lambda: (0, 0, NO_COLLECTIVES)
        self.progress = Progress()
        self.done = 0
        self._channel = channel
        self._pause = threading.Event()

    def run(self) -> None:
        """See `threading.Thread`."""
        sign = Sign()
        with suppress(ChannelClosed):
            while True:
                held = sign[1:4]
                with suppress(Exception):  # without a free descriptor, for example: the last measurement stays
                    held = self.measure()
                progress = self.progress
                sign = Sign(sign.beats + 1, *held, progress.beats, progress.allowed_s, self.done)
                self._channel.send(sign)
                self._pause.wait(BEAT_S)
        end_process()


def end_process() -> NoReturn:
    """End a shard without cleaning up: other threads may be stuck in a collective, and all memory goes with the process."""
    os._exit(0)


class PulseWatch:
    """The driver's judgement of the signs of all shards, look by look.

    Args:
        silent_s: A shard without a heartbeat for so long is given up.
    """

    def __init__(self, size: int, silent_s: float) -> None:
        self._silent_s = silent_s
        self._of_heartbeats = [SilenceWatch(2 * LOOK_S) for _ in range(size)]
        self._of_progress = [SilenceWatch(2 * LOOK_S) for _ in range(size)]

    def look(self, signs: Sequence[Sign], posted: int, is_loaded: bool, now: float) -> tuple[list[int], str] | None:
        """The shards to be given up, and why; None while all are well.

        Those that wait for another one in a collective are not at fault: it has begun fewer.

        Args:
            posted: The number of the newest message to all shards.
        """
        # One that has not begun is waited for.
        silent = [watch.look(sign.beats or now, now) for watch, sign in zip(self._of_heartbeats, signs, strict=True)]
        most = self._silent_s if is_loaded else LOADING_S
        if given_up := [rank for rank, seconds in enumerate(silent) if seconds > most]:
            return given_up, f"gave no sign of life for {most:g} s"
        if not is_loaded:
            return None
        still = [
            watch.look((sign.progress, sign.done, posted) if sign.done < posted else now, now)
            for watch, sign in zip(self._of_progress, signs, strict=True)
        ]
        allowed = [sign.allowed_s or STILL_S for sign in signs]
        if all(seconds <= most for seconds, most in zip(still, allowed, strict=True)):
            return None
        # The one that others wait for may have stopped later than they did, by the signs of its heartbeat.
        hang = [rank for rank, seconds in enumerate(still) if seconds > allowed[rank] / 2]
        least = min(signs[rank].num_collectives for rank in hang)
        behind = [rank for rank in hang if signs[rank].num_collectives == least]
        return behind, f"hangs: it is at work, and has come no further for {allowed[behind[0]]:.0f} s"

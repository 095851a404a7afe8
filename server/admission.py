"""RequestAdmission: which requests the server takes, before it reads them, and when a refused client should come back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import ApiError, invalid, unavailable
from .keys import ApiKey, KeyUse

RATE_WINDOW = 256  # ended requests whose rate is measured
RATE_AGE_S = 60.0
MOST_RETRY_S = 300


class RequestAdmission:
    """Counts the requests in the server and their sequences, of all keys and of each. A request takes a place for each of its
    sequences: one before its body is read (`request`), the others when they are known (`sequences`).

    Args:
        capacity: Sequences that the loaded models can run at the same time.
        max_queue: Sequences that may wait beyond these.

    Attributes:
        num_requests: Requests in the server.
        num_places: Places that they take.
    """

    def __init__(
        self, capacity: Callable[[], int], max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.draining = False
        self.num_requests = 0
        self.num_places = 0
        self._capacity = capacity
        self._max_queue = max_queue
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)  # times, and how many sequences ended
        self._uses: dict[str, KeyUse] = {}

    @property
    def limit(self) -> int:
        """Sequences that may run or wait."""
        return self._capacity() + self._max_queue

    @contextmanager
    def request(self, key: ApiKey | None) -> Iterator[None]:
        """Hold a place for a request. Raises ApiError if there is none."""
        use = self._checked(key)
        self.num_requests += 1
        self.num_places += 1
        if use is not None:
            use.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_places -= 1
            if use is not None:
                use.num_requests -= 1

    @contextmanager
    def sequences(self, key: ApiKey | None, count: int) -> Iterator[None]:
        """Hold the places of a request with `count` sequences, one of them that of `request`. Raises ApiError if too many."""
        most, use = self.limit, None if key is None else self._use(key)
        if count > most:
            raise _too_large(
                count, f"the server takes {most:,} at a time, running or waiting (max_seqs and --max-queue)"
            )
        if self.num_places + count - 1 > most:
            free = most - self.num_places + 1
            raise _too_many(
                f"the request has {count:,} sequences, and {free:,} of the server's {most:,} places are free",
                self.retry_after_s(count - 1),
            )
        if key is not None and use is not None and key.max_sequences is not None:
            if count > key.max_sequences:
                raise _too_large(count, f"the key {key.name} may have {key.max_sequences:,} at a time")
            if use.num_sequences + count > key.max_sequences:
                raise _too_many(
                    f"the key {key.name} may have {key.max_sequences:,} sequences at a time; it has {use.num_sequences:,}, and "
                    f"this request has {count:,}",
                    self.retry_after_s(count - 1),
                )
        self.num_places += count - 1
        if use is not None:
            use.num_sequences += count
        try:
            yield
        finally:
            self.num_places -= count - 1
            self._ends.append((self._clock(), count))
            if use is not None:
                use.num_sequences -= count

    @contextmanager
    def blocks(self, key: ApiKey | None, count: int) -> Iterator[None]:
        """Hold `count` KV blocks of a key's limit. Raises ApiError if they exceed it."""
        use = None if key is None else self._use(key)
        if key is None or use is None or key.max_blocks is None:
            yield
            return
        if count > key.max_blocks:
            raise invalid(
                f"the request may need {count:,} KV blocks, and the key {key.name} may use {key.max_blocks:,}: shorten the "
                "prompt, or ask for fewer tokens or sequences"
            )
        if use.num_blocks + count > key.max_blocks:
            raise _too_many(
                f"the key {key.name} may use {key.max_blocks:,} KV blocks at a time; {use.num_blocks:,} are in use, and this "
                f"request may need {count:,}",
                self.retry_after_s(),
            )
        use.num_blocks += count
        try:
            yield
        finally:
            use.num_blocks -= count

    def reserve_tokens(self, key: ApiKey | None, count: int) -> None:
        """Charge the tokens that a request may need to its key, until `settle_tokens`. Raises ApiError if they are too many.

        A key with a whole minute's tokens may begin any request: one that needs more leaves it in debt.
        """
        if key is None or key.tokens_per_minute is None:
            return
        use = self._use(key)
        wait_s = use.retry_after_s(count)
        if wait_s is not None:
            raise _too_many(
                f"the request may need {count:,} tokens (prompts, and max_tokens for each sequence), and the key {key.name} "
                f"may use {key.tokens_per_minute:,} tokens a minute",
                max(math.ceil(wait_s), 1),
            )
        use.count_tokens(count)

    def settle_tokens(self, key: ApiKey | None, reserved: int, used: int) -> None:
        """Charge the tokens that a request used in place of those that it reserved."""
        if key is not None:
            self._use(key).count_tokens(used - reserved)

    def retry_after_s(self, count: int = 1) -> int:
        """Seconds after which `count` more places should be free: the queue's length by the rate at which sequences end."""
        waiting = max(self.num_places - self._capacity(), 0) + count
        now = self._clock()
        ends = [(at, ended) for at, ended in self._ends if now - at < RATE_AGE_S]
        if len(ends) < 2:
            return 1
        rate = sum(ended for _, ended in ends[1:]) / max(now - ends[0][0], 0.001)
        return min(max(math.ceil(waiting / rate), 1), MOST_RETRY_S)

    def _checked(self, key: ApiKey | None) -> KeyUse | None:
        if self.draining:
            raise unavailable("the server is shutting down: it takes no more requests")
        if self.num_places >= self.limit:
            raise _too_many(
                f"{self.num_places:,} sequences are running or waiting, as many as the server takes",
                self.retry_after_s(),
            )
        if key is None:
            return None
        use = self._use(key)
        if key.max_requests is not None and use.num_requests >= key.max_requests:
            raise _too_many(
                f"the key {key.name} may have {key.max_requests:,} requests at a time", self.retry_after_s()
            )
        wait_s = use.retry_after_s()
        if wait_s is not None:
            raise _too_many(
                f"the key {key.name} may use {key.tokens_per_minute:,} tokens a minute", max(math.ceil(wait_s), 1)
            )
        return use

    def _use(self, key: ApiKey) -> KeyUse:
        if key.name not in self._uses:
            self._uses[key.name] = KeyUse(key, self._clock)
        return self._uses[key.name]


def _too_large(count: int, limit: str) -> ApiError:
    return invalid(
        f"the request has {count:,} sequences (prompts times n or best_of), and {limit}: send several requests"
    )


def _too_many(message: str, retry_after_s: int) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, f"{message}: try again in {retry_after_s} s", code="rate_limit_exceeded", headers=headers)

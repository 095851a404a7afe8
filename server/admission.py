"""RequestAdmission: which requests the server takes, before it reads them, and when a refused client should come back."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..common.answer_memory import AnswerSize
from ..common.units import format_bytes
from .config import MOST_BODY_BYTES
from .errors import ApiError, invalid, unavailable
from .keys import ApiKey, KeyUse

RATE_WINDOW = 256  # ended requests whose rate is measured
RATE_AGE_S = 60.0
BODIES = 16  # of the largest size, whose bytes may be held at the same time
# Tokens that /tokenize and /detokenize convert at the price of one, which takes about as long
CONVERTED = 256
MOST_RETRY_S = 300


class HeldBytes:
    """Memory that the server holds for requests, within a bound for all of them and one for those of each key.

    Attributes:
        most: Bytes that may be held in all.
        num_keys: API keys of the server. Where there are several, one may hold half of all.
        num_bytes: Bytes that are held.
    """

    def __init__(self, most: int, num_keys: int = 0) -> None:
        self.most = most
        self.num_keys = num_keys
        self.num_bytes = 0
        self._of_keys: Counter[str] = Counter()

    @property
    def most_of_key(self) -> int:
        """Bytes that may be held for one key, hence for one request."""
        return self.most // 2 if self.num_keys > 1 else self.most

    def of_key(self, key: str) -> int:
        """Bytes that are held for a key; "" are requests without one."""
        return self._of_keys[key]

    def fits_key(self, key: str, count: int) -> bool:
        """Whether `count` more bytes are within the key's bound."""
        return self._of_keys[key] + count <= self.most_of_key

    def fits(self, count: int) -> bool:
        """Whether `count` more bytes are within the bound of all."""
        return self.num_bytes + count <= self.most

    def hold(self, key: str, count: int) -> None:
        """Count `count` more bytes, or fewer if below 0."""
        self.num_bytes += count
        self._of_keys[key] += count
        if not self._of_keys[key]:
            del self._of_keys[key]


class RequestAdmission:
    """Counts the requests in the server and their sequences, of all keys and of each. A request takes a place for each of its
    sequences: one before its body is read (`request`), the others when they are known (`sequences`).

    Args:
        capacity: Sequences that the loaded models can run at the same time.
        max_queue: Sequences that may wait beyond these.
        num_keys: API keys of the server.
        most_body_bytes: Of one request's body.

    Attributes:
        num_requests: Requests in the server.
        num_places: Places that they take.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_keys: int = 0,
        most_body_bytes: int = MOST_BODY_BYTES,
    ) -> None:
        self.draining = False
        self.num_requests = 0
        self.num_places = 0
        self._capacity = capacity
        self._max_queue = max_queue
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)  # times, and how many sequences ended
        self._uses: dict[str, KeyUse] = {}
        self._turn = asyncio.Lock()  # of requests without a key
        self._num_keys = num_keys
        self._bodies = HeldBytes(BODIES * most_body_bytes, num_keys)
        self._answers: dict[str, HeldBytes] = {}  # by model

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

    def turn(self, key: ApiKey | None) -> asyncio.Lock:
        """A lock of the key, for work of which one key has one piece at a time."""
        return self._turn if key is None else self._use(key).turn

    @contextmanager
    def call(self, key: ApiKey | None) -> Iterator[None]:
        """Count a request that takes no place among those of its key. Raises ApiError if it is one too many."""
        if (use := self._checked_key(key)) is None:
            yield
            return
        use.num_requests += 1
        try:
            yield
        finally:
            use.num_requests -= 1

    def charge_converted(self, key: ApiKey | None, count: int) -> None:
        """Charge a call of `/tokenize` or `/detokenize` that converted so many tokens."""
        self.settle_tokens(key, 0, -(-max(count, 1) // CONVERTED))

    def charge_refused(self, key: ApiKey | None, num_bytes: int) -> None:
        """Charge a request that is refused for what so many bytes of its body say: they were parsed, maybe converted."""
        if num_bytes:
            self.charge_converted(key, num_bytes)

    @contextmanager
    def body(self, key: ApiKey | None) -> Iterator[Callable[[int], None]]:
        """Hold the bytes of a request's body: call what this gives with those that arrive. That raises ApiError if they are
        too many.
        """
        name, bodies, held = "" if key is None else key.name, self._bodies, 0

        def hold(count: int) -> None:
            nonlocal held
            if key is not None and not bodies.fits_key(name, count):
                raise _too_many(
                    f"the key {name} may have {bodies.most_of_key:,} bytes of bodies of requests in the server, and has "
                    f"{bodies.of_key(name):,}",
                    self.retry_after_s(),
                )
            if not bodies.fits(count):
                raise unavailable(
                    f"the server holds {bodies.num_bytes:,} bytes of bodies of requests and may hold {bodies.most:,}: try "
                    "again later, or send shorter ones"
                )
            bodies.hold(name, count)
            held += count

        try:
            yield hold
        finally:
            bodies.hold(name, -held)

    @contextmanager
    def answer(self, key: ApiKey | None, model: str, most_bytes: int) -> Iterator[Callable[[AnswerSize], None]]:
        """Hold the memory of an answer of a model, whose undelivered answers may take `most_bytes`: call what this gives with
        the answer's size, again when more of it is known. That raises ApiError if it does not fit.
        """
        name, held = "" if key is None else key.name, 0
        answers = self._answers.setdefault(model, HeldBytes(most_bytes, self._num_keys))
        answers.most = most_bytes

        def hold(size: AnswerSize) -> None:
            nonlocal held
            more = size.num_bytes - held
            if size.num_bytes > answers.most_of_key:
                of_key = "" if key is None else f" for the key {name}"
                raise invalid(
                    f"the answer may take {format_bytes(size.num_bytes)} of memory: {size}. An answer may take "
                    f"{format_bytes(answers.most_of_key)}{of_key}: ask for fewer tokens (max_tokens), sequences (n, best_of, "
                    "prompts) or log-probabilities, or stream the output, which takes little"
                )
            if not (answers.fits_key(name, more) and answers.fits(more)):
                raise _too_many(
                    f"the answer may take {format_bytes(size.num_bytes)} of memory: {size}. Answers that are not delivered "
                    f"take {format_bytes(answers.of_key(name))} for this key and {format_bytes(answers.num_bytes)} in all, of "
                    f"{format_bytes(answers.most_of_key)} and {format_bytes(answers.most)}",
                    self.retry_after_s(),
                )
            answers.hold(name, more)
            held += more

        try:
            yield hold
        finally:
            answers.hold(name, -held)

    @contextmanager
    def sequences(self, key: ApiKey | None, count: int) -> Iterator[None]:
        """Hold the places of a request with `count` sequences, one of them that of `request`. Raises ApiError if too many."""
        most, use = self.limit, None if key is None else self._use(key)
        if count > most:
            raise _too_large(count, f"the server takes {most:,} at a time, running or waiting (max_seqs and --max-queue)")
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
            raise unavailable("the server is shutting down: it accepts no new requests")
        if self.num_places >= self.limit:
            raise _too_many(
                f"{self.num_places:,} sequences are running or waiting, which is the server's limit", self.retry_after_s()
            )
        return self._checked_key(key)

    def _checked_key(self, key: ApiKey | None) -> KeyUse | None:
        """What a key uses. Raises ApiError if it may have no further request now."""
        if key is None:
            return None
        use = self._use(key)
        if key.max_requests is not None and use.num_requests >= key.max_requests:
            raise _too_many(f"the key {key.name} may have {key.max_requests:,} requests at a time", self.retry_after_s())
        wait_s = use.retry_after_s()
        if wait_s is not None:
            raise _too_many(f"the key {key.name} may use {key.tokens_per_minute:,} tokens a minute", max(math.ceil(wait_s), 1))
        return use

    def _use(self, key: ApiKey) -> KeyUse:
        if key.name not in self._uses:
            self._uses[key.name] = KeyUse(key, self._clock)
        return self._uses[key.name]


def _too_large(count: int, limit: str) -> ApiError:
    return invalid(f"the request has {count:,} sequences (prompts times n or best_of), and {limit}: send several requests")


def _too_many(message: str, retry_after_s: int) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, f"{message}: try again in {retry_after_s} s", code="rate_limit_exceeded", headers=headers)

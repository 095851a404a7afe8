"""Failed attempts at a request: the worker died or hung under it, or the engine failed on it.

Each counts for every request that the worker was running, since none of them can be told from the one that is at fault. So the
attempts before the last one are in company, and the last one is alone:

    attempts that failed     the next one
    0, 1                     beside other requests, as any request; on another worker if there is one
    2 (under suspicion)      on a worker with nothing else, until the request has got further
    3                        none: the request ends with an error that has all three reasons

A request that ran beside the one at fault passes its attempt alone, and goes on in company. The count begins anew once more
than PROGRESS tokens of each continuation are recorded since the first of the failures: a request that gets further is not the
reason; and a silent worker that comes back was alive. The attempts at a request that fails at a certain token end there, and
differ by the last tokens alone, which a dying worker had not reported. Beam searches record nothing before their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_FAILURES = 3
PROGRESS = 8


@dataclass(slots=True)
class Failures:
    """The failed attempts at one request since it last got further.

    Attributes:
        workers: Names, in order.
        reasons: Of each.
        num_tokens: Tokens that were recorded at the first one.
    """

    workers: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def is_suspect(self) -> bool:
        """Whether the next attempt is the last one."""
        return len(self.workers) >= MOST_FAILURES - 1

    def add(self, worker: str, reason: str, num_tokens: int) -> bool:
        """Count an attempt that failed when `num_tokens` tokens were recorded. Returns whether it was the last one."""
        if not self.workers:
            self.num_tokens = num_tokens
        self.workers.append(worker)
        self.reasons.append(reason)
        return len(self.workers) >= MOST_FAILURES

    def forgive(self, worker: str, reason: str) -> None:
        """Count the last failure of this worker for this reason no longer: it was alive."""
        for place in reversed(range(len(self.workers))):
            if (self.workers[place], self.reasons[place]) == (worker, reason):
                del self.workers[place], self.reasons[place]
                return

    def pass_tokens(self, num_tokens: int, num_sequences: int) -> None:
        """Begin anew if the request, with `num_tokens` tokens recorded, is well beyond its first failure."""
        if self.workers and num_tokens - self.num_tokens > PROGRESS * num_sequences:
            self.workers.clear()
            self.reasons.clear()

    @property
    def error(self) -> str:
        """What happened, for the client."""
        attempts = "; ".join(f"{worker} {reason}" for worker, reason in zip(self.workers, self.reasons, strict=True))
        return f"{len(self.workers)} workers failed on this request, the last one with no other request on it: {attempts}"

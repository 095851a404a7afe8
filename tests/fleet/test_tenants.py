"""A tenant's unfinished requests and sequences are bounded over all front ends, also after its clients have left."""

from __future__ import annotations

import msgspec

from pagetide.fleet.messages import NewRequest
from pagetide.fleet.request_queue import RequestQueue
from tests.fleet_stand_ins import new_request


def limited(request_id: str, tenant: str = "bob", n: int = 1, **limits: int) -> NewRequest:
    return msgspec.structs.replace(new_request(request_id, n=n, tenant=tenant), **limits)


def test_requests_beyond_the_limit_are_refused_until_one_has_ended() -> None:
    queue = RequestQueue()
    first = queue.submit(limited("a.0", most_requests=2), 0.0)
    assert queue.submit(limited("b.0", most_requests=2), 0.0).number is not None
    refused = queue.submit(limited("c.0", most_requests=2), 0.0)
    assert (refused.number, refused.kind) == (None, "limited") and "may have 2" in refused.error
    assert queue.submit(limited("c.0", "alice", most_requests=2), 0.0).number is not None, "of another tenant"
    assert queue.submit(limited("b.1", most_requests=2), 0.0).number is not None, "another prompt of the same request"
    assert first.number is not None and queue.cancel(first.number) is not None
    assert queue.submit(limited("d.0", most_requests=2), 0.0).number is not None
    queue.check_invariants()
    assert (queue.counters.cancelled, queue.counters.failed, queue.counters.refused) == (1, 0, 1)
    queue = RequestQueue()  # sequences count with all continuations
    assert queue.submit(limited("a.0", n=3, most_sequences=4), 0.0).number is not None
    refused = queue.submit(limited("b.0", n=2, most_sequences=4), 0.0)
    assert refused.kind == "limited" and "3 unfinished sequences" in refused.error
    assert queue.submit(limited("b.0", n=1, most_sequences=4), 0.0).number is not None

"""Places in the server: how many there are, who gets one, and when to come back."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

pytest.importorskip("msgspec")

from pagetide.server.admission import MOST_RETRY_S, RequestAdmission
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey


def refused(admission: RequestAdmission, key: ApiKey | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught, admission.request(key):
        pass
    return caught.value


def test_a_full_server_says_when_to_come_back() -> None:
    now = [0.0]
    admission = RequestAdmission(lambda: 2, max_queue=2, clock=lambda: now[0])
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admission.request(None))
        error = refused(admission)
        assert (error.status, error.code, error.headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        assert admission.num_requests == 4
    assert admission.num_requests == 0
    for second in range(1, 11):  # ten requests end, one each 2 s
        now[0] = 2.0 * second
        with admission.request(None):
            pass
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admission.request(None))
        # 13 ends in 20 s, 3 must end before there is a place
        assert int(refused(admission).headers["retry-after"]) == 5


def test_the_wait_is_bounded() -> None:
    now = [0.0]
    admission = RequestAdmission(lambda: 0, max_queue=1000, clock=lambda: now[0])
    for now[0] in (0.0, 50.0):
        with admission.request(None):
            pass
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(admission.request(None))
        assert admission.retry_after_s() == MOST_RETRY_S


def test_limits_of_a_key_do_not_touch_others() -> None:
    admission = RequestAdmission(lambda: 10, max_queue=10)
    bob, eve = ApiKey("bob", b"1", max_requests=1, max_blocks=8), ApiKey("eve", b"2", tokens_per_minute=100)
    with admission.request(bob), admission.blocks(bob, 6):
        assert refused(admission, bob).status == 429
        with pytest.raises(ApiError, match="8 KV blocks"), admission.blocks(bob, 3):
            pass
        with admission.blocks(bob, 2), admission.request(eve):
            pass
    with admission.request(bob), admission.blocks(bob, 8):
        pass
    admission.count_tokens(eve, 160)
    error = refused(admission, eve)
    assert "100 tokens a minute" in error.message and int(error.headers["retry-after"]) in (36, 37)


def test_a_server_that_shuts_down_takes_no_more() -> None:
    admission = RequestAdmission(lambda: 10, max_queue=10)
    with admission.request(None):
        admission.draining = True
        assert refused(admission).status == 503

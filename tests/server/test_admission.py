"""Places in the server: how many there are, which request gets one, and when to come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pagetide.common.answer_memory import AnswerSize
from pagetide.server.admission import MOST_RETRY_S, RequestAdmission
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey


@contextmanager
def admitted(admission: RequestAdmission, key: ApiKey | None = None, count: int = 1) -> Iterator[None]:
    with admission.request(key), admission.sequences(key, count):
        yield


def refused(admission: RequestAdmission, key: ApiKey | None = None, count: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught, admitted(admission, key, count):
        pass
    return caught.value


def test_a_full_server_says_when_to_come_back() -> None:
    now = [0.0]
    admission = RequestAdmission(lambda: 2, max_queue=2, clock=lambda: now[0])
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admitted(admission))
        error = refused(admission)
        assert (error.status, error.code, error.headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        assert admission.num_requests == 4
    assert admission.num_requests == 0
    for second in range(1, 11):  # ten requests end, one each 2 s
        now[0] = 2.0 * second
        with admitted(admission):
            pass
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admitted(admission))
        # 13 ends in 20 s, 3 must end before there is a place
        assert int(refused(admission).headers["retry-after"]) == 5


def test_the_wait_is_bounded() -> None:
    now = [0.0]
    admission = RequestAdmission(lambda: 0, max_queue=1000, clock=lambda: now[0])
    for now[0] in (0.0, 50.0):
        with admitted(admission):
            pass
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(admitted(admission))
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
    with pytest.raises(ApiError, match="need 9 KV blocks, and the key bob may use 8") as caught, admission.blocks(bob, 9):
        pass
    assert caught.value.status == 400 and "retry-after" not in caught.value.headers
    admission.settle_tokens(eve, 0, 160)
    error = refused(admission, eve)
    assert "100 tokens a minute" in error.message and int(error.headers["retry-after"]) in (36, 37)


def test_a_request_takes_a_place_for_each_sequence() -> None:
    now = [0.0]
    admission = RequestAdmission(lambda: 4, max_queue=6, clock=lambda: now[0])
    with admitted(admission, count=7):
        assert (admission.num_requests, admission.num_places) == (1, 7)
        error = refused(admission, count=4)
        assert error.status == 429 and "4 sequences, and 3 of the server's 10 places are free" in error.message
        assert admission.num_places == 7
        with admitted(admission, count=3):
            assert "10 sequences are running or waiting" in refused(admission).message
    assert (admission.num_requests, admission.num_places) == (0, 0)
    now[0] = 10.0
    with admitted(admission, count=9):  # 7 sequences ended in 10 s; 5 that wait and 4 more take 13 s
        assert refused(admission, count=4).headers["retry-after"] == "13"
    error = refused(admission, count=11)
    assert error.status == 400 and "11 sequences" in error.message and "takes 10 at a time" in error.message


def test_a_key_has_a_limit_of_sequences() -> None:
    admission, bob = RequestAdmission(lambda: 4, max_queue=6), ApiKey("bob", b"1", max_sequences=3)
    with admitted(admission, bob, 2):
        assert refused(admission, bob, 2).status == 429
        assert refused(admission, bob, 4).status == 400
        with admitted(admission, bob), admitted(admission, None, 7):
            pass
    with admitted(admission, bob, 3):
        pass


def test_tokens_are_reserved_and_settled() -> None:
    now = [0.0]
    admission = RequestAdmission(lambda: 10, max_queue=10, clock=lambda: now[0])
    eve = ApiKey("eve", b"2", tokens_per_minute=60)

    def wait(count: int) -> str | None:
        try:
            admission.reserve_tokens(eve, count)
        except ApiError as error:
            return error.headers["retry-after"] if error.status == 429 else None
        return None

    assert wait(40) is None and wait(20) is None  # all of the minute is reserved
    assert refused(admission, eve).headers["retry-after"] == "1"
    admission.settle_tokens(eve, 40, 10)
    assert wait(31) == "1" and wait(30) is None
    admission.settle_tokens(eve, 30, 0)
    assert wait(1000) == "30"  # more than a minute's: once all of that is left
    now[0] = 1000.0  # never more than a minute's worth
    assert wait(1000) is None and wait(1) == "941"
    admission.settle_tokens(eve, 1000, 70)
    assert wait(1) == "11"
    admission.reserve_tokens(None, 10**9)
    admission.reserve_tokens(ApiKey("bob", b"1"), 10**9)


def refusal(hold: Callable[[Any], None], given: Any) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        hold(given)
    return caught.value.status, caught.value.message


def test_bodies_and_conversions_count_for_their_key() -> None:
    admission = RequestAdmission(lambda: 1, 0, num_keys=2, most_body_bytes=2)  # 32 bytes in all, 16 of a key
    bob, eve, ann = ApiKey("bob", b"1", max_requests=1, tokens_per_minute=60), ApiKey("eve", b"2"), ApiKey("ann", b"3")
    with ExitStack() as stack:
        hold, other, third, again = (stack.enter_context(admission.body(key)) for key in (bob, eve, ann, bob))
        for held, count in ((hold, 10), (other, 16), (again, 6)):
            held(count)
        of_key, of_all = refusal(again, 1), refusal(third, 1)
        assert of_key[0] == 429 and "bob may have 16 bytes of bodies of requests in the server, and has 16" in of_key[1]
        assert of_all[0] == 503 and "holds 32 bytes of bodies of requests and may hold 32" in of_all[1]
    with admission.body(bob) as hold, admission.call(bob), admission.request(None):  # a call takes no place
        hold(16)
        with pytest.raises(ApiError, match="1 requests at a time"), admission.call(bob):
            pass
    admission.charge_converted(bob, 61 * 256)
    assert refused(admission, bob).status == 429


def test_answers_take_what_is_planned_for_them() -> None:
    admission, bob, eve = RequestAdmission(lambda: 1, 0, num_keys=2), ApiKey("bob", b"1"), ApiKey("eve", b"2")
    with ExitStack() as stack:
        hold, other, third = (stack.enter_context(admission.answer(key, "demo", 2000)) for key in (bob, eve, bob))
        status, message = refusal(hold, AnswerSize(10, 10))
        assert status == 400 and "1.12 KiB of memory: 10 sequences with 10 tokens in all. An answer may take" in message
        assert "1000 bytes for the key bob: ask for fewer tokens (max_tokens)" in message
        for held, count in ((hold, 5), (hold, 7), (other, 7)):  # more is known of the first: 768 bytes in all
            held(AnswerSize(count, count))
        status, message = refusal(third, AnswerSize(3, 3))
        assert status == 429 and "768 bytes for this key and 1.50 KiB in all, of 1000 bytes and 1.95 KiB" in message
    with admission.answer(bob, "demo", 2000) as hold:
        hold(AnswerSize(8, 8))


def test_a_server_that_shuts_down_takes_no_more() -> None:
    admission = RequestAdmission(lambda: 10, max_queue=10)
    with admission.request(None):
        admission.draining = True
        assert refused(admission).status == 503

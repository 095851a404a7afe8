"""The memory that is planned for answers: every product of a request's fields counts."""

from __future__ import annotations

from pagetide.common.answer_memory import MOST_UNREAD_BYTES, AnswerSize, planned_bytes


def test_bytes_of_an_answer_and_what_is_planned() -> None:
    for size, num_bytes in (
        (AnswerSize(1, 1000), 0),  # delivered when it ends
        (AnswerSize(4, 1000), 750 * 128),
        (AnswerSize(1, 10, num_prompt=100), 100 * 48),
        (AnswerSize(32, 9600, logprobs=1024), 9600 * (128 + 256 + 1024 * 40)),
        (AnswerSize(1, 1, 100, prompt_logprobs=5), 100 * (48 + 256 + 5 * 40)),
        (AnswerSize(32, 9600, logprobs=1024, is_streamed=True), MOST_UNREAD_BYTES),
    ):
        assert size.num_bytes == num_bytes, size
    assert [planned_bytes(free << 20) for free in (1, 3200, 1 << 20)] == [32 << 20, 100 << 20, 4 << 30]
    scored = "60 tokens in all and 3 log-probabilities for each, and prompts of 5 tokens and 1 log-probabilities for each"
    assert str(AnswerSize(2, 60, 5, logprobs=3, prompt_logprobs=1)) == f"2 sequences with {scored}"

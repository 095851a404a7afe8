"""How much one request may ask for: lists, strings and constraints have bounds, and what is beyond is refused unread."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from pagetide.api.sampling_params import (
    LONGEST_CONSTRAINT,
    LONGEST_STRING,
    MOST_BAD_WORDS,
    MOST_LISTED_IDS,
    MOST_STOP_IDS,
    MOST_STOP_STRINGS,
    SamplingParams,
)

LONG = "x" * LONGEST_STRING


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": [LONG] * MOST_STOP_STRINGS},
        {"stop_token_ids": range(MOST_STOP_IDS)},
        {"bad_words": [LONG] * MOST_BAD_WORDS},
        {"bad_words_ids": [[1, 2]] * (MOST_LISTED_IDS // 2)},
        {"bad_words_ids": [range(MOST_LISTED_IDS)]},
        {"logit_bias": dict.fromkeys(range(MOST_LISTED_IDS), 1.0)},
        {"regex": "a" * LONGEST_CONSTRAINT},
        {"grammar": "a" * LONGEST_CONSTRAINT},
        {"json_schema": {"a": "b" * (LONGEST_CONSTRAINT - len(json.dumps({"a": ""})))}},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
    ],
)
def test_up_to_the_bound_it_is_taken(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    params.over(SamplingParams()).resolve(())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": ["x"] * (MOST_STOP_STRINGS + 1)}, "stop must have at most 128 entries, got more"),
        ({"stop": ["a", LONG + "x"]}, "stop must have at most 256 characters each, got 257: 'xxx"),
        ({"stop_token_ids": range(MOST_STOP_IDS + 1)}, "stop_token_ids must have at most 1,024 entries, got more"),
        ({"bad_words": ["x"] * (MOST_BAD_WORDS + 1)}, "bad_words must have at most 1,024 entries, got more"),
        ({"bad_words": LONG + "x"}, "bad_words must have at most 256 characters each, got 257"),
        ({"bad_words_ids": [[1]] * (MOST_LISTED_IDS + 1)}, "bad_words_ids must have at most 16,384 ids in all, got more"),
        ({"bad_words_ids": [range(9000), range(9000)]}, "bad_words_ids must have at most 16,384 ids in all, got more"),
        ({"logit_bias": dict.fromkeys(range(MOST_LISTED_IDS + 1), 1.0)}, "logit_bias must have at most 16,384 entries"),
        ({"regex": "a" * (LONGEST_CONSTRAINT + 1)}, "regex must have at most 131,072 characters, got 131,073"),
        ({"grammar": "a" * 10**6}, "grammar must have at most 131,072 characters, got 1,000,000"),
        ({"json_schema": {"a": "b" * LONGEST_CONSTRAINT}}, "json_schema must have at most 131,072 characters"),
        ({"seed": -(2**63) - 1}, "seed must be at least -9223372036854775808"),
        ({"seed": 2**64}, "seed must be at most 18446744073709551615"),
    ],
)
def test_beyond_it_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        SamplingParams(**settings)
    assert message in str(refused.value) and len(str(refused.value)) < 200


def test_an_endless_list_is_not_read_to_its_end() -> None:
    entries = {"stop": "a", "stop_token_ids": 1, "bad_words": "a", "bad_words_ids": [1], "logits_processors": len}
    for name, entry in (*entries.items(), ("bad_words_ids", itertools.repeat(1))):
        with pytest.raises(ValueError, match=f"{name} must have at most"):
            SamplingParams(**{name: itertools.repeat(entry)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", {"a": "b" * 10**5}),
        ("temperature", "9" * 10**5),
        ("max_new_tokens", "9" * 10**5),
        ("bad_words", [["a" * 10**5]]),
        ("logit_bias", ["a" * 10**5]),
        ("regex", ["a" * 10**5]),
        ("ignore_eos", "a" * 10**5),
        ("early_stopping", "a" * 10**5),
    ],
)
def test_what_is_refused_is_not_repeated_in_full(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200

"""API keys: where they come from, who has one, and what it may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey, ApiKeys, KeysInvalid, KeyUse, digest_of, read_keys

FILE = """
alice: sk-alice-1234
bob: {key: sk-bob-12345, max_requests: 2, max_sequences: 4, tokens_per_minute: 600, least_priority: -3}
ops: {key: sk-operator-1, admin: true}
"""


def test_a_file_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(FILE)
    keys = read_keys(tmp_path / "keys.yaml", {"PAGETIDE_API_KEY": "sk-env-one,sk-env-two"})
    names = {
        key: getattr(keys.find(f"Bearer {key}"), "name", None) for key in ("sk-alice-1234", "sk-env-two", "sk-alice-12")
    }
    assert names == {"sk-alice-1234": "alice", "sk-env-two": "pagetide_api_key-2", "sk-alice-12": None}
    bob = keys.find("bearer  sk-bob-12345")
    assert bob is not None and (bob.max_requests, bob.tokens_per_minute, bob.max_blocks) == (2, 600, None)
    assert (bob.max_sequences, bob.least_priority) == (4, -3)
    assert keys.has_admin and keys.has_users and "sk-bob" not in repr(bob)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-alice-1234", "sk-alice-1234", "Bearer \ud800"]
)
def test_headers_without_a_known_key(header: str | None) -> None:
    assert ApiKeys([ApiKey("alice", digest_of("sk-alice-1234"))]).find(header) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice: short", "at least 8 characters"),
        ("- sk-alice-1234", "map names to keys"),
        ("alice: {key: sk-alice-1234, max_request: 2}", "unknown option 'max_request'"),
        ("alice: {key: sk-alice-1234, max_requests: 0}", "max_requests must be a number of 1 or more"),
        ("alice: {key: sk-alice-1234, admin: 1}", "admin must be true or false"),
        ("alice: sk-alice-1234\nbob: sk-alice-1234", "the same key"),
        ("alice: [", "cannot be read"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(KeysInvalid, match=message):
        read_keys(tmp_path / "keys.yaml", {})


def test_a_key_may_only_go_behind() -> None:
    alice, bob, ops = ApiKey("alice", b"1"), ApiKey("bob", b"2", least_priority=-3), ApiKey("ops", b"3", admin=True)
    alice.check_priority(0)
    bob.check_priority(-3)
    ops.check_priority(-1000)
    for key, priority in ((alice, -1), (bob, -4)):
        with pytest.raises(ApiError, match="lower ones go first") as caught:
            key.check_priority(priority)
        assert (caught.value.status, caught.value.param) == (403, "priority")


def test_tokens_a_minute_refill() -> None:
    now = [0.0]
    use = KeyUse(ApiKey("bob", b"", tokens_per_minute=60), clock=lambda: now[0])
    assert use.retry_after_s() is None
    use.count_tokens(90)
    assert use.retry_after_s() == pytest.approx(31.0)
    now[0] = 31.0
    assert use.retry_after_s() is None
    now[0] = 1000.0
    use.retry_after_s()
    use.count_tokens(59)
    assert use.retry_after_s() is None  # never more than a minute's worth
    use.count_tokens(2)
    assert use.retry_after_s() == pytest.approx(2.0)

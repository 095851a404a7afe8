"""API keys: where they come from, who has one, and what it may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetide.server.app import Server
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey, ApiKeys, KeysInvalid, digest_of, read_keys

FILE = """
alice: sk-alice-1234
bob: {key: sk-bob-12345, max_requests: 2, max_sequences: 4, tokens_per_minute: 600, least_priority: -3}
ops: {key: sk-operator-1, admin: true}
"""


def test_a_file_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(FILE)
    keys = read_keys(tmp_path / "keys.yaml", {"PAGETIDE_API_KEY": "sk-env-one,sk-env-two"})
    names = {"sk-alice-1234": "alice", "sk-env-two": "pagetide_api_key-2", "sk-alice-12": None}
    assert {key: getattr(keys.find(f"Bearer {key}"), "name", None) for key in names} == names
    bob = keys.find("bearer  sk-bob-12345")
    assert bob is not None and (bob.max_requests, bob.tokens_per_minute, bob.max_blocks) == (2, 600, None)
    assert (bob.max_sequences, bob.least_priority) == (4, -3)
    assert keys.has_admin and keys.has_users and "sk-bob" not in repr(bob)


def test_white_space_and_marks_around_keys_are_no_part_of_them(tmp_path: Path) -> None:
    """As of secrets that end with a line end, and of files of editors that begin with a mark."""
    (tmp_path / "keys.yaml").write_bytes(b"\xef\xbb\xbfalice: |\n  sk-alice-1234\n")
    keys = read_keys(tmp_path / "keys.yaml", {"PAGETIDE_API_KEY": "\ufeffsk-env-one, sk-env-two\n", "PAGETIDE_ADMIN_KEY": "\n"})
    assert all(keys.find(f"Bearer {key}") for key in ("sk-alice-1234", "sk-env-one", "sk-env-two"))
    assert not keys.has_admin


def test_names_that_are_alike_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("pagetide_api_key-1: sk-alice-1234\n")
    with pytest.raises(KeysInvalid, match="two keys are named 'pagetide_api_key-1'"):
        read_keys(tmp_path / "keys.yaml", {"PAGETIDE_API_KEY": "sk-env-one"})


def test_headers_without_a_known_key() -> None:
    keys = ApiKeys([ApiKey("alice", digest_of("sk-alice-1234"))])
    for header in (None, "", "Bearer", "Bearer ", "Basic sk-alice-1234", "sk-alice-1234", "Bearer \ud800"):
        assert keys.find(header) is None, header


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice: short", "at least 8 characters"),
        ("- sk-alice-1234", "map names to keys"),
        ("alice: {key: sk-alice-1234, max_request: 2}", "unknown option 'max_request'"),
        ("alice: {key: sk-alice-1234, max_requests: 0}", "max_requests must be a number of 1 or more"),
        ("alice: {key: sk-alice-1234, admin: 1}", "admin must be true or false"),
        ("alice: sk-alice-1234\nbob: sk-alice-1234", "the same key"),
        ("1: sk-alice-1234\n01: sk-alice-5678", r"cannot be read: .* '01' appears twice, first in line 1 \(as '1'\)"),
        *((f'"{name}": sk-alice-1234', "must be printable") for name in ("", " ", "a\\nb", "\\ud800", "\\0")),
        ("1: sk-alice-1234\n'1': sk-alice-5678", "two keys are named '1'"),
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


def test_salts_of_keys_and_of_requests_live_apart_whatever_they_are() -> None:
    names = (None, "chief", "chief\0", "-", "5:chief", "")
    given = ("", "x", "chief\0", "5:chief", "-x", "0:", "\0")
    keys = [None if name is None else ApiKey(name, b"") for name in names]
    salts = [Server.cache_salt(None, salt, key) for key in keys for salt in given]  # type: ignore[arg-type]
    assert len(set(salts)) == len(names) * len(given) and salts[0] is None
    assert Server.cache_salt(None, None, keys[1]) == Server.cache_salt(None, "", keys[1])  # type: ignore[arg-type]

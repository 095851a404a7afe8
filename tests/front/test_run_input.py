"""The input of `pagetide run` by itself, without an engine: what a file's bytes and a line's fields are taken for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pagetide.batch import input as run_input
from pagetide.batch.config import InputOptions
from pagetide.batch.input import InputFile, read_line

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (BOM, []),
        (BOM + b"\n", []),
        (BOM + b"\r\n", []),
        (BOM + b"a", [(1, b"a")]),
        (BOM + b"\n" + BOM + b"\n", [(2, BOM)]),  # a mark anywhere else is text
        (b"12345678", [(1, b"12345678")]),  # as long as a line may be
        (b"1234567\n", [(1, b"1234567")]),
        (b"12345678\nb\n", [(1, None), (2, b"b")]),
        (b"123456789", [(1, None)]),
        (b"1" * 30 + b"\nb", [(1, None), (2, b"b")]),
        (BOM + b"12345", [(1, b"12345")]),
    ],
)
def test_lines_of_a_file(
    content: bytes, expected: list[tuple[int, bytes | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_input, "LONGEST_LINE_BYTES", 8)
    path = tmp_path / "in.txt"
    path.write_bytes(content)
    source, digest = InputFile(InputOptions(str(path))), hashlib.sha256()
    assert list(source.lines(digest)) == expected
    assert digest.digest() == hashlib.sha256(content).digest()
    assert source.survey().num_lines == len(expected)
    source.close()


class _Key(str):
    """A key that counts how often one of its kind is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        _Key.num_compared += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


@pytest.mark.parametrize("twice", ["k0", "k1999"])
def test_a_key_that_stands_there_twice_is_found_in_one_pass(twice: str) -> None:
    pairs: list[tuple[str, Any]] = [(_Key(f"k{i}"), i) for i in range(2000)]
    _Key.num_compared = 0
    assert run_input._distinct(pairs) == dict(pairs)
    with pytest.raises(ValueError, match=f"the key '{twice}' stands there twice"):
        run_input._distinct([*pairs, (_Key(twice), 5)])
    assert _Key.num_compared < 2 * len(pairs)  # a comparison each would be too many already


def test_a_long_name_is_not_repeated_in_full() -> None:
    name = "temprature" * 100_000
    for line in (f'{{"prompt": "x", "{name}": 1}}', f'{{"{name}": 1, "{name}": 2}}'):
        error = read_line(1, line.encode(), "jsonl").error
        assert error is not None and "tempratu" in error and len(error) < 200

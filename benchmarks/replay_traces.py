"""The requests of a replay: public traces of lengths, times and prefix ids, or a synthetic multi-turn load.

Ids become tokens at full scale: an id stands for as many tokens as in its source (512 Mooncake, 64 agentic), so that a token
of the replay is a token of the source, whatever the block size. Position p of a request is drawn from a generator seeded
with id p // 512 (or 64) where the trace has one, and with an id of the request's own where it has none: in prompts without
ids, and in what is generated. Traces do not say which ids an output has in the next prompt, so no output is found again in
them; in the synthetic load it is.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Row = TypeVar("Row")

STOP = 2
_OWN = 1 << 29  # ids from here on are requests' own
_BITS = (1 << 30) - 1
_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request. `ids` may cover less than the prompt, or more: then what is generated too."""

    at_s: float
    prompt_tokens: int
    output_tokens: int  # the stop token included
    ids: Ids
    own_id: int

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < float("inf"):
            raise ValueError(f"a request comes at a time from 0 s on, got {self.at_s}")
        for name, tokens in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not isinstance(tokens, int) or tokens < 1:
                raise ValueError(f"a request has at least 1 token of {name}, got {tokens!r}")


class BadTrace(ValueError):
    """A trace's file is not there, or not what its name says: the message says which line, and why."""


class Trace:
    """Turns in order of time, and the tokens of each. An id stands for `id_tokens` tokens."""

    def __init__(self, source: str, id_tokens: int, turns: list[Turn]) -> None:
        self.source = source
        self.id_tokens = id_tokens
        self.turns = turns
        self._draws = np.random.default_rng(0).integers(0, _BITS + 1, id_tokens, np.uint32)

    def tokens(self, turn: Turn) -> Tokens:
        """The prompt and, behind it, the output, which a stop token ends."""
        length = turn.prompt_tokens + turn.output_tokens
        ids = np.full(-(-length // self.id_tokens), turn.own_id, np.int64)
        given = turn.ids[: len(ids)]
        ids[: len(given)] = given
        # An odd factor maps different ids to different seeds; no token is a stop token by its highest bit.
        seeds = ids.astype(np.uint32) * np.uint32(2_654_435_761) & np.uint32(_BITS)
        tokens: Tokens = (seeds[:, None] ^ self._draws | np.uint32(_BITS + 1)).ravel()[:length].view(np.int32)
        tokens[-1] = STOP
        return tokens

    def findable_tokens(self, block_size: int) -> int:
        """Prompt tokens, in full blocks, that an earlier prompt began with: hits of an endless pool that never waits."""
        seen: set[int] = set()
        total = 0
        for turn in self.turns:
            ids = turn.ids[: -(-turn.prompt_tokens // self.id_tokens)].tolist()
            known = sum(i in seen for i in ids)  # an id's whole prefix is the same: they are the first ones
            total += min(known * self.id_tokens, turn.prompt_tokens - 1) // block_size * block_size
            covered = -(-(turn.prompt_tokens + turn.output_tokens - 1) // self.id_tokens)
            seen.update(turn.ids[:covered].tolist())
        return total

    def taken(self, num_requests: int | None, speed: float) -> Trace:
        """The first `num_requests` turns, `speed` times as fast."""
        turns = [replace(turn, at_s=turn.at_s / speed) for turn in self.turns[:num_requests]]
        return Trace(self.source, self.id_tokens, turns)


def mooncake(folder: Path) -> Trace:
    """The source rounds times to 3 s; requests of one instant are spread evenly over the 3 s that follow."""
    file = folder / "mooncake_conversation_0-20min.jsonl"

    def turn(number: int, line: str) -> Turn:
        row = _object(line)
        ids = np.array(row["hash_ids"], np.int64)
        return Turn(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids, _OWN + number)

    turns = _turns(file, _lines(file), turn)
    _, first, counts = np.unique([turn.at_s for turn in turns], return_index=True, return_counts=True)
    place = (np.arange(len(turns)) - np.repeat(first, counts)) / np.repeat(counts, counts)
    spread = [replace(turn, at_s=turn.at_s + 3 * share) for turn, share in zip(turns, place.tolist(), strict=True)]
    return Trace(f"{file.name} (times spread over their 3 s)", 512, spread)


def agentic(folder: Path) -> Trace:
    """Sessions of coding agents; times as they are, whether or not the session's turn before has ended."""
    file = folder / "agentic_sessions.jsonl"

    def turn(number: int, line: str) -> Turn:
        row = _object(line)
        ids = np.concatenate([np.arange(at, at + count, dtype=np.int64) for at, count in row["hash_runs"]] or [_NO_IDS])
        return Turn(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids, _OWN + number)

    return Trace(file.name, 64, _turns(file, _lines(file), turn))


def azure(folder: Path, name: str) -> Trace:
    """Times and lengths alone: no prefix is shared."""
    file = folder / f"azure2023_{name}_0-20min.csv"

    def turn(number: int, row: dict[str, str]) -> Turn:
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        return Turn(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), _NO_IDS, _OWN + number)

    turns = _turns(file, csv.DictReader(_lines(file)), turn, header_lines=1)
    return Trace(file.name, 512, [replace(turn, at_s=turn.at_s - turns[0].at_s) for turn in turns])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): name the folder of traces by --data, or "
            "take --trace synthetic"
        ) from None


def _object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a line is a JSON object, got {line[:40]}")
    return row


def _turns(file: Path, rows: Iterable[Row], turn: Callable[[int, Row], Turn], header_lines: int = 0) -> list[Turn]:
    """`turn` of each of the file's rows, in order of time. Raises BadTrace for the first one that is none."""
    turns = []
    for number, row in enumerate(rows):
        try:
            turns.append(turn(number, row))
        except (ValueError, TypeError, KeyError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise BadTrace(
                f"line {number + 1 + header_lines} of {file} is not a request of this trace: {why}"
            ) from None
    if not turns:
        raise BadTrace(f"{file} holds no request")
    return sorted(turns, key=lambda turn: turn.at_s)


SYNTHETIC = (
    "synthetic: sessions begin as a Poisson process, on average {rate:g} requests/s; each has one of 8 system prompts of 2,048 "
    "tokens, 1 to 12 turns (uniform), log-normal user messages (median 600 tokens, sigma 1.2), answers (median 200, "
    "sigma 0.8) and pauses after an arrival (median 25 s, sigma 0.8); every prompt holds all of its session"
)


def synthetic(num_requests: int = 3_658, rate: float = 3.0, seed: int = 0) -> Trace:
    """Chats of many turns, at most 120,000 tokens each; see SYNTHETIC."""
    rng, size = np.random.default_rng(seed), 512
    turns: list[Turn] = []
    session, at_s, next_id = 0, 0.0, 8 * 2_048 // size
    while len(turns) < num_requests * 1.2:  # some of them come after those that are taken
        at_s += rng.exponential(6.5 / rate)
        moment, known, sessions_turns = at_s, 2_048, int(rng.integers(1, 13))
        head = np.arange(4) + 4 * int(rng.integers(8))
        ids = np.concatenate((head, np.arange(next_id, next_id + 256)))
        next_id += 256
        for _ in range(sessions_turns):
            prompt = known + 1 + int(rng.lognormal(np.log(600), 1.2))
            output = 2 + int(rng.lognormal(np.log(200), 0.8))
            known = prompt + output
            if known > 120_000:
                break
            turns.append(Turn(moment, prompt, output, ids, _OWN + session))
            moment += float(rng.lognormal(np.log(25), 0.8))
        session += 1
    turns.sort(key=lambda turn: turn.at_s)
    return Trace(SYNTHETIC.format(rate=rate), size, turns[:num_requests])


def distinct(num_requests: int, prompt_tokens: int, output_tokens: int) -> Trace:
    """Requests that are alike in length, share nothing, and are all there at once."""
    turns = [Turn(0.0, prompt_tokens, output_tokens, _NO_IDS, _OWN + number) for number in range(num_requests)]
    return Trace(f"{num_requests:,} requests of {prompt_tokens:,} + {output_tokens:,} tokens at once", 512, turns)


FILES: dict[str, Callable[[Path], Trace]] = {
    "mooncake": mooncake,
    "agentic": agentic,
    "azure-code": lambda folder: azure(folder, "code"),
    "azure-conv": lambda folder: azure(folder, "conv"),
}
BLOCK_SIZES = {"mooncake": 512, "agentic": 64, "azure-code": 16, "azure-conv": 16, "synthetic": 512}

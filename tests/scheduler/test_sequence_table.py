"""The table of sequences: aborts, ends and ends that are not reported yet."""

from __future__ import annotations

import numpy as np
from fakes import World

PROMPT = np.arange(10, dtype=np.int32)


def two() -> World:
    """Two requests, of which the first has a row and two tokens."""
    world = World(64, block_size=4, max_seqs=1)
    world.add("a", PROMPT, 9)
    world.add("b", PROMPT + 1, 9)
    world.step()
    world.step()
    return world


def test_an_abort_is_requested_once_and_ends_it_later() -> None:
    table = two().scheduler._sequences
    assert table.abort("a", "stop") and not table.abort("a", "aborted") and not table.abort("c", "aborted")
    assert len(table) == 2 and [s.request.request_id for s in table.aborted] == ["a"]
    table.end_aborted()
    assert list(table.by_id) == ["b"] and not table.aborted
    assert [(end.request_id, end.reason, len(end.token_ids)) for end in table.finished] == [("a", "stop", 2)]
    table.end_aborted()
    assert len(table.take_finished()) == 1 and not table.take_finished()


def test_an_aborted_sequence_that_ended_otherwise_ends_once() -> None:
    table = two().scheduler._sequences
    sequence = table.by_id["a"]
    table.abort("a", "aborted")
    table.end(sequence, "length")
    table.end_aborted()
    assert [end.reason for end in table.take_finished()] == ["length"]


def test_a_withdrawn_sequence_is_reported_to_its_caller_alone() -> None:
    table = two().scheduler._sequences
    end = table.withdraw("a")
    assert end is not None and (end.request_id, end.reason, len(end.token_ids)) == ("a", "aborted", 2)
    assert not table.finished and table.withdraw("a") is None
    table.abort("b", "aborted")
    assert table.withdraw("b") is None, "it is aborted already"


def test_a_failure_of_all_keeps_the_ends_that_were_not_reported() -> None:
    world = two()
    table = world.scheduler._sequences
    table.end(table.by_id["b"], "aborted")
    told = {end.request_id: (end.reason, end.error, len(end.token_ids)) for end in table.failed("broke")}
    assert told == {"b": ("aborted", None, 0), "a": ("error", "broke", 2)}
    assert len(table) == 1 and len(table.finished) == 1, "nothing changed"


def test_only_ends_of_its_own_teach_the_forecast() -> None:
    world = two()
    table, forecast = world.scheduler._sequences, world.scheduler.forecast
    table.end(table.by_id["b"], "error", "broke")
    assert forecast._num_ended == 0
    table.end(table.by_id["a"], "stop")
    assert forecast._num_ended == 1

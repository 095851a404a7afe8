"""The journal of the queue: its file stays bounded over many requests."""

from __future__ import annotations

import time
from pathlib import Path

from pagetide.fleet.journal import Journal, JournalChanges
from pagetide.fleet.messages import encode
from tests.fleet_stand_ins import new_request


def test_a_hundred_thousand_requests_leave_a_bounded_file_and_no_number_is_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    journal = Journal(path)
    data, most, number = encode(new_request("r", prompt=20)), 0, 1
    for _ in range(100):
        batch = range(number, number + 1000)
        number += 1000
        journal.commit(
            JournalChanges(
                [(one, f"r{one}", data, "") for one in batch],
                [(one, position, data[:100]) for one in batch for position in range(2)],
                list(batch),
            )
        )
        while journal.forget(0.0, 2000):
            pass
        most = max(most, path.stat().st_size)
    assert most < 10 << 20
    assert journal.next_number == number == 100_001
    assert journal.find_number(98_001) is not None and journal.find_number(98_000) is None
    while journal.forget(time.time() + 1.0, 2000):
        pass
    assert journal.next_number == number
    journal.close()
    journal = Journal(path)
    assert journal.next_number == number
    journal.close()

"""What a lease holds and may hold: every kind of order, and the ends of a broker and of the lease. The rest: test_lease.py."""

from __future__ import annotations

import sys

import pytest

from pagetide.allocator import wire
from pagetide.allocator.lease_balance import LeaseBalance, Order
from pagetide.allocator.lease_events import Event, Granted, Limited, Recalled, Withdrawn
from pagetide.allocator.lease_record import HeldBounds, LeaseRecordWriter, RecordOwner, bounds_between

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")


def generation(counter: int, epoch: int = 7) -> wire.OrderGeneration:
    return wire.OrderGeneration(epoch, counter)


def registered(held: int = 100, granted: int = 500, max_bytes: int | None = 900) -> tuple[LeaseBalance, RecordOwner]:
    """Lease 1, registered with generation 100 at time 10."""
    balance, owner = LeaseBalance(held, max_bytes, "the broker", lambda: 10.0), RecordOwner(held)
    message = wire.RegisteredMessage(1, generation(100), granted)
    balance.register(message, LeaseRecordWriter(owner.take_fd()), max_bytes)
    return balance, owner


def recorded(owner: RecordOwner) -> HeldBounds:
    return bounds_between(owner.read(), owner.read())


def state(balance: LeaseBalance) -> tuple[int, int, int, int | None, Recalled | None]:
    return balance.lower_bytes, balance.upper_bytes, balance.granted_bytes, balance.max_bytes, balance.recall


def test_bounds_above_a_grant_that_fell_can_still_fall() -> None:
    balance, _ = registered()
    balance.shift(0, 400)
    balance.apply(wire.GrantMessage(1, generation(101), 200))
    balance.shift(0, -100)
    assert state(balance)[:3] == (100, 400, 200)
    balance.reduce(400, 0)
    assert balance.granted_bytes == 200, "an answer never raises the grant"


RECALLED = Recalled(50, 10.25)


@pytest.mark.parametrize(
    ("order", "event", "then"),
    [
        (wire.GrantMessage(1, generation(102), 600), Granted(600), (600, 900, RECALLED)),
        (wire.RecallMessage(1, generation(102), 40, 500), Recalled(40, 10.5), (500, 900, Recalled(40, 10.5))),
        (wire.WithdrawMessage(1, generation(102)), Withdrawn(), (500, 900, None)),
        (wire.LimitMessage(1, 300, generation(102)), Limited(300), (500, 300, RECALLED)),
        (
            wire.RecallMessage(1, generation(102), 40, 500, spares_requests=True),
            Recalled(40, 10.5),  # a recall that spares no request is pending
            (500, 900, Recalled(40, 10.5)),
        ),
        (wire.GrantMessage(1, generation(100), 900), None, (500, 900, RECALLED)),
        (wire.RecallMessage(1, generation(101), 50, 250), None, (500, 900, RECALLED)),
        (wire.GrantMessage(1, generation(102, epoch=6), 900), None, (500, 900, RECALLED)),
        (wire.GrantMessage(2, generation(102), 900), None, (500, 900, RECALLED)),
        (wire.LimitMessage(2, 5, generation(102)), None, (500, 900, RECALLED)),
    ],
    ids=repr,
)
def test_orders_for_this_lease_that_are_newer_count_once(
    order: Order, event: Event | None, then: tuple[int, int, Recalled | None]
) -> None:
    balance, _ = registered()
    assert balance.apply(wire.RecallMessage(1, generation(101), 50, 250)) == RECALLED
    assert balance.apply(order) == event
    assert state(balance) == (100, 100, *then)
    assert balance.generation == generation(101 if event is None or order.generation is None else 102)
    assert order.generation is None or balance.apply(order) is None


def test_a_lost_broker_leaves_what_is_held() -> None:
    balance, owner = registered()
    balance.shift(0, 50)
    balance.apply(wire.RecallMessage(1, generation(101), 50, 250))
    balance.lose_broker()
    assert state(balance) == (100, 150, 150, 900, None)
    balance.shift(50, 0)
    assert recorded(owner) == HeldBounds(150, 150), "an old record is written as long as there is no new one"


def test_after_the_end_bounds_only_fall() -> None:
    balance, owner = registered()
    balance.apply(wire.RecallMessage(1, generation(101), 50, 250))
    balance.end()
    assert state(balance) == (100, 100, 0, 900, None)
    balance.shift(-100, 0)
    balance.shift(0, -100)
    assert recorded(owner) == HeldBounds(0, 0)


def test_a_fork_leaves_the_record_to_its_parent() -> None:
    balance, owner = registered()
    balance.leave_to_parent()
    balance.shift(-100, -100)
    assert balance.granted_bytes == 0
    assert recorded(owner) == HeldBounds(100, 100)

"""What a lease holds and may hold: shifts, orders, and the ends of a broker and of the lease."""

from __future__ import annotations

import sys

import pytest

from pagetide.allocator import wire
from pagetide.allocator.errors import GrantExceeded, ProtocolViolation
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


def test_before_a_broker_what_is_held_is_granted() -> None:
    balance = LeaseBalance(100, None, "the broker", lambda: 0.0)
    assert state(balance) == (100, 100, 100, None, None)
    with pytest.raises(GrantExceeded):
        balance.shift(0, 1)
    balance.shift(-40, 0)
    balance.shift(0, -30)
    assert state(balance) == (60, 70, 100, None, None)


def test_a_registration_brings_the_grant_and_the_record() -> None:
    balance, owner = LeaseBalance(100, 900, "the broker", lambda: 0.0), RecordOwner(0)
    balance.shift(-30, 0)
    balance.register(wire.RegisteredMessage(1, generation(3), 500), LeaseRecordWriter(owner.take_fd()), 800)
    assert state(balance) == (70, 100, 500, 800, None)
    assert balance.generation == generation(3)
    assert recorded(owner) == HeldBounds(70, 100)


def test_shifts_go_to_the_record_and_not_above_the_grant() -> None:
    balance, owner = registered()
    balance.shift(0, 400)
    assert recorded(owner) == HeldBounds(100, 500)
    with pytest.raises(GrantExceeded):
        balance.shift(5, 1)
    assert (state(balance)[:2], recorded(owner)) == ((100, 500), HeldBounds(100, 500)), "nothing has changed"
    balance.shift(400, 0)
    balance.set_bounds(20, 30)
    assert (state(balance)[:2], recorded(owner)) == ((20, 30), HeldBounds(20, 30))


def test_bounds_above_a_grant_that_fell_can_still_fall() -> None:
    balance, _ = registered()
    balance.shift(0, 400)
    balance.apply(wire.GrantMessage(1, generation(101), 200))
    balance.shift(0, -100)
    assert state(balance)[:3] == (100, 400, 200)


@pytest.mark.parametrize(
    ("order", "event", "granted", "max_bytes", "recall"),
    [
        (wire.GrantMessage(1, generation(101), 600), Granted(600), 600, 900, None),
        (wire.RecallMessage(1, generation(101), 50, 250), Recalled(50, 10.25), 500, 900, Recalled(50, 10.25)),
        (wire.WithdrawMessage(1, generation(101)), Withdrawn(), 500, 900, None),
        (wire.LimitMessage(1, 300, generation(101)), Limited(300), 500, 300, None),
    ],
)
def test_a_newer_order_is_applied_once(
    order: Order, event: Event, granted: int, max_bytes: int, recall: Recalled | None
) -> None:
    balance, _ = registered()
    assert balance.apply(order) == event
    assert state(balance) == (100, 100, granted, max_bytes, recall)
    assert balance.generation == generation(101)
    assert balance.apply(order) is None


@pytest.mark.parametrize(
    "order",
    [
        wire.GrantMessage(1, generation(99), 900),
        wire.GrantMessage(1, generation(100), 500),
        wire.GrantMessage(1, generation(101, epoch=6), 900),
        wire.GrantMessage(2, generation(101), 900),
        wire.LimitMessage(2, 5),
    ],
    ids=repr,
)
def test_other_orders_change_nothing(order: Order) -> None:
    balance, _ = registered()
    assert balance.apply(order) is None
    assert (state(balance), balance.generation) == ((100, 100, 500, 900, None), generation(100))


def test_a_limit_without_a_generation_does_not_become_the_newest_order() -> None:
    balance, _ = registered()
    assert balance.apply(wire.LimitMessage(1, 300)) == Limited(300)
    assert (balance.max_bytes, balance.generation) == (300, generation(100))


def test_two_orders_of_one_generation_are_a_violation() -> None:
    balance, _ = registered()
    balance.apply(wire.GrantMessage(1, generation(101), 600))
    with pytest.raises(ProtocolViolation, match=r"the broker sent two orders of generation \(7, 101\)"):
        balance.apply(wire.GrantMessage(1, generation(101), 700))
    assert balance.granted_bytes == 600


def test_a_withdrawn_recall_is_no_more() -> None:
    balance, _ = registered()
    balance.apply(wire.RecallMessage(1, generation(101), 50, 250))
    balance.apply(wire.WithdrawMessage(1, generation(102)))
    assert balance.recall is None


def test_a_reduction_ends_the_recall_whose_target_it_meets() -> None:
    balance, _ = registered(held=100, granted=500)
    balance.apply(wire.RecallMessage(1, generation(101), 150, 250))
    balance.reduce(300, 0)
    assert (balance.granted_bytes, balance.recall) == (300, Recalled(150, 10.25))
    balance.reduce(150, 0)
    assert (balance.granted_bytes, balance.recall) == (150, None)
    balance.reduce(400, 0)
    assert balance.granted_bytes == 150, "it never raises the grant"


def test_a_reduction_stays_above_what_is_held_and_the_minimum() -> None:
    balance, _ = registered(held=100, granted=500)
    with pytest.raises(ValueError, match="100 bytes are held still, not 99; unmap first, and shift"):
        balance.reduce(99, 0)
    assert balance.granted_bytes == 500
    balance.reduce(100, 200)
    assert balance.granted_bytes == 200


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

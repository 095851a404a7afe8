"""The queue's decisions: whatever happens to workers, each accepted request ends once, with its undisturbed output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetide.fleet.failures import MOST_FAILURES, PROGRESS
from pagetide.fleet.messages import Assignment, NewRequest, Record, Registration, Report, StaleEpoch, decode_record
from pagetide.fleet.messages import encode_record as encoded
from pagetide.fleet.output_log import OutputLog
from pagetide.fleet.request_queue import CANCELLED, MOST_PASSED, NewRecord, RequestQueue
from pagetide.server.messages import Failed, Piece, RequestEnd
from tests.fleet_stand_ins import MODEL, new_request, outputs_of, text_of, token_of, worker_state

NAMES = ("a", "b", "c")


@dataclass(eq=False)
class ScriptedWorker:
    """A worker that computes what it is told to, under the epoch that it believes in."""

    name: str
    epoch: int
    limit: int
    sequence: int = 0
    running: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # handovers with their output
    last: Report | None = None

    def take(self, assignment: Assignment) -> None:
        assert assignment.number not in self.running
        self.running[assignment.number] = [{**one, "token_ids": list(one["token_ids"])} for one in assignment.handovers]

    def compute(self, number: int, count: int) -> list[bytes]:
        """Up to `count` tokens of each continuation, and the end of the request if all have ended."""
        records: list[Record] = []
        going = self.running[number]
        for one in list(going):
            tokens, most = one["token_ids"], one["sampling"]["max_new_tokens"]
            new = [token_of(one, position) for position in range(len(tokens), min(most, len(tokens) + count))]
            tokens += new
            reason = "length" if len(tokens) >= most else None
            records.append(Piece(number, one["index"], "".join(map(text_of, new)), new, None, reason))
            if reason is not None:
                going.remove(one)
        if not going:
            records.append(RequestEnd(number, [], 0))
            del self.running[number]
        return [encoded(record) for record in records]

    def report(self, records: list[bytes] = [], released: list[int] = [], **more: Any) -> Report:  # noqa: B006
        self.sequence += 1
        self.last = Report(self.name, self.epoch, self.sequence, list(records), list(released), **more)
        return self.last


class QueueMachine(RuleBasedStateMachine):
    """A queue, its journal as a list, and workers that die, hang, come back and are recalled."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs = 0
        self.queue = RequestQueue(shares={"x": 3.0})
        self.requests: dict[int, NewRequest] = {}  # accepted
        self.journal: dict[int, list[bytes]] = {}
        self.ended: dict[int, Record] = {}
        self.cancelled: set[int] = set()
        self.workers: dict[str, ScriptedWorker] = {}  # by name, under their newest epochs
        self.stale: list[ScriptedWorker] = []
        self.names = iter(range(1 << 30))

    # -- the caller's side -------------------------------------------------------------------------------------------

    def write(self, new: list[NewRecord]) -> None:
        """Write records to the journal, as `QueueServer` does."""
        for record in new:
            assert record.number not in self.ended, "a record after the end"
            assert record.position == len(self.journal[record.number]), "a record is skipped or repeated"
            self.journal[record.number].append(record.data)
            if record.ends:
                end = decode_record(record.data)
                assert not isinstance(end, Piece)
                self.ended[record.number] = end

    def match(self) -> None:
        _, ended, _ = self.queue.match(self.now)
        self.write(ended)

    def collect(self) -> None:
        """Let each worker that is alive pull its orders, and follow them."""
        for name, worker in list(self.workers.items()):
            entry = self.queue.workers.find(name)
            if entry is None or entry.epoch != worker.epoch:
                continue
            orders = entry.take_orders()
            for assignment in orders.assignments:
                worker.take(assignment)
            for number in orders.cancelled:
                worker.running.pop(number, None)
            released = [number for number in orders.released if worker.running.pop(number, None) is not None]
            if released:
                self.write(self.queue.append(worker.report(released=released), self.now))
            if orders.stop:
                assert not worker.running, "a worker is ended with requests on it"

    # -- what happens --------------------------------------------------------------------------------------------------

    @initialize()
    def first_worker(self) -> None:
        self.register("a", 400)

    @rule(prompt=st.integers(1, 60), new=st.integers(1, 12), n=st.integers(1, 3), priority=st.integers(-1, 1),
          tenant=st.sampled_from("xy"), early_stop=st.booleans())  # fmt: skip
    def submit(self, prompt: int, new: int, n: int, priority: int, tenant: str, early_stop: bool) -> None:
        request = new_request(f"r{next(self.names)}", prompt, new, n, priority=priority, tenant=tenant)
        answer = self.queue.submit(request, self.now)
        if answer.number is None:
            assert answer.kind == "too_long" and "shorten it" in answer.error
            return
        assert answer.number not in self.requests, "a number is given twice"
        self.requests[answer.number], self.journal[answer.number] = request, []
        if early_stop:
            self.match()

    @rule(name=st.sampled_from(NAMES), limit=st.integers(3, 40))
    def register(self, name: str, limit: int) -> None:
        if (old := self.workers.get(name)) is not None:
            self.stale.append(old)
        entry = self.queue.register(Registration(name, MODEL, 6, worker_state(limit)), self.now)
        assert entry.epoch > self.epochs, "an epoch is given twice"
        self.epochs = entry.epoch
        self.workers[name] = ScriptedWorker(name, entry.epoch, limit)
        self.queue.move_from_draining()

    @rule(seconds=st.sampled_from([0.0, 0.002, 0.01, 1.0]))
    def match_later(self, seconds: float) -> None:
        self.now += seconds
        self.match()
        self.collect()

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 5), data=st.data(), with_state=st.booleans())
    def compute(self, name: str, count: int, data: st.DataObject, with_state: bool) -> None:
        self.collect()
        worker = self.workers.get(name)
        if worker is None or self.queue.workers.find(name) is None:
            return
        numbers = data.draw(st.lists(st.sampled_from(sorted(worker.running)), unique=True)) if worker.running else []
        records = [record for number in numbers for record in worker.compute(number, count)]
        state = worker_state(worker.limit) if with_state else None
        self.write(self.queue.append(worker.report(records, state=state), self.now))

    @rule(name=st.sampled_from(NAMES))
    def engine_fails(self, name: str) -> None:
        self.collect()
        worker = self.workers.get(name)
        if worker is None or self.queue.workers.find(name) is None or not worker.running:
            return
        number = min(worker.running)
        before = len(self.queue.entries[number].failures) if number in self.queue.entries else 0
        del worker.running[number]
        new = self.queue.append(worker.report(faults={number: "the step failed"}), self.now)
        assert bool(new) == (before + 1 == MOST_FAILURES)
        self.write(new)

    @rule(name=st.sampled_from(NAMES))
    def report_again(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.last is not None and self.queue.workers.find(name) is not None:
            assert self.queue.append(worker.last, self.now) == [], "a repeated report is recorded"

    @rule(data=st.data(), count=st.integers(1, 5))
    @precondition(lambda self: self.stale)
    def stale_worker_reports(self, data: st.DataObject, count: int) -> None:
        worker = data.draw(st.sampled_from(self.stale))
        records = [record for number in list(worker.running) for record in worker.compute(number, count)]
        with pytest.raises(StaleEpoch):
            self.queue.append(worker.report(records, released=list(worker.running)), self.now)

    @rule(name=st.sampled_from(NAMES), dies=st.booleans())
    def lose(self, name: str, dies: bool) -> None:
        entry = self.queue.workers.find(name)
        if entry is not None:
            counts = {number: len(self.queue.entries[number].failures) for number in entry.running}
            ended = {number for number, count in counts.items() if dies and count + 1 == MOST_FAILURES}
            new = self.queue.lose(name, "has died" if dies else "")
            assert {record.number for record in new} == ended - entry.untold
            assert len(ended) <= 1, "one under suspicion was not alone"
            self.write(new)
            self.stale.append(self.workers.pop(name))

    @rule(name=st.sampled_from(NAMES[1:]))
    def drain(self, name: str) -> None:
        if self.queue.workers.find(name) is not None:
            self.queue.drain(name)
            self.collect()

    @rule(name=st.sampled_from(NAMES), limit=st.integers(3, 40))
    def recall(self, name: str, limit: int) -> None:
        worker = self.workers.get(name)
        if worker is not None and self.queue.workers.find(name) is not None:
            worker.limit = limit
            self.write(self.queue.append(worker.report(state=worker_state(limit)), self.now))
            self.collect()

    @rule(data=st.data())
    @precondition(lambda self: self.queue.entries)
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.queue.entries)))
        record = self.queue.cancel(number)
        assert record is not None
        self.write([record])
        self.cancelled.add(number)
        assert self.queue.cancel(number) is None

    @rule(data=st.data())
    @precondition(lambda self: self.queue.entries)
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.queue.entries)))
        self.queue.withdraw(number)
        del self.requests[number], self.journal[number]

    @rule()
    def restart(self) -> None:
        """The queue is killed, and begins again from its journal."""
        self.stale += self.workers.values()
        self.workers = {}
        self.epochs += 1 << 32
        drained, model, known = self.queue.drained, self.queue.workers.model, self.queue.failures()
        self.queue = RequestQueue({"x": 3.0}, last_epoch=self.epochs, next_number=max(self.requests, default=0) + 1)
        self.queue.drained, self.queue.workers.model = drained, model
        for number, request in self.requests.items():
            if number not in self.ended:
                entry = self.queue.restore(number, request, self.journal[number], self.now)
                assert entry.log.records == self.journal[number]
        for number, failures in known:
            self.queue.entries[number].failures = failures

    # -- what holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.queue.check_invariants()
        assert set(self.queue.entries) == self.requests.keys() - self.ended.keys(), "a request is lost"
        for worker in self.queue.workers:
            assert worker.view(0).free_blocks >= 0 and worker.view(0).growth_blocks >= 0

    def teardown(self) -> None:
        """With a worker that has room for each request, all end, and once."""
        self.queue.drained.clear()
        for name in NAMES[1:]:
            self.queue.lose(name)
            self.workers.pop(name, None)
        self.register("a", 4000)
        for _ in range(10_000):
            if not self.queue.entries:
                break
            self.match_later(1.0)
            worker = self.workers["a"]
            records = [record for number in list(worker.running) for record in worker.compute(number, 5)]
            self.write(self.queue.append(worker.report(records), self.now))
        assert self.ended.keys() == self.requests.keys(), "requests have not ended"
        self.queue.check_invariants()
        for number, request in self.requests.items():
            self.check_output(number, request)

    def check_output(self, number: int, request: NewRequest) -> None:
        log = OutputLog(request)
        for data in self.journal[number]:
            log.append(decode_record(data), data)
        whole, end = outputs_of(request), self.ended[number]
        found = [output.token_ids for output in log.sequences]
        if isinstance(end, RequestEnd):
            assert found == whole
            assert all(output.finish_reason == "length" for output in log.sequences)
            assert [output.num_characters for output in log.sequences] == [
                sum(len(text_of(token)) for token in tokens) for tokens in whole
            ]
        else:
            assert isinstance(end, Failed)
            if number in self.cancelled:
                assert (end.kind, end.error) == ("cancelled", CANCELLED)
            else:
                assert end.kind == "internal" and end.error.startswith("3 workers failed on this request")
            assert all(some == all_of[: len(some)] for some, all_of in zip(found, whole, strict=True))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=40)


def registered(queue: RequestQueue, name: str, limit: int = 1000, max_seqs: int = 8, pid: int = 0) -> ScriptedWorker:
    entry = queue.register(Registration(name, MODEL, max_seqs, worker_state(limit), pid=pid), 0.0)
    return ScriptedWorker(name, entry.epoch, limit)


def orders(queue: RequestQueue, worker: ScriptedWorker) -> Any:
    found = queue.workers.get(worker.name).take_orders()
    for assignment in found.assignments:
        worker.take(assignment)
    return found


def running(*requests: NewRequest, limit: int = 1000) -> tuple[RequestQueue, ScriptedWorker]:
    """A queue with a worker "a" that has taken these requests."""
    queue = RequestQueue()
    a = registered(queue, "a", limit)
    for request in requests:
        assert queue.submit(request, 0.0).number is not None
    queue.match(0.0)
    assert sorted(one.number for one in orders(queue, a).assignments) == list(range(1, 1 + len(requests)))
    return queue, a


def test_a_request_goes_on_elsewhere_from_its_last_token_and_ends_after_three_failures_with_all_reasons() -> None:
    queue, a = running(request := new_request("r", new=6))
    b = registered(queue, "b")
    assert len(queue.append(a.report(a.compute(1, 2)), 0.0)) == 1
    assert queue.append(a.report(faults={a.running.popitem()[0]: "fault 1"}), 0.0) == []
    queue.match(0.0)
    (assignment,) = orders(queue, b).assignments  # not a again, which has nothing to do
    assert assignment.handovers[0]["token_ids"] == outputs_of(request)[0][:2]
    assert queue.lose("b", "has died") == []
    queue.match(0.0)
    orders(queue, a)  # the only worker: it gets the request again
    (record,) = queue.append(a.report(faults={1: "fault 3"}), 0.0)
    alone = "3 workers failed on this request, the last one with no other request on it: "
    error = f"{alone}a failed: fault 1; b has died; a failed: fault 3"
    assert decode_record(record.data) == Failed(1, "internal", error) and record.ends
    assert not queue.entries and (queue.counters.faults, queue.counters.requeued, queue.counters.failed) == (2, 1, 1)
    queue.check_invariants()


def test_the_fault_of_a_request_that_was_taken_away_or_cancelled_counts_for_nothing() -> None:
    queue, a = running(new_request("r"), new_request("s"))
    queue.cancel(1)
    queue.append(a.report(released=[2]), 0.0)
    assert queue.append(a.report(faults={1: "fault", 2: "fault"}), 0.0) == []
    assert queue.counters.faults == 0 and not queue.entries[2].failures


def test_a_drained_worker_without_another_ends_once_its_requests_have_ended() -> None:
    queue, a = running(new_request("r"))
    queue.submit(new_request("s"), 0.0)
    queue.drain("a")
    queue.match(0.0)
    assert not queue.workers.get("a").has_orders and queue.num_waiting == 1
    queue.append(a.report(a.compute(1, 99)), 0.0)
    queue.move_from_draining()
    assert orders(queue, a).stop
    b = registered(queue, "b")
    queue.match(0.0)
    assert [one.number for one in orders(queue, b).assignments] == [2]


def test_a_recall_orders_requests_back_where_another_worker_has_room_the_last_in_order_first() -> None:
    for room, released in ((100, [2, 4]), (5, [])):  # 2 is less urgent than the others, and 4 the youngest
        queue, a = running(*(new_request(name, prompt=160, new=16, priority=name == "s") for name in "rstu"), limit=100)
        registered(queue, "b", limit=room)
        queue.append(a.report(state=worker_state(25)), 0.0)
        assert orders(queue, a).released == released
        queue.append(a.report(released=released, state=worker_state(25)), 0.0)
        queue.match(0.0)
        workers = {number: entry.worker for number, entry in queue.entries.items()}
        assert workers == {number: "b" if number in released else "a" for number in range(1, 5)}
        assert not queue.workers.get("a").has_orders
        queue.check_invariants()


def test_a_request_is_passed_at_most_so_often_while_no_worker_has_room_for_it() -> None:
    queue = RequestQueue(hold_s=0.0)
    a = registered(queue, "a", limit=40, max_seqs=4)
    queue.submit(new_request("first", prompt=320, new=16), 0.0)
    queue.match(0.0)
    orders(queue, a)
    queue.submit(new_request("large", prompt=480, new=16), 0.0)
    large = queue.find("large")
    assert large is not None
    for count in range(4 * MOST_PASSED):
        queue.submit(new_request(f"small{count}", prompt=8, new=1), float(count))
        queue.match(float(count))
        for assignment in orders(queue, a).assignments:
            queue.append(a.report(a.compute(assignment.number, 1)), float(count))
        queue.check_invariants()
    assert large.num_passed == MOST_PASSED
    queue.append(a.report(a.compute(1, 99)), 500.0)
    queue.match(500.0)
    assert next(one.number for one in orders(queue, a).assignments) == large.number


def test_a_request_that_no_pool_can_hold_any_more_does_not_stop_the_others() -> None:
    queue = RequestQueue(hold_s=0.0)
    a = registered(queue, "a", limit=40)
    queue.submit(new_request("large", prompt=480, new=16), 0.0)
    queue.append(a.report(state=worker_state(20)), 0.0)
    for count in range(3 * MOST_PASSED):
        queue.submit(new_request(f"small{count}", prompt=8, new=1), float(count))
        queue.match(float(count))
        (assignment,) = orders(queue, a).assignments
        queue.append(a.report(a.compute(assignment.number, 1)), float(count))
    assert list(queue.entries) == [1]
    queue.append(a.report(state=worker_state(40)), 999.0)
    queue.match(999.0)
    assert [one.number for one in orders(queue, a).assignments] == [1]


def test_a_prompt_too_large_for_every_worker_is_refused_with_both_sizes() -> None:
    queue = RequestQueue()
    registered(queue, "a", limit=4)
    registered(queue, "b", limit=7)
    answer = queue.submit(new_request("r", prompt=112), 0.0)
    assert (answer.number, answer.kind) == (None, "too_long")
    assert answer.error == (
        "the prompt's 112 tokens need 8 blocks of 16 tokens, and the largest pool of a worker may have 7: shorten it, or give "
        "the workers more kv_memory"
    )
    assert queue.submit(new_request("r", prompt=111), 0.0).number == 1


def test_a_request_with_all_its_tokens_recorded_and_not_its_end_ends_without_a_worker_computing() -> None:
    queue = RequestQueue()
    request = new_request("r", new=2, n=2)
    pieces = [Piece(7, index, "t", tokens, None, "length") for index, tokens in enumerate(outputs_of(request))]
    queue.restore(7, request, [encoded(piece) for piece in pieces], 0.0)
    registered(queue, "a")
    changed, (record,), _ = queue.match(0.0)
    assert not changed and record == NewRecord(7, 2, encoded(RequestEnd(7, [], 0, num_generated=4)), True)
    assert not queue.entries and queue.lengths.expected(0, 100) == int((4 + 4 * 50) / 6)


def test_a_withdrawn_request_is_cancelled_at_its_worker() -> None:
    queue, a = running(new_request("r"))
    queue.withdraw(1)
    assert queue.workers.get("a").take_orders().cancelled == [1]
    assert queue.append(a.report(a.compute(1, 9)), 0.0) == []


@pytest.mark.parametrize("at", [0, 20])
def test_a_request_under_which_three_workers_die_ends_and_those_beside_it_do_not(at: int) -> None:
    """Of those that ran beside it in two deaths, each is alone on a worker until it has got further."""
    queue = RequestQueue(hold_s=0.0)
    workers = {name: registered(queue, name) for name in "ab"}
    requests = {number: new_request(f"r{number}", new=32) for number in range(1, 17)}
    killer, deaths, ends = 6, 0, {}
    for request in requests.values():
        assert queue.submit(request, 0.0).number is not None
    for now in range(400):
        queue.match(float(now))
        for name, worker in workers.items():
            for number in (told := orders(queue, worker)).released:
                del worker.running[number]
            new = queue.append(worker.report(released=told.released), 0.0) if told.released else []
            for number in sorted(worker.running):
                if number != killer or len(worker.running[number][0]["token_ids"]) < at:
                    new += queue.append(worker.report(worker.compute(number, 2)), 0.0)
            if killer in worker.running and len(worker.running[killer][0]["token_ids"]) >= at:
                company = len(worker.running)
                new, deaths = new + queue.lose(name, "has died"), deaths + 1
                workers[name] = registered(queue, name)
                assert (deaths < 3) == (company > 1)
            ends |= {one.number: decode_record(one.data) for one in new if one.ends}
        queue.check_invariants()
    assert deaths == 3 and ends.keys() == requests.keys()
    failed = {number: end for number, end in ends.items() if isinstance(end, Failed)}
    assert failed.keys() == {killer} and failed[killer].error.count("has died") == 3


def test_failures_count_anew_after_progress_and_not_for_what_the_worker_was_not_told() -> None:
    queue, a = running(new_request("r", new=99))
    for count in (1, PROGRESS, 1):  # tokens between the deaths: the third one is the first of a new count
        assert queue.lose("a", "has died") == []
        a = registered(queue, "a")
        queue.match(0.0)
        orders(queue, a)
        queue.append(a.report(a.compute(1, count)), 0.0)
    assert queue.entries[1].failures.reasons == ["has died"]
    queue.submit(new_request("s"), 0.0)
    queue.match(0.0)
    assert queue.lose("a", "has died") == [] and not queue.entries[2].failures
    assert [number for number, _ in queue.failures()] == [1]


def test_a_worker_that_was_silent_and_comes_back_as_the_same_process_has_not_failed() -> None:
    queue, a = running(new_request("r"))
    for pid, count in ((7, 1), (7, 1), (8, 2)):
        queue.lose("a", "has said nothing")
        a = registered(queue, "a", pid=pid)
        assert len(queue.entries[1].failures) == count
        queue.match(0.0)
        orders(queue, a)

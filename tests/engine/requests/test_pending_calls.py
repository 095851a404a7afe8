"""The calls of an engine thread, driven step by step without the thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from pagetide import LLM, RequestRejected, SamplingParams
from pagetide.engine.errors import EngineClosed
from pagetide.engine.requests.manager import RequestManager
from pagetide.engine.requests.pending_calls import Outbox, PendingCall, PendingCalls, Waiter

GREEDY = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", kv_memory="8MiB", device="cpu", share=False) as llm:
        yield llm


class Rig:
    def __init__(self, manager: RequestManager, max_waiting: int = 8) -> None:
        self.manager, self.outbox = manager, Outbox()
        self.calls = PendingCalls(manager, max_waiting, self.outbox)
        manager.delivery.on_outputs = self.calls.note_outputs

    def call(self, *prompts: list[int], interval: int | None = None) -> tuple[PendingCall, Waiter]:
        waiter = asyncio.get_running_loop().create_future()
        call = PendingCall(waiter, 0, None, interval)
        self.calls.arrive(call, self.manager.intake.encode(list(prompts), GREEDY))
        return call, waiter

    def run(self) -> None:
        while self.manager.has_work:
            self.manager.step()

    async def result(self, waiter: Waiter) -> Any:
        self.calls.give_results()
        self.outbox.send()
        return await waiter


@pytest.fixture
def drive(llm: LLM) -> Iterator[Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]]:
    manager = llm._manager

    def run(main: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def life() -> None:
            await main(Rig(manager))

        asyncio.run(life())

    yield run
    manager.delivery.on_outputs = None
    assert not manager.has_work and not manager.delivery.groups


def test_a_call_is_answered_once_all_its_prompts_have_ended(drive: Any, llm: LLM) -> None:
    async def main(rig: Rig) -> None:
        call, waiter = rig.call([5, 6], [7])
        assert rig.calls.num_waiting == 1 and not rig.calls.is_empty
        rig.calls.submit_while_room()
        assert rig.calls.num_waiting == 0 and call.num_running == 2
        rig.manager.step()
        rig.calls.give_results()
        assert not call.over and rig.outbox.is_empty
        rig.run()
        outputs = await rig.result(waiter)
        assert [len(output.token_ids) for output in outputs] == [3, 3]
        assert call.over and rig.calls.is_empty

    drive(main)


def test_a_stream_gives_chunks_to_a_waiter_each(drive: Any) -> None:
    async def main(rig: Rig) -> None:
        call, waiter = rig.call([5, 6], interval=1)
        rig.calls.submit_while_room()
        while not call.states[0].ready(1):
            rig.manager.step()
        (first,) = await rig.result(waiter)
        rig.run()
        again: Waiter = asyncio.get_running_loop().create_future()
        rig.calls.want(again, call)
        (rest,) = await rig.result(again)
        assert (len(first.token_ids) + len(rest.token_ids), first.output) == (3, None)
        assert rest.output is call.groups[0].output or rest.output == call.groups[0].output
        assert call.over and rig.calls.is_empty

    drive(main)


def test_calls_wait_while_the_scheduler_has_no_room(drive: Any, llm: LLM) -> None:
    async def main(rig: Rig) -> None:
        rig.calls = PendingCalls(rig.manager, 1, rig.outbox)
        rig.manager.delivery.on_outputs = rig.calls.note_outputs
        waiters = [rig.call([5 + i])[1] for i in range(3)]
        rig.calls.submit_while_room()
        assert rig.calls.num_waiting == 2
        rig.calls.submit_all()
        assert rig.calls.num_waiting == 0
        rig.run()
        rig.calls.give_results()
        rig.outbox.send()
        assert [len((await waiter)[0].token_ids) for waiter in waiters] == [3, 3, 3]

    drive(main)


def test_errors_and_calls_while_draining_are_results(drive: Any) -> None:
    async def main(rig: Rig) -> None:
        waiter: Waiter = asyncio.get_running_loop().create_future()
        call = PendingCall(waiter, 0, None, None)
        error = RequestRejected("wrong")
        rig.calls.arrive(call, error)
        assert await rig.result(waiter) is error and call.over
        rig.calls.is_draining = True
        call, waiter = rig.call([5])
        assert isinstance(await rig.result(waiter), EngineClosed)
        assert rig.calls.is_empty

    drive(main)


@pytest.mark.parametrize("submitted", [False, True])
def test_a_cancelled_call_gets_an_empty_result_and_its_requests_end(drive: Any, submitted: bool) -> None:
    async def main(rig: Rig) -> None:
        call, waiter = rig.call([5], [6])
        if submitted:
            rig.calls.submit_while_room()
            rig.manager.step()
        rig.calls.cancel(call)
        assert await rig.result(waiter) == [] and rig.calls.is_empty
        later: Waiter = asyncio.get_running_loop().create_future()
        rig.calls.want(later, call)
        assert await rig.result(later) == []
        rig.run()
        assert {group.output.finish_reason for group in call.groups} == ({"aborted"} if submitted else set())

    drive(main)


def test_calls_of_a_closed_loop_are_cancelled(drive: Any) -> None:
    async def main(rig: Rig) -> None:
        gone = asyncio.new_event_loop()
        call = PendingCall(gone.create_future(), 0, None, None)
        rig.calls.arrive(call, rig.manager.intake.encode([[5]], GREEDY))
        gone.close()
        rig.calls.cancel_lost()
        assert call.cancelled and rig.calls.is_empty
        rig.outbox.send()
        assert rig.outbox.is_empty

    drive(main)


def test_calls_at_the_end_get_an_error_each(drive: Any) -> None:
    async def main(rig: Rig) -> None:
        _, first = rig.call([5])
        _, second = rig.call([6])
        rig.calls.end(lambda: EngineClosed("stopped"))
        assert rig.calls.is_empty
        errors = [await rig.result(first), await rig.result(second)]
        assert [str(error) for error in errors] == ["stopped", "stopped"] and errors[0] is not errors[1]

    drive(main)


def test_results_reach_their_loop_in_one_call() -> None:
    async def main() -> None:
        loop, outbox, sent = asyncio.get_running_loop(), Outbox(), []
        send = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *how: (sent.append(how), send(*how))[1]  # type: ignore[assignment]
        waiters = [loop.create_future() for _ in range(3)]
        for number, waiter in enumerate(waiters):
            outbox.put(waiter, number)
        waiters[1].cancel()
        outbox.send()
        assert await waiters[0] == 0 and await waiters[2] == 2
        assert len(sent) == 1 and outbox.is_empty

    asyncio.run(main())

"""Sleep and wake-up of a model at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")
from page_rig import MadeUpEngine

from pagetide.server.models import ModelOptions, ModelRegistry


class GatedEngine(MadeUpEngine):
    """Goes to sleep when it is told to."""

    def __init__(self) -> None:
        super().__init__({})
        self.gate = asyncio.Event()

    async def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append(method)
        if method == "sleep":
            await self.gate.wait()


def test_sleep_and_wake_up_of_a_model_come_one_after_the_other() -> None:
    async def run() -> None:
        engine = GatedEngine()

        async def start(reference: str, arguments: Any, name: str) -> Any:
            return engine

        models = ModelRegistry(start)
        model = models.add(ModelOptions("one", "made up"))
        await models.loaded(model)
        changes = [asyncio.create_task(one) for one in (
            models.sleep(model, 0.0), models.wake_up(model), models.sleep(model, 0.0), models.wake_up(model)
        )]  # fmt: skip
        for _ in range(10):
            await asyncio.sleep(0)
        assert (engine.calls, model.state) == (["sleep"], "asleep")
        engine.gate.set()
        await asyncio.gather(*changes)
        assert (engine.calls, model.state) == (["sleep", "wake_up"] * 2, "ready")
        await models.stop()

    asyncio.run(run())

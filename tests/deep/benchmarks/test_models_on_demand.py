"""Models on demand, simulated: a request's times by hand, and what the real router keeps on a full card."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from benchmarks.models_on_demand import CARDS, CardModel, ModelledCard, SessionRequest, load_of, run

SPEC = CARDS["h100"]


def test_a_request_to_a_sleeper_takes_its_waking_its_prompt_and_its_steps() -> None:
    request = SessionRequest(0, 1, 0.0, 100, 3)
    outcome = run(SPEC, 1, "router", [request])
    model = CardModel(ModelledCard(SPEC, 1, None), SPEC.models[0], None)
    first_s = 0.02 + model.shape.weights_bytes / SPEC.link + model.roofline.step_s(100, 1, 100 * 100 // 2, 0)
    steps_s = 2 * model.roofline.step_s(1, 1, 102, 102)
    assert request.first is not None and request.last is not None
    assert request.first - request.due == pytest.approx(first_s, abs=1e-9)
    assert request.last - request.first == pytest.approx(steps_s, abs=1e-9)
    assert (outcome.in_time, outcome.loads) == (1.0, 1)


def test_the_router_keeps_to_memory_and_minimum_residencies_and_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: dict[CardModel, float] = {}
    spare: list[float] = []  # seconds beyond the minimum
    counts: Counter[str] = Counter()
    enter, leave = ModelledCard.enter, ModelledCard.leave

    async def entering(card: ModelledCard, model: CardModel, seconds: float, bytes_per_s: float) -> None:
        assert card.can_enter(model)
        await enter(card, model, seconds, bytes_per_s)
        assert sum(one.taken_bytes() for one in card.models if one.is_in) <= card.num_bytes
        entered[model] = asyncio.get_running_loop().time()

    def leaving(card: ModelledCard, model: CardModel) -> None:
        assert not model.running
        counts["turns"] += any(one.is_kept for one in model.waiting)
        least_s = max(1.0, 4 * (0.02 + model.shape.weights_bytes / SPEC.link))
        spare.append(asyncio.get_running_loop().time() - entered.pop(model) - least_s)
        counts["left"] += 1
        leave(card, model)

    monkeypatch.setattr(ModelledCard, "enter", entering)
    monkeypatch.setattr(ModelledCard, "leave", leaving)
    load = load_of(SPEC, 16, None, 1)
    outcome = run(SPEC, 16, "router", load)
    assert all(one.last is not None for one in load) and outcome.loads > 16
    assert counts["left"] > 16 and counts["turns"] and min(spare[16:]) >= -1e-9  # the first sleeps are the preparation's
    assert run(SPEC, 16, "router", load_of(SPEC, 16, None, 1)) == outcome, "deterministic"

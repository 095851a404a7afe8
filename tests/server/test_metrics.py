"""The page /metrics: vLLM's dashboards find what they query, and the numbers are those of the requests that were served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagetide.server.engine_client import EngineUnavailable, Generation, RequestFailed
from pagetide.server.messages import Accepted, Piece, RequestEnd
from pagetide.server.metrics import Metrics, ModelMetrics, one_two_five


def test_lengths_have_buckets_up_to_the_context() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(1999) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert one_two_five(1) == (1,)


def generation(metrics: ModelMetrics, *messages: Any) -> Generation:
    one = Generation(1, asyncio.Event(), metrics)
    for message in messages:
        one.take(message)
    return one


def totals(metrics: ModelMetrics) -> dict[str, tuple[float, float]]:
    """The number and the sum of each histogram's values, of those that have any."""
    found = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples}
    names = [name.removesuffix("_count") for name, value in found.items() if name.endswith("_count") and value]
    return {name.removeprefix("vllm:"): (found[f"{name}_count"], round(found[f"{name}_sum"], 6)) for name in names}


def reasons(metrics: ModelMetrics) -> dict[str, float]:
    return {
        sample.labels["finished_reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }


def test_a_request_that_came_whole_has_its_times_from_the_engine() -> None:
    metrics = ModelMetrics("m", 1000)
    pieces = [Piece(1, 0, "", [1] * 11, None, "length"), Piece(1, 1, "", [1] * 6, None, "stop")]
    one = generation(metrics, Accepted(1, [5] * 8, 11), RequestEnd(1, pieces, 3, None, 0.5, 2.0, 7.0))
    one.submitted_at, one.ended_at = 100.0, 108.0
    metrics.ended(one)
    assert totals(metrics) == {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (15, 7.5),
        "request_time_per_output_token_seconds": (1, 0.5),
        "e2e_request_latency_seconds": (1, 8.0),
        "request_queue_time_seconds": (1, 0.5),
        "request_prefill_time_seconds": (1, 1.5),
        "request_decode_time_seconds": (1, 5.0),
        "request_inference_time_seconds": (1, 6.5),
        "request_prompt_tokens": (1, 8),
        "request_generation_tokens": (1, 17),
        "request_max_num_generation_tokens": (1, 11),
        "request_params_max_tokens": (1, 11),
        "request_prefill_kv_computed_tokens": (1, 5),
        "request_params_n": (1, 2),
    }
    assert reasons(metrics) == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_tokens_of_a_stream_are_timed_by_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.5, 13.0, 16.0, 16.0])
    monkeypatch.setattr("pagetide.server.engine_client.time.monotonic", lambda: next(clock))
    metrics = ModelMetrics("m", 1000)
    generation(
        metrics, Accepted(1, [5] * 8), Piece(1, 0, "a", [1]), Piece(1, 1, "b", [1]), Piece(1, 0, "c", [1, 2]),
        Piece(1, 1, "", [], None, "stop"), Piece(1, 1, "d", [3]), Piece(1, 0, "e", [4]),
    )  # fmt: skip
    assert totals(metrics)["time_to_first_token_seconds"] == (1, 2.0)
    assert totals(metrics)["inter_token_latency_seconds"] == (4, 2 * 0.5 + 3.5 + 3.0)


def test_how_requests_end() -> None:
    ends: list[tuple[list[Any], str | None]] = [
        ([], "abort"),
        ([RequestFailed("invalid", "no")], None),
        ([RequestFailed("too_long", "no")], None),
        ([RequestFailed("internal", "a bug")], "error"),
        ([EngineUnavailable("it died")], "error"),
        ([RequestEnd(1, [Piece(1, 0, "", [], None, "error")], 0, None, None, None, 1.0)], "error"),
        ([RequestEnd(1, [Piece(1, 0, "", [], None, "aborted")], 0, None, 0.5, None, 1.0)], "abort"),
    ]
    for messages, reason in ends:
        metrics = ModelMetrics("m", 1000)
        metrics.ended(generation(metrics, *messages))
        counted = {name: count for name, count in reasons(metrics).items() if count}
        assert counted == ({reason: 1} if reason else {}), messages
        assert "request_decode_time_seconds" not in totals(metrics), messages


def test_requests_from_anywhere_make_few_series() -> None:
    metrics = Metrics(["/v1/models", "/v1/models/{name:path}"])
    for i in range(1000):
        metrics.answered(f"M{i}", f"/{i}", 404, 0.1)
        metrics.answered("GET", f"/v1/models/{i}", 404, 0.1)
    metrics.answered("GET", "/health", 200, 0.1)
    (http,) = [family for family in metrics.registry.collect() if family.name == "http_requests"]
    counts = {tuple(one.labels.values()): one.value for one in http.samples if one.name.endswith("_total")}
    assert counts == {("other", "none", "4xx"): 1000, ("GET", "/v1/models/{name}", "4xx"): 1000}

"""The page `/metrics`: vLLM's names where the meaning is the same, `pagetide_*` for what only pagetide has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from ..version import __version__
from .engine_client import Batch, EngineUnavailable, RequestFailed
from .models import ModelRegistry, ServedModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATS_S = 2.0  # an engine that does not answer within this time is left out
ENGINE = "0"  # vLLM's label of the engine's number
_LABELS = ("model_name", "engine")

# vLLM's buckets, in seconds and tokens.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COUNTS = (1, 2, 5, 10, 20)
_REASONS = {"aborted": "abort"}


class Metrics:
    """What the server counts. Each application has its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token", _FIRST_TOKEN_S)
        self._token_gap = self._histogram("inter_token_latency_seconds", "Time between tokens", _TOKEN_S)
        self._request = self._histogram("e2e_request_latency_seconds", "Time of requests", _REQUEST_S)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of prompts", _TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Tokens of outputs", _TOKENS)
        self._continuations = self._histogram("request_params_n", "n of requests", _COUNTS)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._output_tokens = self._counter("generation_tokens", "Tokens of outputs")
        self._ended = self._counter("request_success", "Ended requests", "finished_reason")

    def observer(self, model: str) -> ModelObserver:
        """Counts the tokens of one model's streams."""
        return ModelObserver(self._first_token.labels(model, ENGINE), self._token_gap.labels(model, ENGINE))

    def ended(self, model: str, batch: Batch) -> None:
        """Count a request that has ended or was left."""
        for one in batch.generations:
            prompt = len(one.prompt_token_ids or ())
            self._prompt_tokens.labels(model, ENGINE).inc(prompt)
            self._output_tokens.labels(model, ENGINE).inc(one.num_tokens)
            if one.finished is None or one.ended_at is None:
                self._ended.labels(model, ENGINE, "abort" if one.error is None else "error").inc()
                continue
            self._request.labels(model, ENGINE).observe(one.ended_at - one.submitted_at)
            self._prompt_length.labels(model, ENGINE).observe(prompt)
            self._output_length.labels(model, ENGINE).observe(one.num_tokens)
            self._continuations.labels(model, ENGINE).observe(len(one.reasons))
            for reason in one.reasons.values():
                self._ended.labels(model, ENGINE, _REASONS.get(reason, reason)).inc()

    async def page(self, models: ModelRegistry) -> bytes:
        """The page, with the state of all engines now."""
        each = await asyncio.gather(*(_stats(model) for model in models))
        families = _families([(model, stats) for model, stats in zip(models, each, strict=True)])
        return generate_latest(self._registry) + generate_latest(_Prepared(families))

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, buckets=tuple(buckets), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*_LABELS, *labels), registry=self._registry)


class ModelObserver:
    """See `engine_client.Observer`."""

    def __init__(self, first_token: Any, token_gap: Any) -> None:
        self._first_token = first_token
        self._token_gap = token_gap

    def first_token(self, seconds: float) -> None:
        """Count the time to a first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Count the time between tokens, once for those that came together."""
        self._token_gap.observe(seconds)


class _Prepared(CollectorRegistry):
    """Metric families that exist already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        yield from self._families


async def _stats(model: ServedModel) -> Mapping[str, Any] | None:
    """The statistics of a model's engine; None if it cannot answer."""
    if model.process is None or model.state != "ready":
        return None
    try:
        async with asyncio.timeout(STATS_S):
            stats: Mapping[str, Any] = await model.process.call("stats")
        return stats
    except (RequestFailed, EngineUnavailable, TimeoutError):
        return None


def _families(models: list[tuple[ServedModel, Mapping[str, Any] | None]]) -> list[Metric]:
    build = InfoMetricFamily("pagetide_build", "The version")
    build.add_metric([], {"version": __version__})
    up = GaugeMetricFamily("pagetide_model_ready", "1 if the model serves requests", labels=["model_name"])
    restarts = CounterMetricFamily("pagetide_engine_restarts", "Starts after an engine ended", labels=["model_name"])
    families: dict[str, Metric] = {}
    for model, stats in models:
        up.add_metric([model.name], float(model.state == "ready"))
        restarts.add_metric([model.name], model.num_restarts)
        for kind, name, text, labels, value in _samples(stats or {}):
            family = families.get(name)
            if family is None:
                make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                family = families[name] = make(name, text, labels=[*_LABELS, *labels])
            family.add_metric([model.name, ENGINE, *labels.values()], value)  # type: ignore[attr-defined]
    return [build, up, restarts, *families.values()]


Sample = tuple[str, str, str, dict[str, str], float]


def _samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Kind, name, description, further labels and value of each metric in an engine's statistics."""
    if not stats:
        return
    blocks = stats["blocks"]
    yield "gauge", "vllm:num_requests_running", "Requests in the running batch", {}, stats["running"]
    yield "gauge", "vllm:num_requests_waiting", "Requests that wait", {}, stats["waiting"]
    usage = blocks["live"] / blocks["usable"] if blocks["usable"] else 0.0
    yield "gauge", "vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", {}, usage
    yield "counter", "vllm:num_preemptions", "Preemptions", {}, stats["preemptions"]
    if (cache := stats["prefix_cache"]) is not None:
        yield "counter", "vllm:prefix_cache_queries", "Prompt tokens looked up", {}, cache["lookup_tokens"]
        yield "counter", "vllm:prefix_cache_hits", "Prompt tokens found", {}, cache["hit_tokens"]
    for state, count in blocks.items():
        if state not in ("usable", "mapped"):
            yield "gauge", "pagetide_kv_blocks", "KV blocks by state", {"state": state}, count
    yield "gauge", "pagetide_kv_blocks_usable", "KV blocks of the pool", {}, blocks["usable"]
    yield "gauge", "pagetide_kv_bytes", "Mapped bytes of the KV pool", {}, stats["kv_bytes"]
    yield "counter", "pagetide_steps", "Steps of the engine", {}, stats["steps"]
    yield "counter", "pagetide_computed_tokens", "Tokens computed", {}, stats["computed_tokens"]
    yield (
        "counter",
        "pagetide_recomputed_tokens",
        "Tokens computed again after a preemption",
        {},
        stats["recomputed_tokens"],
    )
    memory = stats["memory"] or {}
    if memory:
        yield "counter", "pagetide_recalls", "Recalls of memory", {}, memory["recalls"]
        yield "counter", "pagetide_grown_bytes", "Bytes by which the pool grew", {}, memory["grown_bytes"]
        yield "counter", "pagetide_given_back_bytes", "Bytes given back", {}, memory["given_back_bytes"]
        if (lease := memory.get("lease")) is not None:
            for name in ("granted_bytes", "max_bytes", "min_bytes"):
                if lease.get(name) is not None:
                    yield "gauge", f"pagetide_lease_{name}", "The engine's lease", {}, lease[name]

"""The page `/metrics`: vLLM's names where the meaning is the same, `pagetide_*` for what only pagetide has."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ..version import __version__
from .admission import RequestAdmission
from .engine_client import Batch, EngineUnavailable, Generation, RequestFailed
from .engine_samples import samples
from .models import STATES, ModelRegistry, ServedModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATS_S = 2.0  # an engine that does not answer within this time is left out
ENGINE = "0"  # vLLM's label of the engine's number

# vLLM's buckets, in seconds and tokens.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20)
_SLEEP_S = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
_HTTP_S = (0.1, 0.5, 1)
_UP_TO_CONTEXT = None  # 1, 2, 5, 10, ... up to the model's context

# Of a request, under "vllm:": description and buckets.
HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "time_to_first_token_seconds": ("Time to the first token", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Time between tokens of a continuation", _TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean time for a token after the first", _TOKEN_S),
    "e2e_request_latency_seconds": ("Time of a request", _REQUEST_S),
    "request_queue_time_seconds": ("Time until the first admission", _REQUEST_S),
    "request_prefill_time_seconds": ("Time from the first admission to the first token", _REQUEST_S),
    "request_decode_time_seconds": ("Time from the first token to the last", _REQUEST_S),
    "request_inference_time_seconds": ("Time from the first admission to the end", _REQUEST_S),
    "request_prompt_tokens": ("Tokens of a prompt", _UP_TO_CONTEXT),
    "request_generation_tokens": ("Tokens of an output", _UP_TO_CONTEXT),
    "request_max_num_generation_tokens": ("Tokens of the longest continuation", _UP_TO_CONTEXT),
    "request_params_max_tokens": ("Tokens that the output may have", _UP_TO_CONTEXT),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that were not in the cache", _UP_TO_CONTEXT),
    "request_params_n": ("Continuations of a request", _COUNTS),
}
REASONS = {"stop": "stop", "length": "length", "aborted": "abort", "error": "error"}  # pagetide's and vLLM's
_PROBES = ("/metrics", "/health", "/live", "/ready", "/load", "/version")
_NAMED = {"/v1/models/": "/v1/models/{name}", "/page/": "/page/{path}"}  # handlers of many paths
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class ModelMetrics:
    """What is counted of one model's requests. See `engine_client.Observer` too."""

    def __init__(self, name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        labels, lengths = {"model_name": name, "engine": ENGINE}, one_two_five(max_model_len)
        self._histograms = {
            metric: Histogram(
                f"vllm:{metric}", text, list(labels), buckets=lengths if bounds is None else bounds, registry=self.registry
            ).labels(**labels)
            for metric, (text, bounds) in HISTOGRAMS.items()
        }
        ended = Counter("vllm:request_success", "Ended continuations", [*labels, "finished_reason"], registry=self.registry)
        self._ended = {reason: ended.labels(**labels, finished_reason=reason) for reason in REASONS.values()}
        self._first_token = self._histograms["time_to_first_token_seconds"]
        self._token_gap = self._histograms["inter_token_latency_seconds"]

    def first_token(self, seconds: float) -> None:
        """Count the time to a first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Count the time between tokens."""
        for _ in range(count):
            self._token_gap.observe(seconds)

    def ended(self, one: Generation) -> None:
        """Count a request that has ended or was left. One that the engine refused is no request."""
        if one.finished is None or one.ended_at is None:
            if not (isinstance(one.error, RequestFailed) and one.error.is_refusal):
                self._ended["abort" if one.error is None else "error"].inc()
            return
        for reason in one.reasons.values():
            self._ended[REASONS[reason]].inc()
        prompt, counts = len(one.prompt_token_ids or ()), one.counts.values()
        found = {
            "e2e_request_latency_seconds": one.ended_at - one.submitted_at,
            "request_prompt_tokens": prompt,
            "request_generation_tokens": one.num_tokens,
            "request_max_num_generation_tokens": max(counts, default=0),
            "request_params_max_tokens": one.max_new_tokens,
            "request_prefill_kv_computed_tokens": prompt - one.finished.num_cached_tokens,
            "request_params_n": len(one.reasons),
            **self._times(one),
        }
        for name, value in found.items():
            if value is not None:
                self._histograms[name].observe(value)

    def _times(self, one: Generation) -> dict[str, float | None]:
        """The times of a request that has ended, by the name of their histogram."""
        end, longest = one.finished, max(one.counts.values(), default=0)
        if end is None or one.ended_at is None or end.first_token_s is None:
            return {} if end is None else {"request_queue_time_seconds": end.queued_s}
        decode_s = end.total_s - end.first_token_s
        token_s = decode_s / (longest - 1) if longest > 1 else 0.0
        if one.first_token_at is None:  # it did not stream: its tokens came at once, when all were there
            self._first_token.observe(max(one.ended_at - one.submitted_at - decode_s, 0.0))
            self.next_tokens(token_s, one.num_tokens - len(one.counts))
        return {
            "request_queue_time_seconds": end.queued_s,
            "request_prefill_time_seconds": None if end.queued_s is None else end.first_token_s - end.queued_s,
            "request_decode_time_seconds": decode_s,
            "request_inference_time_seconds": None if end.queued_s is None else end.total_s - end.queued_s,
            "request_time_per_output_token_seconds": token_s,
        }


class Metrics:
    """What the server counts. Each application has its own.

    Args:
        handlers: Paths of the endpoints; requests to others are counted together.
    """

    def __init__(self, handlers: Collection[str] = ()) -> None:
        self.handlers = handlers
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._models: dict[str, ModelMetrics] = {}
        self._http = Counter(
            "http_requests", "HTTP requests, without probes", ["method", "handler", "status"], registry=self.registry
        )
        self._http_s = Histogram(
            "http_request_duration_seconds", "Time of HTTP requests, streams to their end", ["method", "handler"],
            buckets=_HTTP_S, registry=self.registry,
        )  # fmt: skip
        self._errors = Counter("pagetide_http_errors", "HTTP requests that failed", ["status"], registry=self.registry)
        self._sleep_s = Histogram(
            "vllm:sleep_mode_operation_duration_seconds", "Time of sleeping and waking up", ["operation"],
            buckets=_SLEEP_S, registry=self.registry,
        )  # fmt: skip
        for operation in ("sleep", "wake"):
            self._sleep_s.labels(operation)  # 0 from the beginning

    def of(self, model: ServedModel) -> ModelMetrics:
        """What is counted of a model. Raises ApiError unless it is loaded."""
        found = self._models.get(model.name)
        if found is None:
            found = self._models[model.name] = ModelMetrics(model.name, model.engine.info.max_model_len)
        return found

    def ended(self, model: str, batch: Batch) -> None:
        """Count a request that has ended or was left."""
        if (counted := self._models.get(model)) is not None:  # else it was unloaded meanwhile
            for one in batch.counted:
                counted.ended(one)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an HTTP request, unless it is a probe."""
        if path in _PROBES:
            return
        named = (name for start, name in _NAMED.items() if path.startswith(start))
        handler = path if path in self.handlers else next(named, "none")
        method = method if method in _METHODS else "other"
        self._http.labels(method, handler, f"{status // 100}xx").inc()
        if status >= 400:
            self._errors.labels(status).inc()
        self._http_s.labels(method, handler).observe(seconds)

    def sleep_operation(self, operation: str) -> AbstractContextManager[object]:
        """Count the time of "sleep" or "wake"."""
        return self._sleep_s.labels(operation).time()

    async def page(self, models: ModelRegistry, admission: RequestAdmission) -> bytes:
        """The page, with the state of all engines now."""
        each = await asyncio.gather(*(engine_stats(model) for model in models))
        families = _Families()
        for model, (stats, others) in zip(models, each, strict=True):
            self._add_model(families, model)
            for engine, one in stats.items():
                families.add_engine({"model_name": model.name, "engine": engine}, one)
            for name, family in others.items():
                for further, value in family["samples"]:
                    families.add(family["type"], name, family["help"], further, value)
        for name in self._models.keys() - {model.name for model in models}:
            del self._models[name]  # unloaded
        families.add("gauge", "pagetide_build_info", "The version", {"version": __version__}, 1.0)
        limit = "Sequences that may run or wait; more get 429"
        families.add("gauge", "pagetide_requests", "Generating requests in the server", {}, admission.num_requests)
        families.add("gauge", "pagetide_places", "Sequences of the generating requests", {}, admission.num_places)
        families.add("gauge", "pagetide_requests_limit", limit, {}, admission.limit)
        for registry in (self.registry, *(counted.registry for counted in self._models.values())):
            families.add_all(registry.collect())
        return generate_latest(_Prepared(list(families)))

    def _add_model(self, families: _Families, model: ServedModel) -> None:
        name = {"model_name": model.name}
        labels = name | {"engine": ENGINE}
        families.add("gauge", "pagetide_model_ready", "1 if it serves requests", name, float(model.state == "ready"))
        families.add("counter", "pagetide_engine_restarts", "Restarts after an unexpected end", name, model.num_restarts)
        for one in STATES:
            is_on = float(model.state == one)
            families.add("gauge", "pagetide_model_state", "1 for the present state", name | {"state": one}, is_on)
        families.add("gauge", "pagetide_model_waiting_requests", "Requests that wait for it to serve", name, model.num_waiting)
        for how in ("load", "wake"):
            ways = name | {"operation": how}
            families.add("counter", "pagetide_model_loads", "Times it was loaded or woken up", ways, model.comings[how])
            families.add("counter", "pagetide_model_load_seconds", "Seconds of these", ways, model.coming_s[how])
        for reason in ("asked", "ended", "keep_alive", "memory", "turn"):
            text = "Times it left the memory"
            families.add("counter", "pagetide_model_unloads", text, name | {"reason": reason}, model.goings[reason])
        if model.state in ("ready", "asleep"):
            states = {"awake": model.state == "ready", "weights_offloaded": False, "discard_all": model.state == "asleep"}
            for state, is_on in states.items():
                text = "1 for the present state; a sleeping model holds no memory"
                families.add("gauge", "vllm:engine_sleep_state", text, labels | {"sleep_state": state}, float(is_on))
        if model.state == "ready" and model.process is not None and model.process.is_alive:
            self.of(model)


class _Families:
    """Metric families by name, in the order in which they were added. The labels of a family are the same each time."""

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._by_name.values())

    def add(self, kind: str, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of a gauge or a counter."""
        if name not in self._by_name:
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            self._by_name[name] = make(name, text, labels=list(labels))
        self._by_name[name].add_metric(list(labels.values()), value)

    def add_engine(self, labels: Mapping[str, str], stats: Mapping[str, Any]) -> None:
        """Add the statistics of an engine, if there are any."""
        for sample in samples(stats):
            self.add(sample.kind, sample.name, sample.text, {**labels, **sample.labels}, sample.value)
        if stats:
            steps, name = stats["step_tokens"], "vllm:iteration_tokens_total"  # a histogram, for all its name
            counts = itertools.accumulate(steps["steps"])
            bounds = map(floatToGoString, (*steps["up_to"], math.inf))
            buckets = [(bound, float(count)) for bound, count in zip(bounds, counts, strict=True)]
            family = HistogramMetricFamily(name, "Tokens of a step", labels=list(labels))
            family.add_metric(list(labels.values()), buckets, stats["computed_tokens"])
            self.add_all([family])

    def add_all(self, families: Iterable[Metric]) -> None:
        """Add whole families. Their times of creation are left out."""
        for family in families:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if (known := self._by_name.setdefault(family.name, family)) is not family:
                known.samples += family.samples


class _Prepared(CollectorRegistry):
    """Metric families that exist already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        yield from self._families


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return tuple(bounds)


_Named = Mapping[str, Mapping[str, Any]]


async def engine_stats(model: ServedModel) -> tuple[_Named, _Named]:
    """The statistics of a model's engines by their label, and further metrics by name. Empty if it cannot answer.

    A durable client has several engines: "stats" is `{"workers": {name: statistics}}`. Its "fleet_metrics" are
    `{name: {"help": text, "type": "gauge" or "counter", "samples": [[labels, value], ...]}}`.
    """
    engine = model.process
    if engine is None or model.state != "ready":
        return {}, {}
    try:
        async with asyncio.timeout(STATS_S):
            if not engine.is_durable:
                return {ENGINE: await engine.call("stats")}, {}
            stats, others = await asyncio.gather(engine.call("stats"), engine.call("fleet_metrics"))
            return stats["workers"], others
    except (RequestFailed, EngineUnavailable, TimeoutError):
        return {}, {}

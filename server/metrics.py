"""The page `/metrics`: vLLM's names where the meaning is the same, `pagetide_*` for what only pagetide has."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..version import __version__
from .admission import RequestAdmission
from .distribution import Distribution, cumulated, one_two_five
from .engine_client import Batch, EngineUnavailable, Generation, RequestFailed
from .engine_samples import samples
from .models import ModelRegistry, ServedModel

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
_PROBES = ("/metrics", "/health", "/ready", "/load", "/version")
_NAMED = {"/v1/models/": "/v1/models/{name}", "/page/": "/page/{path}"}  # handlers of many paths
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class ModelMetrics:
    """What is counted of one model's requests. See `engine_client.Observer` too."""

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self.histograms = {
            name: Distribution(lengths if bounds is None else bounds) for name, (_, bounds) in HISTOGRAMS.items()
        }
        self.reasons = dict.fromkeys(REASONS.values(), 0)
        self._first_token = self.histograms["time_to_first_token_seconds"]
        self._token_gap = self.histograms["inter_token_latency_seconds"]

    def first_token(self, seconds: float) -> None:
        """Count the time to a first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Count the time between tokens."""
        self._token_gap.observe(seconds, count)

    def ended(self, one: Generation) -> None:
        """Count a request that has ended or was left. One that the engine refused is no request."""
        if one.finished is None or one.ended_at is None:
            if not (isinstance(one.error, RequestFailed) and one.error.is_refusal):
                self.reasons["abort" if one.error is None else "error"] += 1
            return
        for reason in one.reasons.values():
            self.reasons[REASONS[reason]] += 1
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
                self.histograms[name].observe(value)

    def _times(self, one: Generation) -> dict[str, float | None]:
        """The times of a request that has ended, by the name of their histogram."""
        end, longest = one.finished, max(one.counts.values(), default=0)
        if end is None or one.ended_at is None or end.first_token_s is None:
            return {} if end is None else {"request_queue_time_seconds": end.queued_s}
        decode_s = end.total_s - end.first_token_s
        token_s = decode_s / (longest - 1) if longest > 1 else 0.0
        if one.first_token_at is None:  # it did not stream: its tokens came at once, when all were there
            self._first_token.observe(max(one.ended_at - one.submitted_at - decode_s, 0.0))
            self._token_gap.observe(token_s, one.num_tokens - len(one.counts))
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
        self._process = ProcessCollector(registry=None)
        self._models: dict[str, ModelMetrics] = {}
        self._http: Counter[tuple[str, str, str]] = Counter()  # method, handler, "2xx"
        self._http_s: dict[tuple[str, str], Distribution] = {}
        self._errors: Counter[int] = Counter()  # by status
        self._sleep_s = {operation: Distribution(_SLEEP_S) for operation in ("sleep", "wake")}

    def of(self, model: ServedModel) -> ModelMetrics:
        """What is counted of a model. Raises ApiError unless it is loaded."""
        found = self._models.get(model.name)
        if found is None:
            found = self._models[model.name] = ModelMetrics(model.engine.info.max_model_len)
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
        self._http[method, handler, f"{status // 100}xx"] += 1
        if status >= 400:
            self._errors[status] += 1
        key = method, handler
        if key not in self._http_s:
            self._http_s[key] = Distribution(_HTTP_S)
        self._http_s[key].observe(seconds)

    @contextmanager
    def sleep_operation(self, operation: str) -> Iterator[None]:
        """Count the time of "sleep" or "wake"."""
        began = time.monotonic()
        yield
        self._sleep_s[operation].observe(time.monotonic() - began)

    async def page(self, models: ModelRegistry, admission: RequestAdmission) -> bytes:
        """The page, with the state of all engines now."""
        each = await asyncio.gather(*(_stats(model) for model in models))
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
        self._add_http(families)
        return generate_latest(_Prepared([*families, *self._process.collect()]))

    def _add_model(self, families: _Families, model: ServedModel) -> None:
        name = {"model_name": model.name}
        labels = name | {"engine": ENGINE}
        families.add("gauge", "pagetide_model_ready", "1 if it serves requests", name, float(model.state == "ready"))
        families.add("counter", "pagetide_engine_restarts", "Restarts after an unexpected end", name, model.num_restarts)
        if model.state in ("ready", "asleep"):
            states = {"awake": model.state == "ready", "weights_offloaded": False, "discard_all": model.state == "asleep"}
            for state, is_on in states.items():
                text = "1 for the present state; a sleeping model holds no memory"
                families.add("gauge", "vllm:engine_sleep_state", text, labels | {"sleep_state": state}, float(is_on))
        if model.state == "ready" and model.process is not None and model.process.is_alive:
            self.of(model)
        counted = self._models.get(model.name)
        if counted is not None:
            for reason, count in counted.reasons.items():
                further = {"finished_reason": reason}
                families.add("counter", "vllm:request_success", "Ended continuations", labels | further, count)
            for metric, distribution in counted.histograms.items():
                text, _ = HISTOGRAMS[metric]
                families.add_histogram(f"vllm:{metric}", text, labels, distribution.buckets, distribution.total)

    def _add_http(self, families: _Families) -> None:
        for (method, handler, status), count in self._http.items():
            labels = {"method": method, "handler": handler, "status": status}
            families.add("counter", "http_requests", "HTTP requests, without probes", labels, count)
        for (method, handler), distribution in self._http_s.items():
            labels, text = {"method": method, "handler": handler}, "Time of HTTP requests, streams to their end"
            families.add_histogram("http_request_duration_seconds", text, labels, distribution.buckets, distribution.total)
        for status_code, count in self._errors.items():
            labels = {"status": str(status_code)}
            families.add("counter", "pagetide_http_errors", "HTTP requests that failed", labels, count)
        for operation, distribution in self._sleep_s.items():
            name, text = "vllm:sleep_mode_operation_duration_seconds", "Time of sleeping and waking up"
            families.add_histogram(name, text, {"operation": operation}, distribution.buckets, distribution.total)


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
            steps = stats["step_tokens"]
            buckets = cumulated(steps["up_to"], steps["steps"])
            name_of_vllm = "vllm:iteration_tokens_total"  # a histogram, for all its name
            self.add_histogram(name_of_vllm, "Tokens of a step", labels, buckets, stats["computed_tokens"])

    def add_histogram(
        self, name: str, text: str, labels: Mapping[str, str], buckets: list[tuple[str, float]], total: float
    ) -> None:
        """Add a histogram."""
        if name not in self._by_name:
            self._by_name[name] = HistogramMetricFamily(name, text, labels=list(labels))
        self._by_name[name].add_metric(list(labels.values()), buckets, total)


class _Prepared(CollectorRegistry):
    """Metric families that exist already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        yield from self._families


_Named = Mapping[str, Mapping[str, Any]]


async def _stats(model: ServedModel) -> tuple[_Named, _Named]:
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

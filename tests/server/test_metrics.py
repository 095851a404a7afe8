"""The page /metrics: vLLM's dashboards find what they query, and the numbers are those of the requests that were served."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from servers import WITH_EVERYTHING, ServerProcess

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")
prometheus = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from pagetide.server.distribution import Distribution, one_two_five  # noqa: E402
from pagetide.server.engine_client import EngineUnavailable, Generation, RequestFailed  # noqa: E402
from pagetide.server.messages import Accepted, Piece, RequestEnd  # noqa: E402
from pagetide.server.metrics import HISTOGRAMS, Metrics, ModelMetrics  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
QUERIED = yaml.safe_load((Path(__file__).parent / "vllm_dashboards.yaml").read_text("utf-8"))
ADMIN = {"Authorization": "Bearer sk-operator-1"}
LABELS = {
    "model_name", "engine", "le", "finished_reason", "reason", "source", "sleep_state", "operation", "handler", "status",
    "method", "state", "kind", "direction", "version", "device", "dtype", "attention", "block_size", "cache_dtype",
    "enable_prefix_caching", "num_cpu_blocks", "num_gpu_blocks",
}  # fmt: skip

Samples = dict[str, list[tuple[dict[str, str], float]]]


def parsed(page: str) -> Samples:
    """Labels and value of each sample of a page, by name."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample with these labels."""
    (found,) = [number for own, number in samples[name] if labels.items() <= own.items()]
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("metrics") / "log"
    environ = {"OMP_NUM_THREADS": "1", "PAGETIDE_ADMIN_KEY": "sk-operator-1"}
    with ServerProcess(WITH_EVERYTHING, log, **environ) as server:
        yield server


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "The sea was", "ignore_eos": True, "seed": 1} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(server: ServerProcess, path: str, **fields: Any) -> dict[str, Any]:
    """The usage of a streamed request."""
    body = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True} | fields
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    usage: dict[str, Any] = yaml.safe_load(lines[-1].removeprefix("data: "))["usage"]
    return usage


@pytest.fixture(scope="module")
def served(server: ServerProcess) -> tuple[Samples, list[dict[str, Any]]]:
    """The page after known requests, and their usage: two whole ones, one of them with two continuations, and two streams."""
    prompt = "It is a truth universally acknowledged that a whale is in want of a sea. " * 2
    usages = [
        complete(server, prompt=prompt, max_tokens=9)["usage"],
        complete(server, prompt=prompt, max_tokens=6, n=2, temperature=1.0)["usage"],
        stream(server, "/v1/completions", prompt="Call me", max_tokens=12),
        stream(server, "/v1/chat/completions", messages=[{"role": "user", "content": "Where?"}], max_tokens=5),
    ]
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "n": -1}).status_code == 400
    assert httpx.get(f"{server.url}/no/such/path").status_code == 404
    for operation in ("sleep", "wake_up"):
        httpx.post(f"{server.url}/{operation}", headers=ADMIN, timeout=120)
    page = httpx.get(f"{server.url}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(page.text), usages


@pytest.mark.parametrize("name", QUERIED["known"])
def test_a_dashboard_of_vllm_finds_what_it_queries(served: tuple[Samples, list[Any]], name: str) -> None:
    samples, _ = served
    assert name in samples
    for labels, _ in samples[name]:
        assert labels.keys() >= set(QUERIED["known"][name])
    for label, values in QUERIED["values"].get(name, {}).items():
        assert {labels[label] for labels, _ in samples[name]} >= set(values)


def test_what_is_not_known_is_not_there(served: tuple[Samples, list[Any]]) -> None:
    samples, _ = served
    unknown = [name for names in QUERIED["unknown"].values() for name in names]
    assert len(set(unknown)) == len(unknown)
    assert not {*unknown} & (samples.keys() | QUERIED["known"].keys())
    assert all(len(reason) > 20 for reason in QUERIED["unknown"])


def test_labels_are_few_and_name_no_request(served: tuple[Samples, list[Any]]) -> None:
    samples, _ = served
    names = {label for each in samples.values() for labels, _ in each for label in labels}
    assert names <= LABELS
    handlers = {labels["handler"] for labels, _ in samples["http_requests_total"]}
    assert handlers <= {"/v1/completions", "/v1/chat/completions", "/sleep", "/wake_up", "none"}


def test_the_numbers_are_those_of_the_requests(server: ServerProcess, served: tuple[Samples, list[Any]]) -> None:
    samples, usages = served
    assert [usage["completion_tokens"] for usage in usages] == [9, 12, 12, 5]
    prompts = [usage["prompt_tokens"] for usage in usages]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0, "the second prompt is the first one's"

    def total(name: str) -> tuple[float, float]:
        return value(samples, f"vllm:{name}_count"), value(samples, f"vllm:{name}_sum")

    assert total("request_prompt_tokens") == (4, sum(prompts))
    assert total("request_generation_tokens") == (4, 38)
    assert total("request_max_num_generation_tokens") == (4, 9 + 6 + 12 + 5)
    assert total("request_params_max_tokens") == (4, 9 + 6 + 12 + 5)
    assert total("request_params_n") == (4, 5)
    assert total("request_prefill_kv_computed_tokens") == (4, sum(prompts) - cached)
    reasons = {labels["finished_reason"]: count for labels, count in samples["vllm:request_success_total"]}
    assert reasons == {"length": 5, "stop": 0, "abort": 0, "error": 0}, "a refused request is none"
    assert total("inter_token_latency_seconds")[0] == 38 - 5
    seconds = {name: total(name) for name in HISTOGRAMS if name.endswith("_seconds")}
    assert {count for name, (count, _) in seconds.items() if name != "inter_token_latency_seconds"} == {4}
    queue, prefill, decode, inference = (
        seconds[f"request_{name}_time_seconds"][1] for name in ("queue", "prefill", "decode", "inference")
    )
    assert prefill + decode == pytest.approx(inference)
    assert 0 <= queue and 0 < prefill and 0 < decode
    assert queue + inference <= seconds["e2e_request_latency_seconds"][1]
    assert prefill < seconds["time_to_first_token_seconds"][1] < seconds["e2e_request_latency_seconds"][1]
    assert value(samples, "http_requests_total", handler="/v1/completions", status="2xx") == 3
    assert value(samples, "http_requests_total", handler="/v1/completions", status="4xx") == 1
    assert value(samples, "http_requests_total", handler="none", status="4xx", method="GET") == 1
    assert value(samples, "http_requests_total", handler="/sleep", status="2xx") == 1
    for operation in ("sleep", "wake"):
        assert value(samples, "vllm:sleep_mode_operation_duration_seconds_count", operation=operation) == 1
    assert value(samples, "vllm:engine_sleep_state", sleep_state="awake") == 1


def test_the_engines_counters_are_those_of_the_requests(server: ServerProcess, served: Any) -> None:
    """The engine of `served` was put to sleep: this one began at 0."""

    def now() -> Samples:
        return parsed(httpx.get(f"{server.url}/metrics").text)

    before = now()
    usages = [
        complete(server, max_tokens=20)["usage"],
        stream(server, "/v1/completions", prompt="x y z " * 9, max_tokens=3),
    ]
    until = time.monotonic() + 60
    while value(now(), "vllm:generation_tokens_total") < 23 and time.monotonic() < until:
        time.sleep(0.05)
    after = now()
    prompts = sum(usage["prompt_tokens"] for usage in usages)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("vllm:generation_tokens_total") == 23
    assert grown("vllm:prompt_tokens_total") == prompts
    assert grown("vllm:prompt_tokens_by_source_total", source="local_compute") == prompts
    assert grown("vllm:prefix_cache_queries_total") == prompts
    assert grown("vllm:iteration_tokens_total_count") == grown("pagetide_steps_total") == 23
    assert grown("vllm:iteration_tokens_total_sum") == prompts + 19 + 2, "the last token of each is not computed"
    blocks = {labels["state"]: count for labels, count in after["pagetide_kv_blocks"]}
    assert blocks.keys() == {"free", "draining", "live", "cached", "in_flight"}
    assert blocks["live"] == value(after, "vllm:kv_cache_usage_perc") == 0 < blocks["cached"]


def test_a_client_that_leaves_is_an_abort(server: ServerProcess, served: Any) -> None:
    body = {"prompt": "The sea", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    until = time.monotonic() + 60
    while True:
        samples = parsed(httpx.get(f"{server.url}/metrics").text)
        if value(samples, "vllm:request_success_total", finished_reason="abort") == 1:
            break
        assert time.monotonic() < until
        time.sleep(0.05)


# ---- without a server ---------------------------------------------------------------------------


def test_a_distribution_counts_as_prometheus_does() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        bounds = sorted({round(draw.uniform(0, 10), draw.randrange(3)) for _ in range(6)})
        registry = prometheus.CollectorRegistry()
        oracle = prometheus.Histogram("h", "h", buckets=bounds, registry=registry)
        ours = Distribution(bounds)
        for _ in range(50):
            number, count = draw.choice([draw.uniform(-1, 12), *bounds]), draw.randrange(3)
            ours.observe(number, count)
            for _ in range(count):
                oracle.observe(number)
        samples = [s for family in registry.collect() for s in family.samples if s.name == "h_bucket"]
        assert ours.buckets == [(sample.labels["le"], sample.value) for sample in samples]
        assert ours.total == pytest.approx(registry.get_sample_value("h_sum"))


def test_lengths_have_buckets_up_to_the_context() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(1999) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert one_two_five(1) == (1,)


class FakeEvent:
    def set(self) -> None:
        pass


def generation(metrics: ModelMetrics, *messages: Any) -> Generation:
    one = Generation(1, FakeEvent(), metrics)  # type: ignore[arg-type]
    for message in messages:
        one.take(message)
    return one


def totals(metrics: ModelMetrics) -> dict[str, tuple[int, float]]:
    return {name: (sum(one.counts), round(one.total, 6)) for name, one in metrics.histograms.items() if any(one.counts)}


def test_a_request_that_came_whole_has_its_times_from_the_engine() -> None:
    metrics = ModelMetrics(1000)
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
    assert metrics.reasons == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_tokens_of_a_stream_are_timed_by_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.5, 13.0, 16.0, 16.0])
    monkeypatch.setattr("pagetide.server.engine_client.time.monotonic", lambda: next(clock))
    metrics = ModelMetrics(1000)
    generation(
        metrics, Accepted(1, [5] * 8), Piece(1, 0, "a", [1]), Piece(1, 1, "b", [1]), Piece(1, 0, "c", [1, 2]),
        Piece(1, 1, "", [], None, "stop"), Piece(1, 1, "d", [3]), Piece(1, 0, "e", [4]),
    )  # fmt: skip
    assert totals(metrics)["time_to_first_token_seconds"] == (1, 2.0)
    assert totals(metrics)["inter_token_latency_seconds"] == (4, 2 * 0.5 + 3.5 + 3.0)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "abort"),
        ([RequestFailed("invalid", "no")], None),
        ([RequestFailed("too_long", "no")], None),
        ([RequestFailed("internal", "a bug")], "error"),
        ([EngineUnavailable("it died")], "error"),
        ([RequestEnd(1, [Piece(1, 0, "", [], None, "error")], 0, None, None, None, 1.0)], "error"),
        ([RequestEnd(1, [Piece(1, 0, "", [], None, "aborted")], 0, None, 0.5, None, 1.0)], "abort"),
    ],
)
def test_how_requests_end(messages: list[Any], reason: str | None) -> None:
    metrics = ModelMetrics(1000)
    metrics.ended(generation(metrics, *messages))
    assert {name: count for name, count in metrics.reasons.items() if count} == ({reason: 1} if reason else {})
    assert not any(metrics.histograms["request_decode_time_seconds"].counts)


def test_requests_from_anywhere_make_few_series() -> None:
    metrics = Metrics(["/v1/models", "/v1/models/{name:path}"])
    for i in range(1000):
        metrics.answered(f"M{i}", f"/{i}", 404, 0.1)
        metrics.answered("GET", f"/v1/models/{i}", 404, 0.1)
    metrics.answered("GET", "/health", 200, 0.1)
    assert metrics._http == {("other", "none", "4xx"): 1000, ("GET", "/v1/models/{name}", "4xx"): 1000}


def test_every_metric_of_pagetide_is_documented(served: tuple[Samples, list[Any]]) -> None:
    samples, _ = served
    document = (ROOT / "docs" / "serve.md").read_text("utf-8")
    rows = re.findall(r"^\| (`pagetide_.+?) \|", document, re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(pagetide_\w+)`", row)]
    assert len(set(documented)) == len(documented)
    assert set(documented) == {name for name in samples if name.startswith("pagetide_")}

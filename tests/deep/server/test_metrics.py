"""The page /metrics: vLLM's dashboards find what they query, and the numbers are those of the requests that were served."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from servers import WITH_EVERYTHING, ServerProcess

from pagetide.server.metrics import HISTOGRAMS

ROOT = Path(__file__).resolve().parents[3]
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
    environ = {"OMP_NUM_THREADS": "1", "PAGETIDE_ADMIN_KEY": "sk-operator-1"}
    with ServerProcess(WITH_EVERYTHING, tmp_path_factory.mktemp("metrics") / "log", **environ) as server:
        yield server


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    """The usage of a request."""
    body = {"ignore_eos": True, "seed": 1} | fields
    usage: dict[str, Any] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["usage"]
    return usage


def stream(server: ServerProcess, path: str, **fields: Any) -> dict[str, Any]:
    """The usage of a streamed request."""
    body = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True} | fields
    *_, last = server.events(path, json=body)
    usage: dict[str, Any] = last["usage"]
    return usage


@pytest.fixture(scope="module")
def served(server: ServerProcess) -> tuple[Samples, list[dict[str, Any]]]:
    """The page after known requests, and their usage: two whole ones, one of them with two continuations, and two streams."""
    prompt = "It is a truth universally acknowledged that a whale is in want of a sea. " * 2
    usages = [
        complete(server, prompt=prompt, max_tokens=9),
        complete(server, prompt=prompt, max_tokens=6, n=2, temperature=1.0),
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


def test_a_dashboard_of_vllm_finds_what_it_queries(served: tuple[Samples, list[Any]]) -> None:
    samples, _ = served
    for name, wanted in QUERIED["known"].items():
        assert all(labels.keys() >= set(wanted) for labels, _ in samples[name]), name
        for label, values in QUERIED["values"].get(name, {}).items():
            assert {labels[label] for labels, _ in samples[name]} >= set(values), name


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
    assert all(total_s > 0 for name, (_, total_s) in seconds.items() if name != "request_queue_time_seconds")
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
        complete(server, prompt="The sea was", max_tokens=20),
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


def test_every_metric_of_pagetide_is_documented(served: tuple[Samples, list[Any]]) -> None:
    samples, _ = served
    document = (ROOT / "docs" / "serve.md").read_text("utf-8")
    rows = re.findall(r"^\| (`pagetide_.+?) \|", document, re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(pagetide_\w+)`", row)]
    assert len(set(documented)) == len(documented)
    of_a_tier = {name for name in documented if name.startswith("pagetide_disk_")}  # which this server has not
    assert set(documented) - of_a_tier == {name for name in samples if name.startswith("pagetide_")}

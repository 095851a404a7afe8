"""Random requests by the server's OpenAPI description, as schemathesis draws them: valid ones, and ones broken on purpose."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

REQUEST_S = 600.0  # an answer that takes longer is a hang; 640 continuations, 8 at a time, take minutes on a busy core
CONCURRENT = 4
# Which share of the requests goes to an operation; those that are not named get one each, in both modes.
SHARES = {
    "POST /v1/completions": 0.35, "POST /v1/chat/completions": 0.35, "POST /tokenize": 0.1, "POST /detokenize": 0.08,
    "GET /v1/models/{name}": 0.03, "GET /is_sleeping": 0.03, "POST /admin/models/unload": 0.04,
}  # fmt: skip
# Arguments for the server under test: contexts are short, and fields beyond the description do not end every request early.
SERVER = [
    "demo", "--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "8",
    "--max-model-len", "128", "--ignore-unknown-fields",
]  # fmt: skip


class Misbehaved(AssertionError):
    """An answer that must not be."""


def send_requests(url: str, count: int, number: int, headers: dict[str, str]) -> Counter[int]:
    """Send `count` requests or some more, drawn with seed `number`. Returns how many had each status.

    Raises Misbehaved for an answer of 500 or more, one that the description lacks, or none.
    """
    description = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    found: Counter[int] = Counter()
    for further in itertools.count():  # what can be drawn from a small schema is drawn once
        found += _send_round(description, count - found.total(), number + further, headers)
        if found.total() >= count:
            return found


def _send_round(description: Any, count: int, number: int, headers: dict[str, str]) -> Counter[int]:
    """Send about `count` requests, at least one to each operation."""
    found: Counter[int] = Counter()
    for result in description.get_all_operations():
        operation = result.ok()
        if operation.label in ("POST /sleep", "POST /wake_up", "POST /admin/models/load"):
            continue  # they start processes; without an admin key they are refused: see the test
        share = SHARES.get(operation.label)
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if share else (GenerationMode.POSITIVE,)
        for mode in modes:
            wanted = 1 if share is None else max(round(count * share / len(modes)), 1)
            if mode is GenerationMode.NEGATIVE and operation.label == "GET /v1/models/{name}":
                continue  # every text is a name
            found += _send(operation, mode, wanted, number, headers)
    return found


def _send(operation: Any, mode: GenerationMode, count: int, number: int, headers: dict[str, str]) -> Counter[int]:
    statuses: Counter[int] = Counter()
    answers: list[Future[int]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def draw(case: Any) -> None:
        answers.append(pool.submit(_status, case, headers))

    with ThreadPoolExecutor(CONCURRENT) as pool:
        draw()
        for answer in answers:
            statuses[answer.result()] += 1
    return statuses


def _status(case: Any, headers: dict[str, str]) -> int:
    response = case.call(headers=headers, timeout=REQUEST_S)
    declared = case.operation.definition.raw["responses"]
    status = response.status_code
    if status >= 500 or not {str(status), f"{status // 100}XX"} & set(declared):
        raise Misbehaved(f"{status} {response.text[:500]} for\n{case.as_curl_command()[:4000]}")
    return int(status)


def wait_until_idle(url: str, headers: dict[str, str], timeout_s: float = REQUEST_S) -> None:
    """Wait until no request is open and all blocks are back. Raises Misbehaved."""
    until = time.monotonic() + timeout_s
    while True:
        load = httpx2.get(f"{url}/load", headers=headers).json()["server_load"]
        samples = {}
        for line in httpx2.get(f"{url}/metrics", headers=headers).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("vllm:num_requests_") or (
                name.startswith("pagetide_kv_blocks{") and 'state="live"' in name
            ):
                samples[name] = float(value)
        left = {name: value for name, value in samples.items() if value}
        if not load and samples and not left:
            return
        if time.monotonic() > until:
            raise Misbehaved(f"something is left: {load} open requests, {left}")
        time.sleep(0.05)

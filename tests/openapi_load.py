"""Random requests by the server's OpenAPI description, as schemathesis draws them: valid ones, and ones broken on purpose."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

REQUEST_S = 600.0  # an answer that takes longer is a hang; 640 continuations, 8 at a time, take minutes on a busy core
CONCURRENT = 4
# Which share of the requests goes to an operation; those that are not named get few.
SHARES = {
    "POST /v1/completions": 0.16, "POST /v1/chat/completions": 0.16, "POST /tokenize": 0.06, "POST /detokenize": 0.06,
    "POST /v1/messages": 0.12, "POST /v1/messages/count_tokens": 0.05, "POST /v1/responses": 0.12,
    "POST /api/chat": 0.1, "POST /api/generate": 0.1, "POST /api/show": 0.02,
    "GET /v1/models/{name}": 0.03, "GET /is_sleeping": 0.03, "POST /admin/models/unload": 0.04,
}  # fmt: skip
# Arguments for the server under test: contexts are short, and fields beyond the description do not end every request early.
SERVER = [
    "demo", "--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "8",
    "--max-model-len", "128", "--ignore-unknown-fields", "--response-format", "hermes",
]  # fmt: skip


class Misbehaved(AssertionError):
    """An answer that must not be."""


def send_requests(url: str, count: int, number: int, headers: dict[str, str]) -> Counter[int]:
    """Send `count` requests or some more, drawn with seed `number`, and at least one to each operation.

    Each round sends as many as the Hypothesis profile has examples. Returns how many had each status.

    Raises Misbehaved for an answer of 500 or more, one that the description lacks, or none.
    """
    cases = _cases(schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers))
    found: Counter[int] = Counter()
    missing = {label for label, _ in cases}
    for further in itertools.count():
        sent, statuses = _send(cases, number + further, headers)
        found += statuses
        missing -= sent
        if found.total() >= count and not missing:
            break
    return found


def _cases(description: Any) -> list[tuple[str, Any]]:
    """Operations with strategies of requests to them, each as often as its share in per cent, or once."""
    cases: list[tuple[str, Any]] = []
    for result in description.get_all_operations():
        operation = result.ok()
        if operation.label in ("POST /sleep", "POST /wake_up", "POST /admin/models/load"):
            continue  # they start processes; without an admin key they are refused: see the test
        share = SHARES.get(operation.label)
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if share else (GenerationMode.POSITIVE,)
        for mode in modes:
            if mode is GenerationMode.NEGATIVE and operation.label == "GET /v1/models/{name}":
                continue  # every text is a name
            times = max(round(100 * (share or 0) / len(modes)), 1)
            cases += [(operation.label, operation.as_strategy(generation_mode=mode))] * times
    return cases


def _send(cases: list[tuple[str, Any]], number: int, headers: dict[str, str]) -> tuple[set[str], Counter[int]]:
    """One round: the operations that requests went to, and how many had each status."""
    sent: set[str] = set()
    answers: list[Future[int]] = []

    @seed(number)
    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=st.integers(0, len(cases) - 1).flatmap(lambda chosen: cases[chosen][1]))
    def draw(case: Any) -> None:
        sent.add(case.operation.label)
        answers.append(pool.submit(_status, case, headers))

    with ThreadPoolExecutor(CONCURRENT) as pool:
        draw()
    return sent, Counter(answer.result() for answer in answers)


def _status(case: Any, headers: dict[str, str]) -> int:
    response = case.call(headers=headers, timeout=REQUEST_S)
    declared = case.operation.definition.raw["responses"]
    status = response.status_code
    if status >= 500 or not {str(status), f"{status // 100}XX"} & set(declared):
        raise Misbehaved(f"{status} {response.text[:500]} for\n{case.as_curl_command()[:4000]}")
    return int(status)

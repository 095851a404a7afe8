"""Requests drawn from the OpenAPI description: no answer of 500, no hang, nothing left. `make soak` sends 10,000."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
httpx2 = pytest.importorskip("httpx2")

from openapi_load import SERVER, send_requests, wait_until_idle  # noqa: E402
from servers import ServerProcess  # noqa: E402

OPS = {"Authorization": "Bearer sk-operator-1"}


def test_500_requests_by_the_description(tmp_path: Path) -> None:
    with ServerProcess(SERVER, tmp_path / "log", PAGETIDE_ADMIN_KEY="sk-operator-1", OMP_NUM_THREADS="1") as server:
        statuses = send_requests(server.url, 500, 0, OPS)
        assert sum(statuses.values()) >= 500 and statuses[200] >= 50 and statuses[400] >= 50, statuses
        for path in ("/sleep", "/wake_up", "/admin/models/load"):
            assert httpx2.post(f"{server.url}{path}", json={"model": "demo"}).status_code == 401
        wait_until_idle(server.url, OPS)
        assert "Traceback" not in server.said

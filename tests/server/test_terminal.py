"""The server's log on a terminal, and elsewhere."""

from __future__ import annotations

import io
import json
import logging
import re

from durable_rig import FrontEnd, KeptRequests, at_once

from pagetide.server.terminal import terminal_log


class Screen(io.StringIO):
    """A terminal of 80 columns and 24 rows."""

    def isatty(self) -> bool:
        return True


async def lines_of(stream: io.StringIO, num_requests: int, reminder: str = "") -> list[str]:
    """What a server with a root handler for `stream` logs."""
    root, usual = logging.getLogger(), logging.StreamHandler(stream)
    root.addHandler(usual)
    logging.getLogger("pagetide.access").setLevel(logging.INFO)
    with terminal_log(stream) as terminal:
        if terminal is not None:
            terminal.remind(reminder)
        async with FrontEnd(KeptRequests(), at_once) as front:
            for path in ("page/main.js", "page/info", "health", "metrics", "page/none.js", "a%1b[2J" + "a" * 99):
                await front.client.get(f"/{path}")
            for _ in range(num_requests):
                assert (await front.ask("/v1/completions", {"prompt": "The sea", "max_tokens": 2})).status == 200
    assert usual in root.handlers
    root.removeHandler(usual)
    return stream.getvalue().splitlines()


async def test_a_terminal_has_short_lines_and_keeps_the_address_in_sight() -> None:
    reminder = "serving kept\n  curl " + "u" * 100  # three rows
    lines = await lines_of(Screen(), 40, reminder)
    known = [re.sub(r"^\d\d:\d\d:\d\d (.*) in \d\.\d\d s", r"\1", line) for line in lines]
    refused = ["GET /page/none.js 404", "GET /a�[2J" + "a" * 54 + "… 404"]
    served, told = ["POST /v1/completions 200, 8 + 13 tokens"], reminder.split("\n")
    # 20 rows of lines and 3 of the reminder leave one for the cursor; the path that was cut takes two.
    assert known == [*refused, *served * 18, *told, *served * 21, *told, *served]


async def test_elsewhere_each_request_is_a_line_of_json() -> None:
    found = [json.loads(line) for line in await lines_of(io.StringIO(), 1)]
    assert [(one["path"], one["status"]) for one in found][:2] == [("/page/main.js", 200), ("/page/info", 200)]
    assert found[-1].keys() == {"method", "path", "status", "seconds", "client", "request_id", "key", "model"}

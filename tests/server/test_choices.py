"""The usage of prompts: what it counts of the cache's tiers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pagetide.server.choices import usage
from pagetide.server.messages import RequestEnd


def test_usage_tells_which_cached_tokens_came_from_disk() -> None:
    def generation(cached: int, from_disk: int) -> Any:
        end = RequestEnd(0, [], cached, num_disk_tokens=from_disk)
        return SimpleNamespace(prompt_token_ids=[7] * 20, num_generated=3, finished=end)

    ended = cast(
        "list[Any]", [generation(16, 12), generation(8, 0), SimpleNamespace(**vars(generation(0, 0)) | {"finished": None})]
    )
    details = {"cached_tokens": 24, "disk_tokens": 12}
    assert usage(ended) == {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69, "prompt_tokens_details": details}
    assert usage(ended[1:])["prompt_tokens_details"] == {"cached_tokens": 8}

"""The process that tests parts: `python -m pagetide.engine.self_check.child REQUEST`, with REQUEST as JSON.

    {"device": 0, "parts": ["pool", ...], "failed": [...]}       parts to test, and parts that failed elsewhere
    {"identity": {...}}                                          its first message: the device responds
    {"part": "pool", "state": "passed", ...}                     then one for each tested part

It exits after the first failure, as that may affect later parts on the device, and when its parent process is gone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...common.child_process import parent_channel
from ...common.frames import PickleChannel
from .identity import identity_of
from .report import FAILED

if TYPE_CHECKING:
    from .parts import Seams


def main() -> None:
    """Execute the request on the command line."""
    answers = parent_channel()
    request: dict[str, Any] = json.loads(sys.argv[1])
    import torch

    from .parts import cuda_seams

    torch.zeros(1, device=f"cuda:{request['device']}")  # creates the context and initializes the device
    answers.send({"identity": identity_of(request["device"])})
    serve(request["parts"], lambda: cuda_seams(request["device"], request["failed"]), answers)


def serve(parts: Sequence[str], seams: Callable[[], Seams], answers: PickleChannel) -> None:
    """Test the parts in order until one fails, and send the outcome of each."""
    from .parts import check_part

    there = seams()
    for part in parts:
        outcome = check_part(part, there)
        answers.send(asdict(outcome))
        if outcome.state == FAILED:
            return


if __name__ == "__main__":
    main()

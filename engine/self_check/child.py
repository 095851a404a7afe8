"""The process that tests parts: `python -m pagetide.engine.self_check.child REQUEST`, with REQUEST as JSON.

    {"device": 0, "parts": ["pool", ...], "failed": [...]}       parts to test, and parts that failed elsewhere
    {"identity": {...}}                                          its first line: the device responds
    {"part": "pool", "state": "passed", ...}                     then a line for each tested part

It exits after the first failure, as that may affect later parts on the device, and when its parent process is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from .identity import identity_of
from .report import FAILED

if TYPE_CHECKING:
    from .parts import Seams


def main() -> None:
    """Execute the request on the command line."""
    answers = private_output()
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    request: dict[str, Any] = json.loads(sys.argv[1])
    import torch

    from .parts import cuda_seams

    torch.zeros(1, device=f"cuda:{request['device']}")  # creates the context and initializes the device
    answer(answers, {"identity": identity_of(request["device"])})
    serve(request["parts"], lambda: cuda_seams(request["device"], request["failed"]), answers)


def serve(parts: Sequence[str], seams: Callable[[], Seams], answers: IO[str]) -> None:
    """Test the parts in order until one fails, and write one line for each."""
    from .parts import check_part

    there = seams()
    for part in parts:
        outcome = check_part(part, there)
        answer(answers, asdict(outcome))
        if outcome.state == FAILED:
            return


def answer(answers: IO[str], line: dict[str, Any]) -> None:
    """Write one line."""
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def private_output() -> IO[str]:
    """A private copy of standard output. Output of libraries, and of compilers that they start, goes to standard error."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def end_with_parent() -> None:
    """Wait until standard input ends, as it does when the parent process exits, then exit."""
    while os.read(0, 1):  # not by sys.stdin: a terminating interpreter needs its lock
        pass
    os._exit(1)


if __name__ == "__main__":
    main()

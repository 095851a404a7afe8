"""The process in which parts are tried: `python -m pagetide.engine.self_check.child REQUEST`, REQUEST being JSON.

    {"device": 0, "parts": ["pool", ...], "failed": [...]}       what to try, and what failed elsewhere already
    {"identity": {...}}                                          its first line: the device is there and answers
    {"part": "pool", "state": "passed", ...}                     then a line for each part, as soon as it was tried

It ends behind the first part that fails: what that left on the device would be blamed on the next one. It ends too where the
process that started it is gone.
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
    """Does what the request on the command line says."""
    answers = private_output()
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    request: dict[str, Any] = json.loads(sys.argv[1])
    import torch

    from .parts import cuda_seams

    torch.zeros(1, device=f"cuda:{request['device']}")  # the context, and what else a device does at first
    answer(answers, {"identity": identity_of(request["device"])})
    serve(request["parts"], lambda: cuda_seams(request["device"], request["failed"]), answers)


def serve(parts: Sequence[str], seams: Callable[[], Seams], answers: IO[str]) -> None:
    """Try the parts in their order, as far as they pass, and answer a line for each."""
    from .parts import check_part

    there = seams()
    for part in parts:
        outcome = check_part(part, there)
        answer(answers, asdict(outcome))
        if outcome.state == FAILED:
            return


def answer(answers: IO[str], line: dict[str, Any]) -> None:
    """Say one thing."""
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def private_output() -> IO[str]:
    """Standard output, for us alone: what libraries, and compilers that they start, print goes to standard error."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def end_with_parent() -> None:
    """Wait until standard input ends, as it does with the process that holds its other end."""
    while os.read(0, 1):  # not by sys.stdin, whose lock an interpreter that ends wants to have
        pass
    os._exit(1)


if __name__ == "__main__":
    main()

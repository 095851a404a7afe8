"""Tries a folder's tokenizer in a process of its own, before this one loads it.

tokenizers, sentencepiece and tiktoken are compiled: a hostile or damaged file can make them abort, exhaust memory or not end,
and none of these is an exception. In the other process, with bounds of memory and time, they are an error of the load.

`tokenizer.json` is tried by the library `tokenizers` alone, which begins in 0.1 s; folders without that file by transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...common.child_process import SAID_CHARS, ChildProcess
from .. import demo_model
from ..text import tokenizer_bounds

log = logging.getLogger(__name__)

_BUNDLED = Path(str(demo_model.__file__)).parent.resolve()
_TIMEOUT_S = 300.0  # beside a bound of processor time
_MEMORY_BYTES = 4 << 30  # of addresses, threads' stacks included
_TRANSFORMERS_BYTES = 32 << 30  # it imports torch, which maps many gigabytes where it is built for CUDA
_MEMORY_A_BYTE = 64  # of the file


def try_tokenizer(folder: Path, options: Mapping[str, Any], trust_remote_code: bool) -> str | None:
    """Why the tokenizer of `folder` cannot be used, as the end of a sentence; None if it can. Remembers folders that can.

    Not tried are pagetide's own model, and a tokenizer by code of the folder that is trusted.
    """
    if folder.resolve() == _BUNDLED or (trust_remote_code and not (folder / "tokenizer.json").is_file()):
        return None
    named = [path for path in sorted(folder.iterdir()) if "token" in path.name or "vocab" in path.name]
    files = [path.stat() for path in named if path.is_file()]
    identity = tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in files)
    try:
        _try(folder, json.dumps(dict(options), default=str), identity)
    except ValueError as error:
        return str(error)
    except OSError as error:
        log.warning("the tokenizer in %s is loaded untried, since no other process can try it: %s", folder, error)
    return None


@lru_cache(maxsize=64)
def _try(folder: Path, options: str, files: tuple[tuple[int, ...], ...]) -> None:
    """Raises ValueError if the trial fails, OSError if there is none."""
    base = _MEMORY_BYTES if (folder / "tokenizer.json").is_file() else _TRANSFORMERS_BYTES
    memory = base + _MEMORY_A_BYTE * max((size for _, size, *_ in files), default=0)
    script = str(tokenizer_bounds.__file__)
    with ChildProcess((script, str(folder), str(memory), options), captures=True) as trial:
        status, lines = trial.wait(_TIMEOUT_S), trial.said.splitlines()
        if status is None:
            raise ValueError(f"a trial of it did not end within {_TIMEOUT_S:g} s")
        if status == tokenizer_bounds.TRIED:
            return
        said = next((line for line in lines if "memory" in line), lines[-1] if lines else "")[:SAID_CHARS]
        if status == tokenizer_bounds.UNTRIED:
            raise OSError(said)
        raise ValueError(said if said and status > 0 else f"a trial of it {trial.ending(said)}")

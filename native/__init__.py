"""Kernels for the CPU in C++: attention over block tables, products with packed weights, and elementwise operations.

They are operators of torch, `torch.ops.pagetide.*`, built by `native/build.py`. Without the library, everything is computed by
torch's own operators.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

import torch

from .build import sources_digest

log = logging.getLogger(__name__)

LIBRARY = Path(os.environ.get("PAGETIDE_NATIVE_LIBRARY", "").strip() or Path(__file__).parent / "_kernels.so")


@lru_cache(maxsize=1)
def instructions() -> str | None:
    """The instruction set of the kernels, such as "avx512_amx", "avx2" or "neon"; None if they cannot serve. Loads them.

    The first call says why it cannot. PAGETIDE_NATIVE=0 switches it off, and the name of an instruction set selects that one
    if the processor has it. PAGETIDE_NATIVE_LIBRARY names another file of the library, such as one with sanitisers.
    """
    wanted = os.environ.get("PAGETIDE_NATIVE", "").strip()
    if wanted == "0":
        log.info("native kernels are disabled by PAGETIDE_NATIVE=0; using torch's operators")
        return None
    if not LIBRARY.exists():
        named = "PAGETIDE_NATIVE_LIBRARY names it" if "PAGETIDE_NATIVE_LIBRARY" in os.environ else "no C++ compiler?"
        log.warning(
            "native kernels were not built, %s is missing (%s): using torch's operators, at about half the speed on a CPU; "
            "install g++ or clang, then repeat the installation",
            LIBRARY,
            named,
        )
        return None
    try:
        torch.ops.load_library(LIBRARY)  # type: ignore[no-untyped-call]
        sources: str = torch.ops.pagetide.sources()
    except (OSError, AttributeError) as error:  # no library, or another one
        log.warning("native kernels cannot be loaded (%s): using torch's operators, at about half the speed on a CPU", error)
        return None
    if sources != sources_digest():
        log.warning(
            "native kernels in %s were built from other sources: using torch's operators, at about half the speed on "
            "a CPU; run `make`, or install again, to rebuild them",
            LIBRARY,
        )
        return None
    name: str = torch.ops.pagetide.instructions()
    if wanted not in ("", "1", name):
        log.warning("PAGETIDE_NATIVE=%r: using native kernels for %s; 0 disables them", wanted, name or "no processor")
    if not name:
        log.warning("native kernels need AVX2 or NEON, which this processor lacks: using torch's operators")
    return name or None


@lru_cache(maxsize=1)
def panel_columns() -> int:
    """The number of outputs with weights that lie together: a packed weight has room for a multiple of them."""
    return int(torch.ops.pagetide.panel_columns())

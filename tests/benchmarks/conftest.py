"""The benchmarks are programs of the checkout, not part of what is installed: these tests find them there."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # last: what is installed goes first

"""The GPU benchmarks, part by part: each part has a time limit, and its results are written before the next part.

    python -m benchmarks.gpu --results build/bench                       the parts in the order of their value
    python -m benchmarks.gpu --only attention,swap --results DIR         some of them, and what they need
    python -m benchmarks.gpu --only memory --seconds 180 --budget-s 300  the external process for three minutes
    python -m benchmarks.gpu --only decode --no-overlap --no-cuda-graphs  the engine without them
    python -m benchmarks.gpu --device cpu --tiny                         every part's code on a CPU; the figures mean nothing

What was measured before stays in DIR; a part that is measured again replaces its own figures there. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import above_0, names_of
from benchmarks.figures import Figure

from .parts import BOUNDS, BY_NAME, Note, PartResult, PartRunner, Unmeasured, markdown, read, with_needs, write

LEAST_S = 10.0  # a part is not begun with less


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of(list(BY_NAME), "part"), default=list(BY_NAME), metavar="PART,...")
    parser.add_argument("--results", metavar="DIR", type=Path, help="where gpu.json and gpu.md are written")
    parser.add_argument("--budget-s", type=above_0, default=360.0, help="for all parts together (%(default)g)")
    parser.add_argument("--seconds", type=above_0, default=40.0, help="of the external process in memory (%(default)g)")
    parser.add_argument("--attention", metavar="NAME", help="the engine's, in place of its choice")
    parser.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, help="begin steps ahead, or do not (on CUDA they are)"
    )
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="capture decode steps (%(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the code")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    if args.device == "cpu" and not args.tiny:
        parser.error("a CPU runs none of the real sizes: add --tiny")
    return args


def main(given: Sequence[str] | None = None) -> int:
    """0 when every part ran to its end."""
    args = arguments(given)
    ends_at = time.monotonic() + args.budget_s
    run: dict[str, Any] = {}
    kept = read(args.results / "gpu.json") if args.results else {}
    known: dict[str, float] = {}
    errors = 0
    with _folder(args.tiny) as folder, PartRunner(args, folder) as runner:
        for spec in with_needs(args.only):
            left_s = ends_at - time.monotonic()
            box_s = max(spec.box_s, args.seconds + 40) if spec.name == "memory" else spec.box_s
            if left_s < LEAST_S:
                part = PartResult(spec.name, [], runner.device, args.seed, error=f"no time left of {args.budget_s:g} s")
                if spec.name in kept:
                    print(f"\n{spec.name}: {part.error}; the figures of an earlier run stay", flush=True)
                    continue
            else:
                print(f"\n{spec.name}: up to {min(box_s, left_s):.0f} s", flush=True)
                shown = 0
                for part in runner.run(spec, min(box_s, left_s), known):
                    for item in part.items[shown:]:
                        show(item)
                    shown = len(part.items)
            known |= {item.name: item.value for item in part.items if isinstance(item, Figure)}
            errors += part.error is not None
            print(f"{spec.name}: {part.took_s:.1f} s" + (f", ended early: {part.error}" if part.error else ""), flush=True)
            run[spec.name] = part.to_dict()
            if args.results:
                together = kept | run
                write({name: together[name] for name in BY_NAME if name in together}, args.results)
    print("\n" + "\n".join(markdown(run).splitlines()[4 : 6 + len(BOUNDS)]), flush=True)
    return 1 if errors else 0


def _folder(tiny: bool) -> tempfile.TemporaryDirectory[str]:
    """For the model: in memory, where the host has a file system of memory with room for it and what reads it."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > (0 if tiny else 24 << 30)
    return tempfile.TemporaryDirectory(prefix="pagetide-bench-", dir=memory if roomy else None)


def show(item: Any) -> None:
    """A line, or some, as soon as it is known."""
    if isinstance(item, Figure):
        bound = "" if item.target is None else f"   {'meets' if item.meets else 'MISSES'} {item.target:g}"
        print(f"  {item.name:<72} {item.value:>12,.3f} {item.unit}{bound}", flush=True)
    elif isinstance(item, Unmeasured):
        print(f"  {item.name:<72} unmeasured: {item.reason[:200]}", flush=True)
    elif isinstance(item, Note):
        print("\n".join([f"  {item.title}", *(f"    {line}" for line in item.lines)]), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""`pagetide cache`: what the disk cache of quantized weights holds, and its deletion."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from .common.units import format_bytes


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `cache` to `commands`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache",
        help="show or clear the disk cache of quantized weights",
        description="Quantized weights are kept on disk, so that the next start need not quantize again. "
        "PAGETIDE_CACHE_SIZE limits the folder (default 20GiB; 0 disables the cache): the least recently used files "
        "are deleted first.",
    )
    parser.add_argument("action", choices=("info", "clear"), help="info lists the files, clear deletes them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns its exit status. Raises OSError if files cannot be deleted."""
    from .engine.loading.quantized_cache import QuantizedCache

    cache = QuantizedCache()
    if args.action == "clear":
        freed = cache.clear()
        print(json.dumps({"freed_bytes": freed}) if args.json else f"{format_bytes(freed)} freed in {cache.folder}")
        return 0
    files = cache.files()
    total = sum(file.num_bytes for file in files)
    if args.json:
        rows = [{"name": file.path.name, "bytes": file.num_bytes, "used": file.used_s} for file in files]
        report = {"folder": str(cache.folder), "bytes": total, "most_bytes": cache.most_bytes, "files": rows}
        print(json.dumps(report, indent=1))
        return 0
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used_s))
        print(f"{file.path.name}  {format_bytes(file.num_bytes):>12}  used {used}")
    print(f"{format_bytes(total)} of at most {format_bytes(cache.most_bytes)} in {cache.folder}")
    return 0

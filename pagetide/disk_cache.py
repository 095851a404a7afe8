"""`pagetide cache`: what is kept on disk, packed weights and computed prefixes, and its deletion."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from .common.units import format_bytes


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `cache` to `commands`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache",
        help="show or clear what is kept on disk: packed weights, computed prefixes",
        description="Computed prefixes are kept in the folder of disk_kv_path; one that an engine uses is not cleared. "
        "Weights that were quantized are kept on disk, so that the next start need not quantize again; where "
        "PAGETIDE_CACHE_SIZE is set, packed ones that are not quantized too. It limits the folder (default 20GiB; 0 disables "
        "the cache): the least recently used files are deleted first.",
    )
    parser.add_argument("action", choices=("info", "clear"), help="info lists the files, clear deletes them")
    parser.add_argument("--kind", choices=("weights", "kv"), default="weights", help="packed weights, or prefixes (kv)")
    parser.add_argument("--path", type=Path, help="of kv: the engine's disk_kv_path (default: ~/.cache/pagetide/kv)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns its exit status. Raises OSError if files cannot be deleted."""
    if args.kind == "kv":
        return _run_kv(args)
    from .engine.loading.weight_cache import WeightCache

    cache = WeightCache()
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


def _run_kv(args: argparse.Namespace) -> int:
    """As `run`, for computed prefixes."""
    from .engine.execution.disk_files import FolderUnusable, clear_folder, folder_bytes, folders, kept_dir

    path, status = args.path or kept_dir(), 0
    sizes = {folder.name: folder_bytes(folder) for folder in folders(path)}
    freed = 0
    if args.action == "clear":
        for name in sizes:
            try:
                freed += clear_folder(path / name)
            except FolderUnusable as error:
                print(f"not cleared: {error}", file=sys.stderr)
                status = 1
    if args.json:
        rows = [{"name": name, "bytes": size} for name, size in sizes.items()]
        print(json.dumps({"freed_bytes": freed} if args.action == "clear" else {"folder": str(path), "models": rows}, indent=1))
    elif args.action == "clear":
        print(f"{format_bytes(freed)} freed in {path}")
    else:
        for name, size in sizes.items():
            print(f"{name}  {format_bytes(size):>12}")
        print(f"{format_bytes(sum(sizes.values()))} in {path}")
    return status

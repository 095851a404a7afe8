"""Loading a model on the CPU: its peak of memory and its time, against what stays and against reading the file.

    python -m benchmarks.loading [--json FILE] [--rounds 3] [--hidden 1024] [--layers 24] [--dtypes bfloat16 float32 int8]
        [--seed 0]

A random Qwen2-like model of 0.4 billion parameters in bfloat16, in a temporary directory and in the page cache. Each
load runs in a process of its own, which has loaded a tiny model before, so that libraries and their first use count for
nothing. Memory is the resident set: what stays is its rise by the loaded engine (weights and primitives, with a KV pool
of 1 MiB), the peak its rise at most, by the kernel's own high-water mark. Reading is `read` of the whole file into
fresh memory, in the same process.

A second start has its packed weights from the disk cache, which an engine before has written. int8 is of the bfloat16 model,
and is quantized at its first start.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import save_qwen2
from benchmarks.processes import Worker
from pagetide import LLM
from pagetide.common.units import MIB
from pagetide.engine.loading.mapped_files import LIBC
from pagetide.engine.loading.mapped_weights import MappedWeights

HIDDEN, LAYERS = 1024, 24
MOST_TIME, MOST_AGAIN, MOST_MEMORY = 2.0, 1.3, 1.15
DTYPES = ("bfloat16", "float32", "int8")


def cached_bytes(weights: MappedWeights) -> int:
    """Bytes of weights that are in memory, of this process or of the page cache."""
    pages = 0
    for one in weights.extents:
        state = (ctypes.c_ubyte * (one.num_bytes // mmap.PAGESIZE))()
        if LIBC.mincore(ctypes.c_void_p(one.begin), ctypes.c_size_t(one.num_bytes), state) == 0:
            pages += sum(page & 1 for page in bytes(state))
    return pages * mmap.PAGESIZE


def memory_bytes(name: str) -> int:
    """A size of this process from /proc: VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


def load(folder: str, dtype: str) -> LLM:
    """An engine with next to no KV."""
    form: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    return LLM(folder, device="cpu", kv_memory="1MiB", max_seqs=4, max_model_len=64, share=False, **form)


def measure_here(pipe: Connection, folder: str, tiny: str, dtype: str, cache: str | None) -> None:
    """The process: load the model of `folder` once, after that of `tiny` alone; with the packed weights of `cache`, if it has
    them.
    """
    os.environ["PAGETIDE_CACHE_SIZE"] = "0"
    with load(tiny, dtype):
        pass
    gc.collect()
    file = Path(folder) / "model.safetensors"
    if cache is not None:
        os.environ.update({"PAGETIDE_CACHE_SIZE": "1TiB", "XDG_CACHE_HOME": cache})
    began = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        content = stream.readall()
    read_s = time.perf_counter() - began
    del content
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    before, began = memory_bytes("VmRSS"), time.perf_counter()
    with load(folder, dtype) as llm:
        loaded_s = time.perf_counter() - began
        stays = memory_bytes("VmRSS") - before
        pipe.send({
            "read_s": read_s, "load_s": loaded_s, "stays": stays, "peak": memory_bytes("VmHWM") - before,
            "weights": llm.stats()["weights_bytes"],
        })  # fmt: skip


def measure(folder: Path, tiny: Path, dtype: str, rounds: int) -> list[Figure]:
    """The figures of one type of weights."""

    def run(cache: str | None) -> dict[str, float]:
        with Worker(measure_here, str(folder), str(tiny), dtype, cache) as worker:
            return cast(dict[str, float], worker.receive())

    runs, again = [], []
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        writes = run(cache)
        for _ in range(rounds):
            runs.append(run(None))
            again.append(run(cache))
    times, times_again = ([run["load_s"] / run["read_s"] for run in each] for each in (runs, again))
    peaks = [run["peak"] / run["stays"] for run in runs]

    is_read = dtype == "bfloat16"  # other types are converted
    return [
        median(f"{dtype}: peak of memory / what stays", peaks, "x", MOST_MEMORY if dtype != "int8" else None),
        median(f"{dtype}: time / reading the file", times, "x", MOST_TIME if is_read else None),
        median(f"{dtype}: time", [run["load_s"] for run in runs], "s"),
        median(f"{dtype}: a second start / reading the file", times_again, "x", MOST_AGAIN if is_read else None),
        median(f"{dtype}: a second start", [run["load_s"] for run in again], "s"),
        median(f"{dtype}: a second start, peak of memory / what stays", [run["peak"] / run["stays"] for run in again], "x"),
        median(f"{dtype}: the start that writes", [writes["load_s"]], "s"),
        median(f"{dtype}: what stays", [run["stays"] / MIB for run in runs], "MiB"),
        median(f"{dtype}: weights, by the plan", [run["weights"] / MIB for run in runs], "MiB"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--hidden", type=whole, default=HIDDEN, help="of the model, a multiple of 64 (%(default)s)")
    parser.add_argument("--layers", type=whole, default=LAYERS, help="of the model (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    args = parser.parse_args(argv)
    if args.hidden % 64:
        parser.error(f"16 heads of an even size need a hidden size that is a multiple of 64, got {args.hidden}")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        model, tiny = Path(scratch) / "model", Path(scratch) / "tiny"
        save_qwen2(model, args.hidden, args.layers, args.seed)
        save_qwen2(tiny, 64, 1, args.seed)
        for dtype in args.dtypes:
            figures += measure(model, tiny, dtype, args.rounds)
    report("loading on the CPU", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

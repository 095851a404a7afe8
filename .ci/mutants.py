"""Plants faults in the code one by one, and says how many of them the tests find.

    python .ci/mutants.py --tier quick --results build/mutants-quick.jsonl
    python .ci/mutants.py --tier all --results build/mutants-all.jsonl --only-survivors-of build/mutants-quick.jsonl
    python .ci/mutants.py --report build/mutants-*.jsonl

A mutant is one changed operator, condition, number or call in scheduler/, cache/, allocator/, api/, frames/, engine/sampling/
or fleet/: twelve for each folder, drawn with a fixed seed. It is planted in a copy of the checkout. The tests of its folder and
those of equal tokens run, cheap files first, until one fails or the CPU seconds are spent. A file of results has a line of JSON
for each mutant, and a later run continues it. --checkout names another checkout with the same code, such as one with older
tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from cpu_meter import cpu_s

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("scheduler", "cache", "allocator", "api", "frames", "engine/sampling", "fleet")
EACH = 12
SEED = 34
MOST_CPU_S = 600.0
HANGS_S = 300  # a test that takes longer hangs, which finds the mutant
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one line of a file: `before` at a place becomes `after`."""

    file: str
    line: int
    column: int
    before: str
    after: str

    @property
    def folder(self) -> str:
        return next(folder for folder in FOLDERS if self.file.startswith(f"{folder}/"))

    def plant(self, checkout: Path) -> None:
        """Write the changed file into a checkout. Raises ValueError if the code there is another."""
        path = checkout / self.file
        lines = path.read_text("utf-8").splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        if not line[self.column :].startswith(self.before.encode()):
            raise ValueError(f"{path}:{self.line} does not read {self.before!r}: the checkout has other code")
        rest = line[self.column + len(self.before.encode()) :]
        lines[self.line - 1] = (line[: self.column] + self.after.encode() + rest).decode()
        path.write_text("".join(lines), "utf-8")


def changed(node: ast.AST) -> ast.AST | None:
    """A faulty copy of a node, or None if there is no simple one."""
    faulty = copy.deepcopy(node)
    if isinstance(faulty, ast.Compare) and len(faulty.ops) == 1 and type(faulty.ops[0]) in SWAPS:
        faulty.ops = [SWAPS[type(faulty.ops[0])]()]  # type: ignore[list-item]
    elif isinstance(faulty, ast.BinOp | ast.BoolOp) and type(faulty.op) in SWAPS:
        faulty.op = SWAPS[type(faulty.op)]()  # type: ignore[assignment]
    elif isinstance(faulty, ast.UnaryOp) and isinstance(faulty.op, ast.Not):
        return faulty.operand
    elif isinstance(faulty, ast.Constant) and isinstance(faulty.value, bool):
        faulty.value = not faulty.value
    elif isinstance(faulty, ast.Constant) and isinstance(faulty.value, int):
        faulty.value += 1
    elif isinstance(faulty, ast.Expr) and isinstance(faulty.value, ast.Call):
        return ast.Pass()
    else:
        return None
    return faulty


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What runs and matters: no annotations, messages, logs, or checks of invariants."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.FunctionDef) and child.name in ("check_invariants", "__repr__"):
                continue
            if isinstance(child, ast.Expr) and ast.unparse(child).startswith(("log.", "warnings.")):
                continue
            yield child
            yield from _nodes(child)


def mutants_of(folder: str) -> list[Mutant]:
    """Every simple fault within one line of a folder's files."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        lines = [line.encode() for line in text.splitlines()]
        for node in _nodes(ast.parse(text)):
            faulty = changed(node)
            if faulty is not None and node.lineno == node.end_lineno:  # type: ignore[attr-defined]
                line, start, end = node.lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
                before, after = lines[line - 1][start:end].decode(), ast.unparse(faulty)
                # Parentheses, since the text around may bind closer than the new operator.
                after = f"({after})" if isinstance(faulty, ast.BinOp | ast.BoolOp | ast.Compare) else after
                found.append(Mutant(str(path.relative_to(ROOT)), line, start, before, after))
    return found


def drawn() -> list[Mutant]:
    """The mutants: the same ones for the same code."""
    return [m for folder in FOLDERS for m in random.Random(SEED).sample(mutants_of(folder), EACH)]


def copy_of(checkout: Path, target: Path) -> Path:
    """A copy of a checkout's files without its history, environment and results; the native kernels come along."""
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".hypothesis", ".*_cache")
    shutil.copytree(checkout, target, symlinks=True, ignore=ignored)
    return target


def run_tests(checkout: Path, folder: str, tier: str, costs: Path | None) -> tuple[str, float]:
    """The tests that may find a mutant. Returns "found", "survives", "out of time" or "broken", and the CPU seconds."""
    tiers = ("tests/deep", "tests") if tier == "all" else ("tests",)
    paths = [f"{part}/{folder}" for part in tiers]
    paths += [str(path.relative_to(checkout)) for part in tiers for path in (checkout / part).glob("engine/test_equality*.py")]
    paths = list(dict.fromkeys(path for path in paths if (checkout / path).exists()))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "cpu_meter", "-p", "no:cacheprovider"]
    command += ["-m", "not gpu and not stress", "-o", f"faulthandler_timeout={HANGS_S}", *paths]
    if tier == "all" and (checkout / "tests" / "deep").is_dir():
        command.append("--hypothesis-profile=deep")
    path = f"{checkout}/src{os.pathsep}{ROOT / '.ci'}"
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environ |= {"CPU_ORDER": str(costs)} if costs else {}
    with (checkout / "tests.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=checkout, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        spent = 0.0
        while (status := process.poll()) is None and spent < MOST_CPU_S:
            time.sleep(0.2)
            spent = max(spent, cpu_s(process.pid))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # 1: a test failed, or hung. Other statuses are faults of the run, such as a usage error.
    outcome = "out of time" if status is None else {0: "survives", 1: "found"}.get(status, "broken")
    return outcome, spent


def done_in(results: Path) -> dict[str, dict[str, object]]:
    """The lines of a file of results, by mutant."""
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    return {f"{line['file']}:{line['line']}:{line['column']}": line for line in map(json.loads, lines)}


def report(files: list[Path]) -> None:
    """Print how many mutants each file of results has found, and those that were not."""
    for file in files:
        lines = list(done_in(file).values())
        outcomes = Counter(str(line["outcome"]) for line in lines)
        print(f"{file}: {len(lines)} mutants, {dict(outcomes)}, {sum(float(str(line['cpu_s'])) for line in lines):.0f} CPU s")
        for line in lines:
            if line["outcome"] != "found":
                print(f"  {line['outcome']}: {line['file']}:{line['line']}: {line['before']} -> {line['after']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults in the code and runs the tests.")
    parser.add_argument("--tier", choices=("quick", "all"), default="quick", help="the tests that run (default: quick)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout to copy (default: this one)")
    parser.add_argument("--results", type=Path, help="the file of results, which a later run continues")
    parser.add_argument("--only-survivors-of", type=Path, help="a file of results: leave out the mutants that were found")
    parser.add_argument("--costs", type=Path, help="a folder that cpu_meter wrote: cheap files of tests run first")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (default: 2)")
    parser.add_argument("--report", type=Path, nargs="+", help="print these files of results, and run nothing")
    args = parser.parse_args()
    if args.report:
        return report(args.report)
    wanted = drawn()
    if args.only_survivors_of:
        before = done_in(args.only_survivors_of)
        wanted = [m for m in wanted if before[f"{m.file}:{m.line}:{m.column}"]["outcome"] != "found"]
    wanted = [m for m in wanted if f"{m.file}:{m.line}:{m.column}" not in done_in(args.results)]
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copies.put(copy_of(args.checkout, Path(folder, str(number))))
        for place in sorted({mutant.folder for mutant in wanted}):  # a test that fails anyway would find all of them
            outcome, spent = run_tests(Path(folder, "0"), place, args.tier, args.costs)
            print(f"{outcome:12} {spent:6.1f} s  the tests of {place} without a mutant", flush=True)
            if outcome not in ("survives", "out of time"):
                sys.exit(f"the tests of {place} fail without a mutant: {Path(folder, '0', 'tests.log').read_text()[-2000:]}")

        def try_one(mutant: Mutant) -> None:
            checkout = copies.get()
            original = (checkout / mutant.file).read_text("utf-8")
            mutant.plant(checkout)
            outcome, spent = run_tests(checkout, mutant.folder, args.tier, args.costs)
            (checkout / mutant.file).write_text(original, "utf-8")
            copies.put(checkout)
            line = {**asdict(mutant), "outcome": outcome, "cpu_s": round(spent, 1)}
            with args.results.open("a", encoding="utf-8") as results:
                results.write(json.dumps(line) + "\n")
            print(f"{outcome:12} {spent:6.1f} s  {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(try_one, wanted))


if __name__ == "__main__":
    main()

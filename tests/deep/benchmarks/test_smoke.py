"""Every benchmark, as a user starts it but for its sizes: it runs to its end and writes its figures, whatever these say.

Those with processes fork them here from a server that has loaded the libraries once; a user's are fresh interpreters.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import sys
from pathlib import Path

import pytest
from benchmark_results import check_results, read_results
from nvml_standin import COMPILER

from benchmarks import goodput, processes
from benchmarks.gpu import __main__ as gpu
from benchmarks.peers import make

ROOT = Path(__file__).resolve().parents[3]
MAIN = 'if __name__ == "__main__":'

# A command line for each.
COMMANDS = {
    "bookkeeping": "--steps 2 --sequences 8 --repeats 1",
    "engine_cpu": "--rounds 1 --hidden 32 --layers 1 --prompts 2 --new-tokens 3 --dtypes float32",
    "kept_prefixes": "--rounds 1 --hidden 256 --layers 4 --vocab 512 --tokens 2000",
    "kv_cache_dtype": "--passages 1 --hidden 128 --layers 1 --vocab 256 --cases 2x20 1x40 --new-tokens 2 --rounds 1",
    "models_on_demand": "--data none --cards 4090 --counts 4 --only router,ollama --seeds 1",
    "memory": "--batches 3 --hidden 32 --layers 1 --most 2 --first 1",
    "prefix": "--repeats 1 --blocks 2000",
    "prefix_hits": "--data none --requests 10",
    "pressure": "--seeds 1 --requests 20",
    "quantization": "--passages 1 --hidden 128 --layers 1 --vocab 256 --sequences 2 --new-tokens 2 --rounds 1",
    "serve": "--streams 1,3 --tokens 4 --requests 3 --step-ms 1 --hidden 32 --layers 1 --rounds 1",
    "sharing": "--data none --mixes 4x8b --only static,first,pool,leases --slices 2",
    "shards": "--rounds 1 --hidden 64 --layers 1 --dtypes float32 --prompts 2 --new-tokens 3",
    "state_pool": "--questions 2 --requests 12",
    "states": "--rounds 1 --hidden 64 --layers 4 --tokens 2 --copies 1",
    "windows": "--context 2048",
}
WITH_PROCESSES = {
    "elastic": "--rounds 1 --moved 48MiB --new-tokens 2 --only half-decode,growth,idle,speed",
    "fleet": "--only queue,first,workers --requests 128 --rounds 1 --streams 4 --singles 1 --seconds 0.3",
    "goodput": "--data none --seconds 0.25 --per-second 40 --step-ms 1 --only leases",
    "loading": "--rounds 1 --hidden 64 --layers 1 --dtypes float32",
    "monitor": "--starts 1 --seconds 0.1",
    "waking": "--rounds 1 --hidden 64 --layers 1 --cycles 2",
}


def run(name: str, command: str, folder: Path) -> list[str]:
    """The names of the figures that a benchmark writes."""
    file = folder / "new" / f"{name}.json"
    logger = logging.getLogger("pagetide")
    level = logger.level
    try:
        importlib.import_module(f"benchmarks.{name}").main([*command.split(), "--json", str(file)])
    finally:
        logger.setLevel(level)  # which a program may change for all of its process
    return [figure["name"] for figure in read_results(file)["figures"]]


def test_every_benchmark_is_run() -> None:
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if MAIN in path.read_text("utf-8")}
    # test_model_families.py has that one.
    assert programs - {"stand_ins"} == COMMANDS.keys() | WITH_PROCESSES.keys() | {"model_families"}


@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs_to_its_end(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(name, COMMANDS[name], tmp_path)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_those_with_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one test: they share the server that their processes are forked from."""
    monkeypatch.setattr(processes, "METHOD", "forkserver")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the server finds pagetide where it is installed, not in the checkout
    multiprocessing.set_forkserver_preload(["pagetide.engine.build"])
    monkeypatch.setattr(goodput, "SETTLE_S", 0.0)  # in which a broker forgets
    for name, command in WITH_PROCESSES.items():
        if name != "monitor" or COMPILER is not None:  # its driver is a stand-in that is compiled
            run(name, command, tmp_path)
    arguments = ["--device", "cpu", "--tiny", "--only", "recall,memory", "--seconds", "0.2", "--results", str(tmp_path)]
    assert gpu.main(arguments) == 0  # those parts that move memory; the others: test_gpu.py
    parts = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert [(name, part["error"]) for name, part in parts.items()] == [("bandwidth", None), ("recall", None), ("memory", None)]
    for part in parts.values():
        check_results(part)


def test_peers_take_turns_and_agree(tmp_path: Path) -> None:
    """A second pagetide stands in for OpenVINO: no other engine is installed here."""
    make.save_models(tmp_path / "models", layers=1, hidden=64)
    make.write_engines(tmp_path, {"openvino": (sys.executable, "benchmarks.peers.pagetide_server")})
    sizes = "--rounds 1 --prompts 2 --new-tokens 3 --long-prompt 32 --busy 1"
    names = run("engine_cpu", f"--peers {tmp_path} --only 512.*bfloat16|0.6.*int4.x.4 {sizes}", tmp_path)
    figures = read_results(tmp_path / "new" / "engine_cpu.json")["figures"]
    assert len(names) == 3 * 5  # workloads; two speeds, a ratio, an agreement and what others used
    assert any(f["value"] > 0 for f in figures if f["unit"] == "cores"), "times of milliseconds tell nothing by themselves"
    assert {f["value"] for f in figures if f["unit"] == "share"} == {1.0}
    assert {f["target"] for f in figures if f["unit"] == "x"} == {1.0}


LLAMA_CPP = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer({"usage": {"prompt_tokens": len(asked["prompt"])}})

    def answer(self, what):
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_models_take_turns_beside_a_swapping_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up llama_cpp.server: no other engine is installed here."""
    make.save_models(tmp_path / "models", layers=1, hidden=64)
    make.write_engines(tmp_path, {"llama_cpp": (sys.executable, "")})
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "server.py").write_text(LLAMA_CPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = run("waking", f"--peers {tmp_path} --rounds 1", tmp_path)
    figures = read_results(tmp_path / "new" / "waking.json")["figures"]
    assert len(names) == 5 and [len(figure["samples"]) for figure in figures] == [3] * 5
    assert [figure["target"] for figure in figures] == [0.3, None, None, None, None]

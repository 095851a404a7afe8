"""The command `pagetide`, as a process where that matters and in this one where it does not."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT
from command_rig import DEMO, PROMPTS, SHORT, _one_monitor, command, demo_fixture, finished, prompt_arguments, refused  # noqa: F401
from monitors import without

import pagetide
from pagetide import LLM, SamplingParams
from pagetide.cli import _parser, main
from pagetide.engine import llm as llm_module
from pagetide.engine.build import plan_only
from pagetide.engine.config import EngineConfig
from pagetide.engine.loading.models import BUILT_IN_FILE, read_models


def test_version_and_models_in_a_process(tmp_path: Path) -> None:
    run = finished("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"pagetide {pagetide.__version__}\n", "")
    models = tmp_path / "models.yaml"
    models.write_text("broken: [1, 2]\n")
    run = finished("models", env={**os.environ, "PAGETIDE_CONFIG": str(models)})
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"pagetide: {models}:1: ") and run.stderr.count("\n") == 1


def test_plain_text(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0)
    texts = [str(output.text) for output in demo.generate(PROMPTS, params)]
    greedy = ["generate", *DEMO, *SHORT, "--temperature", "0"]
    for stream in ([], ["--stream"]):
        assert main([*greedy, "--prompt", PROMPTS[0], *stream]) == 0
        assert capsys.readouterr() == (f"{texts[0]}\n", "")
        assert main([*greedy, *prompt_arguments(PROMPTS), *stream]) == 0
        expected = "\n".join(f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(texts, 1))
        assert capsys.readouterr() == (expected, "")


def test_stream_as_json_lines(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", *DEMO, *SHORT, "--seed", "5", *prompt_arguments(PROMPTS), "--stream", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    chunks = [json.loads(line) for line in out.split("\n")[:-1]]
    assert err == ""
    expected = demo.generate(PROMPTS, SamplingParams(max_new_tokens=12, seed=5))
    for i, output in enumerate(expected):
        own = [chunk for chunk in chunks if chunk["index"] == i]
        assert [token for chunk in own for token in chunk["token_ids"]] == output.token_ids
        assert "".join(chunk["text"] for chunk in own) == output.text
        assert ["output" in chunk for chunk in own] == [False] * (len(own) - 1) + [True]
        assert own[-1]["output"]["completions"][0]["text"] == output.text
    assert [chunk["index"] for chunk in chunks[:6]] == [0, 1, 2, 0, 1, 2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of an engine: takes down what it is `told`; answers with `error`, or raises."""
    fake = SimpleNamespace(told={}, error=None, raises=None)

    @contextmanager
    def opened(model: str, **options: Any) -> Iterator[Any]:
        fake.told = {"model": model, **options}
        try:
            yield SimpleNamespace(generate=generate)
        finally:
            fake.told["closed"] = True

    def generate(prompts: list[str], params: SamplingParams) -> list[Any]:
        fake.told.update(prompts=prompts, params=params)
        if fake.raises:
            raise fake.raises
        one = SimpleNamespace(decoded=None, token_ids=[1, 2], error=fake.error)
        return [SimpleNamespace(completions=(one,) * (params.n or 1), to_dict=dict) for _ in prompts]

    monkeypatch.setattr(llm_module, "LLM", opened)
    return fake


def test_every_option_arrives(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin"))
    engine = "--device cuda:1 --dtype bfloat16 --kv-memory 2GiB --block-size 32 --max-seqs 7 --max-step-tokens 99"
    numbers = "--max-new-tokens 5 --min-new-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 --seed -4"
    more = (
        "--n 2 --frequency-penalty 0.5 --presence-penalty -1 --start-id 3 --best-of 4 --length-penalty 0.5 "
        "--early-stopping never --logprobs 2 --prompt-logprobs 0 --bad-word x --bad-word yz --regex a+ --num-beams 1 --json"
    )
    ends = "--repetition-penalty 1.5 --stop a --stop bc --stop-token-id 5 --stop-token-id 6 --ignore-eos"
    serving = "--max-chunk-tokens 33 --host-kv-memory 8GiB --no-prefix-caching --no-share --max-model-len 512"
    serving += " --idle-s 2.5 --prefix-cache-memory 1GiB --no-special-tokens --prompt-file - --prompt p"
    options = f"{engine} {serving} {numbers} {more} {ends}"
    assert main(["generate", "--model", "org/model", *options.split()]) == 0
    assert fake.told == {
        "model": "org/model", "device": "cuda:1", "dtype": "bfloat16", "kv_memory": "2GiB", "block_size": 32,
        "max_seqs": 7, "max_step_tokens": 99, "max_model_len": 512, "max_chunk_tokens": 33, "host_kv_memory": "8GiB",
        "prefix_cache_memory": "1GiB", "prefix_caching": False, "idle_s": 2.5, "share": False,
        "prompts": ["p", "from\nstdin"], "closed": True,
        "params": SamplingParams(
            max_new_tokens=5, min_new_tokens=2, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125,
            repetition_penalty=1.5, seed=-4, stop=["a", "bc"], stop_token_ids=[5, 6], ignore_eos=True,
            add_special_tokens=False, n=2, frequency_penalty=0.5, presence_penalty=-1, start_id=3, best_of=4,
            length_penalty=0.5, early_stopping="never", logprobs=2, prompt_logprobs=0, bad_words=["x", "yz"], regex="a+",
            num_beams=1,
        ),
    }  # fmt: skip
    assert capsys.readouterr().out == "{}\n" * 2
    assert main(["generate", "--model-name", "m", "--prompt", "p", "--prompt", "q", "--n", "2"]) == 0
    assert capsys.readouterr().out == "\n".join(f"--- {i} of 4 ---\n[1, 2]\n" for i in range(1, 5))  # ids
    assert main(["generate", "--model-name", "m", "--prompt", "p", "--block-size", "auto"]) == 0
    defaults = {"prompts": ["p"], "params": SamplingParams(), "closed": True}
    assert fake.told == {"model": "m", "block_size": "auto", **defaults}


@pytest.mark.parametrize("name", ["json_schema", "grammar"])
def test_a_form_is_a_text_or_a_file(name: str, fake: Any, tmp_path: Path, capsys: Any) -> None:
    file, option = tmp_path / "form", f"--{name.replace('_', '-')}"
    file.write_text('{"type": "array"}\n', "utf-8")
    for given, text in (("{}", "{}"), (f"@{file}", '{"type": "array"}\n')):
        assert main(["generate", "--model-name", "m", "--prompt", "p", option, given]) == 0
        assert getattr(fake.told["params"], name) == text
    with pytest.raises(SystemExit):
        main(["generate", "--model-name", "m", "--prompt", "p", option, f"@{file}.none"])
    assert f"pagetide generate: argument {option}: cannot read {file}.none: " in capsys.readouterr().err


def test_early_stopping_and_second_names_of_flags(fake: Any) -> None:
    for text, value in (("true", True), ("false", False)):
        assert main(["generate", "--model-name", "m", "--prompt", "p", "--early-stopping", text]) == 0
        assert fake.told["params"].early_stopping is value
    for model in ("--model", "--model-name"):
        assert main(["generate", model, "m", "--prompt", "p", "--max-tokens", "7", "--min-tokens", "2"]) == 0
        assert fake.told["model"] == "m"
        assert fake.told["params"] == SamplingParams(max_new_tokens=7, min_new_tokens=2)
    assert [_parser().parse_args(["plan", *given]).model for given in (["m"], ["--model", "m"])] == ["m", "m"]


def test_exit_status(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model-name", "m", "--prompt", "p"]
    fake.error = "RuntimeError: lost the device"
    assert main(arguments) == 1
    assert capsys.readouterr() == ("[1, 2]\n", "pagetide: a request failed: RuntimeError: lost the device\n")
    fake.raises = KeyboardInterrupt()
    assert main(arguments) == 130
    assert fake.told["closed"]
    assert capsys.readouterr() == ("", "interrupted\n")
    fake.raises = KeyError("a bug of ours shows its traceback")
    with pytest.raises(KeyError):
        main(arguments)


def test_an_unknown_model_is_told_which_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    complaint = refused(capsys, "generate", "--model-name", "nosuch", "--prompt", "x")
    assert complaint.startswith("pagetide: 'nosuch' is neither a known name nor a folder, nor a repository in the ")
    assert f"{BUILT_IN_FILE} names demo" in complaint and "hf download" not in complaint
    assert "or openai" in refused(capsys, "run", "--model", "demo", "--input", "-", "--output", str(tmp_path / "o"))
    said = refused(capsys, "serve", "demo", "--max-model-len", "9999")
    assert said.startswith("pagetide: the model demo cannot be loaded: max_model_len 9,999 is beyond the 1,024")


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the engine refuses is said as the library says it (tests/engine/test_llm.py, test_config.py)."""
    binary = tmp_path / "prompt.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments, message in {
        (): "no prompt given: use --prompt TEXT or --prompt-file F",
        ("--prompt-file", str(tmp_path / "none.txt")): "none.txt: No such file or directory; check the path",
        ("--prompt-file", str(binary)): "prompt.bin",
        ("--prompt", "x", "--max-new-tokens", "0"): "max_new_tokens must be at least 1, got 0",
        ("--prompt", "x", "--stop-token-id", "5000"): "stop_token_ids [5000] are outside the vocabulary of 4,096",
        ("--prompt", "x", "--kv-memory", "2parsecs"): "kv_memory: cannot read '2parsecs' as an amount of memory",
        ("--prompt", "x", "--host-kv-memory", "much"): "host_kv_memory: cannot read 'much'",
        ("--prompt", "x", "--logprobs", "1"): "log-probabilities are only printed as JSON: add --json",
        ("--prompt", "x", "--model", str(tmp_path)): f"{tmp_path} has no config.json",
        ("--prompt", "x", "--model", str(tmp_path / "none")): f"there is no folder {tmp_path / 'none'}",
    }.items():
        assert message in refused(capsys, "generate", *DEMO, *arguments)


def test_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = BUILT_IN_FILE.parent.parent / "engine" / "demo_model"
    assert main(["models", "--json"]) == 0
    line = [text.startswith("demo:") for text in BUILT_IN_FILE.read_text().splitlines()].index(True) + 1
    row = {"name": "demo", "path": str(folder), "defined_in": f"{BUILT_IN_FILE}:{line}", "error": None}
    assert json.loads(capsys.readouterr().out) == [row]
    own = tmp_path / "own.yaml"
    own.write_text(f"# mine\nlonger-name: {folder}\ngone: ./gone\n")
    monkeypatch.setenv("PAGETIDE_CONFIG", str(own))
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["demo", "longer-name", "gone"]
    assert rows["longer-name"] == {**row, "name": "longer-name", "defined_in": f"{own}:2"}
    assert rows["gone"]["path"] == "./gone" and str(tmp_path / "gone") in rows["gone"]["error"]
    assert main(["models"]) == 0
    _, longer, gone, why = capsys.readouterr().out.splitlines()
    assert longer == f"longer-name  {folder}  ({own}:2)"
    assert gone.startswith("gone         ./gone  (") and why.startswith("             not usable: ")
    assert "longer-name" in refused(capsys, "plan", "nosuch")


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """As the library's own (tests/engine/test_llm.py compares that with a real start)."""
    options = ["--device", "cpu", "--context", "200", "--kv-memory", "32MiB"]
    assert main(["plan", "demo", *options, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert err == ""
    expected = plan_only(EngineConfig.resolve("demo", device="cpu", kv_memory="32MiB"), context=200).to_dict()
    for name, value in expected.items():
        loose = name in ("free_bytes", "left_bytes", "answers_bytes")  # others work on this machine too
        assert told[name] == (pytest.approx(value, rel=0.2) if loose else value), name
    assert told["kv_bytes_per_token"] == 2 * 8 * 4 * 32 * 4
    assert main(["plan", "demo", *options]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["model".ljust(len(next(iter(lines))))].strip() == "demo as float32 on cpu"
    shown = {name.strip(): value.strip() for name, value in lines.items()}
    assert shown["sequences of 200"] == f"{told['sequences_that_fit']:,} at the same time"
    assert shown["KV per token"] == "8,192 bytes in float32"
    in_int8 = told["kv_cache_dtypes"]["int8"]
    fit = f"{in_int8['sequences_that_fit']:,} with the same memory, 2,176 bytes per token"
    assert shown["... in int8 or fp8"] == fit and told["kv_cache_dtypes"]["fp8"] == in_int8
    assert shown["tokens that fit"] == f"{told['tokens_that_fit']:,}"
    assert "context must be 1 to 1,024 tokens" in refused(capsys, "plan", "demo", "--context", "1025")
    assert "context must be 1 to" in refused(capsys, "plan", "demo", "--context", "0")


def test_a_plan_of_a_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/engine/memory/test_estimate.py compares the numbers with transformers' model; here `--exact` is that."""
    demo = read_models()["demo"].resolve().path
    shutil.copy(demo / "config.json", tmp_path)
    device = ["--memory", "2GiB", "--max-seqs", "8", "--json"]
    told = []
    for more in ([str(tmp_path)], ["--config", str(tmp_path / "config.json")], [str(tmp_path), "--exact"]):
        assert main(["plan", *more, *device]) == 0
        told.append(json.loads(capsys.readouterr().out))
    plans = [*(one["plan"] for one in told[:2]), told[2]]
    for plan in plans:
        for name in ("model", "device", "answers_bytes"):
            del plan[name]
    assert plans[0] == plans[1] == plans[2] and told[0]["source"] == "config.json"
    assert main(["plan", "demo", *device]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == "the headers of its weight files"
    assert main(["plan", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(" 80 GB")
    divided = []  # the weights are here, or not, or the configuration alone is named
    for more in (["demo"], [str(tmp_path)], ["--config", str(tmp_path / "config.json")]):
        assert main(["plan", *more, "--tensor-parallel-size", "2", *device]) == 0
        divided.append(json.loads(capsys.readouterr().out) | {"model": "", "answers_bytes": 0})
    assert divided[0] == divided[1] == divided[2] and divided[0]["device"] == "cuda:0,cuda:1"
    assert divided[0]["weights_bytes"] < plans[0]["weights_bytes"]
    assert "other.json is not there" in refused(capsys, "plan", "--config", str(tmp_path / "other.json"))
    assert "is a folder: name it without" in refused(capsys, "plan", "--config", str(tmp_path))
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert "needs a folder: rename" in refused(capsys, "plan", "--config", str(tmp_path / "other.json"), "--exact")
    assert "is neither auto, cpu" in refused(capsys, "plan", "demo", "--device", "voodoo2")


def test_arguments_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in [
        ([], "pagetide"),
        (["nosuch"], "nosuch"),
        (["generat"], ": did you mean generate? ("),
        (["generate"], "model"),
        (["plan"], "pagetide plan: "),
        (["generate", "--model", "m", "--promt", "x"], "generate: unknown flag --promt: did you mean --prompt? ("),
        (["run", "--inputt=x"], "run: unknown flag --inputt: did you mean --input? ("),
        (["serve", "m", "--gpu-memory-utilization", "1"], ": use --kv-memory instead (the size of"),
        (["plan", "m", "--quux"], "plan: unknown flag --quux ("),
        (["generate", "--model", "m", "--stop-strings", "x"], "--stop-strings: use --stop instead ("),
        (["plan", "m", "--model", "n"], "plan: argument --model/--model-name: not allowed with argument MODEL ("),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capsys.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("pagetide") and err.endswith(" --help)\n") and said in err
    size = "--block-size: block_size must be an integer of at least 1, or auto, got 'big'"
    assert size in refused(capsys, "generate", *DEMO, "--prompt", "x", "--block-size", "big")
    said = "--early-stopping: early_stopping must be "
    assert said in refused(capsys, "generate", *DEMO, "--prompt", "x", "--early-stopping", "1")


@pytest.mark.parametrize(("library", "arguments"), [("numpy", ["generate", "--help"]), ("torch", ["plan", "demo"])])
def test_a_library_that_is_missing_is_named_on_one_line(library: str, arguments: list[str], tmp_path: Path) -> None:
    """As after an installation without dependencies: torch, or numpy, on which the parser's flags depend."""
    text = f"raise ModuleNotFoundError('missing', name={library!r})"
    run = finished(*arguments, env=without(tmp_path, library, text))
    said = f"pagetide: {library} is not installed, and this command needs it: pip install -e '{ROOT}'\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", said)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_interrupt_while_libraries_are_loaded_is_no_traceback(library: str, tmp_path: Path) -> None:
    """numpy is loaded for the flags, torch for the command itself."""
    text = "import signal; signal.raise_signal(signal.SIGINT)"
    run = finished("plan", "demo", env=without(tmp_path, library, text))
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "interrupted\n")


def test_a_closed_output_is_no_failure() -> None:
    script = shlex.join(command("models")) + " >&-"
    ended = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")

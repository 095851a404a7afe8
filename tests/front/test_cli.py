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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pagetide
from pagetide import LLM, SamplingParams
from pagetide.cli import _parser, main
from pagetide.engine import llm as llm_module
from pagetide.engine.build import plan_only
from pagetide.engine.config import EngineConfig
from pagetide.engine.loading.models import BUILT_IN_FILE
from pagetide.monitor import watch

PROMPTS = ['"What is the matter," said', "Natásha went to the window and", "CORIOLANUS:\n"]
DEMO = ["--model-name", "demo", "--device", "cpu", "--kv-memory", "32MiB"]
SHORT = ["--max-new-tokens", "12"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pagetide", *arguments]


def finished(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False, **options)


def prompt_arguments(prompts: list[str]) -> list[str]:
    return [argument for prompt in prompts for argument in ("--prompt", prompt)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what has to fail; its one line of complaint."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagetide: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module", autouse=True)
def _one_monitor() -> Iterator[None]:
    """Else each engine would start one, and end it again."""
    with watch(timeout_s=60):
        yield


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", device="cpu", kv_memory="32MiB") as llm:
        yield llm


@pytest.fixture(autouse=True)
def _built_in_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGETIDE_CONFIG", raising=False)


# -- as a process ------------------------------------------------------------------------------------------------------


def test_prompts_from_everywhere_as_json_lines(demo: LLM, tmp_path: Path) -> None:
    """What a process prints is what the library gives for the same seed; nothing else is printed."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPTS[2], "utf-8")
    run = finished(
        "generate", *DEMO, *SHORT, "--seed", "3", *prompt_arguments(PROMPTS[:2]), "--prompt-file", str(file),
        "--prompt-file", "-", "--json", input="潮汐 in the",
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    lines = [json.loads(line) for line in run.stdout.split("\n")[:-1]]
    expected = demo.generate([*PROMPTS, "潮汐 in the"], SamplingParams(max_new_tokens=12, seed=3))
    assert [line["prompt"] for line in lines] == [*PROMPTS, "潮汐 in the"]
    for line, output in zip(lines, expected, strict=True):
        told = output.to_dict()
        (completion,), timings = line["completions"], line["completions"][0]["timings"]
        same = {name: told[name] for name in ("request_id", "completions", "num_cached_tokens")}
        assert line | same == told
        assert completion | {"timings": 0} == told["completions"][0] | {"timings": 0}
        assert 0 < timings["first_token_s"] <= timings["total_s"]


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    """`pagetide generate --stream ... | head -1`"""
    many = prompt_arguments(PROMPTS)
    arguments = command("generate", *DEMO, "--max-new-tokens", "600", "--ignore-eos", "--stream", *many)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "--- 1 of 3 ---\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(300) == 141


def test_version_and_models_in_a_process(tmp_path: Path) -> None:
    run = finished("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"pagetide {pagetide.__version__}\n", "")
    models = tmp_path / "models.yaml"
    models.write_text("broken: [1, 2]\n")
    run = finished("models", env={**os.environ, "PAGETIDE_CONFIG": str(models)})
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"pagetide: {models}:1: ") and run.stderr.count("\n") == 1


# -- generate ----------------------------------------------------------------------------------------------------------


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


def test_several_continuations_are_those_of_the_library(
    demo: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many as are asked for, else as the models file says; streamed they stand in the same order."""
    own = tmp_path / "own.yaml"
    own.write_text(f"demo:\n  path: {BUILT_IN_FILE.parent.parent / 'engine' / 'demo_model'}\n  sampling: {{n: 2}}\n")
    monkeypatch.setenv("PAGETIDE_CONFIG", str(own))
    drawn = ["--temperature", "1", "--seed", "7"]
    for n, asked in ((2, []), (3, ["--n", "3"]), (1, ["--n", "1"])):
        params = SamplingParams(n=n, max_new_tokens=12, temperature=1, seed=7)
        texts = [str(each.text) for output in demo.generate(PROMPTS[:2], params) for each in output.completions]
        assert len(texts) == 2 * n
        expected = "\n".join(f"--- {i} of {2 * n} ---\n{text}\n" for i, text in enumerate(texts, 1))
        for stream in ([], ["--stream"]):
            arguments = ["generate", *DEMO, *SHORT, *drawn, *asked, *prompt_arguments(PROMPTS[:2]), *stream]
            assert main(arguments) == 0
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


def test_a_seed_reproduces_and_another_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", *DEMO, *SHORT, "--seed", seed, "--prompt", PROMPTS[1]]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


class FakeLLM:
    """Takes down what it is told; answers with `error`."""

    told: dict[str, Any]
    error: str | None = None
    raises: BaseException | None = None

    def __init__(self, model: str, **options: Any) -> None:
        type(self).told = {"model": model, **options}

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.told["closed"] = True

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
        self.told.update(prompts=prompts, params=params)
        if self.raises:
            raise self.raises
        one = SimpleNamespace(decoded=None, token_ids=[1, 2], error=self.error)
        return [SimpleNamespace(completions=(one,) * (params.n or 1), to_dict=dict) for _ in prompts]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    class Fake(FakeLLM):
        pass

    monkeypatch.setattr(llm_module, "LLM", Fake)
    return Fake


def test_every_option_arrives(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin"))
    engine = "--device cuda:1 --dtype bfloat16 --kv-memory 2GiB --block-size 32 --max-seqs 7 --max-step-tokens 99"
    numbers = (
        "--max-new-tokens 5 --min-new-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 --seed -4 --n 2"
    )
    more = (
        "--frequency-penalty 0.5 --presence-penalty -1 --start-id 3 --best-of 4 --length-penalty 0.5 --early-stopping never "
        "--logprobs 2 --prompt-logprobs 0 --bad-word x --bad-word yz --regex a+ --num-beams 1 --json"
    )
    ends = "--repetition-penalty 1.5 --stop a --stop bc --stop-token-id 5 --stop-token-id 6 --ignore-eos"
    serving = "--max-chunk-tokens 33 --host-kv-memory 8GiB --no-prefix-caching --idle-s 2.5 --no-share "
    serving += "--prefix-cache-memory 1GiB"
    options = (
        f"{engine} --max-model-len 512 {serving} {numbers} {more} {ends} --no-special-tokens --prompt-file - --prompt p"
    )
    arguments = ["generate", "--model", "org/model", *options.split()]
    assert main(arguments) == 0
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
    assert fake.told == {
        "model": "m",
        "block_size": "auto",
        "prompts": ["p"],
        "params": SamplingParams(),
        "closed": True,
    }


@pytest.mark.parametrize("name", ["json_schema", "grammar"])
def test_a_form_is_a_text_or_a_file(name: str, fake: type[FakeLLM], tmp_path: Path, capsys: Any) -> None:
    file, option = tmp_path / "form", f"--{name.replace('_', '-')}"
    file.write_text('{"type": "array"}\n', "utf-8")
    for given, text in (("{}", "{}"), (f"@{file}", '{"type": "array"}\n')):
        assert main(["generate", "--model-name", "m", "--prompt", "p", option, given]) == 0
        assert getattr(fake.told["params"], name) == text
    with pytest.raises(SystemExit):
        main(["generate", "--model-name", "m", "--prompt", "p", option, f"@{file}.none"])
    assert f"pagetide generate: argument {option}: cannot read {file}.none: " in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False)])
def test_early_stopping(text: str, value: bool, fake: type[FakeLLM]) -> None:
    assert main(["generate", "--model-name", "m", "--prompt", "p", "--early-stopping", text]) == 0
    assert fake.told["params"].early_stopping is value


def test_log_probabilities_as_json(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--temperature", "0", "--prompt", PROMPTS[0], "--logprobs", "2", "--prompt-logprobs", "1", "--json"]
    params = SamplingParams(max_new_tokens=12, temperature=0, logprobs=2, prompt_logprobs=1)
    expected = json.loads(json.dumps(demo.generate(PROMPTS[:1], params)[0].to_dict(), allow_nan=False))
    assert main(["generate", *DEMO, *SHORT, *asked]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["prompt_logprobs"] == expected["prompt_logprobs"]
    assert output["completions"][0]["logprobs"] == expected["completions"][0]["logprobs"]
    assert main(["generate", *DEMO, *SHORT, *asked, "--stream"]) == 0
    chunks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    streamed = [one for chunk in chunks for one in chunk["logprobs"]]
    assert [one["token_id"] for one in streamed] == output["completions"][0]["token_ids"]
    assert [[i for i, _ in one["top"]] for one in streamed] == [
        [i for i, _ in one["top"]] for one in expected["completions"][0]["logprobs"]
    ]


def test_the_best_of_several(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    best = ["generate", *DEMO, *SHORT, "--prompt", PROMPTS[0], "--temperature", "1", "--seed", "7", "--best-of", "5"]
    params = SamplingParams(max_new_tokens=12, temperature=1, seed=7, best_of=5)
    assert main(best) == 0
    assert capsys.readouterr() == (f"{demo.generate(PROMPTS[0], params)[0].text}\n", "")
    assert "best_of 5 cannot be streamed with n 1" in refused(capsys, *best, "--stream")


def test_exit_status(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
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


def test_an_unknown_model_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    complaint = refused(capsys, "generate", "--model-name", "nosuch", "--prompt", "x")
    assert complaint.startswith("pagetide: 'nosuch' is not a known name")
    assert f"{BUILT_IN_FILE} names demo" in complaint
    assert "hf download nosuch" in complaint


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    binary = tmp_path / "prompt.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments, message in {
        (): "nothing to continue: give --prompt TEXT or --prompt-file F",
        ("--prompt-file", str(tmp_path / "none.txt")): f"No such file or directory: '{tmp_path / 'none.txt'}'",
        ("--prompt-file", str(binary)): "prompt.bin",
        ("--prompt", "x", "--max-new-tokens", "0"): "max_new_tokens must be at least 1, got 0",
        ("--prompt", "x", "--temperature", "-1"): "temperature must be 0 (greedy) or above, got -1.0",
        ("--prompt", "x", "--temperature", "nan"): "temperature must be 0 (greedy) or above, got nan",
        ("--prompt", "x", "--top-p", "1.1"): "top_p must be in (0, 1], got 1.1",
        ("--prompt", "x", "--stop", ""): "stop must be non-empty strings",
        ("--prompt", "x", "--stop-token-id", "5000"): "stop_token_ids [5000] are outside the vocabulary of 4,096",
        ("--prompt", "x", "--kv-memory", "2parsecs"): "kv_memory: cannot read '2parsecs' as an amount of memory",
        ("--prompt", "x", "--kv-memory", "1KiB"): "kv_memory 1.00 KiB is no pool",
        ("--prompt", "x", "--kv-memory", "900TiB"): "are free",
        ("--prompt", "x", "--device", "gpu"): "device must be auto, cpu, cuda or cuda:N",
        ("--prompt", "x", "--dtype", "int8"): "dtype must be one of auto, float32",
        ("--prompt", "x", "--max-model-len", "5000"): "max_model_len 5,000 is beyond the 1,024 positions of demo",
        ("--prompt", "x", "--max-seqs", "0"): "max_seqs must be at least 1",
        ("--prompt", "x", "--max-chunk-tokens", "0"): "max_chunk_tokens must be at least 1",
        ("--prompt", "x", "--idle-s", "-1"): "idle_s must be a number of seconds of at least 0, got -1.0",
        ("--prompt", "x", "--host-kv-memory", "much"): "host_kv_memory: cannot read 'much'",
        ("--prompt", "x", "--host-kv-memory", "1MiB", "--no-prefix-caching"): "leave prefix_caching on",
        ("--prompt", "x", "--prefix-cache-memory", "much"): "prefix_cache_memory: cannot read 'much'",
        ("--prompt", "x", "--prefix-cache-memory", "0", "--no-prefix-caching"): "or prefix_cache_memory out",
        ("--prompt", "x", "--logprobs", "1"): "log-probabilities are not shown beside a text: add --json",
        ("--prompt", "x", "--best-of", "2", "--n", "3"): "best_of 2 is below n 3",
        ("--prompt", "x", "--n", "0"): "n must be at least 1, got 0",
        ("--prompt", "word " * 2000): "with a context of 1,024 tokens",
        ("--prompt", "\udcff"): "surrogates not allowed",
        ("--prompt", "x", "--model", str(tmp_path)): f"{tmp_path} has no config.json",
        ("--prompt", "x", "--model", str(tmp_path / "none")): f"there is no folder {tmp_path / 'none'}",
        ("--prompt", "x", "--model", ""): "the model's name is empty",
    }.items():
        assert message in refused(capsys, "generate", *DEMO, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["nosuch"], ["generate"], ["generate", *DEMO, "--top-q", "1"], ["generate", *DEMO, "--seed", "one"],
        ["generate", *DEMO, "--block-size", "big"], ["generate", *DEMO, "--early-stopping", "1"], ["plan"], ["models", "demo"],
    ],
)  # fmt: skip
def test_arguments_that_are_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagetide") and err.endswith(" --help)\n") and err.count("\n") == 1
    assert "_int_or_auto" not in err and "_early_stopping" not in err


# -- models and plan ---------------------------------------------------------------------------------------------------


def test_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = BUILT_IN_FILE.parent.parent / "engine" / "demo_model"
    assert main(["models", "--json"]) == 0
    row = {"name": "demo", "path": str(folder), "defined_in": f"{BUILT_IN_FILE}:{line_of('demo:')}", "error": None}
    assert json.loads(capsys.readouterr().out) == [row]
    own = tmp_path / "own.yaml"
    own.write_text(f"# mine\nlonger-name: {folder}\ngone: ./gone\n")
    monkeypatch.setenv("PAGETIDE_CONFIG", str(own))
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["demo", "longer-name", "gone"]
    assert rows["longer-name"] == {
        "name": "longer-name", "path": str(folder), "defined_in": f"{own}:2", "error": None,
    }  # fmt: skip
    assert rows["gone"]["path"] == "./gone" and str(tmp_path / "gone") in rows["gone"]["error"]
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"longer-name  {folder}  ({own}:2)"
    assert lines[2].startswith("gone         ./gone  (")
    assert lines[3].startswith("             not usable: ")
    assert len(lines) == 4
    assert "longer-name" in refused(capsys, "plan", "nosuch")


def line_of(start: str) -> int:
    lines = BUILT_IN_FILE.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.startswith(start))


def test_plan(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """As the library's own, and as the real start has it."""
    options = ["--device", "cpu", "--context", "200", "--kv-memory", "32MiB"]
    assert main(["plan", "demo", *options, "--json"]) == 0
    out, err = capsys.readouterr()
    told, stats = json.loads(out), demo.stats()
    assert err == ""
    expected = plan_only(EngineConfig.resolve("demo", device="cpu", kv_memory="32MiB"), context=200).to_dict()
    for name, value in expected.items():
        loose = name in ("free_bytes", "left_bytes")  # others work on this machine too
        assert told[name] == (pytest.approx(value, rel=0.2) if loose else value), name
    assert told["kv_bytes"] == pytest.approx(stats["kv_bytes"], rel=0.05)
    assert told["kv_bytes_per_token"] == stats["kv_bytes_per_token"] == 2 * 8 * 4 * 32 * 4
    assert told["sequences_that_fit"] == pytest.approx(stats["blocks"]["usable"] // 13, rel=0.05)
    assert main(["plan", "demo", *options]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["model".ljust(len(next(iter(lines))))].strip() == "demo as float32 on cpu"
    shown = {name.strip(): value.strip() for name, value in lines.items()}
    assert shown["sequences of 200"] == f"{told['sequences_that_fit']:,} at the same time"
    assert shown["KV per token"] == "8,192 bytes in float32"
    in_int8 = told["kv_cache_dtypes"]["int8"]
    assert (
        shown["... in int8 or fp8"] == f"{in_int8['sequences_that_fit']:,} with the same memory, 2,176 bytes per token"
    )
    assert told["kv_cache_dtypes"]["fp8"] == in_int8
    assert shown["tokens that fit"] == f"{told['tokens_that_fit']:,}"
    assert "context must be 1 to 1,024 tokens" in refused(capsys, "plan", "demo", "--context", "1025")
    assert "context must be 1 to" in refused(capsys, "plan", "demo", "--context", "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--model", "m", "--promt", "x"], "generate: unknown flag --promt: did you mean --prompt? ("),
        (["run", "--inputt=x"], "run: unknown flag --inputt: did you mean --input? ("),
        (["plan", "m", "--quux"], "plan: unknown flag --quux ("),
        (["generate", "--model", "m", "--max-num-seqs", "4"], "flag --max-num-seqs: as for LLM: write --max-seqs ("),
        (
            ["generate", "--model", "m", "--stop-strings", "x"],
            "flag --stop-strings: as for SamplingParams: write --stop (",
        ),
        (["plan", "m", "--model", "n"], "plan: argument --model/--model-name: not allowed with argument MODEL ("),
    ],
)
def test_an_unknown_flag_is_answered(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_second_names_of_flags(fake: type[FakeLLM]) -> None:
    for model in ("--model", "--model-name"):
        assert main(["generate", model, "m", "--prompt", "p", "--max-tokens", "7", "--min-tokens", "2"]) == 0
        assert fake.told["model"] == "m"
        assert fake.told["params"] == SamplingParams(max_new_tokens=7, min_new_tokens=2)


def test_the_model_of_plan_by_place_or_flag() -> None:
    assert [_parser().parse_args(["plan", *given]).model for given in (["m"], ["--model", "m"])] == ["m", "m"]


def test_standard_input_needs_a_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, "run", "--model", "demo", "--input", "-", "--output", str(tmp_path / "o"))
    assert "add --input-format text, jsonl or openai" in said


def test_a_library_that_is_missing_is_named_on_one_line(tmp_path: Path) -> None:
    """As after an installation without dependencies: torch, or numpy, on which the parser's flags depend."""
    for library, arguments in (("numpy", ["generate", "--help"]), ("torch", ["plan", "demo"])):
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").write_text(f"raise ModuleNotFoundError('missing', name={library!r})")
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        run = finished(*arguments, env={**os.environ, "PYTHONPATH": path})
        said = f"pagetide: {library} is not installed, and this command needs it: pip install pagetide\n"
        assert (run.returncode, run.stdout, run.stderr) == (2, "", said)
        shutil.rmtree(tmp_path / library)


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_an_interrupt_while_libraries_are_loaded_is_no_traceback(module: str, tmp_path: Path) -> None:
    """numpy is loaded for the flags, torch for the command itself."""
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = finished("plan", "demo", env={**os.environ, "PYTHONPATH": path})
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "interrupted\n")


def test_a_closed_output_is_no_failure() -> None:
    script = shlex.join(command("models")) + " >&-"
    ended = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_text_beyond_the_locale_is_refused_with_what_to_set() -> None:
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    run = finished("generate", *DEMO, "--prompt", "Café ☃", env=environ)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("pagetide: a prompt must be text that UTF-8 can say: ") and run.stderr.count("\n") == 1
    assert run.stderr.endswith(": set PYTHONUTF8=1, or LC_ALL=C.UTF-8\n")

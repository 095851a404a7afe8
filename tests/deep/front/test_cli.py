"""The command `pagetide generate`, started cold as a process, and with an engine for each command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from command_rig import DEMO, PROMPTS, SHORT, _one_monitor, command, demo_fixture, finished, prompt_arguments  # noqa: F401

from pagetide import LLM, SamplingParams
from pagetide.cli import main
from pagetide.engine.loading.models import BUILT_IN_FILE


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


def test_output_that_the_locale_cannot_encode_is_not_lost() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    asked = ["generate", *DEMO, "--prompt", "Call", "--regex", "\u00e9{2}ok", "--max-new-tokens", "20"]
    for more, read in (
        (["--json"], lambda out: json.loads(out)["completions"][0]["text"]),
        (["--json", "--stream"], lambda out: json.loads(out.splitlines()[-1])["output"]["completions"][0]["text"]),
        ([], lambda out: out.removesuffix("\n").replace("\\xe9", "\u00e9")),
    ):
        run = finished(*asked, *more, env=environ)
        assert (run.returncode, run.stderr, read(run.stdout)) == (0, "", "\u00e9\u00e9ok"), more


def test_text_beyond_the_locale_is_refused_with_what_to_set() -> None:
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    run = finished("generate", *DEMO, "--prompt", "Café ☃", env=environ)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("pagetide: a prompt must be text that UTF-8 can say: ") and run.stderr.count("\n") == 1
    assert run.stderr.endswith(": set PYTHONUTF8=1, or LC_ALL=C.UTF-8\n")


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


def test_log_probabilities_as_json(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--temperature", "0", "--prompt", PROMPTS[0], "--logprobs", "2", "--prompt-logprobs", "1", "--json"]
    params = SamplingParams(max_new_tokens=12, temperature=0, logprobs=2, prompt_logprobs=1)
    expected = json.loads(json.dumps(demo.generate(PROMPTS[:1], params)[0].to_dict(), allow_nan=False))
    assert main(["generate", *DEMO, *SHORT, *asked, "--stream"]) == 0
    chunks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    output = chunks[-1]["output"]
    assert output["prompt_logprobs"] == expected["prompt_logprobs"]
    assert output["completions"][0]["logprobs"] == expected["completions"][0]["logprobs"]
    streamed = [one for chunk in chunks for one in chunk["logprobs"]]
    assert [one["token_id"] for one in streamed] == output["completions"][0]["token_ids"]
    tops = [[[token for token, _ in one["top"]] for one in told] for told in (streamed, output["completions"][0]["logprobs"])]
    assert tops[0] == tops[1]

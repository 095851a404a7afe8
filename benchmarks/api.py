"""The overhead of each API: the same work through `AsyncLLM`, the pipeline and `pagetide run`, compared with `LLM.generate`.

    python -m benchmarks.api [--json FILE] [--data DIR] [--rounds 7] [--prompts 256] [--new-tokens N] [--seed 0]

The bundled model in float32 on the CPU, 64 sequences at a time. Prompts are pieces of text of 4 to 32 words, and prompt and
output together have at most 80 tokens, so that short prompts have long outputs; or each output has N. Tokens are drawn, all
with one seed. The text is that of the .txt files in DIR, or the model's held-out one.

    LLM.generate    all prompts in one call: what the others are measured by
    AsyncLLM        a task each prompt, all at once, on one event loop; an engine of its own, with the same settings
    ... streamed    the same with `stream`, read token by token: for the record
    pipeline        over the very engine of LLM.generate, given a generator of strings; gives full texts, as transformers does
    run             the command's `main`, in this process, JSON lines in and out with each prompt's own limit: reading the input
                    twice, fingerprints, records and their sync to the disk included

Not in the times: reading a model and making an engine (`run` is handed the engine of LLM.generate where it would make its
own), and what one pass leaves in the prefix cache, which is forgotten before each. The doors take turns, another one first in
each round; a figure is the median over the rounds of the ratio within a round. Before that a pass of each warms up, and every
door must give the very tokens of LLM.generate; in the rounds, its texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.arguments import add_data, whole
from benchmarks.figures import Figure, report
from pagetide import LLM, AsyncLLM, SamplingParams, cli, pipeline
from pagetide.engine import demo_model
from pagetide.engine import llm as llm_module

MAX_SEQS = 64
ENGINE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kv_memory": "64MiB", "max_seqs": MAX_SEQS, "share": False
}  # fmt: skip
WORDS = (4, 32)  # of a prompt
MOST_TOKENS = 80  # of prompt and output together
DRAWN = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
TARGET = 0.95
MEASURED_BY = "LLM.generate"
FOR_THE_RECORD = "AsyncLLM, streamed"

Outputs = list[tuple[str, list[int]]]  # text and tokens of each prompt


class ApiWork:
    """The prompts, and what is asked of each: `new_tokens`, or as many as come to MOST_TOKENS with the prompt.

    Raises ValueError for a prompt that leaves no room for an output.
    """

    def __init__(self, llm: LLM, prompts: list[str], new_tokens: int | None, seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self.num_prompt_tokens = [len(llm.tokenize(prompt)) for prompt in prompts]
        if (longest := max(self.num_prompt_tokens)) >= MOST_TOKENS:
            raise ValueError(
                f"{max(WORDS)} words of the text have up to {longest} tokens, and only {MOST_TOKENS - 1} leave room for an "
                "output; name another text by --data"
            )
        self.params = [
            SamplingParams(max_new_tokens=new_tokens or MOST_TOKENS - length, seed=seed, **DRAWN)
            for length in self.num_prompt_tokens
        ]
        # Of the pipeline; without None the model's own max_new_tokens would go before max_length.
        self.lengths = {"max_new_tokens": new_tokens, **({} if new_tokens else {"max_length": MOST_TOKENS})}


class Doors:
    """Two engines, and the doors to them by name. Each call of a door is one pass over the work."""

    def __init__(self, work: ApiWork, llm: LLM, loop: asyncio.Runner, scratch: Path) -> None:
        self.work = work
        self.llm = llm
        self.loop = loop
        self.async_llm = AsyncLLM("demo", **ENGINE)
        self.pipe = pipeline(model=llm, do_sample=True, seed=work.seed, **work.lengths, **DRAWN)
        self.scratch = scratch
        self.input = scratch / "in.jsonl"
        lines = (
            {"prompt": prompt, "max_new_tokens": params.max_new_tokens, "seed": params.seed, **DRAWN}
            for prompt, params in zip(work.prompts, work.params, strict=True)
        )
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self.by_name: dict[str, Callable[[], Outputs]] = {
            MEASURED_BY: self.generate,
            "AsyncLLM": lambda: loop.run(self.generate_async()),
            FOR_THE_RECORD: lambda: loop.run(self.stream_async()),
            "pipeline": self.answers,
            "run": self.run,
        }

    def generate(self) -> Outputs:
        """One call of LLM.generate."""
        outputs = self.llm.generate(self.work.prompts, self.work.params, progress=False)
        return [(output.text or "", output.token_ids) for output in outputs]

    async def generate_async(self) -> Outputs:
        """A task each prompt."""

        async def one(prompt: str, params: SamplingParams) -> tuple[str, list[int]]:
            (output,) = await self.async_llm.generate(prompt, params)
            return output.text or "", output.token_ids

        return list(await asyncio.gather(*map(one, self.work.prompts, self.work.params)))

    async def stream_async(self) -> Outputs:
        """A task each prompt, which reads its stream."""

        async def one(prompt: str, params: SamplingParams) -> tuple[str, list[int]]:
            text, tokens = "", []
            async for chunk in self.async_llm.stream(prompt, params):
                text += chunk.text
                tokens += chunk.token_ids
            return text, tokens

        return list(await asyncio.gather(*map(one, self.work.prompts, self.work.params)))

    def answers(self) -> Outputs:
        """The pipeline's full texts, without the prompts; no tokens, which it gives in the place of texts."""
        texts = [records[0]["generated_text"] for records in self.pipe(prompt for prompt in self.work.prompts)]
        return [(text.removeprefix(prompt), []) for text, prompt in zip(texts, self.work.prompts, strict=True)]

    def answers_as_tokens(self) -> list[list[int]]:
        """What the pipeline generates, as tokens."""
        answers = self.pipe(self.work.prompts, return_tensors=True)
        lengths = self.work.num_prompt_tokens
        return [records[0]["generated_token_ids"][n:] for records, n in zip(answers, lengths, strict=True)]

    def run(self) -> Outputs:
        """The command, with the engine that is there."""
        output = self.scratch / "out.jsonl"
        command = ["run", "--model", "demo", "--input", str(self.input), "--output", str(output)]
        made = mock.patch.object(llm_module, "LLM", return_value=contextlib.nullcontext(self.llm))
        with made, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = cli.main([*command, "--output-token-ids", "--restart", "--overwrite"])
        if status != 0:
            raise RuntimeError(f"pagetide run ended with status {status}: {output.read_text('utf-8')[:500]}")
        records = map(json.loads, output.read_text("utf-8").splitlines())
        return [(record["text"], record["token_ids"]) for record in records]

    def forget(self) -> None:
        """Let no pass find what another one computed."""
        self.llm.reset_prefix_cache()
        self.loop.run(self.async_llm.reset_prefix_cache())


def read_text(folder: Path | None) -> list[str]:
    """The words of the model's held-out text, or of all .txt files in `folder`. Raises ValueError where there are too few."""
    files = [Path(str(demo_model.__file__)).with_name("heldout.txt")]
    if folder is not None:
        files = sorted(folder.glob("*.txt"))
    try:
        words = [word for file in files for word in file.read_text("utf-8").split() if word != "%%"]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the text cannot be read: {error}; name another folder by --data") from error
    if len(words) <= max(WORDS):
        raise ValueError(
            f"{folder} has {len(files)} .txt files with {len(words)} words, and more than {max(WORDS)} are needed; with "
            "--data none the bundled text is taken"
        )
    return words


def pieces(words: Sequence[str], num: int, seed: int) -> list[str]:
    """`num` pieces of text from anywhere, of any of the lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(*WORDS, num).tolist()
    firsts = [int(rng.integers(len(words) - length)) for length in lengths]
    return [" ".join(words[first : first + length]) for first, length in zip(firsts, lengths, strict=True)]


def turns(names: list[str], number: int) -> Iterator[str]:
    """All of `names`, each round another one first."""
    return (names[(number + place) % len(names)] for place in range(len(names)))


def compare(doors: Doors, rounds: int) -> list[Figure]:
    """The figures. Raises RuntimeError where a door gives other tokens or texts."""
    texts, tokens = _both(doors.generate())
    for name, door in doors.by_name.items():
        doors.forget()
        served, served_tokens = _both(door())
        _check(name, served, texts)
        _check(name, doors.answers_as_tokens() if name == "pipeline" else served_tokens, tokens)
    num_tokens = sum(map(len, tokens))
    print(f"{len(texts)} prompts, {num_tokens:,} tokens a pass; every door gave the same", flush=True)
    speeds: dict[str, list[float]] = {name: [] for name in doors.by_name}
    for number in range(rounds):
        for name in turns(list(doors.by_name), number):
            doors.forget()
            start = time.perf_counter()
            outputs = doors.by_name[name]()
            speeds[name].append(num_tokens / (time.perf_counter() - start))
            _check(name, _both(outputs)[0], texts)
    plain = speeds.pop(MEASURED_BY)
    figures = [Figure(MEASURED_BY, statistics.median(plain), "tokens/s", better="higher", samples=plain)]
    for name, speed in speeds.items():
        ratios = [mine / theirs for mine, theirs in zip(speed, plain, strict=True)]
        target = None if name == FOR_THE_RECORD else TARGET
        figures += [
            Figure(name, statistics.median(speed), "tokens/s", better="higher", samples=speed),
            Figure(f"{name} / {MEASURED_BY}", statistics.median(ratios), "x", target, "higher", ratios),
        ]
    return figures


def _both(outputs: Outputs) -> tuple[list[str], list[list[int]]]:
    return [text for text, _ in outputs], [tokens for _, tokens in outputs]


def _check(name: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """Raises RuntimeError unless both are the same, one after the other."""
    if len(got) != len(expected):
        raise RuntimeError(f"{name} gave {len(got)} outputs for {len(expected)} prompts")
    wrong = [place for place, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]]
    if wrong:
        first = wrong[0]
        raise RuntimeError(
            f"{name} gave something else than {MEASURED_BY} for {len(wrong)} prompts, the first of them number {first}: "
            f"{got[first]!r:.200} instead of {expected[first]!r:.200}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    add_data(parser, "text in .txt files", "the model's held-out text")
    parser.add_argument("--rounds", type=whole, default=7)
    parser.add_argument("--prompts", type=whole, default=256)
    parser.add_argument("--new-tokens", type=whole, metavar="N", help="of every output (default: as said above)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        prompts = pieces(read_text(args.data), args.prompts, args.seed)
    except ValueError as error:
        parser.error(str(error))
    with asyncio.Runner() as loop, LLM("demo", **ENGINE) as llm, tempfile.TemporaryDirectory() as scratch:
        try:
            work = ApiWork(llm, prompts, args.new_tokens, args.seed)
        except ValueError as error:
            parser.error(str(error))
        doors = Doors(work, llm, loop, Path(scratch))
        try:
            figures = compare(doors, args.rounds)
        finally:
            loop.run(doors.async_llm.stop())
    report("the doors, of LLM.generate", figures, args.seed, args.json)


if __name__ == "__main__":
    main()

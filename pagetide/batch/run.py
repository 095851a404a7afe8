"""`pagetide run`: a file of prompts in, a file of records out, in order; a killed run resumes where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..api.sampling_params import SamplingParams
from ..engine.errors import ConfigError, EngineError
from ..engine.loading.models import ModelSpec, resolve_model
from ..engine.loading.weight_files import find_weights
from ..engine.requests.progress import Bar
from ..engine.text.chat_template import options_from_data
from ..serve import add_fleet, check_libraries
from ..server.engine_outputs import prompt_end, tokenizer_facts
from ..server.response_templates import choose_template
from .config import STDIN, RunConfig, add_run_flags, fingerprint, read_config
from .input import InputFile, InputRequest, Summary, read_line
from .output import Output, Settings, files_of
from .results import Record, ResultBuilder, failure_of, is_error, line_of, usage_of, was_started

if TYPE_CHECKING:
    from ..engine.llm import LLM, OrderedOutputs
    from ..engine.requests.outputs import RequestOutput
    from ..fleet.messages import FleetModel
    from ..fleet.sync import SyncFleet

log = logging.getLogger(__name__)

RECORDS_VERSION = 1  # the version of the record format: a run does not resume with another
# Consecutive lines that may fail in the engine before a run stops; none of them is written
MOST_FAILURES = 32
_LOOK_S = 0.5  # between looks whether it is time to save what is known
_READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".py")  # small files of a model's folder that affect its output
_WEIGHTS = (".safetensors", ".bin")


class EngineFails(EngineError):
    """Consecutive lines fail in the engine: the cause is not in the lines."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `run` to `commands`, the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="generate text for each line of a file",
        description="Generate text for each line of a file: text, JSON objects or OpenAI batch requests. Records are "
        "written in input order. A run that was stopped or killed resumes where it was when it is started again.",
    )
    parser.add_argument("--restart", action="store_true", help="discard the unfinished output of an earlier run")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output once the new one is complete")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_fleet(parser, "send the lines to a running fleet, and use its model")
    add_run_flags(parser)
    parser.set_defaults(run=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns 0, 1 when some lines have error records, 130 when interrupted.

    Raises the errors that `pagetide.cli` reports with status 2: ConfigError, ModelNotFound, OSError and so on. Records
    written so far stay.
    """
    if args.fleet is None:
        return _run(args, None)
    check_libraries("pagetide run --fleet")
    from ..fleet.api import Fleet
    from ..fleet.sync import SyncFleet

    with SyncFleet(Fleet(args.fleet, args.fleet_name)) as fleet:
        return _run(args, fleet)


def _run(args: argparse.Namespace, fleet: SyncFleet | None) -> int:
    """Run the command on an engine of its own, or on a fleet. Returns and raises as `main`."""
    config = read_config(args) if fleet is None else _fleet_config(args, fleet.model)
    spec = resolve_model(config.model)
    target = _checked_output(config, None if args.config is None else Path(args.config))
    with closing(InputFile(config.input)) as source, Output(target) as output:
        survey = source.survey()
        settings = {**_settings(config, spec), "input": survey.sha256, "input.format": survey.format}
        if fleet is not None:
            settings |= _fleet_settings(fleet.model)
        run = _RunState(config, source, survey, output, settings, fleet)
        if not (args.restart or args.overwrite) and (counts := output.finished(run.settings)) is not None:
            print(f"{target} is already complete with these settings", file=sys.stderr)
            run.tally = _Tally(**counts, resumed_lines=counts["lines"])
        else:
            resumes = output.begin(run.settings, restart=args.restart, overwrite=args.overwrite)
            try:
                run.go_on(resumes)
            except KeyboardInterrupt:
                again = "the same command, without --restart," if args.restart else "the same command"
                print(
                    f"interrupted: {run.tally.lines:,} of {survey.num_lines:,} records are complete; {again} resumes",
                    file=sys.stderr,
                )
                return 130
    print(json.dumps(run.tally.to_dict(target)) if args.json else run.tally.describe(target))
    return int(run.tally.errors > 0)


@dataclass(slots=True)
class _Tally:
    """Totals over the records. `seconds`, `new_tokens` and `preemptions` cover only this start of the run."""

    lines: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    resumed_lines: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    preemptions: int = 0

    def add(self, record: Record) -> int:
        """Add a record. Returns its number of generated tokens."""
        prompt, generated = usage_of(record)
        self.lines += 1
        self.errors += is_error(record)
        self.prompt_tokens += prompt
        self.completion_tokens += generated
        return generated

    @property
    def counts(self) -> dict[str, int]:
        """The totals that do not depend on how often the run was stopped."""
        names = ("lines", "errors", "prompt_tokens", "completion_tokens")
        return {name: getattr(self, name) for name in names}

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated per second by this start."""
        return self.new_tokens / self.seconds if self.new_tokens else None

    def to_dict(self, output: Path) -> dict[str, Any]:
        more = {"resumed_lines": self.resumed_lines, "seconds": round(self.seconds, 3), "preemptions": self.preemptions}
        speed = None if self.tokens_per_s is None else round(self.tokens_per_s, 1)
        return {"output": str(output), **self.counts, **more, "tokens_per_s": speed}

    def describe(self, output: Path) -> str:
        """The summary as text."""
        rows = [("records", f"{self.lines:,} in {output}"), ("errors", f"{self.errors:,}")]
        if self.resumed_lines:
            rows.append(("of an earlier start", f"{self.resumed_lines:,}"))
        rows += [("tokens of prompts", f"{self.prompt_tokens:,}"), ("tokens generated", f"{self.completion_tokens:,}")]
        if self.tokens_per_s is not None:
            rows += [("seconds", f"{self.seconds:,.1f}"), ("tokens per second", f"{self.tokens_per_s:,.1f}")]
            rows.append(("preemptions", f"{self.preemptions:,}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class _RunState:
    """One start of a run, from the existing records to the last."""

    def __init__(
        self,
        config: RunConfig,
        source: InputFile,
        survey: Summary,
        output: Output,
        settings: Settings,
        fleet: SyncFleet | None = None,
    ) -> None:
        self.settings = settings
        self.tally = _Tally()
        self._config = config
        self._survey = survey
        self._output = output
        self._fleet = fleet
        self._digest = hashlib.sha256()
        self._lines = source.lines(self._digest)
        self._line = next(self._lines, None)  # the first line without a request or a record
        # Lines that the engine has accepted or refused, and the records of those that need none.
        self._asked: deque[InputRequest | Record] = deque()
        self._saved: dict[int, dict[str, Any]] = {}  # what an earlier start knew of lines that are still to come
        self._resumed_tokens: dict[int, int] = {}  # that an earlier start generated, by line
        self._ignored_fields: set[str] = set()  # that the log has told of

    def go_on(self, resumes: bool) -> None:
        """Serve the lines without records, and give the output its final name. With `resumes`, say what there is already."""
        self._recover()
        self.tally.resumed_lines = self.tally.lines
        if resumes:
            total, count = self._survey.num_lines, len(self._saved)
            left = f"{total - self.tally.lines:,} to do" + (f", {count:,} of them begun" if count else "")
            print(f"resuming: {self.tally.lines:,} of {total:,} records are complete, {left}", file=sys.stderr)
        if self.tally.lines < self._survey.num_lines and self._fleet is not None:
            self._serve(self._fleet)
            self.tally.preemptions = self._fleet.stats()["preemptions"]
        elif self.tally.lines < self._survey.num_lines:
            from ..engine.llm import LLM

            with LLM(self._config.model, **self._config.engine) as llm:
                self._serve(llm)
                self.tally.preemptions = llm.stats()["preemptions"]
        if self._digest.hexdigest() != self._survey.sha256:
            raise ConfigError(
                f"{self._config.input.path} changed while it was read: its records stay in {self._output.part}. "
                "Leave the input unchanged, and start over with --restart"
            )
        self._output.finish(self.settings, self.tally.counts)

    def _recover(self) -> None:
        """Skip the lines that have records."""
        for record in self._output.recover(lambda record: self._line is not None and line_of(record) == self._line[0]):
            self.tally.add(record)
            self._line = next(self._lines, None)
        for entry in self._output.saved():
            line, known = entry.get("line"), entry.get("record")
            is_valid = line_of(known) == line if isinstance(known, dict) else isinstance(entry.get("request"), dict)
            if isinstance(line, int) and is_valid and self._line is not None and line >= self._line[0]:
                self._saved[line] = entry

    def _outputs(self, llm: LLM | SyncFleet, recorder: ResultBuilder) -> Iterator[RequestOutput]:
        """The outputs of the lines that need the engine, in order."""
        requests = self._requests(llm, recorder)
        if self._fleet is not None:  # its journal keeps what is generated
            run_id = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
            pairs = ((prompt, params) for prompt, params, _ in requests)
            return self._fleet.generate_each(pairs, lambda: f"run {run_id} line {_line_of(self._asked[-1])}")
        prompts, params, begun = itertools.tee(requests, 3)
        outputs = cast("LLM", llm).generate_each(
            (prompt for prompt, _, _ in prompts), (own for _, own, _ in params), exported=(data for _, _, data in begun)
        )
        return self._saving(outputs, recorder)

    def _saving(self, outputs: OrderedOutputs, recorder: ResultBuilder) -> Iterator[RequestOutput]:
        """`outputs`; meanwhile what is known of the lines to come is saved from time to time, and at an interrupt."""
        try:
            while True:
                while not outputs.wait(_LOOK_S):
                    if self._output.save_is_due:
                        self._output.save(lambda: self._unfinished(outputs, recorder))
                try:
                    output = next(outputs)
                except StopIteration:
                    return
                yield output
        except KeyboardInterrupt:
            self._output.save(lambda: self._unfinished(outputs, recorder))
            raise

    def _unfinished(self, outputs: OrderedOutputs, recorder: ResultBuilder) -> list[dict[str, Any]] | None:
        """What is known of each line to come, for `_recover`; lines that are refused or failed begin anew.

        None where an interrupt has separated a line from its output.
        """
        pending = outputs.pending()
        if len(pending) != sum(isinstance(asked, InputRequest) for asked in self._asked):
            return None
        known = iter(pending)
        entries: list[dict[str, Any]] = []
        for asked in self._asked:
            own = next(known) if isinstance(asked, InputRequest) else asked
            if isinstance(own, dict):
                entries.append({"line": _line_of(asked), "record" if own is asked else "request": own})
            elif own is not None and isinstance(asked, InputRequest) and not (asked.error or failure_of(own)):
                entries.append({"line": asked.line, "record": recorder.record(asked, own)})
        return [*entries, *self._saved.values()]

    def _serve(self, llm: LLM | SyncFleet) -> None:
        facts = tokenizer_facts(llm.tokenizer)
        recorder = ResultBuilder(
            self._config.output,
            self._config.model,
            self._survey.sha256[:12],
            _token_bytes(llm),
            choose_template(facts["chat_template"], facts["response_template"]),
            facts["special_tokens"],
            partial(prompt_end, llm.tokenizer),
        )
        held: list[Record] = []  # failed lines since the last that did not fail
        began = time.perf_counter()
        with self._bar() as bar:
            for output in self._outputs(llm, recorder):
                self._take_records(held, bar, time.perf_counter() - began)
                ask = self._asked.popleft()
                assert isinstance(ask, InputRequest)
                held.append(recorder.record(ask, output))
                why = failure_of(output)
                if why is None or not was_started(output):
                    self._write(held, bar, time.perf_counter() - began)
                elif len(held) == MOST_FAILURES:
                    raise EngineFails(
                        f"{MOST_FAILURES} lines in a row failed in the engine, the last with: {why}; none of these is "
                        "written, and the same command goes on with them"
                    )
            self._write(held, bar, time.perf_counter() - began)
            self._take_records(held, bar, time.perf_counter() - began)

    def _take_records(self, held: list[Record], bar: Bar, seconds: float) -> None:
        """Write the records of an earlier start that come next, after those that are `held`."""
        while self._asked and not isinstance(first := self._asked[0], InputRequest):
            self._asked.popleft()
            self._write([*held, first], bar, seconds)
            held.clear()

    def _write(self, records: list[Record], bar: Bar, seconds: float) -> None:
        """Write all `records`, and clear the list."""
        for record in records:
            self._output.write(record)
            self.tally.new_tokens += self.tally.add(record) - self._resumed_tokens.pop(line_of(record) or 0, 0)
            self.tally.seconds = seconds
            bar.update()
        records.clear()

    def _requests(
        self, llm: LLM | SyncFleet, recorder: ResultBuilder
    ) -> Iterator[tuple[str | list[int], SamplingParams, dict[str, Any] | None]]:
        """The prompts for the engine, with the data of requests that an earlier start began.

        Lines of which an earlier start has the record need no engine. An invalid line becomes an empty prompt, which the
        engine refuses at its place. So such lines keep their order and count towards the look-ahead.
        """
        while self._line is not None:
            number, _ = self._line
            if (record := self._saved.get(number, {}).get("record")) is not None:
                self._resumed_tokens[number] = usage_of(record)[1]
                self._asked.append(self._saved.pop(number)["record"])
                self._line = next(self._lines, None)
                continue
            ask = read_line(*self._line, self._survey.format)
            self._line = next(self._lines, None)
            for name in ask.ignored:
                if name not in self._ignored_fields:
                    self._ignored_fields.add(name)
                    log.warning("lines give %s, which is ignored", name)
            prompt: str | list[int] = []
            params = SamplingParams()
            try:
                if ask.messages is not None:
                    calls = recorder.answers(ask)
                    options = options_from_data(llm.tokenizer, {**ask.template_options, **calls.template()})
                    prompt = llm.render(ask.messages, **options)
                    ask = replace(ask, sampling={**ask.sampling, **calls.params()})
                elif ask.prompt is not None:
                    prompt = ask.prompt
                params = self._params(ask)
            except (ValueError, TypeError) as error:  # TypeError: options that no template takes
                ask, prompt = replace(ask, error=str(error)), []
            self._asked.append(ask)
            begun = self._saved.pop(number, {}).get("request")
            if begun is not None:
                self._resumed_tokens[number] = len(begun.get("token_ids") or ())
            yield prompt, params, begun

    def _params(self, ask: InputRequest) -> SamplingParams:
        """The line's parameters over the run's; a line without a seed gets one from the run's seed and the line number."""
        base = self._config.sampling
        switches = {"ignore_eos": base.ignore_eos, "add_special_tokens": base.add_special_tokens}
        seed = {"seed": (self._config.seed << 32) + ask.line}
        return SamplingParams(**{**seed, **switches, **ask.sampling}).over(base)

    def _bar(self) -> Bar:
        return Bar(
            lambda: self.tally.new_tokens,
            total=self._survey.num_lines,
            initial=self.tally.lines,
            unit="line",
            desc="running",
            smoothing=0.1,
        )


def _line_of(asked: InputRequest | Record) -> int | None:
    return asked.line if isinstance(asked, InputRequest) else line_of(asked)


def _token_bytes(llm: LLM | SyncFleet) -> Callable[[int], bytes]:
    """A function that gives the text of one token of the model, in UTF-8."""
    from ..engine.text.detokenizer import token_bytes

    tokenizer = llm.tokenizer
    return lambda token_id: f"token_id:{token_id}".encode() if tokenizer is None else token_bytes(tokenizer, token_id)


def _checked_output(config: RunConfig, file: Path | None) -> Path:
    """The path for the records. Raises ConfigError for an unusable one."""
    if config.output.path == STDIN:
        raise ConfigError("the output must be a file, so that a run can go on after it was stopped; got -")
    output = Path(config.output.path)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"the output's folder {output.absolute().parent} is not there: make it, or name another")
    output = output.resolve()  # follow links: the target is replaced, not the link
    if output.exists() and not (output.is_file() or output.is_dir()):
        raise ConfigError(f"the output {output} is no regular file: name one, or a new one")
    for path in files_of(output):
        if config.input.path != STDIN and _is_same(path, Path(config.input.path)):
            raise ConfigError(f"the input {path} would be written over by the run: name another output")
        if file is not None and _is_same(path, file):
            raise ConfigError(f"the configuration {path} would be written over by the run: name another output")
        if path.exists() and path != output and not path.is_file():
            raise ConfigError(f"{path}, which a run writes beside its output, is no regular file: name another output")
    return output


def _is_same(path: Path, other: Path) -> bool:
    if path.resolve() == other.resolve():
        return True
    return path.exists() and other.exists() and path.samefile(other)


def _fleet_config(args: argparse.Namespace, model: FleetModel) -> RunConfig:
    """The configuration of a run on a fleet. Raises ConfigError for what the fleet decides."""
    config = read_config(args, model.reference)
    if config.model not in (model.reference, model.name):
        raise ConfigError(f"the fleet serves {model.reference}, and not {config.model}: leave the model out")
    if given := config.engine:
        raise ConfigError(f"the fleet's workers have their own engine settings: leave out {', '.join(given)}")
    return config


def _fleet_settings(model: FleetModel) -> Settings:
    """What determines the records among a fleet's settings."""
    names = ("identity", "dtype", "layout", "max_model_len")
    return {f"fleet.{name}": getattr(model, name) for name in names}


def _settings(config: RunConfig, spec: ModelSpec) -> Settings:
    """All settings that determine the records, except the input."""
    files = hashlib.sha256(repr((spec.dtype, sorted(spec.tokenizer.items(), key=str), spec.sampling)).encode())
    for path in sorted(spec.path.iterdir()) if spec.path.is_dir() else find_weights(spec.path).paths:
        if path.suffix in _READ_WHOLE:
            files.update(path.name.encode() + b"\0" + path.read_bytes())
        elif path.suffix in _WEIGHTS or spec.path.is_file():
            files.update(f"{path.name}\0{path.stat().st_size}".encode())
    return {"records": RECORDS_VERSION, "model files": files.hexdigest(), **fingerprint(config)}

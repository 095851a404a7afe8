"""The command `pagetide`: generate text, run batches and the demo, list models, plan memory, check the machine.

Imports here are few: an interrupt before `main` begins is a traceback.
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import locale
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .flags import FlagParser
from .version import __version__

if TYPE_CHECKING:
    from .common.settings import Settings
    from .engine.loading.models import ModelSpec

T = TypeVar("T")


class _Parser(FlagParser):
    """Says of an unknown flag what the Python API says of an argument of this name."""

    def what_is_known(self, flag: str) -> str | None:
        from .api.arguments import table_answer

        said = table_answer(flag.lstrip("-").replace("-", "_"))
        if said is None:
            return None
        flags = {text for text in self._option_string_actions if text.startswith("--")}
        return re.sub(r"[a-z_]+", lambda word: own if (own := f"--{word[0].replace('_', '-')}") in flags else word[0], said)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0, 1 if a request failed, 2 for bad input, 130 if interrupted, 141 if the reader closed the output pipe.
    """
    verbose = 0
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a locale cannot encode is written as escapes, and not lost
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = _parser().parse_args(argv)  # its flags need numpy, which takes a while to load
        verbose = args.verbose
        logging.basicConfig(
            level=[logging.WARNING, logging.INFO, logging.DEBUG][min(verbose, 2)],
            format="%(asctime)s %(name)s %(levelname)s: %(message)s",
        )
        run: Callable[[argparse.Namespace], int] = args.run
        status = run(args)
        if sys.stdout is not None:  # stdout may be closed
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stderr.close()
        return 141
    except ModuleNotFoundError as error:
        return _missing(error)
    except Exception as error:
        if not _is_ours(error) or verbose > 1:
            raise
        from .common.error_text import said_of

        print(f"pagetide: {said_of(error)}{_of_the_locale(error)}", file=sys.stderr)
        return 2


def _missing(error: ModuleNotFoundError) -> int:
    """Report a library that is not installed, and return the exit status. Raises the error for a module of pagetide."""
    library = str(error.name).partition(".")[0]
    if library == "pagetide":
        raise error
    from .common.error_text import install_command

    said = f"pagetide: {library} is not installed, and this command needs it: {install_command()}"
    print(said, file=sys.stderr)
    return 2


def _is_ours(error: Exception) -> bool:
    """Whether the error message suffices for the user, without a traceback."""
    from .allocator.errors import AllocatorError
    from .engine.errors import EngineError
    from .monitor.errors import MonitorError
    from .scheduler.request import SchedulerError

    return isinstance(error, EngineError | SchedulerError | AllocatorError | MonitorError | ValueError | OSError)


def _of_the_locale(error: Exception) -> str:
    """What to do where text could not be encoded, as the locale of this process has no UTF-8; empty for other errors."""
    encodings = {codecs.lookup(name).name for name in (sys.getfilesystemencoding(), locale.getpreferredencoding(False))}
    if encodings == {"utf-8"} or not isinstance(error.__cause__ or error, UnicodeEncodeError):
        return ""
    return f"; the locale's encoding is {locale.getpreferredencoding(False)}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def _parser() -> argparse.ArgumentParser:
    from .api.sampling_params import SamplingParams
    from .common.settings import add_flags, settings_of
    from .engine.config import EngineArguments, Scope

    parser = _Parser(prog="pagetide", description="Run language models over a paged KV cache whose memory grows and shrinks.")
    parser.add_argument("--version", action="version", version=f"pagetide {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="generate text from prompts", description="Generate text from one or more prompts."
    )
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt text; repeatable")
    generate.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="F",
        help="read one prompt from this file, or from standard input (-); repeatable",
    )
    generate.add_argument("--stream", action="store_true", help="print the text as it is generated")
    _add_json(generate, "print JSON lines: outputs, or chunks with --stream")
    _add_model(generate)
    add_flags(generate.add_argument_group("engine"), settings_of(EngineArguments, Scope.MODEL))
    group = generate.add_argument_group("sampling (defaults from the model's generation config)")
    add_flags(group, settings_of(SamplingParams))
    generate.set_defaults(run=_generate)

    demo, stress = _add_demo(commands), _add_stress(commands)

    models = commands.add_parser("models", help="list the named models", description="List the models of the models files.")
    _add_json(models, "print JSON")
    models.set_defaults(run=_models)

    plan = commands.add_parser(
        "plan",
        help="estimate a model's memory, and how many sequences fit",
        description="Estimate the memory of a model's weights and KV cache, compare it with the free memory, and count the "
        "sequences that fit. Loads no weights and reserves no memory. For a device that is not here, or a model of which only "
        "the configuration is, it counts by the configuration.",
    )  # fmt: skip
    place = _add_model(plan, positional=True)
    place.add_argument("--config", type=Path, metavar="FILE", help="a model's config.json, instead of a model")
    add_flags(plan.add_argument_group("engine"), settings_of(EngineArguments, Scope.PLAN))
    plan.add_argument("--memory", metavar="SIZE", help="plan for a device with so much memory, e.g. 24GiB, that is not here")
    plan.add_argument("--exact", action="store_true", help="build the model without weights, by torch and transformers")
    plan.add_argument("--context", type=int, metavar="TOKENS", help="length of the counted sequences (default: the maximum)")
    _add_json(plan, "print JSON")
    plan.set_defaults(run=_plan)

    for command in (generate, demo, stress, models, plan, *_add_modules(commands)):
        command.add_argument("-v", "--verbose", action="count", default=0, help="log more; -vv shows tracebacks")
    return parser


def _add_demo(commands: Any) -> argparse.ArgumentParser:
    demo: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="watch the engine serve more prompts than its pool has room for",
        description="Serve many prompts with the bundled model from a KV pool too small for all of them, then again with "
        "enough room, and compare the tokens. Shows a live view on a terminal, plain lines elsewhere.",
    )
    demo.add_argument("--device", default="auto", help="cpu, cuda or cuda:1 (default: cuda if available)")
    demo.add_argument("--prompts", type=int, default=24, metavar="N", help="number of prompts, at least 16 (default 24)")
    demo.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="output tokens per prompt (default 96)")
    demo.add_argument(
        "--pool", type=float, default=0.5, metavar="SHARE", help="pool size as a fraction of the need (default 0.5)"
    )
    demo.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    demo.add_argument(
        "--shared",
        action="store_true",
        help="show two engines and an external process that share one device of host memory instead; only --seed and "
        "--json apply",
    )
    demo.add_argument("--table", action="store_true", help="also print the texts and a table of figures at the end")
    _add_json(demo, "print the table and the texts as JSON, without the live view")
    demo.set_defaults(run=_demo)
    return demo


def _add_stress(commands: Any) -> argparse.ArgumentParser:
    stress: argparse.ArgumentParser = commands.add_parser(
        "stress",
        help="put this machine's memory, or a card, under pressure, and check every token",
        description="Two engines with the bundled model serve random requests on a private device of host memory or, with "
        "--device cuda, on a card without other free memory, while an external process takes and returns memory and "
        "parts of the pools are recalled. Then the same requests run undisturbed, and every token is compared. The exit status "
        "is 0 if nothing was wrong.",
    )
    stress.add_argument("--seconds", type=float, default=60.0, help="of pressure, at least 5 (default 60)")
    stress.add_argument("--device", default="cpu", help="cpu: this machine's memory (default); cuda, cuda:1: a card; auto")
    stress.add_argument("--kills", action="store_true", help="also kill engines, start them again and repeat their requests")
    stress.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    stress.add_argument("--image", type=Path, metavar="FILE", help="write the last view of the memory to this file, as SVG")
    _add_json(stress, "print the report as JSON, without the live view")
    stress.set_defaults(run=_stress)
    return stress


def _add_modules(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands that have modules of their own."""
    from . import disk_cache, doctor, fleet_command, model_commands, replay, serve
    from .batch import run

    return [one.add_parser(commands) for one in (run, serve, replay, doctor, disk_cache, fleet_command)] + (
        model_commands.add_parsers(commands)
    )


def _add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _add_model(parser: argparse.ArgumentParser, positional: bool = False) -> argparse._ActionsContainer:
    """Add the model's flag, and return its group. With `positional` the model may also be given without it."""
    help_text = "a name (see `pagetide models`), a folder, a GGUF file, or a hub id in the local cache"
    place: argparse._ActionsContainer = parser
    if positional:
        place = parser.add_mutually_exclusive_group(required=True)
        place.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help_text)
    place.add_argument(
        "--model", "--model-name", dest="model", metavar="MODEL", required=not positional,
        default=argparse.SUPPRESS if positional else None, help="another way to name the model" if positional else help_text,
    )  # fmt: skip
    return place


def _located(args: argparse.Namespace, settings: Settings, make: Callable[..., T]) -> T:
    """The result of `make` for the values that flags gave. An error about one names its flag."""
    from .common.settings import located, of_flags
    from .engine.errors import ConfigError

    given = of_flags(args, settings)
    return located(given, lambda: make(**{name: one.value for name, one in given.items()}), ConfigError)


def _generate(args: argparse.Namespace) -> int:
    from .api.sampling_params import SamplingParams
    from .common.settings import settings_of
    from .engine.config import EngineArguments, Scope

    params = _located(args, settings_of(SamplingParams), SamplingParams)
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("log-probabilities are only printed as JSON: add --json")
    prompts = [*args.prompt, *(_read_prompt(name) for name in args.prompt_file)]
    if not prompts:
        raise ValueError("no prompt given: use --prompt TEXT or --prompt-file F")
    from .engine.llm import LLM

    with _located(args, settings_of(EngineArguments, Scope.MODEL), partial(LLM, args.model)) as llm:
        outputs = _stream(llm, prompts, params, args.json) if args.stream else llm.generate(prompts, params)
        if args.json and not args.stream:
            for output in outputs:
                print(_json_line(output.to_dict()))
        elif not args.stream:
            _print_texts(
                [str(c.token_ids if c.decoded is None else c.decoded) for output in outputs for c in output.completions]
            )
    errors = [completion.error for output in outputs for completion in output.completions if completion.error]
    for error in errors:
        print(f"pagetide: a request failed: {error}", file=sys.stderr)
    return int(bool(errors))


def _read_prompt(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error


def _json_line(value: Any) -> str:
    """A line of JSON that standard output can encode."""
    return json.dumps(value, ensure_ascii=(sys.stdout.encoding or "").lower() not in ("utf-8", "utf8"))


def _print_texts(texts: Sequence[str]) -> None:
    for i, text in enumerate(texts):
        if len(texts) > 1:
            print(f"{'' if i == 0 else chr(10)}--- {i + 1} of {len(texts)} ---")
        print(text)


def _stream(llm: Any, prompts: Sequence[str], params: Any, as_json: bool) -> list[Any]:
    """Print chunks as they come: JSON lines of all prompts mixed, or one text after another."""
    from dataclasses import asdict

    outputs: dict[int, Any] = {}
    view = None if as_json else _InTurn(len(prompts), params.n or llm.config.sampling.n or 1)
    for chunk in llm.stream(list(prompts), params):
        if chunk.output is not None:
            outputs[chunk.index] = chunk.output
        if view is None:
            line = {"index": chunk.index, "number": chunk.number, "text": chunk.text, "token_ids": chunk.token_ids}
            line |= {"logprobs": [asdict(one) for one in chunk.logprobs]} if chunk.logprobs is not None else {}
            line |= {"output": chunk.output.to_dict()} if chunk.output else {}
            print(_json_line(line), flush=True)
        else:
            view.show(chunk)
    return [outputs[i] for i in range(len(prompts))]


class _InTurn:
    """Prints several streamed texts one after another: the first incomplete one is live."""

    def __init__(self, num_prompts: int, each: int) -> None:
        count, self._each = num_prompts * each, each
        self._waiting = [""] * count
        self._done = [False] * count
        self._live = 0
        self._begin()

    def show(self, chunk: Any) -> None:
        place = chunk.index * self._each + chunk.number
        self._waiting[place] += chunk.text
        self._done[place] = chunk.completion is not None
        while self._live < len(self._done):
            print(self._waiting[self._live], end="", flush=True)
            self._waiting[self._live] = ""
            if not self._done[self._live]:
                return
            print()
            self._live += 1
            self._begin()

    def _begin(self) -> None:
        if len(self._done) > 1 and self._live < len(self._done):
            print(f"{'' if self._live == 0 else chr(10)}--- {self._live + 1} of {len(self._done)} ---")


def _demo(args: argparse.Namespace) -> int:
    if args.shared:
        from .demo.shared import run_shared

        return run_shared(seed=args.seed, as_json=args.json)
    from .demo.run import DemoOptions, run

    options = DemoOptions(args.device, args.prompts, args.max_new_tokens, args.pool, args.seed)
    return run(options, as_json=args.json, with_table=args.table)


def _stress(args: argparse.Namespace) -> int:
    from .stress import run_stress

    return run_stress(
        seconds=args.seconds, seed=args.seed, device=args.device, kills=args.kills, as_json=args.json, image=args.image
    )


def _models(args: argparse.Namespace) -> int:
    from .engine.errors import EngineError
    from .engine.loading.models import read_models

    rows = []
    for entry in read_models().values():
        try:
            path, trouble = str(entry.resolve().path), None
        except EngineError as error:
            path, trouble = entry.path, str(error)
        rows.append({"name": entry.name, "path": path, "defined_in": entry.where, "error": trouble})
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['path']}  ({row['defined_in']})")
        if row["error"]:
            print(f"{'':<{width}}  not usable: {row['error']}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from .common.settings import settings_of
    from .engine.config import EngineArguments, EngineConfig, Scope
    from .engine.errors import UnsupportedModel
    from .engine.memory.estimate import CONTEXT_BYTES, estimate, plan_device

    device, memory_bytes = plan_device(args.device, args.memory)
    args.device = "cuda" if device is not None and device != "cpu" else args.device
    spec, file, has_weights = _model_to_plan(args)
    resolve = partial(EngineConfig.resolve, spec)
    config = _located(args, settings_of(EngineArguments, Scope.PLAN), resolve)  # its errors come before torch is loaded
    config = replace(config, sleeps=True)  # as a server's
    plan: Any
    exact = (has_weights and memory_bytes is None) or config.devices or config.quantization or config.device == "cpu"
    if args.exact or (exact and find_spec("torch") is not None):
        from .engine.build import plan_only

        if file != spec.config_file:
            raise ValueError(f"this plan is counted by transformers, which needs a folder: rename {file.name} to config.json")
        free_bytes = memory_bytes if memory_bytes is None or device == "cpu" else memory_bytes - CONTEXT_BYTES
        plan = plan_only(config, context=args.context, has_weights=has_weights, memory_bytes=free_bytes)
    else:
        counted = partial(estimate, config, file, device=device or "cuda", memory_bytes=memory_bytes, context=args.context)
        try:
            plan = counted()
        except UnsupportedModel:  # of a family that is not counted by its fields
            if find_spec("torch") is None:
                raise
            from .engine.memory.planning import outlined_model

            plan = counted(model=outlined_model(spec, file))
    print(json.dumps(plan.to_dict(), indent=1) if args.json else plan.describe())
    return 0


def _model_to_plan(args: argparse.Namespace) -> tuple[ModelSpec, Path, bool]:
    """The model that is named, its configuration file, and whether its weights are here."""
    from .engine.errors import ModelNotFound
    from .engine.loading.models import ModelSpec, resolve_model
    from .engine.loading.weight_files import find_weights

    if args.config is not None:
        file = args.config.absolute()
        if not file.is_file():
            why = "is a folder: name it without --config" if file.is_dir() else "is not there"
            raise ValueError(f"--config takes the file of a model's configuration, and {file} {why}")
        return ModelSpec(str(args.config), file.parent, "a configuration"), file, False
    spec = resolve_model(args.model, needs_weights=False)
    try:
        find_weights(spec.path)
    except ModelNotFound:
        return spec, spec.config_file, False
    return spec, spec.config_file, True


if __name__ == "__main__":
    sys.exit(main())

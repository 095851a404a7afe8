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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .flags import FlagParser, flags_of
from .version import __version__


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
    from .engine.errors import EngineError
    from .scheduler.errors import SchedulerError

    return isinstance(error, EngineError | SchedulerError | ValueError | OSError)


def _of_the_locale(error: Exception) -> str:
    """What to do where text could not be encoded, as the locale of this process has no UTF-8; empty for other errors."""
    encodings = {codecs.lookup(name).name for name in (sys.getfilesystemencoding(), locale.getpreferredencoding(False))}
    if encodings == {"utf-8"} or not isinstance(error.__cause__ or error, UnicodeEncodeError):
        return ""
    return f"; the locale's encoding is {locale.getpreferredencoding(False)}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="pagetide", description="Run language models over a paged KV cache whose memory grows and shrinks."
    )
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
    _add_serving(_add_engine(generate))
    _add_sampling(generate)
    generate.set_defaults(run=_generate)

    demo = _add_demo(commands)

    models = commands.add_parser("models", help="list the named models", description="List the models of the models files.")
    _add_json(models, "print JSON")
    models.set_defaults(run=_models)

    plan = commands.add_parser(
        "plan",
        help="estimate a model's memory, and how many sequences fit",
        description="Estimate the memory of a model's weights and KV cache, compare it with the free memory, and count the "
        "sequences that fit. Loads no weights and reserves no memory.",
    )
    _add_engine(plan, positional=True)
    plan.add_argument("--context", type=int, metavar="TOKENS", help="length of the counted sequences (default: the maximum)")
    _add_json(plan, "print JSON")
    plan.set_defaults(run=_plan)

    for command in (generate, demo, models, plan, *_add_modules(commands)):
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


def _add_modules(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands that have modules of their own."""
    from . import disk_cache, doctor, fleet_command, replay, serve
    from .batch import run

    def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
        return _engine_arguments(args) | _serving_arguments(args)

    serving = serve.add_parser(commands, _add_engine_options, _add_serving, engine_arguments)
    others = [one.add_parser(commands) for one in (replay, doctor, disk_cache, fleet_command)]
    return [run.add_parser(commands), serving, *others]


def _add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _add_engine(parser: argparse.ArgumentParser, positional: bool = False) -> argparse._ArgumentGroup:
    """Add the engine's options; those not given keep the defaults of `LLM`. Returns their group.

    With `positional` the model may also be given without a flag.
    """
    help_text = "a name (see `pagetide models`), a folder, or a hub id in the local cache"
    place: argparse._ActionsContainer = parser
    if positional:
        place = parser.add_mutually_exclusive_group(required=True)
        place.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help_text)
    place.add_argument(
        "--model",
        "--model-name",
        dest="model",
        metavar="MODEL",
        required=not positional,
        default=argparse.SUPPRESS if positional else None,
        help="another way to name the model" if positional else help_text,
    )
    return _add_engine_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the engine's options; those not given keep the defaults of `LLM`. Returns their group."""
    from .engine.attention.backends import NAMES as ATTENTION

    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda if available)")
    engine.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="divide the model over N devices; sizes are then per device"
    )
    engine.add_argument("--devices", metavar="D,D", help="divide the model over these devices, e.g. cuda:0,cuda:1")
    engine.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    engine.add_argument("--quantization", metavar="FORM", help="int8 or int4 weights, CPU only (default: not quantized)")
    engine.add_argument(
        "--kv-cache-dtype", metavar="FORM", help="int8 or fp8: one byte per element of K and V (default: the model's dtype)"
    )
    engine.add_argument(
        "--kv-memory",
        metavar="BYTES",
        help="a size, e.g. 2GiB, or bounds: min=1GiB,max=4GiB,weight=2,priority=0 (default: see `pagetide plan`)",
    )
    engine.add_argument("--block-size", type=_int_or_auto, metavar="TOKENS", help="tokens per block, or auto")
    engine.add_argument("--attention", metavar="NAME", help=f"{', '.join(ATTENTION)} (default: the fastest available)")
    engine.add_argument("--max-seqs", type=int, metavar="N", help="maximum number of running sequences (default 256)")
    engine.add_argument("--max-step-tokens", type=int, metavar="N", help="maximum tokens per step (default 2048)")
    engine.add_argument("--max-model-len", type=int, metavar="TOKENS", help="maximum total tokens of prompt and output")
    return engine


def _add_serving(engine: argparse._ArgumentGroup) -> None:
    """Add the engine options that `plan` does not take, as they matter only to a running engine."""
    engine.add_argument(
        "--max-chunk-tokens",
        type=int,
        metavar="N",
        help="maximum tokens of one prompt per step (default: only the step's limit)",
    )
    engine.add_argument(
        "--host-kv-memory", metavar="BYTES", help="host memory for swapped-out blocks, e.g. 8GiB (default: none)"
    )
    engine.add_argument(
        "--prefix-cache-memory",
        metavar="BYTES",
        help="maximum memory of cached blocks that no request uses, e.g. 2GiB, or 0 (default: no limit)",
    )
    engine.add_argument(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_const",
        const=False,
        help="do not reuse common prefixes of prompts",
    )
    engine.add_argument(
        "--idle-s", type=float, metavar="SECONDS", help="idle time after which unneeded memory is returned (default 10)"
    )
    engine.add_argument(
        "--no-share",
        dest="share",
        action="store_const",
        const=False,
        help="do not hold a lease, and do not share memory with other engines",
    )
    engine.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_const",
        const=False,
        help="do not launch a step before the previous step's tokens reach the host",
    )
    engine.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_const",
        const=False,
        help="do not replay decode steps from CUDA graphs",
    )
    engine.add_argument(
        "--no-self-check",
        dest="self_check",
        action="store_const",
        const=False,
        help="skip the self-check of CUDA devices (see `pagetide doctor`)",
    )


_SAMPLING_NUMBERS: dict[str, type[int] | type[float]] = {
    "max_new_tokens": int, "min_new_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    "repetition_penalty": float, "frequency_penalty": float, "presence_penalty": float, "seed": int, "start_id": int,
}  # fmt: skip
_SAMPLING_OTHERS = (
    "n", "best_of", "num_beams", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "bad_words", "stop",
    "stop_token_ids", "ignore_eos", "json_schema", "regex", "grammar", "add_special_tokens",
    "skip_special_tokens",
)  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of SamplingParams that fits a command line; omitted ones keep the model's default."""
    group = parser.add_argument_group("sampling (defaults from the model's generation config)")
    for name, kind in _SAMPLING_NUMBERS.items():
        group.add_argument(*flags_of(name), dest=name, type=kind, metavar="N" if kind is int else "X")
    group.add_argument("--n", type=int, metavar="N", help="outputs per prompt (default 1, or the models file's)")
    group.add_argument("--best-of", type=int, metavar="N", help="generate N candidates, return the n most likely")
    group.add_argument("--num-beams", type=int, metavar="N", help="beam search with N beams")
    group.add_argument("--length-penalty", type=float, metavar="X", help="beam search: length penalty (default 1)")
    group.add_argument(
        "--early-stopping", type=_early_stopping, metavar="true|false|never", help="beam search: when to stop (default false)"
    )
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: log-probability of each token, and the K most likely ones"
    )
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="with --json: the same for prompt tokens")
    group.add_argument(
        "--bad-word", dest="bad_words", action="append", metavar="TEXT", help="string that must not be generated; repeatable"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this string; repeatable")
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="stop at this token id; repeatable",
    )
    group.add_argument("--json-schema", type=_text_or_file, metavar="TEXT|@F", help="JSON schema that the output must match")
    group.add_argument("--regex", metavar="TEXT", help="regular expression that the whole output must match")
    group.add_argument(
        "--grammar", type=_text_or_file, metavar="TEXT|@F", help="grammar that the output must match, in Lark's notation"
    )
    group.add_argument("--ignore-eos", action="store_true", help="ignore EOS")
    group.add_argument("--no-special-tokens", dest="add_special_tokens", action="store_false", help="do not add BOS")
    group.add_argument(
        "--keep-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        default=None,
        help="keep special tokens in the text",
    )


def _int_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens or auto, got {text!r}") from None


def _early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"must be true, false or never, got {text!r}")
    return values[text]


def _text_or_file(text: str) -> str:
    """The text, or the content of the file named after an @."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text[1:]}: {error}") from None


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return _given(
        args, "device", "devices", "tensor_parallel_size", "dtype", "quantization", "kv_cache_dtype", "kv_memory",
        "block_size", "attention", "max_seqs", "max_step_tokens", "max_model_len",
    )  # fmt: skip


def _serving_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return _given(
        args, "max_chunk_tokens", "prefix_cache_memory", "host_kv_memory", "prefix_caching", "idle_s", "share", "overlap",
        "cuda_graphs", "self_check",
    )  # fmt: skip


def _generate(args: argparse.Namespace) -> int:
    from .api.sampling_params import SamplingParams

    params = SamplingParams(**_given(args, *_SAMPLING_NUMBERS, *_SAMPLING_OTHERS))
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("log-probabilities are only printed as JSON: add --json")
    prompts = [*args.prompt, *(_read_prompt(name) for name in args.prompt_file)]
    if not prompts:
        raise ValueError("no prompt given: use --prompt TEXT or --prompt-file F")
    from .engine.llm import LLM

    with LLM(args.model, **_engine_arguments(args), **_serving_arguments(args)) as llm:
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
    from .engine.config import EngineConfig

    config = EngineConfig.resolve(args.model, **_engine_arguments(args))  # its errors come before torch is loaded
    from .engine.build import plan_only

    plan = plan_only(config, context=args.context)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=1))
    else:
        print(plan.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())

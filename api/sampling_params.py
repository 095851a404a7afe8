"""SamplingParams: how to continue a prompt, as callers say it; validated at once, and resolved for the engine."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import FrozenInstanceError, InitVar, dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from ..common.settings import Kind, data, integer, number, setting, switch, text, text_or_file
from ..scheduler.request import Constraint, LogitsProcessor, Sampling, TokenLists
from .arguments import explains_arguments, explains_names

DEFAULT_MAX_NEW_TOKENS = 256
MOST_FORKS = 4096  # continuations of a prompt
MOST_BEAMS = 256
MOST_LOGPROBS = 1024  # most likely tokens returned per token
MOST_STOP_STRINGS = 128
MOST_STOP_IDS = 1024
MOST_BAD_WORDS = 1024
MOST_PROCESSORS = 256
LONGEST_STRING = 256  # characters of a stop string, or of a bad word
MOST_LISTED_IDS = 16_384  # token ids in all lists of `bad_words_ids` together, and in `logit_bias`
LONGEST_REPR = 80  # characters of a value
LONGEST_CONSTRAINT = 131_072  # characters of a schema, a regular expression or a grammar
_MOST = 2**31 - 1  # token ids and counts are 32 bits wide

# Names of vLLM and transformers with the same values and meaning as the parameters that they stand for.
ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "num_return_sequences": "n"}

T = TypeVar("T")


class JsonSchemaModel(Protocol):
    """A class that describes itself by a JSON schema, such as a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]:
        """The schema."""
        ...


def _sampling_class(cls: type[T]) -> type[T]:
    """Make the aliases of a dataclass readable, and let unknown names and changes raise errors that say what to write."""
    for alias, name in ALIASES.items():
        # Not a field for `dataclasses.replace`, which would pass the old value on with a new one of `name`.
        del cls.__dict__["__dataclass_fields__"][alias]
        setattr(cls, alias, property(attrgetter(name), doc=f"`{name}`."))
    cls.__init__ = explains_arguments(cls.__name__)(cls.__init__)  # type: ignore[method-assign]

    # With slots, dataclass's own method fails with a TypeError for names that are not fields, such as the aliases.
    def unchangeable(self: T, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"{cls.__name__} does not change: make another with dataclasses.replace(params, "
            f"{ALIASES.get(name, name)}={_shortened(repr(value))})"
        )

    cls.__setattr__ = unchangeable  # type: ignore[method-assign,assignment]
    return explains_names(cls.__name__)(cls)


@_sampling_class
@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams:
    """How to continue a prompt. `None` stands for the value of the model's `generation_config.json`, else the default.

    Args:
        n: Continuations of each prompt, which is computed once for all of them (default 1). Each draws its own tokens; with
            temperature 0 they are all alike. Alias: `num_return_sequences`.
        best_of: Continuations to generate; the `n` with the highest mean log-probability are returned, best first.
        num_beams: Above 1: beam search with this many beams, as in transformers' `generate`; `n` of them are returned, best
            first. With a temperature, candidates are drawn instead of being the most likely.
        length_penalty: For beams: the exponent of the length that divides a beam's log-probability (default 1).
        early_stopping: For beams: True stops at `num_beams` complete ones, False when a better one is unlikely, "never"
            when a better one is impossible (default False).
        max_new_tokens: Most tokens to generate, at least 1 (default 256). The model's context also ends generation.
            Alias: `max_tokens`.
        min_new_tokens: No end id or stop id is sampled before this many tokens. Alias: `min_tokens`.
        temperature: 0 is greedy. Defaults to 0 unless the model's generation config sets `do_sample`, or `top_k`, `top_p` or
            `min_p` is given here (then 1).
        top_k: Sample among the k most likely tokens; 0 or -1 is off.
        top_p: Sample among the fewest tokens that hold this probability, in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens already in the prompt or the output.
        frequency_penalty: Subtracted from a token's logit for each occurrence in the output so far, -2 to 2.
        presence_penalty: Subtracted once from a token's logit if it is in the output already, -2 to 2.
        bad_words: A string or strings never generated, at the beginning of a text or after a space. At most 1,024, of at most
            256 characters each.
        bad_words_ids: Lists of token ids never generated as a whole. At most 16,384 ids in all.
        logit_bias: Token ids, at most 16,384, and the values to add to their logits.
        logits_processors: transformers' `LogitsProcessor` objects, or functions like them. Each is called for this request
            alone with the tokens so far, int64 [1, tokens], and the scores, float32 [1, vocabulary], and returns scores. They
            run after the penalties and before temperature.
        json_schema: A JSON schema for the output: a text, a mapping, or a class with `model_json_schema`, such as a pydantic
            model. At most 131,072 characters, like the next two.
        regex: A regular expression that the whole output must match.
        grammar: A context-free grammar in Lark's notation that the output must satisfy.
        stop: A string or strings that end the text, which is cut before them. At most 128, of at most 256 characters each.
        stop_token_ids: Ids that end the text, besides the model's end ids. At most 1,024.
        ignore_eos: Ignore the model's end ids.
        start_id: First token of the prompt, prepended unless it is there. For a string it replaces the tokenizer's BOS.
        logprobs: Return the log-probability of each generated token, before any of the processing above, and those of this
            many most likely tokens; True is 0, False is None.
        prompt_logprobs: The same for the prompt's tokens, from the second on.
        seed: The same request with the same seed gives the same tokens; `None` draws a random seed.
        add_special_tokens: Let the tokenizer add its special tokens (BOS) to a prompt given as a string.
        skip_special_tokens: Leave special tokens out of the text (default True). A stop string that is one ends it either way.
        kept_special_tokens: Special tokens that stay in the text all the same.

    Raises:
        ValueError: a value is outside its range; the message names it.
        UnknownArgument: (a TypeError and ValueError) an unknown name; the message says what to write instead.
    """

    # fmt: off
    max_new_tokens: int | None = setting(
        None, integer(), "maximum tokens to generate", flags=["--max-new-tokens", "--max-tokens"]
    )
    min_new_tokens: int | None = setting(
        None, integer(), "minimum tokens to generate", flags=["--min-new-tokens", "--min-tokens"]
    )
    temperature: float | None = setting(None, number(), "0 is greedy")
    top_k: int | None = setting(None, integer(), "sample among the K most likely tokens")
    top_p: float | None = setting(None, number(), "sample among the fewest tokens with this probability")
    min_p: float | None = setting(None, number(), "drop tokens below this share of the most likely one")
    repetition_penalty: float | None = setting(None, number(), "above 1: fewer repetitions of prompt and output")
    stop: str | Sequence[str] | None = setting(None, text(action="append"), "stop before this string; repeatable")
    stop_token_ids: Sequence[int] | None = setting(
        None, integer(metavar="ID", action="append"), "stop at this token id; repeatable",
        flags=["--stop-token-ids", "--stop-token-id"],
    )
    ignore_eos: bool = setting(False, switch(), "ignore EOS")
    seed: int | None = setting(None, integer(), "random seed")
    add_special_tokens: bool = setting(True, switch(), "add BOS to a prompt", off=["--no-special-tokens"])
    n: int | None = setting(None, integer(), "outputs per prompt", unset="1, or the models file's")
    best_of: int | None = setting(None, integer(), "generate N candidates, return the n most likely")
    num_beams: int | None = setting(None, integer(), "beam search with N beams")
    length_penalty: float | None = setting(None, number(), "beam search: length penalty", unset="1")
    early_stopping: bool | Literal["never"] | None = setting(
        None, Kind("true|false|never", bool, lambda given: {"true": True, "false": False}.get(given, given)),
        "beam search: when to stop", unset="false",
    )
    frequency_penalty: float | None = setting(None, number(), "subtracted for each occurrence in the output, -2 to 2")
    presence_penalty: float | None = setting(None, number(), "subtracted once for tokens in the output, -2 to 2")
    bad_words: str | Sequence[str] | None = setting(
        None, text(action="append"), "string that must not be generated; repeatable", flags=["--bad-words", "--bad-word"]
    )
    bad_words_ids: Sequence[Sequence[int]] | None = setting(
        None, data(), "lists of token ids that must not be generated, in YAML"
    )
    logit_bias: Mapping[int, float] | None = setting(None, data(), "added to the logits of token ids, in YAML, e.g. {5: -100}")
    logits_processors: Sequence[LogitsProcessor] | None = None
    json_schema: str | Mapping[str, Any] | JsonSchemaModel | None = setting(
        None, text_or_file(), "JSON schema that the output must match"
    )
    regex: str | None = setting(None, text(), "regular expression that the whole output must match")
    grammar: str | None = setting(None, text_or_file(), "grammar that the output must match, in Lark's notation")
    start_id: int | None = setting(None, integer(metavar="ID"), "first token of the prompt")
    logprobs: int | None = setting(None, integer(), "log-probability of each token, and the N most likely ones")
    prompt_logprobs: int | None = setting(None, integer(), "the same for prompt tokens")
    skip_special_tokens: bool | None = setting(
        None, switch(), "leave special tokens out of the text", unset="yes", off=["--keep-special-tokens"]
    )
    kept_special_tokens: Sequence[str] | None = None
    # fmt: on
    # A type checker takes them for fields: they can be given, and read as what they are aliases of
    if TYPE_CHECKING:
        num_return_sequences: int | None = None
        max_tokens: int | None = None
        min_tokens: int | None = None
    else:
        num_return_sequences: InitVar[int | None] = None
        max_tokens: InitVar[int | None] = None
        min_tokens: InitVar[int | None] = None

    def __post_init__(self, *aliases: int | None) -> None:
        _apply_aliases(self, dict(zip(("num_return_sequences", "max_tokens", "min_tokens"), aliases, strict=True)))
        _keep(self)
        _check_integer("n", self.n, least=1, most=MOST_FORKS)
        _check_integer("max_new_tokens", self.max_new_tokens, least=1, most=_MOST)
        _check_integer("min_new_tokens", self.min_new_tokens, least=0, most=_MOST)
        _check_integer("top_k", self.top_k, least=0, most=_MOST)
        _check_integer("seed", self.seed, least=-(2**63), most=2**64 - 1)
        _check_number("temperature", self.temperature, 0.0, math.inf, "must be 0 (greedy) or above")
        _check_number("top_p", self.top_p, 0.0, 1.0, "must be in (0, 1]", open_below=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "must be in [0, 1]")
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "must be above 0", open_below=True)
        for name in ("stop", "stop_token_ids", "kept_special_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Iterable) or isinstance(value, Mapping)):
                raise ValueError(f"{name} must be a list, got {value!r:.80}")
        _check_strings("stop", self.stop_strings, MOST_STOP_STRINGS)
        _check_strings("kept_special_tokens", self.kept_special_tokens or (), MOST_STOP_STRINGS)
        _check_most("stop_token_ids", self.stop_token_ids, MOST_STOP_IDS)
        for token_id in () if self.stop_token_ids is None else self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, least=0, most=_MOST)
        _check_choice(self)
        _check_logits_settings(self)
        for name in ("ignore_eos", "add_special_tokens", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool) and (value is not None or name != "skip_special_tokens"):
                raise ValueError(f"{name} must be True or False, got {value!r:.80}")
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")

    def __repr__(self) -> str:
        """The parameters that are set, each in at most LONGEST_REPR characters."""
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        each = ((name, repr(value)) for name, value, unset in given if value != unset)
        return f"SamplingParams({', '.join(f'{name}={_shortened(text)}' for name, text in each)})"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, for either form of input."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def bad_strings(self) -> tuple[str, ...]:
        """`bad_words` as a tuple, for either form of input."""
        if self.bad_words is None:
            return ()
        return (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)

    @property
    def constraint(self) -> Constraint | None:
        """The kind and text of the output's constraint: a JSON schema, regular expression or grammar."""
        if self.json_schema is not None:
            schema = self.json_schema  # a class has become its schema
            return "json_schema", schema if isinstance(schema, str) else json.dumps(schema, default=dict)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    @property
    def num_started(self) -> int:
        """Continuations generated per prompt; `n` of them are returned."""
        return max(self.n or 1, self.best_of or 1)

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with `defaults` for None values."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if self.temperature is None and any(v is not None for v in (self.top_k, self.top_p, self.min_p)):
            given["temperature"] = defaults.temperature or 1.0
        if self.min_new_tokens is None and self.max_new_tokens is not None and defaults.min_new_tokens is not None:
            given["min_new_tokens"] = min(defaults.min_new_tokens, self.max_new_tokens)  # the request's own value wins
        if self.max_new_tokens is None and self.min_new_tokens is not None and defaults.max_new_tokens is not None:
            given["max_new_tokens"] = max(defaults.max_new_tokens, self.min_new_tokens)
        return replace(defaults, **given)

    def resolve(self, eos_token_ids: Sequence[int] = (), bad_words: TokenLists = ()) -> Sampling:
        """The engine's settings; draws a missing seed. `bad_words` are the token ids of `bad_words`."""
        least = int(self.min_new_tokens or 0)
        most = max(DEFAULT_MAX_NEW_TOKENS, least) if self.max_new_tokens is None else int(self.max_new_tokens)
        own = () if self.stop_token_ids is None else self.stop_token_ids
        ends = [int(i) for i in (*own, *(() if self.ignore_eos else eos_token_ids))]
        return Sampling(
            max_new_tokens=most,
            min_new_tokens=least,
            temperature=float(self.temperature or 0.0),
            top_k=int(self.top_k or 0),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            min_p=float(self.min_p or 0.0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            stop_token_ids=tuple(dict.fromkeys(ends)),
            seed=int.from_bytes(os.urandom(8), "little") if self.seed is None else int(self.seed) % 2**64,
            frequency_penalty=float(self.frequency_penalty or 0.0),
            presence_penalty=float(self.presence_penalty or 0.0),
            bad_words=(*bad_words, *(tuple(map(int, ids)) for ids in self.bad_words_ids or ())),
            logit_bias=tuple((int(i), float(bias)) for i, bias in (self.logit_bias or {}).items()),
            logits_processors=tuple(self.logits_processors or ()),
            constraint=self.constraint,
            logprobs=0 if self.logprobs is None and self.best_of and self.num_started > (self.n or 1) else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            num_candidates=0,
        )


# Read at most one entry more than allowed: iterators may be endless, and one too many is refused.
_READ = {
    "stop": MOST_STOP_STRINGS,
    "stop_token_ids": MOST_STOP_IDS,
    "bad_words": MOST_BAD_WORDS,
    "bad_words_ids": MOST_LISTED_IDS,
    "logits_processors": MOST_PROCESSORS,
    "kept_special_tokens": MOST_STOP_STRINGS,
}


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 3]}..."


def _apply_aliases(params: SamplingParams, given: Mapping[str, Any]) -> None:
    """Set parameters by their aliases. Raises ValueError if both are given and differ."""
    for alias, value in given.items():
        name = ALIASES[alias]
        if value is not None:
            if getattr(params, name) not in (None, value):
                raise ValueError(
                    f"{name} is {getattr(params, name)} and {alias} {value}: they mean the same; give {name} alone, also to "
                    "dataclasses.replace"
                )
            object.__setattr__(params, name, value)


def _keep(params: SamplingParams) -> None:
    """Normalize `params`: copy the given lists (iterators too) and `logit_bias`, resolve -1, booleans and classes.

    Other types stay, to be refused.
    """
    if params.top_k == -1 and not isinstance(params.top_k, bool):
        object.__setattr__(params, "top_k", 0)
    for name in ("logprobs", "prompt_logprobs"):
        if isinstance(value := getattr(params, name), bool):
            object.__setattr__(params, name, 0 if value else None)
    describe = getattr(params.json_schema, "model_json_schema", None)
    if describe is not None:
        object.__setattr__(params, "json_schema", _schema_of(describe))
    for name, most in _READ.items():
        value = getattr(params, name)
        if _is_list(value):
            kept = tuple(islice(value, most + 1))
            if name == "bad_words_ids":
                kept = tuple(_up_to(most + 1, kept))
            object.__setattr__(params, name, kept)
    if isinstance(params.logit_bias, Mapping):
        object.__setattr__(params, "logit_bias", dict(params.logit_bias))


def _up_to(left: int, lists: Iterable[Any]) -> Iterator[Any]:
    """The lists up to so many ids of all of them; what is none stays, to be refused."""
    for ids in lists:
        if _is_list(ids):
            ids = tuple(islice(ids, left))
            left -= len(ids)
        yield ids
        if not left:
            return


def _schema_of(describe: Callable[[], Any]) -> Any:
    """The schema of a class, by its `model_json_schema`. Raises ValueError if that fails."""
    try:
        return describe()
    except Exception as error:  # pydantic's errors, and a base class itself
        raise ValueError(f"json_schema: the class gives no schema: {type(error).__name__}: {error}") from error


def _check_choice(params: SamplingParams) -> None:
    """Raise ValueError for invalid `n`, `best_of` and beam parameters, or combinations of them."""
    _check_integer("best_of", params.best_of, least=1, most=MOST_FORKS)
    _check_integer("num_beams", params.num_beams, least=1, most=MOST_BEAMS)
    _check_number("length_penalty", params.length_penalty, -math.inf, math.inf, "must be a finite number")
    if not (params.early_stopping is None or isinstance(params.early_stopping, bool) or params.early_stopping == "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', got {params.early_stopping!r:.80}")
    if params.best_of is not None and params.best_of < (params.n or 1):
        raise ValueError(f"best_of {params.best_of} is below n {params.n}, which are to be chosen among them")
    if (params.num_beams or 1) == 1:
        return
    if params.best_of is not None:
        raise ValueError("best_of and num_beams are two ways to choose among several: give one of them")
    if (params.n or 1) > (params.num_beams or 1):
        raise ValueError(f"n {params.n} is above num_beams {params.num_beams}: there are no more to be given")
    for name in ("stop", "logprobs", "prompt_logprobs"):
        if getattr(params, name) not in (None, (), []):
            raise ValueError(f"{name} cannot be given with num_beams {params.num_beams}")


def _check_logits_settings(params: SamplingParams) -> None:
    """Raise ValueError for invalid logits processing, log-probability, constraint and `start_id` parameters."""
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0, "must be in [-2, 2]")
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0, "must be in [-2, 2]")
    _check_integer("start_id", params.start_id, least=0, most=_MOST)
    _check_integer("logprobs", params.logprobs, least=0, most=MOST_LOGPROBS)
    _check_integer("prompt_logprobs", params.prompt_logprobs, least=0, most=MOST_LOGPROBS)
    for name, kind in (("bad_words", (str, Iterable)), ("bad_words_ids", Iterable), ("logits_processors", Iterable)):
        value = getattr(params, name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, Mapping)):
            raise ValueError(f"{name} must be a list, got {value!r:.80}")
    _check_strings("bad_words", params.bad_strings, MOST_BAD_WORDS)
    _check_most("logits_processors", params.logits_processors, MOST_PROCESSORS)
    num_ids = 0
    for ids in params.bad_words_ids or ():
        if not isinstance(ids, tuple) or not ids:
            raise ValueError(f"bad_words_ids must be non-empty lists of token ids, got {ids!r:.80}")
        num_ids += len(ids)
        if num_ids > MOST_LISTED_IDS:
            raise ValueError(f"bad_words_ids must have at most {MOST_LISTED_IDS:,} ids in all, got more")
        for token_id in ids:
            _check_integer("bad_words_ids", token_id, least=0, most=_MOST)
    if params.logit_bias is not None and not isinstance(params.logit_bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {params.logit_bias!r:.80}")
    _check_most("logit_bias", params.logit_bias, MOST_LISTED_IDS)
    for token_id, bias in (params.logit_bias or {}).items():
        _check_integer("logit_bias's token ids", token_id, least=0, most=_MOST)
        _check_number(f"logit_bias of token {token_id}", bias, -math.inf, math.inf, "must be a finite number")
    for processor in params.logits_processors or ():
        if not callable(processor):
            raise ValueError(f"logits_processors must be callable, got {processor!r:.80}")
    given = [name for name in ("json_schema", "regex", "grammar") if getattr(params, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be given together: an output has one form")
    for name in given:
        value = getattr(params, name)
        if not isinstance(value, str) and not (name == "json_schema" and isinstance(value, Mapping)):
            raise ValueError(f"{name} must be a text, got {value!r:.80}")
    try:
        constraint = params.constraint
    except (TypeError, RecursionError) as error:
        raise ValueError(f"json_schema cannot be said in JSON: {error}") from error
    if constraint is not None and len(constraint[1]) > LONGEST_CONSTRAINT:
        form, text = constraint
        raise ValueError(f"{form} must have at most {LONGEST_CONSTRAINT:,} characters, got {len(text):,}")


# Checks of single parameter values. They raise ValueError with the name and at most 80 characters of the value.


def _is_list(value: Any) -> bool:
    """Whether `value` is an iterable, but not text, bytes or a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _check_most(name: str, values: Sized | None, most: int) -> None:
    """Check that there are at most `most` entries. None is valid."""
    if values is not None and len(values) > most:
        raise ValueError(f"{name} must have at most {most:,} entries, got more")


def _check_strings(name: str, strings: Sequence[object], most: int) -> None:
    """Check for at most `most` strings, none empty or longer than LONGEST_STRING characters."""
    _check_most(name, strings, most)
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"{name} must be non-empty strings, got {one!r:.80}")
        if not one.isascii() and any("\ud800" <= character <= "\udfff" for character in one):
            raise ValueError(f"{name} must be text that UTF-8 can say, which half of a surrogate pair is not, got {one!r:.80}")
        if len(one) > LONGEST_STRING:
            raise ValueError(f"{name} must have at most {LONGEST_STRING} characters each, got {len(one):,}: {one!r:.80}")


def _check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check for an integer (numpy's too) from `least` to `most`. None is valid."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def _check_number(name: str, value: object, low: float, high: float, rule: str, open_below: bool = False) -> None:
    """Check for a finite number from `low` (or above it) to `high`; `rule` says so in words. None is valid."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ValueError(f"{name} must be a number, got {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (open_below and number <= low):
        raise ValueError(f"{name} {rule}, got {value}")

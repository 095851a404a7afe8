"""Constrained output: llguidance turns JSON schemas, regular expressions and grammars into masks over the vocabulary.

For the choice of library see docs/decisions/0021-constrained-output.md.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ...api.json_schemas import json_options, readable
from ...common.error_text import install_command
from ...scheduler.request import CANNOT_FOLLOW, Constraint, RequestRejected, Sampling
from ..errors import Attempt
from .logits import Bool, Int32, Int64, Rows, index
from .processors import Troubles

_MOST_KEPT = 64  # unused constraints kept; the least recently used one is dropped
# llguidance's limit for compiling one constraint. The worst regular expressions found took 0.9 s and 64 MiB with this
# limit, and 4.8 s and 200 MiB with the library's default of 1,000,000. They failed at their first token with either.
_LEXER_FUEL = 300_000
# The limit for one mask. The items of an ambiguous grammar keep growing, and the time with their square, which delays all
# requests: with a vocabulary of 4,096 a mask took up to 1.9 s with the library's default of 50,000; in one run on a busy
# machine 1.07 s with 20,000, and 0.09 s with this limit. A choice of 300 JSON objects that begin alike stays below it; a
# chain of 6,000 rules needs that many.
_STEP_ITEMS = 8_000
# The library recurses into rules that refer to each other. A grammar of the longest text that is allowed overflows the usual
# stack of 8 MiB, which ends the process. Of a larger one, memory is used as far as a compilation goes.
_STACK_BYTES = 256 << 20
_LONGEST_MESSAGE = 400  # characters; the library's messages may repeat the whole constraint
_starting = threading.Lock()  # the size of stacks is the process's
_END = "<|pagetide: the end|>"  # an extra token after the vocabulary: the output may end here
_NO_BEGINNING = "no text can begin with it: it refers to itself, and nothing comes before the reference"
_INSTALL = f"constrained output needs llguidance: {install_command('constrained')}"


class CompiledConstraint:
    """A constraint of one model, compiled at first use and shared by all requests with it. Safe for concurrent use.

    A request holds it until the request ends, so a step never compiles.
    """

    def __init__(self, constraints: Constraints, constraint: Constraint) -> None:
        self._constraints = constraints
        self._constraint = constraint
        self._master: Any = None
        self._compiling = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether it is compiled."""
        return self._master is not None

    def compile(self) -> None:
        """Compile the constraint, or wait for the thread that is compiling it. Others can be compiled at the same time.

        Raises:
            RequestRejected: llguidance is missing or does not support the tokenizer, or the constraint is invalid or too large.
        """
        if not self.ready:
            with self._compiling:
                if not self.ready:
                    self._master = self._constraints.compiled(self._constraint)

    def matcher(self) -> Any:
        """A new `LLMatcher` at the beginning of one output. Raises as `compile` does."""
        self.compile()
        return self._master.deep_copy()


class Constraints:
    """The constraints of one model. Safe for concurrent use. The first compilation converts the tokenizer."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._data: Any = None  # llguidance's form of the tokenizer
        self._executor: Any = None
        self._alive: WeakValueDictionary[Constraint, CompiledConstraint] = WeakValueDictionary()
        self._newest: OrderedDict[Constraint, CompiledConstraint] = OrderedDict()  # kept without a request
        self._lock = threading.Lock()  # never held during compilation
        self._preparing = threading.Lock()

    def of(self, constraint: Constraint) -> CompiledConstraint:
        """The single object for `constraint`, compiled or not."""
        with self._lock:
            found = self._alive.get(constraint)
            if found is None:
                found = self._alive[constraint] = CompiledConstraint(self, constraint)
            self._newest[constraint] = found
            self._newest.move_to_end(constraint)
            while len(self._newest) > _MOST_KEPT:
                self._newest.popitem(last=False)
            return found

    def follow(self, other: Constraints) -> None:
        """Take over what `other`, of the same tokenizer and vocabulary, has compiled."""
        with other._lock:
            self._data, self._executor = other._data, other._executor
            self._alive.update(other._alive)
            self._newest.update(other._newest)

    def matcher(self, constraint: Constraint) -> Any:
        """A new `LLMatcher` for one output. Raises as `CompiledConstraint.compile` does."""
        return self.of(constraint).matcher()

    def masks(self, matchers: list[Any]) -> tuple[Bool, Bool]:
        """What may come next: bool[n, vocab] of tokens, and bool[n]: whether the output may end.

        The mask of a matcher in error is meaningless.
        """
        words = (self._data.vocab_size + 31) // 32
        bits = np.zeros((len(matchers), words), np.uint32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)], bits.ctypes.data, words * 4, len(matchers)
        )
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        end = self._data.eos_token
        width = min(end, self.vocab_size)
        tokens = np.zeros((len(matchers), self.vocab_size), np.bool_)
        tokens[:, :width] = unpacked[:, :width]
        return tokens, unpacked[:, end]

    def compiled(self, constraint: Constraint) -> Any:
        """Compile `constraint` to the `LLMatcher` from which its matchers are copied. Raises RequestRejected."""
        return _on_deep_stack(lambda: self._compile(constraint))

    def _compile(self, constraint: Constraint) -> Any:
        library = _library()
        self._prepare(library)
        kind, text = constraint
        try:
            if kind == "json_schema":
                schema = json.loads(text)
                text = json.dumps(readable(schema))
                grammar = library.LLMatcher.grammar_from_json_schema(text, defaults=json_options(schema))
            elif kind == "regex":
                grammar = library.LLMatcher.grammar_from_regex(text)
            else:
                grammar = library.LLMatcher.grammar_from_lark(text)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"the {kind} cannot be used: {_summary(str(error))}") from error
        limits = library.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, step_max_items=_STEP_ITEMS)
        matcher = library.LLMatcher(self._data, grammar, log_level=0, limits=limits)
        trouble = _trouble(matcher, self._data)
        if trouble is not None:
            raise RequestRejected(f"the {kind} cannot be used: {trouble}")
        return matcher

    def _prepare(self, library: Any) -> None:
        with self._preparing:
            if self._data is None:
                data = _tokenizer_data(self._tokenizer, library)
                self._executor = library.LLExecutor(torch.get_num_threads())
                self._data = data


class Constrained:
    """The logits processor for constraints: excludes the tokens that a row's constraint does not allow.

    The row's end ids are allowed exactly where the output may end. If nothing else is left there, one end id is allowed even if
    another processor excluded it.
    """

    def __init__(self, num_rows: int, constraints: Constraints, troubles: Troubles) -> None:
        self._asked = np.zeros(num_rows, np.bool_)
        self._complete = np.zeros(num_rows, np.bool_)
        self._matchers: dict[int, Any] = {}
        self._ends: dict[int, Int64] = {}
        self._constraints = constraints
        self._troubles = troubles

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        """(Re)start `row` and match its output again. Returns whether it has a constraint."""
        if sampling.constraint is None:
            return False
        self._asked[row] = True
        self._ends[row] = np.array([i for i in sampling.stop_token_ids if i < self._constraints.vocab_size], np.int64)
        try:
            self._matchers[row] = self._constraints.matcher(sampling.constraint)
        except RequestRejected as error:
            self._troubles[row] = str(error)
            return True
        for token in token_ids[num_prompt:].tolist():
            self._consume(row, token)
        return True

    def release(self, rows: Rows) -> None:
        """Forget `rows`."""
        self._asked[rows] = False
        self._complete[rows] = False
        for row in rows.tolist() if self._ends else ():
            self._ends.pop(row, None)
            self._matchers.pop(row, None)

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        """bool[n]: which of `rows` have a constraint."""
        return self._asked[rows]

    def complete(self, rows: Rows) -> Bool | None:
        """bool[n]: which of `rows` have complete output. None: no row."""
        if not self._ends:
            return None
        complete = self._complete[rows]
        return complete if complete.any() else None

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        """Exclude the tokens that each row's constraint does not allow. A row without a usable matcher keeps no token."""
        matched = np.array([row in self._matchers for row in rows.tolist()])
        x[index(places[~matched], x)] = -torch.inf
        places, rows = places[matched], rows[matched]
        if not len(rows):
            return
        allowed, may_end = self._constraints.masks([self._matchers[row] for row in rows.tolist()])
        for i, row in enumerate(rows.tolist()):
            if self._matchers[row].is_error():
                error = _format_error(self._matchers[row])
                self._troubles.setdefault(row, f"{CANNOT_FOLLOW}: {error}; use a smaller or less ambiguous one")
                allowed[i], may_end[i] = False, False
            allowed[i, self._ends[row]] = may_end[i]
        at = index(places, x)
        x[at] = kept = x[at].masked_fill_(torch.from_numpy(~allowed).to(x.device), -torch.inf)
        lost = torch.isneginf(kept.amax(-1)).cpu().numpy()
        for i in np.flatnonzero(lost & may_end).tolist():
            if len(ends := self._ends[int(rows[i])]):
                x[int(places[i]), int(ends[0])] = 0.0  # even if another processor excluded it

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        """Advance the matchers of `rows` by `tokens`."""
        if self._ends:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self._consume(row, token)

    def _consume(self, row: int, token: int) -> None:
        """Advance by `token`. A token that does not fit leaves the matcher in error; the next `apply` reports it."""
        matcher = self._matchers.get(row)
        if matcher is None:
            return
        ends = self._ends[row]
        if token in ends:
            self._complete[row] = True
        else:
            matcher.consume_token(token)
            self._complete[row] = not len(ends) and matcher.is_stopped() and not matcher.is_error()


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestRejected(_INSTALL) from error
    return llguidance


def _tokenizer_data(tokenizer: Any | None, library: Any) -> Any:
    """llguidance's `LLTokenizer`, with an extra special end token last: a model may have several end ids, or none."""
    if tokenizer is None:
        raise RequestRejected("constrained output needs a tokenizer, which the model's folder lacks")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestRejected(f"constrained output needs a tokenizer of the tokenizers library, not {type(tokenizer).__name__}")
    from tokenizers import AddedToken, Tokenizer

    own = Tokenizer.from_str(backend.to_str())
    own.no_padding()
    own.no_truncation()
    taken = max(own.get_vocab(with_added_tokens=True).values(), default=-1)
    own.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    end = own.token_to_id(_END)
    if end is None or end <= taken:
        raise RequestRejected("constrained output needs a tokenizer whose ids have no gaps")
    try:
        return library.LLTokenizer(own.to_str(), eos_token=end)
    except ValueError as error:
        raise RequestRejected(f"constrained output does not work with this model's tokenizer: {error}") from error


def _on_deep_stack(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread with a stack of `_STACK_BYTES`."""
    result: Future[Any] = Future()

    def run() -> None:
        with Attempt() as attempt:
            result.set_result(work())
        if attempt.error is not None:
            result.set_exception(attempt.error)

    thread = threading.Thread(target=run, name="compile", daemon=True)
    with _starting:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return result.result()


def _trouble(matcher: Any, data: Any) -> str | None:
    """Why a new matcher cannot be used, or None. It tries a mask and a token, because an empty language fails only at the first
    mask, and some oversized constraints only at the first token.
    """
    if not matcher.is_error():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask[data.eos_token :] = 0
        if not matcher.is_error() and mask.any():
            trial = matcher.deep_copy()
            trial.consume_token(int(mask.argmax()))
            trial.compute_bitmask()
            if trial.is_error():
                return _format_error(trial)
    return _format_error(matcher) if matcher.is_error() else None


def _format_error(matcher: Any) -> str:
    """A matcher's error on one line."""
    error = str(matcher.get_error())
    return _NO_BEGINNING if error.startswith("NoExtensionBias") else _summary(error)


def _summary(text: str) -> str:
    """An error of the library on one line: its first line, and the reason if a later line has it.

    The regex parser reports `regex parse error:`, the pattern, a mark under it, and then `error: unclosed group`.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0].rstrip(":") if lines else "llguidance gave no reason"
    reason = next((line for line in lines[1:] if line.startswith("error: ")), None)
    return _shortened(first if reason is None else f"{first}: {reason.removeprefix('error: ')}")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."

"""The entry point for users of transformers: `pagetide.pipeline("text-generation", model=...)`.

The module is not called `pipeline`, because importing it would then replace the function of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import TracebackType
from typing import Any, overload

from ..common.on_error import OnError
from ..engine.llm import LLM
from ..engine.loading.generation import HARMLESS, REFUSED, SERVED, ModelDefaults, asked_for, known_to_transformers
from .arguments import CALL, Arguments, flatten_model_kwargs, refuse_unknown, sort_arguments
from .call import PipelineCall, Record
from .inputs import One, Several, read_inputs

_TASK = "text-generation"


def pipeline(
    task: str | None = _TASK,
    model: Any = None,
    *,
    tokenizer: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> TextGenerationPipeline:
    """Make a text-generation pipeline like transformers', with this engine behind it.

    Args:
        task: "text-generation", or "text_generation".
        model: A name, a folder, a hub id in the local cache, a loaded transformers model (left unchanged, its weights
            shared), or an `LLM`, which the pipeline uses and does not close.
        tokenizer: A name, a folder, a hub id in the local cache or a loaded tokenizer; None: the model's own.
        model_kwargs: More options, as transformers takes them for loading the model.
        options: `device`, `device_map`, `dtype` or `torch_dtype` and `trust_remote_code` as in transformers; the engine
            options of `LLM`, such as `kv_memory` or `max_seqs`; and defaults for the arguments of a call.

    Raises:
        ValueError: An argument is unknown (UnknownArgument, also a TypeError) or not supported; the message says why.
        ModelNotFound, UnsupportedModel, NotEnoughMemory, ConfigError: As `LLM` raises them.
    """
    if task is not None and str(task).replace("_", "-") != _TASK:  # MindFormers writes it with an underscore
        raise ValueError(f"the task {task!r} is not served: there is {_TASK!r}")
    if model is None:
        raise ValueError("no model was given: name one, such as 'demo', or give its folder or a loaded model")
    flat = flatten_model_kwargs(options, model_kwargs)
    refuse_unknown(flat, CALL | _generation_names() | _engine_options(), "pipeline")
    engine_options = {name: value for name in _engine_options() if (value := flat.pop(name, None)) is not None}
    own = not isinstance(model, LLM)
    if not own and (engine_options or tokenizer is not None):
        given = ", ".join([*engine_options, *(["tokenizer"] if tokenizer is not None else [])])
        raise ValueError(f"the LLM that was given is made already: {given} belong to its own making")
    arguments = sort_arguments(flat, _generation_names(), HARMLESS)
    asked_for(arguments.generation)  # check early: errors come before the model is loaded
    llm = LLM(model, tokenizer=tokenizer, **engine_options) if own else model
    with OnError(lambda: llm.close() if own else None):
        return TextGenerationPipeline(llm, arguments, closes=own)


class TextGenerationPipeline:
    """Continues prompts and answers chats, with the inputs and outputs of transformers' pipeline of this name.

    Made by `pagetide.pipeline`. Use it as a context manager, or call `close`, to release memory at a known time.

    Attributes:
        task: "text-generation".
        llm: The engine; also available as `model`, since there is no transformers model to call.
        tokenizer: transformers' tokenizer.
    """

    task = _TASK

    def __init__(self, llm: LLM, arguments: Arguments, *, closes: bool) -> None:
        if llm.tokenizer is None:
            raise ValueError(
                f"{llm.config.model.name} has no tokenizer, and a pipeline needs one: give tokenizer=..., or use LLM with "
                f"token ids"
            )
        self.llm = llm
        self.tokenizer = llm.tokenizer
        self._defaults = ModelDefaults.of(llm.config.model)
        self._arguments = arguments
        self._closes = closes

    @property
    def model(self) -> LLM:
        """The engine, under transformers' name for the model."""
        return self.llm

    @property
    def generation_config(self) -> Any:
        """The model's own `GenerationConfig`; changes to it take effect with the next call."""
        return self._defaults.generation_config

    @overload
    def __call__(self, text_inputs: str | list[dict[str, Any]], **options: Any) -> list[Record]: ...
    @overload
    def __call__(self, text_inputs: list[str] | list[list[dict[str, Any]]], **options: Any) -> list[list[Record]]: ...
    @overload
    def __call__(self, text_inputs: Any, **options: Any) -> Any: ...

    def __call__(self, text_inputs: Any, **options: Any) -> Any:
        """Continue the inputs.

        Args:
            text_inputs: A string, a chat (a list of messages with "role" and "content") or a list of either; or a data
                set, a generator or any other iterable, even endless, which is read as needed and answered one by one.
            options: As transformers' pipeline takes them: `max_new_tokens`, `max_length`, `do_sample`, `temperature`,
                `top_k`, `top_p`, `num_beams`, `num_return_sequences`, `return_full_text`, `return_tensors`, `streamer`,
                ... Also `seed`, which makes the answer to a prompt reproducible, and `look_ahead`, the number of
                prompts taken from a stream before the first is answered (default: twice as many as run at the same
                time).

        Returns:
            For one prompt a list of its continuations, each `{"generated_text": ...}` or `{"generated_token_ids":
            ...}`; for a list of prompts a list of such lists; for a stream an iterator of them, in the order of the
            prompts.

        Raises:
            ValueError: An argument or a prompt is not supported. In a stream it is raised at the prompt's place.
        """
        given = sort_arguments(options, _generation_names(), HARMLESS)
        if options.get("tokenizer") not in (None, self.tokenizer):
            raise ValueError("tokenizer is given at the making of the pipeline, not at a call")
        arguments = given.over(self._arguments)
        call = PipelineCall(self.llm, self.tokenizer, self._defaults, arguments, options.get("max_length"))
        inputs = read_inputs(text_inputs)
        if isinstance(inputs, One):
            (records,) = call.run([call.prepare(inputs.prompt)])
            return records
        if isinstance(inputs, Several):
            if len(inputs.prompts) > 1 and call.streamer is not None and (options.get("batch_size") or 1) > 1:
                raise ValueError("a streamer takes one prompt at a time: leave batch_size out")
            return list(call.run([call.prepare(prompt) for prompt in inputs.prompts]))
        kind = Answers if inputs.length is None else SizedAnswers
        return kind(lambda: call.run(map(call.prepare, inputs.open())), inputs.length)

    def close(self) -> None:
        """Release the engine's memory, unless the caller supplied the `LLM`. Idempotent."""
        if self._closes:
            self.llm.close()

    def __enter__(self) -> TextGenerationPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Answers(Iterator[list[Record]]):
    """The answers to a stream of prompts, in its order. Reading drives the engine, which works some prompts ahead.

    At its end it can be iterated again, which restarts a data set from its beginning. `close` aborts pending prompts.
    """

    def __init__(self, begin: Callable[[], Iterator[list[Record]]], length: int | None) -> None:
        self._begin = begin
        self._length = length
        self._run: Iterator[list[Record]] = begin()
        self._ended = False

    def __iter__(self) -> Answers:
        if self._ended:
            self._run, self._ended = self._begin(), False
        return self

    def __next__(self) -> list[Record]:
        self._ended = True  # unless it gives something
        records = next(self._run)
        self._ended = False
        return records

    def close(self) -> None:
        """Abort pending prompts. Idempotent."""
        self._run, self._ended = iter(()), True


class SizedAnswers(Answers):
    """The answers to a data set of known length, for progress bars."""

    def __len__(self) -> int:
        assert self._length is not None
        return self._length


@cache
def _engine_options() -> frozenset[str]:
    """The names of the options that `LLM` takes besides the model and its tokenizer."""
    return frozenset(inspect.signature(LLM).parameters) - {"model", "tokenizer"}


@cache
def _generation_names() -> frozenset[str]:
    return SERVED | HARMLESS | REFUSED.keys() | known_to_transformers()

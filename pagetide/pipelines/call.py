"""One call of a pipeline: converts prompts to tokens and parameters, and the engine's outputs to records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..api.sampling_params import SamplingParams
from ..engine.errors import EngineClosed
from ..engine.llm import LLM
from ..engine.loading.generation import ModelDefaults
from ..engine.requests.outputs import RequestOutput
from ..engine.streamers import generate_into
from ..engine.text.chat_template import within_bounds
from ..scheduler.request import RequestRejected
from .arguments import Arguments, note
from .inputs import Conversation, Prompt

Record = dict[str, Any]  # {"generated_text": ...} or {"generated_token_ids": ...}


class Prepared(NamedTuple):
    """A prepared prompt: the original, the ids for the engine, how many of them come from it, and the sampling parameters."""

    prompt: Prompt
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams


@dataclass(slots=True)
class _Failure:
    """The error that ended the intake of prompts."""

    error: Exception | None = None


class PipelineCall:
    """One call of a pipeline, with resolved arguments. Read-only."""

    def __init__(self, llm: LLM, tokenizer: Any, defaults: ModelDefaults, arguments: Arguments, max_length: int | None) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._asked = arguments.text
        self._form = arguments.text.get("form", "full text")
        self.streamer = arguments.text.get("streamer")
        self._max_length = max_length  # a max_length given to the call, not to `pipeline`, also goes to the tokenizer
        self._generation = defaults.resolve(arguments.generation, tokenizer.pad_token_id)
        self._prefix = self._asked.get("prefix", "")
        self._prefix_length = 0
        if self._prefix:
            special = self._asked.get("add_special_tokens", False)
            self._prefix_length = len(self._tokenizer(self._prefix, add_special_tokens=special)["input_ids"])
        hole = self._asked.get("handle_long_generation")
        if hole not in (None, "hole"):
            raise ValueError(f"handle_long_generation must be None or 'hole', got {hole!r}")

    def prepare(self, prompt: Prompt) -> Prepared:
        """The prompt's tokens and parameters, like transformers' `preprocess`. Raises ValueError."""
        ids = self._encode_chat(prompt) if isinstance(prompt, Conversation) else self._encode(self._prefix + prompt)
        if self._asked.get("handle_long_generation") == "hole":
            ids = self._cut(ids)
        own = len(ids)
        if not ids:
            if (bos := self._generation.bos_token_id) is None:
                raise ValueError(f"the prompt {prompt!r} has no token, and the model has no BOS to start from")
            ids = [bos]
        return Prepared(prompt, ids, own, self._generation.sampling_params(len(ids), self._prefix_length))

    def run(self, prepared: Iterable[Prepared]) -> Iterator[list[Record]]:
        """The answers, in order. A prompt's error is raised at its place, after the answers before it."""
        if self.streamer is not None:
            for one in prepared:
                yield self._records(one, generate_into(self.streamer, self._llm, one.token_ids, one.params))
            return
        failure = _Failure()
        queued, said, answered = itertools.tee(_until_failure(prepared, failure), 3)
        outputs = self._llm.generate_each(
            (one.token_ids for one in queued), (one.params for one in said), look_ahead=self._asked.get("look_ahead")
        )
        for output in outputs:
            yield self._records(next(answered), output)
        if failure.error is not None:
            raise failure.error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, **self._tokenizer_options())["input_ids"])

    def _encode_chat(self, chat: Conversation) -> list[int]:
        options = self._tokenizer_options()
        options.pop("add_special_tokens", None)  # the chat template adds them
        goes_on = self._goes_on(chat)
        options |= {"tools": self._asked.get("tools"), "documents": self._asked.get("documents")}
        options |= {"add_generation_prompt": not goes_on, "continue_final_message": goes_on, "return_dict": True}
        with within_bounds(self._tokenizer, options) as settings:
            return list(self._tokenizer.apply_chat_template(list(chat.messages), **settings)["input_ids"])

    def _tokenizer_options(self) -> dict[str, Any]:
        options = {name: self._asked[name] for name in ("add_special_tokens", "truncation") if name in self._asked}
        if self._max_length is not None:
            options["max_length"] = self._max_length
        options |= self._asked.get("tokenizer_encode_kwargs", {})
        if "return_tensors" in options:
            raise ValueError("tokenizer_encode_kwargs cannot say return_tensors: the engine takes token ids")
        if options.pop("padding", None) is not None:
            note("padding")
        return options

    def _goes_on(self, chat: Conversation) -> bool:
        """Whether to continue the chat's last message and not answer it."""
        last: bool = chat.messages[-1]["role"] == "assistant"
        return bool(self._asked.get("continue_final_message", last))

    def _cut(self, ids: list[int]) -> list[int]:
        """The end of a prompt that is too long for the model, with room for the new tokens."""
        new, most = self._generation.num_new_tokens(len(ids), self._prefix_length)[1], self._tokenizer.model_max_length
        if len(ids) + new <= most:
            return ids
        if most <= new:
            raise ValueError(f"{new:,} new tokens leave no room for a prompt: the tokenizer takes at most {most:,}")
        return ids[-(most - new) :]

    def _records(self, prepared: Prepared, output: RequestOutput) -> list[Record]:
        """The records of one output, like transformers' `postprocess`."""
        _raise_errors(output)
        sequences = [completion.token_ids for completion in output.completions]
        pad = self._generation.pad_token_id
        longest = max(map(len, sequences))
        if pad is not None:  # pad shorter sequences, as transformers does
            sequences = [ids + [pad] * (longest - len(ids)) for ids in sequences]
        return [self._record(prepared, ids) for ids in sequences]

    def _record(self, prepared: Prepared, new: Sequence[int]) -> Record:
        whole = [*prepared.token_ids, *new]
        if self._form == "tensors":
            return {"generated_token_ids": whole}
        text = self._decode(whole[prepared.num_prompt_tokens :])
        if self._form == "new text":
            return {"generated_text": text}
        if isinstance(prepared.prompt, str):
            return {"generated_text": prepared.prompt + text}
        messages = list(prepared.prompt.messages)
        if self._goes_on(prepared.prompt):
            last = messages.pop()
            return {"generated_text": [*messages, {"role": last["role"], "content": last["content"] + text}]}
        answer: Any = {"role": "assistant", "content": text}
        # the response template defines the parts of the text
        if getattr(self._tokenizer, "response_template", None) is not None:
            before = self._decode(prepared.token_ids[: prepared.num_prompt_tokens])
            answer = self._tokenizer.parse_response(text, prefix=before, tools=self._asked.get("tools"))
        return {"generated_text": [*messages, answer]}

    def _decode(self, ids: Sequence[int]) -> str:
        skip = self._asked.get("skip_special_tokens", True) and not getattr(self._tokenizer, "response_template", None)
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=self._asked.get("clean_up_tokenization_spaces")
        )
        return text


def _until_failure(prepared: Iterable[Prepared], failure: _Failure) -> Iterator[Prepared]:
    """The prompts up to the first one that fails to prepare; then `failure` holds the error."""
    try:
        yield from prepared
    except Exception as error:  # also errors of the caller's data source; raised at the failed prompt's place
        failure.error = error


def _raise_errors(output: RequestOutput) -> None:
    for completion in output.completions:
        if completion.finish_reason == "aborted":
            raise EngineClosed("the engine was closed before the answer was complete")
        if completion.finish_reason == "error":
            if not output.prompt_token_ids:  # it was never started
                raise RequestRejected(completion.error)
            raise RuntimeError(f"the answer could not be completed: {completion.error}")

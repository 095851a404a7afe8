"""The records of `pagetide run`: the result of each input line, plain or in the form of OpenAI's batch API.

A record does not depend on when, how fast or on what machine it was made: ids derive from the input and the line, and
OpenAI's time of creation is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..server.answers import Answer, AnswerReader, openai_call, openai_message
from ..server.response_templates import PLAIN_TEMPLATE, ResponseTemplate
from .config import OutputOptions
from .input import InputRequest

if TYPE_CHECKING:
    from ..engine.requests.outputs import Completion, RequestOutput, TokenLogprobs

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResultBuilder:
    """Makes records.

    `model` is the model name in the answers, `run_id` distinguishes the ids of different inputs, and `token_bytes`
    gives a token's text in UTF-8, perhaps a part of a character, for OpenAI's log-probabilities. `template` is the format of
    the model's answers, `special_tokens` are the tokenizer's, and `prompt_end` gives the text at the end of a prompt.
    """

    options: OutputOptions
    model: str
    run_id: str
    token_bytes: Callable[[int], bytes]
    template: ResponseTemplate = PLAIN_TEMPLATE
    special_tokens: Collection[str] = ()
    prompt_end: Callable[[Sequence[int]], str] = lambda _: ""

    def record(self, request: InputRequest, output: RequestOutput) -> Record:
        """The record of a line. `output` is ignored if the line itself was invalid."""
        why = request.error or failure_of(output)
        error = None if why is None else f"line {request.line}: {why}"
        if request.scores_only and error is None:
            output = replace(output, completions=tuple(map(_without_tokens, output.completions)))
        if request.kind == "plain":
            return self._failed(request, error) if error is not None else self._plain(request, output)
        status, body = 200, self._body(request, output)
        if error is not None:
            status = 500 if request.error is None and was_started(output) else 400
            body = {"error": {"message": error, "type": _error_type(status), "param": None, "code": None}}
        return {
            "id": f"batch_req_{self._id(request)}",
            "custom_id": request.id,
            "response": {"status_code": status, "request_id": f"req_{self._id(request)}", "body": body},
            "error": None if error is None else {"code": _error_type(status), "message": error},
        }

    def answers(self, request: InputRequest) -> AnswerReader:
        """The reader of the output of a line with messages."""
        return AnswerReader(request.tools or {}, self.template, self._id(request), self.special_tokens)

    def _read(self, request: InputRequest, output: RequestOutput) -> Callable[[int, Completion], Answer]:
        reader = self.answers(request)
        reader.prompt_end = self.prompt_end(output.prompt_token_ids)
        return lambda index, one: reader.read(index, one.decoded or "", is_cut=one.finish_reason == "length")

    def _id(self, request: InputRequest) -> str:
        return f"{self.run_id}_{request.line}"

    def _head(self, request: InputRequest) -> Record:
        head: Record = {"line": request.line}
        if request.id is not None:
            head["id"] = request.id
        if self.options.prompt and request.messages is not None:
            head["messages"] = request.messages
        elif self.options.prompt and request.prompt is not None:
            head["prompt"] = request.prompt
        return head

    def _failed(self, request: InputRequest, error: str) -> Record:
        return {**self._head(request), "finish_reason": "error", "error": error}

    def _plain(self, request: InputRequest, output: RequestOutput) -> Record:
        each = [self._continuation(completion) for completion in output.completions]
        if request.messages is not None:
            read = self._read(request, output)
            for index, (one, completion) in enumerate(zip(each, output.completions, strict=True)):
                answer = read(index, completion)
                if completion.decoded is not None:
                    one["text"] = answer.content or (None if answer.calls else "")
                if answer.reasoning:
                    one["reasoning"] = answer.reasoning
                if answer.calls:
                    one["tool_calls"] = list(map(openai_call, answer.calls))
        record = {**self._head(request), **each[0]}
        if len(each) > 1:
            record["completions"] = each
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = [None if entry is None else asdict(entry) for entry in output.prompt_logprobs]
        return {**record, "usage": _usage(output)}

    def _continuation(self, completion: Completion) -> Record:
        record: Record = {"text": completion.decoded}
        if self.options.token_ids or completion.decoded is None:
            record["token_ids"] = completion.token_ids
        record["finish_reason"] = completion.finish_reason
        if completion.logprobs is not None:
            record["logprobs"] = [asdict(entry) for entry in completion.logprobs]
        return record

    def _body(self, request: InputRequest, output: RequestOutput) -> Record:
        is_chat = request.kind == "chat"
        make = partial(self._chat_choice, self._read(request, output)) if is_chat else self._text_choice
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._id(request)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": [make(index, completion) for index, completion in enumerate(output.completions)],
            "usage": _usage(output),
        }

    def _text_choice(self, index: int, completion: Completion) -> Record:
        logprobs = None
        if completion.logprobs is not None:
            tokens = [self._text(entry.token_id) for entry in completion.logprobs]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [entry.logprob for entry in completion.logprobs],
                "top_logprobs": [{self._text(i): x for i, x in entry.top} for entry in completion.logprobs],
                "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
            }
        text = completion.decoded or ""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _chat_choice(self, read: Callable[[int, Completion], Answer], index: int, completion: Completion) -> Record:
        logprobs = None
        if completion.logprobs is not None:
            logprobs = {"content": [self._chat_token(entry) for entry in completion.logprobs]}
        answer = read(index, completion)
        reason = "tool_calls" if answer.calls and completion.finish_reason == "stop" else completion.finish_reason
        return {"index": index, "message": openai_message(answer), "logprobs": logprobs, "finish_reason": reason}

    def _chat_token(self, entry: TokenLogprobs) -> Record:
        one = self._token(entry.token_id, entry.logprob)
        return {**one, "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top]}

    def _token(self, token_id: int, logprob: float) -> Record:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(self.token_bytes(token_id))}

    def _text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _without_tokens(completion: Completion) -> Completion:
    text, scores = completion.decoded and "", completion.logprobs and []
    return replace(completion, decoded=text, token_ids=[], logprobs=scores, finish_reason="length")


def failure_of(output: RequestOutput) -> str | None:
    """The error of a request that was refused or failed; None otherwise."""
    return next((completion.error for completion in output.completions if completion.error is not None), None)


def was_started(output: RequestOutput) -> bool:
    """Whether the engine accepted the request; a request refused at admission has no id."""
    return output.request_id != ""


def line_of(record: Record) -> int | None:
    """The input line of a record; None if no `ResultBuilder` made it."""
    line = record.get("line")
    if line is None:
        line = str(record.get("id")).rpartition("_")[2]
        return int(line) if line.isdecimal() else None
    return line if isinstance(line, int) else None


def is_error(record: Record) -> bool:
    """Whether the line failed."""
    return record.get("error") is not None


def usage_of(record: Record) -> tuple[int, int]:
    """The numbers of prompt and generated tokens; (0, 0) for an error."""
    holder = record if "line" in record else (record.get("response") or {}).get("body") or {}
    usage = holder.get("usage") or {}
    return int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))


def _usage(output: RequestOutput) -> Record:
    prompt = len(output.prompt_token_ids)
    generated = sum(len(completion.token_ids) for completion in output.completions)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _error_type(status: int) -> str:
    return "invalid_request_error" if status == 400 else "server_error"

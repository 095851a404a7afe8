"""The endpoints of the server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from ..api.arguments import table_answer
from ..common.settings import unknown_setting
from ..version import __version__
from . import anthropic, openai_responses
from .admission import RequestAdmission
from .anthropic import CountRequest, MessageCompletion, MessagesRequest
from .bodies import BodyRoute
from .chat import ChatCompletion
from .choices import error_event, json_encode
from .completions import TextCompletion
from .config import ENGINE_OPTIONS, ModelOptions
from .engine_client import Batch, EngineClient, EngineUnavailable, RequestFailed
from .errors import ApiError, error_body, from_engine, invalid, unavailable
from .fields import IGNORED
from .guard import CorsHeaders, CorsQuestions, Guard, GuardRules, RequestContext
from .keys import ApiKey, ApiKeys
from .messages import ModelInfo
from .metrics import CONTENT_TYPE, Metrics, engine_stats
from .models import ModelRegistry, ServedModel
from .ollama import (
    API_VERSION,
    NOT_SERVED,
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerate,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
    listed,
    loaded,
    running,
    shown,
)
from .openai_responses import ResponseCompletion, ResponsesRequest
from .page import PageEndpoints
from .requests import (
    MOST_DRAIN_S,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    LoadRequest,
    RequestBody,
    TokenizeRequest,
    UnloadRequest,
    from_validation,
)
from .resume import DurableRequest, keyed_id
from .streams import ClientLeft, StreamedResponse, awaited_stream, header_value, json_response, unless_left

log = logging.getLogger(__name__)

OWNER = "pagetide"
DEFAULT_MAX_QUEUE = 256
STOP_DRAIN_S = 30.0  # of a model's requests, where the page stops it


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Settings of the endpoints."""

    max_queue: int = DEFAULT_MAX_QUEUE
    ignore_unknown_fields: bool = False
    rules: GuardRules = field(default_factory=GuardRules)


class Server:
    """The state behind the endpoints: models, keys, admission, the page, and the durable requests that have a reader here."""

    def __init__(self, models: ModelRegistry, keys: ApiKeys, options: AppOptions) -> None:
        self.models = models
        self.keys = keys
        self.options = options
        self.admission = RequestAdmission(
            lambda: models.capacity, options.max_queue, num_keys=len(keys), most_body_bytes=options.rules.most_body_bytes
        )
        self.metrics = Metrics()
        self.durable_batches: set[Batch] = set()
        self.page = PageEndpoints(models, keys)
        self._ignored_fields: set[str] = set()  # that the log has told of
        self._has_served = False

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted, and all preloaded models have served once."""
        self._has_served = self._has_served or self.models.is_ready
        return self._has_served and not self.admission.draining

    def check_fields(self, body: RequestBody) -> None:
        """Refuse a body with unknown fields, and log each field of other servers that is ignored once. Raises ApiError."""
        for name in body.check_fields(self.options.ignore_unknown_fields):
            if name not in self._ignored_fields:
                self._ignored_fields.add(name)
                log.warning("requests give %s, which is ignored: %s", name, IGNORED[name])

    def detach(self) -> None:
        """End the readers of durable requests; their clients continue elsewhere."""
        for batch in self.durable_batches:
            batch.detach()

    def cache_salt(self, given: str | None, key: ApiKey | None) -> str | None:
        """The salt of a request: requests of different keys, or with and without one, never share cached blocks."""
        if key is None:
            return f"-{given}" if given else None
        return f"{len(key.name)}:{key.name}{given or ''}"

    def token_count(self, info: ModelInfo, work: TextCompletion | ChatCompletion) -> int:
        """The tokens that a request may come to need: its prompts, and their outputs. Its prompts are tokenized.

        A request that was there before has its tokens already.
        """
        longest, generations = info.max_model_len, work.batch.generations
        each, total = work.num_sequences // len(generations), 0
        for one in (one for one in generations if not one.is_attached):
            num_prompt = len(one.prompt_token_ids or ())
            room = max(longest - num_prompt, 0)
            total += num_prompt + each * (room if one.max_new_tokens is None else min(one.max_new_tokens, room))
        return total

    def block_count(self, info: ModelInfo, work: TextCompletion | ChatCompletion) -> int:
        """The KV blocks that a request may come to need. Its prompts are tokenized."""
        block_size, longest = info.block_size, info.max_model_len
        lengths = [
            longest if one.max_new_tokens is None else min(len(one.prompt_token_ids or ()) + one.max_new_tokens, longest)
            for one in work.batch.generations
        ]
        return sum(-(-length // block_size) for length in lengths) * work.num_sequences // len(lengths)


def make_app(server: Server) -> ASGIApp:
    """The ASGI application: the endpoints behind the guard. Its runner stops the models at the end."""
    failures = {"4XX": "The request is refused", "503": "The model cannot serve now"}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in failures.items()
    }
    app = FastAPI(title="pagetide", version=__version__, docs_url=None, redoc_url=None, responses=responses)
    app.state.server = server
    app.router.route_class = BodyRoute
    add_errors(app)
    _add_generation(app, server)
    _add_ollama(app, server)
    _add_cancellation(app, server)
    _add_models(app, server)
    _add_tokens(app, server)
    _add_health(app, server)
    _add_states(app, server)
    _add_admin(app, server)
    server.page.add_to(app)
    origins = list(server.options.rules.origins)
    if origins:
        app.add_middleware(CorsQuestions, origins=origins)
    server.metrics.handlers = {route.path for route in app.routes if isinstance(route, APIRoute)}
    rules = replace(server.options.rules, open_paths=server.page.files.paths)
    guard = Guard(app, server.keys, server.admission, rules, server.metrics.answered, server.page.sessions)
    return CorsHeaders(guard, origins) if origins else guard


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_encode(data), status, headers, "application/json")


def add_errors(app: FastAPI) -> None:
    """Answer errors in OpenAI's form."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _json(error_body(error, request.url.path), error.status, error.headers)

    async def from_client(request: Request, error: Exception) -> Response:
        found = from_engine(error)
        if found.code == "context_length_exceeded":
            found.param = "prompt" if request.url.path.endswith("/v1/completions") else "messages"
        return await api_error(request, found)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await api_error(request, from_validation(list(error.errors())))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
        api = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), headers=error.headers)
        return await api_error(request, api)

    async def unforeseen(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(500, "the server failed on this request; see its log"))

    async def left(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestFailed, from_client)
    app.add_exception_handler(EngineUnavailable, from_client)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientLeft, left)
    app.add_exception_handler(Exception, unforeseen)


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        server.check_fields(body)
        return await _run(server, request, server.models.get(body.model), body, TextCompletion, kind="cmpl")

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        server.check_fields(body)
        return await _run(server, request, server.models.get(body.model), body, ChatCompletion, kind="chatcmpl")

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """OpenAI's responses, without a state."""
        server.check_fields(body)
        make = partial(ResponseCompletion, tools=body.client_tools())
        model = server.models.get(body.model)
        return await _run(server, request, model, body.as_chat(), make, failed=openai_responses.error_event)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Anthropic's messages."""
        server.check_fields(body)
        model = server.models.get_claude(body.model)
        return await _run(server, request, model, body.as_chat(), MessageCompletion, failed=anthropic.error_event)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        """The tokens of the prompt of a message."""
        server.check_fields(body)
        model, context = server.models.get_claude(body.model), RequestContext.of(request.scope)
        async with _using(server, request, model):
            count = await MessageCompletion(model, body.as_chat(), None).count_prompt(context.tenant)
        server.admission.charge_converted(context.key, count)
        return _json({"input_tokens": count})


def _add_ollama(app: FastAPI, server: Server) -> None:
    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChatRequest, request: Request) -> Response:
        """Ollama's chats."""
        server.check_fields(body)
        model = server.models.get(body.model)
        if not body.messages:
            return await _keep(server, request, model, body)
        return await _run(server, request, model, body.as_chat(), OllamaChat, failed=None, keep_alive_s=body.keep_alive)

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Ollama's answer to a prompt, or continuation of a raw one."""
        server.check_fields(body)
        model = server.models.get(body.model)
        if not body.prompt:
            return await _keep(server, request, model, body)
        make = partial(OllamaGenerate, prompt=body.prompt if body.raw else None)
        return await _run(server, request, model, body.as_chat(), make, failed=None, keep_alive_s=body.keep_alive)

    @app.get("/api/tags")
    async def ollama_tags() -> Response:
        return _json({"models": await _described(server.models, listed)})

    @app.get("/api/ps")
    async def ollama_ps() -> Response:
        ready = [model for model in server.models if model.state == "ready" and model.has_engine]
        return _json({"models": await _described(ready, running)})

    @app.post("/api/show")
    async def ollama_show(body: ShowRequest) -> Response:
        server.check_fields(body)
        return _json(shown(server.models.get(body.model or body.name)))

    @app.get("/api/version")
    async def ollama_version() -> Response:
        return _json({"version": API_VERSION})

    async def refuse(request: Request) -> Response:
        raise ApiError(400, NOT_SERVED[request.scope["route"].path])

    for path in NOT_SERVED:
        app.add_api_route(path, refuse, methods=["DELETE", "GET", "HEAD", "POST"], include_in_schema=False)


def _add_cancellation(app: FastAPI, server: Server) -> None:
    @app.delete("/v1/completions")
    async def cancel_keyed_completion(request: Request) -> Response:
        """End a completion, by the Idempotency-Key that it was sent with."""
        return await _cancel(server, request, "cmpl")

    @app.delete("/v1/completions/{response_id}")
    async def cancel_completion(response_id: str, request: Request) -> Response:
        """End a completion that goes on without its client."""
        return await _cancel(server, request, "cmpl", response_id)

    @app.delete("/v1/chat/completions")
    async def cancel_keyed_chat_completion(request: Request) -> Response:
        """End a chat completion, by the Idempotency-Key that it was sent with."""
        return await _cancel(server, request, "chatcmpl")

    @app.delete("/v1/chat/completions/{response_id}")
    async def cancel_chat_completion(response_id: str, request: Request) -> Response:
        """End a chat completion that goes on without its client."""
        return await _cancel(server, request, "chatcmpl", response_id)


async def _cancel(server: Server, request: Request, kind: str, response_id: str | None = None) -> Response:
    """End what is unfinished of a response of the same API key. Raises ApiError if the key has had no such response."""
    tenant = RequestContext.of(request.scope).tenant
    if response_id is None:
        given = header_value(request.scope["headers"], b"idempotency-key")
        if given is None:
            raise ApiError(400, "name the request to end: its id behind the path, or its Idempotency-Key as a header")
        response_id = keyed_id(kind, tenant, given)
    engines = [model.process for model in server.models if model.process is not None]
    for engine in engines if response_id.startswith(f"{kind}-") else ():
        if not engine.is_durable:  # its requests end when their clients leave
            continue
        count = await engine.call("cancel", response_id=response_id, tenant=tenant)
        if count is not None:
            kind_name = {"cmpl": "text_completion.deleted", "chatcmpl": "chat.completion.deleted"}[kind]
            return _json({"id": response_id, "object": kind_name, "deleted": count > 0, "cancelled": count})
    raise ApiError(
        404,
        f"there is no request {response_id!r:.80} of this key that goes on without its client, or it ended so long ago that it "
        "was forgotten",
        code="request_not_found",
    )


async def _durable(
    engine: EngineClient, kind: str, request: Request, body: CompletionRequest | ChatRequest
) -> DurableRequest | None:
    """What makes a request durable; None if the engine is not. Raises ApiError for its headers."""
    if not engine.is_durable:
        return None
    context = RequestContext.of(request.scope)
    key, headers = context.key, request.scope["headers"]
    durable = DurableRequest.of(kind, headers, context.tenant, await request.body(), bool(body.stream))
    return durable if key is None else replace(durable, most_requests=key.max_requests, most_sequences=key.max_sequences)


async def _described(
    models: Iterable[ServedModel], describe: Callable[[ServedModel, Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Each of `models` with the statistics of its engines."""
    of_all = list(models)
    stats = await asyncio.gather(*map(engine_stats, of_all))
    return [describe(model, engines) for model, (engines, _) in zip(of_all, stats, strict=True)]


@asynccontextmanager
async def _using(
    server: Server, request: Request, model: ServedModel, keep_alive_s: float | None = None
) -> AsyncIterator[None]:
    """As `ModelRegistry.using`. Raises ClientLeft if the client leaves before the model serves."""
    async with AsyncExitStack() as stack:
        await unless_left(stack.enter_async_context(server.models.using(model, keep_alive_s)), request.receive)
        yield


async def _unless_stopped(server: Server, work: Awaitable[None]) -> None:
    """Wait for an operation of an operator, which the end of the server cuts off. Raises ApiError then."""
    try:
        await work
    except asyncio.CancelledError:
        if not server.admission.draining:
            raise
        raise unavailable("the server is shutting down") from None


async def _keep(server: Server, request: Request, model: ServedModel, body: OllamaRequest) -> Response:
    """Answer a request of Ollama's without a prompt: it loads the model, or unloads it once nothing runs. Raises ApiError."""
    if body.keep_alive != 0:
        async with _using(server, request, model, body.keep_alive):
            return _json(loaded(body, model, "load"))
    if model.options.residency.pinned:
        raise invalid(f"{model.name!r} is pinned: POST /sleep, with an admin key, frees its memory", "keep_alive")
    await server.models.release(model)
    return _json(loaded(body, model, "unload"))


async def _run(
    server: Server,
    request: Request,
    model: ServedModel,
    body: CompletionRequest | ChatRequest,
    make: Callable[..., TextCompletion | ChatCompletion],
    *,
    kind: str = "",
    failed: Callable[[ApiError], bytes] | None = error_event,
    keep_alive_s: float | None = None,
) -> Response:
    """Serve a generating request to its end, once its model is loaded.

    Args:
        make: Makes the work, in the API's form.
        kind: Of the response's id, if the request can be durable.
        failed: Makes the event of an error of a stream that waits for its model, with comments; None: streams of this API have
            no comments, and begin with the answer.
        keep_alive_s: See `ModelRegistry.using`.
    """
    RequestContext.of(request.scope).facts["model"] = model.name

    async def tried() -> Response:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(_using(server, request, model, keep_alive_s))
            durable = await _durable(_awake(model), kind, request, body) if kind else None
            salt = server.cache_salt(body.cache_salt, RequestContext.of(request.scope).key)
            _awake(model)
            work = make(model, body, salt, server.metrics.of(model), durable)
            return await _served(server, request, model, work, body, durable, stack)

    async def served() -> Response:
        while True:
            try:
                return await tried()
            except _FellAsleep:
                log.debug("%s fell asleep before a request began, which waits for it", model.name)

    return await served() if failed is None or not body.stream else await awaited_stream(served(), failed)


class _FellAsleep(Exception):
    """An operator put the model to sleep, or unloaded it, between the first look and the beginning of a request."""


def _awake(model: ServedModel) -> EngineClient:
    """The engine of a model that was ready before. Raises _FellAsleep, and as `ServedModel.engine`."""
    if model.state != "ready":
        raise _FellAsleep
    return model.engine


async def _served(
    server: Server,
    request: Request,
    model: ServedModel,
    work: TextCompletion | ChatCompletion,
    body: CompletionRequest | ChatRequest,
    durable: DurableRequest | None,
    using: AsyncExitStack,
) -> Response:
    """Serve a request with a loaded model; `using` is closed at its end. Raises _FellAsleep before it has begun."""
    context, batch, info = RequestContext.of(request.scope), work.batch, model.engine.info
    batch.request_id, batch.tenant = context.request_id, context.tenant
    batch.retention = body.retention
    if context.key is not None:
        context.key.check_priority(body.priority)
        batch.retention = None if batch.retention is None else context.key.bounded(batch.retention)
    reserved: int | None = 0  # tokens; None if they are refused
    async with using.pop_all() as stack:

        def end() -> None:
            batch.end()
            context.tokens = batch.num_tokens
            server.metrics.ended(model.name, batch)
            batch.when_settled(settle)

        def settle() -> None:
            if reserved is None:  # charged, it would be refused again when it comes back as it was told
                return
            used = reserved if batch.goes_on else batch.num_computed  # what goes on may come to need them all
            server.admission.settle_tokens(context.key, reserved, used)

        answer = stack.enter_context(server.admission.answer(context.key, model.name, info.answers_bytes))
        answer(work.answer_size(info.max_model_len))
        stack.enter_context(server.admission.sequences(context.key, work.num_sequences))
        if durable is not None:
            batch.is_kept = durable.has_key
            server.durable_batches.add(batch)
            stack.callback(server.durable_batches.discard, batch)
        stack.callback(end)
        try:
            try:
                await unless_left(work.begin(), request.receive)
            except RequestFailed as error:
                if error.kind == "unavailable" and model.state != "ready":
                    raise _FellAsleep from error
                raise
            answer(work.answer_size(info.max_model_len))  # with the prompts
            most, reserved = server.token_count(info, work), None
            server.admission.reserve_tokens(context.key, most)
            reserved = most
            if context.key is not None and context.key.max_blocks is not None:
                stack.enter_context(server.admission.blocks(context.key, server.block_count(info, work)))
        except (ApiError, RequestFailed):  # it is refused
            batch.is_kept = any(one.is_attached for one in batch.generations)
            raise
        if not body.stream:
            return await json_response(work.parts(), request.receive, stack.pop_all)
        batch.is_resumable = durable is not None
        held = stack.pop_all()  # until the stream has ended
        return StreamedResponse(work.events(), held, work.failed, work.media_type)


def _add_models(app: FastAPI, server: Server) -> None:
    def describe(model: ServedModel) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": OWNER,
            "root": model.options.reference,
            "state": model.state,
        }
        if model.level:
            entry["sleep_level"] = model.level
        if model.process is not None and model.process.is_alive:
            entry["max_model_len"] = model.process.info.max_model_len
        return entry

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [describe(model) for model in server.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(describe(server.models.get(name)))


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        server.check_fields(body)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        model = server.models.get(body.model)
        template = {**(body.chat_template_kwargs or {}), "add_generation_prompt": body.add_generation_prompt}
        if body.tools:
            template["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
        context = RequestContext.of(request.scope)
        messages = None if body.messages is None else [message.model_dump(exclude_unset=True) for message in body.messages]
        async with _using(server, request, model):
            most = model.engine.info.max_model_len
            found = await model.engine.call(
                "tokenize",
                prompt=body.prompt,
                template=template,
                add_special_tokens=body.add_special_tokens,
                messages=messages,
                texts=bool(body.return_token_strs),
                tenant=context.tenant,
            )
        server.admission.charge_converted(context.key, len(found["tokens"]))
        texts = {"token_strs": found["texts"]} if body.return_token_strs else {}
        return _json({"count": len(found["tokens"]), "max_model_len": most, "tokens": found["tokens"], **texts})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        server.check_fields(body)
        model, context = server.models.get(body.model), RequestContext.of(request.scope)
        server.admission.charge_converted(context.key, len(body.tokens))
        async with _using(server, request, model):
            return _json({"prompt": await model.engine.call("detokenize", tenant=context.tenant, tokens=body.tokens)})


def _add_health(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether requests are accepted, and the models that are loaded at the start have served."""
        return Response(status_code=200 if server.is_healthy else 503)

    @app.get("/live")
    async def live() -> Response:
        """Whether the HTTP process answers."""
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether all models serve that are to. Models that sleep or are unloaded do for a request."""
        failures = {model.name: model.error for model in server.models if model.state == "failed"}
        states = {model.name: model.state for model in server.models}
        if server.admission.draining:
            raise unavailable("the server is shutting down")
        if not server.models.is_ready:
            raise unavailable(f"not all models are ready: {states}" + (f", failures: {failures}" if failures else ""))
        return _json({"status": "ready", "models": states, "failures": failures})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        page = await server.metrics.page(server.models, server.admission)
        return Response(page, headers={"content-type": CONTENT_TYPE})

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": server.admission.num_requests})


def _add_states(app: FastAPI, server: Server) -> None:
    @app.post("/sleep")
    async def sleep(
        model: str | None = None,
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        drain_s: Annotated[float | None, Query(ge=0, le=MOST_DRAIN_S, allow_inf_nan=False)] = None,
    ) -> Response:
        """Free the memory of a model, or of all; as vLLM's. On a CPU level 1 leaves weights to the page cache."""
        named = [server.models.get(model)] if model is not None else list(server.models)
        with server.metrics.sleep_operation("sleep"):
            for one in named:
                await _unless_stopped(server, server.models.sleep(one, drain_s, level))
        return Response(status_code=200)

    @app.post("/wake_up")
    async def wake_up(model: str | None = None) -> Response:
        """Wake a model up, or load it; without a name, wake all that sleep."""
        sleeping = [one for one in server.models if one.state == "asleep"]
        named = [server.models.get(model)] if model is not None else sleeping
        with server.metrics.sleep_operation("wake"):
            for one in named:
                await _unless_stopped(server, server.models.wake_up(one))
        return Response(status_code=200)

    @app.post("/unload")
    async def unload_model(
        model: str, drain_s: Annotated[float, Query(ge=0, le=MOST_DRAIN_S, allow_inf_nan=False)] = 0.0
    ) -> Response:
        """End the engine of a model, which the next request loads again."""
        one = server.models.get(model)
        _check_own(one)
        await server.models.unload(one, drain_s)
        return Response(status_code=200)

    @app.get("/running")
    async def running_models() -> Response:
        """The models that are loaded, asleep, or on the way: those too that wait for room."""
        return _json({"running": [_placed(one) for one in server.models if one.state != "unloaded" or one.num_waiting]})

    @app.get("/is_sleeping")
    async def is_sleeping(model: str | None = None) -> Response:
        """Whether a model is asleep; without a name, whether all are."""
        named = [server.models.get(model)] if model is not None else list(server.models)
        return _json({"is_sleeping": bool(named) and all(one.state == "asleep" for one in named)})


def _add_admin(app: FastAPI, server: Server) -> None:
    @app.post("/page/model", include_in_schema=False)
    async def change(request: Request, model: str, action: Literal["load", "sleep", "wake", "stop"]) -> Response:
        """The page's buttons. A session of an admin key may use them."""
        key = RequestContext.of(request.scope).key
        if key is None or not key.admin:
            raise ApiError(403, f"only an admin key may {action} a model: sign in with one")
        one = server.models.get(model)
        _check_own(one)
        if action == "sleep":
            work = server.models.sleep(one, None)
        elif action == "stop":
            work = server.models.unload(one, STOP_DRAIN_S)
        else:
            work = server.models.wake_up(one)
        await _unless_stopped(server, work)
        return _json({"state": one.state})

    @app.post("/admin/models/load")
    async def load(body: LoadRequest) -> Response:
        began = time.monotonic()
        if "record" in body.options:
            raise ApiError(400, "a recording is a file of this machine: set it at the start, by --record", param="options")
        for name in body.options:
            if name not in ENGINE_OPTIONS:
                raise ApiError(400, unknown_setting(name, ENGINE_OPTIONS, table_answer), param="options")
        model = server.models.add(ModelOptions(body.name or body.model, body.model, body.options))
        await _unless_stopped(server, server.models.loaded(model))
        return _json({"name": model.name, "seconds": round(time.monotonic() - began, 3)})

    @app.post("/admin/models/unload")
    async def unload(body: UnloadRequest) -> Response:
        _check_own(server.models.get(body.name))
        await server.models.remove(body.name, body.drain_s)
        return _json({"name": body.name})


def _check_own(model: ServedModel) -> None:
    """Raise ApiError for a model of other processes."""
    if model.process is not None and model.process.is_durable:
        raise ApiError(400, f"the model {model.name} is served by other processes, not by this server", param="name")


def _placed(model: ServedModel) -> dict[str, Any]:
    """A model in `/running`."""
    now = time.monotonic()
    return {
        "model": model.name,
        "state": model.state,
        "sleep_level": model.level,
        "error": model.error,
        "weights_bytes": model.weights_bytes,
        "running": model.num_running,
        "waiting": model.num_waiting,
        "idle_s": 0.0 if model.num_running else round(now - model.last_used, 3),
        "expires_in_s": None if model.expires_at == math.inf else round(max(model.expires_at - now, 0.0), 3),
        "pinned": model.options.residency.pinned,
        "unloaded_for": None if model.departure is None else asdict(model.departure),
    }

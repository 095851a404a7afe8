"""The errors of the HTTP API, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`, Anthropic's or Ollama's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from .engine_client import EngineUnavailable, RequestFailed

RETRY_UNAVAILABLE_S = 5
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(HTTPException):
    """An error that the client gets. An HTTPException, because FastAPI makes 400 of all others that come while it reads a body.

    Args:
        status: HTTP status.
        message: What was asked, what is there, what to do.
        param: The field of the request that is wrong.
        code: OpenAI's code, such as "model_not_found".
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = dict(headers or {})

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """As `body`, in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """As `body`, in Ollama's form."""
        return {"error": self.message}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON body of a response of the endpoint at `path`."""
    if path.startswith(OLLAMA_PATH):
        return error.ollama_body
    return error.anthropic_body if path.startswith(ANTHROPIC_PATH) else error.body


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that cannot be served as it is (400)."""
    return ApiError(400, message, param=param, code=code)


def from_engine(error: Exception) -> ApiError:
    """The error to send for an error of the engine client."""
    if isinstance(error, RequestFailed):
        if error.kind == "too_long":
            return invalid(str(error), code="context_length_exceeded")
        if error.kind == "invalid":
            return invalid(str(error))
        if error.kind == "conflict":
            return ApiError(422, str(error), code="idempotency_conflict")
        if error.kind == "not_found":
            return ApiError(404, str(error), code="request_not_found")
        if error.kind == "cancelled":
            return ApiError(410, str(error), code="request_cancelled")
        if error.kind == "limited":
            headers = {"retry-after": str(RETRY_UNAVAILABLE_S)}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
        if error.kind in ("unavailable", "memory"):
            return unavailable(str(error))
        return ApiError(500, f"the engine failed on this request: {error}")
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error))
    raise error


def unavailable(message: str) -> ApiError:
    """The error while a model cannot serve: asleep, loading, draining, ended (503)."""
    return ApiError(503, message, code="unavailable", headers={"retry-after": str(RETRY_UNAVAILABLE_S)})


def _type_of(status: int) -> str:
    types = {
        401: "invalid_request_error",
        403: "permission_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    }
    return types.get(status, "invalid_request_error" if status < 500 else "server_error")

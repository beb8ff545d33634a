"""Errors for clients: OpenAI's nested error object on every route."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

from jaxserve.api import DeadlineMissed, EngineFailed, Overloaded, Rejected

MAX_MESSAGE_CHARS = 1000

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than 200. Its message goes to the client: no paths, no `str(exception)`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, body: dict[str, Any] | None = None) -> web.Response:
        """Makes the HTTP response. `body`: the error in the format of another API than OpenAI's."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
            headers["Retry-After-Ms"] = str(math.ceil(self.retry_after * 1000))
        return json_response(body or self.body(), status=self.status, headers=headers)


class PromptTooLong(ApiError):
    """The 400 for a prompt that is too long for the context."""

    def __init__(self, prompt_tokens: int, max_model_len: int, *, param: str, exact: bool = True):
        """`exact`: all tokens were counted."""
        size = f"{prompt_tokens} tokens" if exact else f"more than {prompt_tokens} tokens"
        super().__init__(
            400,
            f"the prompt has {size}; this model's maximum context length is "
            f"{max_model_len} tokens, including at least 1 for the answer",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.most_tokens = max_model_len - 1


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Returns the JSON body of an error in Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    if isinstance(error, PromptTooLong):
        # Clients parse the numbers out of exactly this text.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.most_tokens} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}
    named = f"{error.param}: " if error.param and error.param not in error.message else ""
    return {"type": "error", "error": {"type": kind, "message": named + error.message}}


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Makes errors name the request's own fields instead of those of the translated chat.

    Pass longer names before their prefixes. A name with a dot never occurs as a word of a message.
    """
    try:
        yield
    except ApiError as error:
        for field, own in names.items():
            if "." in field:
                error.message = error.message.replace(field, own)
            rest = (error.param or "").removeprefix(field)
            if rest != (error.param or "") and rest[:1] in ("", ".", "["):
                error.param = own + rest
                break
        raise


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Returns a response with a JSON body."""
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error (400) of an invalid request."""
    return ApiError(400, message, param=param, code=code)


def too_large(most: int) -> ApiError:
    """Makes the 413 for a body of more than `most` bytes."""
    message = f"the request body is too large: the limit is {most:,} bytes"
    return ApiError(413, message, code="request_too_large")


def internal_error() -> ApiError:
    """Makes the 500 for an unexpected exception, which is in the log."""
    return ApiError(500, "internal server error", code="internal_error")


def engine_error(error: Rejected | Overloaded | EngineFailed, *, accepting: bool) -> ApiError:
    """Translates a failure of the engine. `accepting`: the engine takes requests in principle."""
    if isinstance(error, Rejected):
        return invalid(str(error), param=error.param, code=error.code)
    if isinstance(error, DeadlineMissed):
        return ApiError(503, str(error), code="deadline", retry_after=error.retry_after)
    if isinstance(error, Overloaded):
        status, code = (429, "overloaded") if accepting else (503, "not_ready")
        return ApiError(status, str(error), code=code, retry_after=error.retry_after)
    return ApiError(503, "the engine has failed; the server must be restarted", code="failed")

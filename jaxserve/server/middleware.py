"""Middleware around every handler: one error format, and request ids."""

from __future__ import annotations

import logging
import uuid

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from jaxserve.config import ServerConfig
from jaxserve.server.errors import ApiError, anthropic_body, internal_error
from jaxserve.server.reply import GENERATION
from jaxserve.server.request.schema import MAX_REQUEST_ID_CHARS
from jaxserve.server.service import SERVICE

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_ID_HEADER = "request-id"
REQUEST_ID = web.RequestKey("request_id", str)
_BEGUN = web.RequestKey("begun", bool)
"""Whether the answer of a request has begun."""
_REJECTIONS = {
    400: "invalid",
    401: "unauthorized",
    404: "invalid",
    429: "overloaded",
    503: "not_ready",
}


@web.middleware
async def error_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every error of a handler or the router into our error format. After an answer has
    begun, it closes the connection instead, so that the client does not take the answer for
    complete."""
    try:
        return await handler(request)
    except ApiError as error:
        generation = request.get(GENERATION)
        begun = generation is not None and generation.completion_tokens > 0
        if not begun and (reason := _REJECTIONS.get(error.status)):
            request.app[SERVICE].metrics.request_rejected(reason)
        return _response(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _http_error(request, error)
    except ConnectionError:
        raise  # the client has disconnected; aiohttp closes the connection
    except Exception:
        # The path as it was sent, percent-encoded, so that it cannot forge log lines.
        path, fields = request.rel_url.raw_path, {"request_id": request_id(request)}
        log.exception("%s %s failed", request.method, path, extra={"fields": fields})
        return _response(request, internal_error())
    finally:
        request.app[SERVICE].huge_bodies.release(request)


def _response(request: web.Request, error: ApiError) -> web.Response:
    """Makes the response of an error. Raises ConnectionError if the answer has begun; this closes
    the connection."""
    if not request.get(_BEGUN):
        return shaped(error, request.path, request.app[SERVICE].config)
    if request.transport is not None:
        request.transport.close()
    raise ConnectionResetError("an answer that had begun was cut off") from error


def shaped(error: ApiError, path: str, config: ServerConfig) -> web.Response:
    """Makes the response of an error, in Anthropic's format on Anthropic's routes."""
    return error.response(anthropic_body(error) if _is_anthropics(path, config) else None)


def _is_anthropics(path: str, config: ServerConfig) -> bool:
    return path.removeprefix(config.root_path).startswith("/v1/messages")


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    response = _response(request, as_api_error(request, error, request.app[SERVICE].config))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def as_api_error(
    request: web.BaseRequest, error: web.HTTPException, config: ServerConfig
) -> ApiError:
    """Translates an error of aiohttp."""
    match error:
        case web.HTTPNotFound():
            message = f"no such route: {request.method} {request.path}"
            meant = _meant(request, config.root_path) if isinstance(request, web.Request) else None
            hint = f"; {meant} was probably meant: mind the base URL" if meant else ""
            message = f"{message[:500]}{hint}; GET {config.root_path}/openapi.json lists them"
            code = "unknown_url"
        case web.HTTPMethodNotAllowed():
            taken = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} does not take {request.method}, but {taken}"
            code = "method_not_allowed"
        case web.HTTPExpectationFailed():
            message = "the header Expect may only be 100-continue"
            code = "expectation_failed"
        case _:
            message, code = error.reason or "bad request", None
    return ApiError(error.status, message, code=code)


def _meant(request: web.Request, root_path: str) -> str | None:
    """Returns the route that was meant, if the base URL has one /v1 too many or too few."""
    path = request.path.removeprefix(root_path)
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    wanted = path if path.startswith("/v1/") else f"/v1{path}"
    routes = {resource.canonical for resource in request.app.router.resources()}
    meant = root_path + wanted
    return meant if wanted in routes and meant != request.path else None


class ClientErrorFilter(logging.Filter):
    """Filter for aiohttp's logger. Invalid requests, and clients that disconnect during an answer,
    are not errors of the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.info("a request was not HTTP: %s", type(error).__name__)
            return False
        return True


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the id. It is a signal handler, so that streams and router errors also get the
    header."""
    request[_BEGUN] = True
    response.headers[REQUEST_ID_HEADER] = request_id(request)
    if _is_anthropics(request.path, request.app[SERVICE].config):
        response.headers[ANTHROPIC_ID_HEADER] = request_id(request)
    response.headers[hdrs.SERVER] = "jaxserve"  # hides the versions of Python and aiohttp


async def close_when_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Closes connections while the server drains, so that clients and balancers do not reuse
    them."""
    if request.app[SERVICE].engine.status().phase == "draining":
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


def request_id(request: web.Request) -> str:
    """Returns the request id from the header or the body, or a new one."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = _id_of_header(request) or uuid.uuid4().hex
    return request[REQUEST_ID]


def take_request_id(request: web.Request, of_body: str | None) -> None:
    """Stores the request id of the body. A header, which a proxy may set, wins, as in vLLM."""
    if of_body is not None:
        request[REQUEST_ID] = _id_of_header(request) or of_body


def _id_of_header(request: web.Request) -> str | None:
    """Returns the id in the header; None unless it is printable ASCII of reasonable length."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    usable = 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    return given if usable else None

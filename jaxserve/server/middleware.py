"""What happens around every handler: errors in one shape, request ids."""

from __future__ import annotations

import logging
import uuid

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from jaxserve.server.errors import ApiError, anthropic_body
from jaxserve.server.reply import GENERATION
from jaxserve.server.request.schema import MAX_REQUEST_ID_CHARS
from jaxserve.server.service import SERVICE

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
_REJECTIONS = {
    400: "invalid",
    401: "unauthorized",
    404: "invalid",
    429: "overloaded",
    503: "not_ready",
}


@web.middleware
async def error_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error raised by a handler or by the router into the one shape."""
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
        raise  # the client is gone; aiohttp ends the connection
    except Exception:
        # As it was sent: percent-encoded, so that a path cannot write lines of its own.
        path, fields = request.rel_url.raw_path, {"request_id": request_id(request)}
        log.exception("%s %s failed", request.method, path, extra={"fields": fields})
        return _response(request, ApiError(500, "internal server error", code="internal_error"))


def _response(request: web.Request, error: ApiError) -> web.Response:
    """In Anthropic's shape on its routes."""
    root = request.app[SERVICE].config.root_path
    anthropic = request.path.removeprefix(root).startswith("/v1/messages")
    return error.response(anthropic_body(error) if anthropic else None)


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    config = request.app[SERVICE].config
    match error:
        case web.HTTPNotFound():
            message = f"no such route: {request.method} {request.path}"
            message = f"{message[:500]}; GET {config.root_path}/openapi.json lists them"
            code = "unknown_url"
        case web.HTTPMethodNotAllowed():
            taken = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} does not take {request.method}, but {taken}"
            code = "method_not_allowed"
        case web.HTTPRequestEntityTooLarge():
            limit = config.max_request_bytes
            message = f"the request body is too large: this server takes {limit:,} bytes"
            code = "request_too_large"
        case _:
            message, code = error.reason or "bad request", None
    response = _response(request, ApiError(error.status, message, code=code))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


class ClientsAffairs(logging.Filter):
    """For aiohttp's logger: what no client may send, and that one has left while it was written to,
    are no errors of the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.info("a request was not HTTP: %s", type(error).__name__)
            return False
        return True


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler, so that streams and errors of the router have the header, too."""
    response.headers[REQUEST_ID_HEADER] = request_id(request)
    response.headers[hdrs.SERVER] = "jaxserve"  # and not the versions of Python and aiohttp


async def close_when_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Clients and balancers that keep connections must not send their next request here."""
    if request.app[SERVICE].engine.status().phase == "draining":
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


def request_id(request: web.Request) -> str:
    """The client's, from the header or else from the body; one made here where it sent none."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = _id_of_header(request) or uuid.uuid4().hex
    return request[REQUEST_ID]


def take_request_id(request: web.Request, of_body: str | None) -> None:
    """The body has been read; as in vLLM a header, which a proxy may set, goes before it."""
    if of_body is not None:
        request[REQUEST_ID] = _id_of_header(request) or of_body


def _id_of_header(request: web.Request) -> str | None:
    """None: there is none of printable ASCII and of reasonable length."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    usable = 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    return given if usable else None

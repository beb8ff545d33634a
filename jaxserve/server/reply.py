"""How one generation is answered: as a stream of events or as one JSON body."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from aiohttp import web

from jaxserve.api import EngineFailed, Overloaded, ReaderTooSlow, Rejected
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import (
    ApiError,
    engine_error,
    internal_error,
    invalid,
    json_response,
)
from jaxserve.server.off_loop import Lane, off_loop
from jaxserve.server.output.generation import Choice, Delta, Generation, GrammarLeft
from jaxserve.server.service import Service
from jaxserve.server.sse import EventStream
from jaxserve.server.time_limit import read_timeout, time_limit

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-jaxserve-ignored-params"
MAX_IGNORED_SHOWN = 32
INLINE_ENTRIES = 2048
"""Tokens and logprobs of an answer that is put together on the event loop: 2 to 4 ms."""
GENERATION = web.RequestKey("generation", Generation)
"""Where a request keeps its Generation, for the log."""


class Reply(Protocol):
    """One API's way to put deltas into words."""

    def events(self, delta: Delta) -> bytes:
        """Events of one step; empty if there is nothing to say yet."""
        ...

    def last_events(self) -> bytes: ...

    def error_events(self, error: ApiError) -> bytes: ...

    def collect(self, delta: Delta) -> None:
        """Keep a delta for `body`."""
        ...

    def body(self) -> dict[str, Any]: ...


_RESTART_SECONDS = 5.0
"""When a client may come back to a server that has just shut down."""


async def answer(
    arrival: Arrival,
    generation: Generation,
    reply: Reply,
    *,
    stream: bool,
    ignored: tuple[str, ...],
) -> web.StreamResponse:
    """Submit the generation and answer with it: as a stream, or as one body when it has ended.

    `ignored`: fields that nothing knows, for a header. Raises ApiError as long as nothing was sent;
    later failures are events of the stream.
    """
    service = arrival.service
    headers = ignored_header(service, (*ignored, *generation.ignored))
    arrival.request[GENERATION] = generation
    service.huge_bodies.release(arrival.request)
    service.metrics.observe_tokenizing(generation.tokenizing)
    deltas = generation.deltas(service.engine, service.metrics, arrival.at)
    async with aclosing(deltas):
        try:
            with service.backlog.holding(generation.choices):
                if stream:
                    return await _stream(arrival, generation, deltas, reply, headers)
                client_waits = read_timeout(arrival.request)
                async with time_limit(service, arrival.at, client_waits) as patience:
                    async for together in deltas:
                        patience.has_begun()
                        for delta in together:
                            reply.collect(delta)
            timing = _server_timing(arrival, generation, generation.choices[0])
            where = Lane.LARGE if generation.num_entries > INLINE_ENTRIES else Lane.INLINE
            body = await off_loop(where, _encoded, reply)
            return json_response(body, headers=headers | timing)
        except (Rejected, Overloaded, EngineFailed) as error:
            raise _as_api_error(service, error) from error
        finally:
            if most := max(choice.num_tokens for choice in generation.choices):
                service.metrics.request_generated(most)


def _encoded(reply: Reply) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(reply.body()))


async def _stream(
    arrival: Arrival,
    generation: Generation,
    deltas: AsyncIterator[list[Delta]],
    reply: Reply,
    headers: dict[str, str],
) -> web.StreamResponse:
    service = arrival.service
    async with EventStream(arrival.request, headers, service.config.keep_alive_interval) as stream:
        try:
            async with time_limit(service, arrival.at) as patience:
                async for together in deltas:
                    patience.has_begun()
                    if events := b"".join(map(reply.events, together)):
                        if stream.silent:
                            choice = generation.choices[together[0].choice]
                            await _send_first(arrival, stream, events, generation, choice)
                        else:
                            await stream.send(events)
            await stream.send(reply.last_events())
        except ApiError as error:
            if not stream.started:
                raise
            await stream.send(reply.error_events(error))
        except (Rejected, Overloaded, EngineFailed) as error:
            if not stream.started:
                raise
            await stream.send(reply.error_events(_as_api_error(service, error)))
        except ConnectionError:
            raise  # nobody is left to be told
        except Exception:
            if not stream.started:
                raise
            log.exception("an answer that had begun failed: %s", arrival.id)
            await stream.send(reply.error_events(internal_error()))
    return stream.response


async def _send_first(
    arrival: Arrival, stream: EventStream, events: bytes, generation: Generation, choice: Choice
) -> None:
    if not stream.started:
        stream.response.headers.update(_server_timing(arrival, generation, choice))
    await stream.send(events)
    stream.silent = False
    if choice.start is not None:
        generation.first_write = time.perf_counter() - choice.start.on_host
        arrival.service.metrics.observe_first_write(generation.first_write)


def _server_timing(arrival: Arrival, generation: Generation, choice: Choice) -> dict[str, str]:
    """Where the time to the first token went, for who looks at one request."""
    start = choice.start
    if start is None:
        return {}
    parts = {
        "tokenize": generation.tokenizing,
        "queue": start.queued,
        "prefill": start.prefill,
        "ttft": start.on_host - arrival.at,
    }
    shown = ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in parts.items())
    return {"Server-Timing": shown}


def _as_api_error(service: Service, error: Rejected | Overloaded | EngineFailed) -> ApiError:
    if isinstance(error, GrammarLeft):
        # No 500: clients would try again, and meet the limit again.
        return invalid(
            f"after {error.num_tokens} tokens the grammar asked for cannot be followed any "
            "further: too many ways to read the output so far, or too many states; rules "
            "that are recursive at their beginning and fewer nested repetitions need less",
            code="grammar_limit",
        )
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, f"the answer was given up: {error}", code="slow_reader")
    status = service.engine.status()
    accepting = status.ready and status.phase != "draining"
    if isinstance(error, EngineFailed) and status.phase == "draining":
        message = "the server is shutting down, this request was not finished"
        return ApiError(503, message, code="not_ready", retry_after=_RESTART_SECONDS)
    if isinstance(error, EngineFailed) and status.phase != "failed":
        return ApiError(500, "the engine could not finish this request", code="generation_failed")
    answer = engine_error(error, accepting=accepting)
    if answer.status == 429:
        answer.retry_after = service.backlog.seconds_to_drain()
    return answer


def ignored_header(service: Service, ignored: tuple[str, ...]) -> dict[str, str]:
    """Counts the fields that had no effect; the header that names them, if there are any."""
    for name in ignored:
        service.metrics.parameter_ignored(name[:100])
    shown = [name[:100] for name in ignored if name.isascii() and name.isprintable()]
    return {IGNORED_HEADER: ",".join(shown[:MAX_IGNORED_SHOWN])} if shown else {}

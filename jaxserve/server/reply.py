"""Answers with one generation: as a stream of events or as one JSON body."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from aiohttp import web

from jaxserve.api import EngineFailed, Overloaded, Rejected
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import json_response
from jaxserve.server.failures import api_error
from jaxserve.server.off_loop import Lane, off_loop
from jaxserve.server.output.generation import Delta, Generation
from jaxserve.server.server_timing import server_timing
from jaxserve.server.service import Service
from jaxserve.server.streaming import Events, streamed
from jaxserve.server.time_limit import read_timeout, time_limit

IGNORED_HEADER = "x-jaxserve-ignored-params"
MAX_IGNORED_SHOWN = 32
INLINE_ENTRIES = 2048
"""Answers of up to this many tokens and logprobs are built on the event loop: 2 to 4 ms."""
GENERATION = web.RequestKey("generation", Generation)
"""The Generation of a request, for the log."""


class Reply(Events, Protocol):
    """The interface by which an API formats deltas."""

    def collect(self, delta: Delta) -> None:
        """Keeps a delta for `body`."""
        ...

    def body(self) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed. Call it after all deltas are
        collected."""
        ...


async def answer(
    arrival: Arrival,
    generation: Generation,
    reply: Reply,
    *,
    stream: bool,
    ignored: tuple[str, ...],
) -> web.StreamResponse:
    """Submits the generation and answers with it: as a stream, or as one body at its end.

    `ignored`: fields that no code knows, for a header. Raises ApiError only before anything was
      sent. Later failures are events of the stream.
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
                    return await streamed(arrival, generation, deltas, reply, headers)
                client_waits = read_timeout(arrival.request)
                async with time_limit(service, arrival.at, client_waits) as patience:
                    async for together in deltas:
                        patience.has_begun()
                        for delta in together:
                            reply.collect(delta)
            timing = server_timing(arrival, generation, generation.choices[0])
            where = Lane.LARGE if generation.num_entries > INLINE_ENTRIES else Lane.INLINE
            body = await off_loop(where, _encoded, reply)
            return json_response(body, headers=headers | timing)
        except (Rejected, Overloaded, EngineFailed) as error:
            raise api_error(service, error) from error
        finally:
            if most := max(choice.num_tokens for choice in generation.choices):
                service.metrics.request_generated(most)


def _encoded(reply: Reply) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(reply.body()))


def ignored_header(service: Service, ignored: tuple[str, ...]) -> dict[str, str]:
    """Counts the ignored fields and returns the header that names them, if there are any."""
    for name in ignored:
        service.metrics.parameter_ignored(name[:100])
    shown = [name[:100] for name in ignored if name.isascii() and name.isprintable()]
    return {IGNORED_HEADER: ",".join(shown[:MAX_IGNORED_SHOWN])} if shown else {}

"""Streams an answer as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

from aiohttp import web

from jaxserve.api import EngineFailed, Overloaded, Rejected
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import ApiError, internal_error
from jaxserve.server.failures import api_error
from jaxserve.server.output.generation import Choice, Delta, Generation
from jaxserve.server.server_timing import server_timing
from jaxserve.server.sse import EventStream
from jaxserve.server.time_limit import time_limit

log = logging.getLogger(__name__)

WEIGHTS_HEADER = "x-jaxserve-weights"
"""Response header with the version of the weights that computed the answer; several versions after
a change during the answer. If the change came after the headers, a comment before the last events
of a stream has it."""


class Events(Protocol):
    """The interface by which an API formats deltas as events."""

    def events(self, delta: Delta) -> bytes:
        """Returns the events of one step; empty if there is nothing to send yet."""
        ...

    def last_events(self) -> bytes:
        """Returns the events after the last delta."""
        ...

    def error_events(self, error: ApiError) -> bytes:
        """Returns the events that end a stream with this error."""
        ...


async def streamed(
    arrival: Arrival,
    generation: Generation,
    deltas: AsyncIterator[list[Delta]],
    reply: Events,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Writes the events of a generation. Raises an error before the first event. Sends a later one
    as an event of the stream."""
    service = arrival.service
    async with EventStream(arrival.request, headers, service.config.keep_alive_interval) as stream:

        async def end(events: bytes) -> None:
            await stream.send(_later_weights(stream, generation) + events)

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
            await end(reply.last_events())
        except ApiError as error:
            if not stream.started:
                raise
            await end(reply.error_events(error))
        except (Rejected, Overloaded, EngineFailed) as error:
            if not stream.started:
                raise
            await end(reply.error_events(api_error(service, error)))
        except ConnectionError:
            raise  # the client has disconnected
        except Exception:
            if not stream.started:
                raise
            log.exception("an answer failed after it had begun: %s", arrival.id)
            await end(reply.error_events(internal_error()))
    return stream.response


def named(versions: set[int]) -> str:
    """Returns the value of the header for these versions of the weights."""
    return ",".join(map(str, sorted(versions)))


def _later_weights(stream: EventStream, generation: Generation) -> bytes:
    """Returns a comment with the versions of the weights if they differ from the header's."""
    names = named(generation.weights)
    if not stream.started or not names or stream.response.headers.get(WEIGHTS_HEADER) == names:
        return b""
    return f": {WEIGHTS_HEADER}: {names}\n\n".encode()


async def _send_first(
    arrival: Arrival, stream: EventStream, events: bytes, generation: Generation, choice: Choice
) -> None:
    if not stream.started:
        stream.response.headers.update(server_timing(arrival, generation, choice))
    await stream.send(events)
    stream.silent = False
    if choice.start is not None:
        generation.first_write = time.perf_counter() - choice.start.on_host
        arrival.service.metrics.observe_first_write(generation.first_write)

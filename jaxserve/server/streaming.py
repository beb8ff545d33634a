"""An answer as a stream of events."""

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
"""Of answers: the version of the weights that computed them; several after a change on the way.
Also a comment before a stream's last events, if a change came after its header."""


class Events(Protocol):
    """One API's way to put deltas into events."""

    def events(self, delta: Delta) -> bytes:
        """Events of one step; empty if there is nothing to say yet."""
        ...

    def last_events(self) -> bytes:
        """Events after the last delta."""
        ...

    def error_events(self, error: ApiError) -> bytes:
        """Events that end a stream with this error."""
        ...


async def streamed(
    arrival: Arrival,
    generation: Generation,
    deltas: AsyncIterator[list[Delta]],
    reply: Events,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Writes the events of a generation. An error before the first event is raised; a later one is
    an event of the stream."""
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
            raise  # nobody is left to be told
        except Exception:
            if not stream.started:
                raise
            log.exception("an answer that had begun failed: %s", arrival.id)
            await end(reply.error_events(internal_error()))
    return stream.response


def named(versions: set[int]) -> str:
    """Returns versions of the weights as the header has them."""
    return ",".join(map(str, sorted(versions)))


def _later_weights(stream: EventStream, generation: Generation) -> bytes:
    """Returns a comment that names the versions of the weights, if the header named others."""
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

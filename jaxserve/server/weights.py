"""Admin routes that change the weights, pause the engine, or put it to sleep."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec
from aiohttp import web

from jaxserve.api import Running, WeightChange, WeightsRefused
from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.reply import GENERATION
from jaxserve.server.request.parse import read_fields
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.streaming import WEIGHTS_HEADER, named

PAUSE_MODES, SLEEP_LEVELS = ("keep", "wait"), ("1", "2")
"""Values of query parameters. The first is the default."""


class WeightsRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/weights."""

    model: str
    """A folder on the server, or any other value of --model."""
    step: int | None = None
    """Step of a folder of Orbax checkpoints; default: the newest complete one."""
    running: Running = Running.DRAIN
    in_place: bool = False


class ServedWeights(msgspec.Struct, kw_only=True):
    """The weights that are served."""

    version: int
    model: str
    paused: bool
    sleeping: bool


class ChangedWeights(msgspec.Struct, kw_only=True):
    """The result of a change of weights."""

    version: int
    model: str
    load_seconds: float
    gap_seconds: float


class Paused(msgspec.Struct, kw_only=True):
    is_paused: bool


class Sleeping(msgspec.Struct, kw_only=True):
    is_sleeping: bool


def routes(prefix: str) -> list[web.RouteDef]:
    """Returns the routes below a path."""
    return [
        web.get(f"{prefix}/v1/weights", show),
        web.post(f"{prefix}/v1/weights", change),
        web.post(f"{prefix}/pause", pause),
        web.post(f"{prefix}/resume", resume),
        web.get(f"{prefix}/is_paused", is_paused),
        web.post(f"{prefix}/sleep", sleep),
        web.post(f"{prefix}/wake_up", wake_up),
    ]


async def show(request: web.Request) -> web.Response:
    """GET /v1/weights: the served weights."""
    state = request.app[SERVICE].engine.weights
    return json_response(
        ServedWeights(
            version=state.version, model=state.model, paused=state.paused, sleeping=state.sleeping
        )
    )


async def change(request: web.Request) -> web.Response:
    """POST /v1/weights: serves other weights of the same shapes from some step on."""
    service = _accepting(request)
    fields = (await read_fields(request, WeightsRequest)).fields
    wanted = WeightChange(fields.model, fields.step, fields.running, fields.in_place)
    done = await _refused(service.engine.change_weights(wanted))
    return json_response(
        ChangedWeights(
            version=done.version,
            model=fields.model,
            load_seconds=round(done.load_seconds, 3),
            gap_seconds=round(done.gap_seconds, 4),
        )
    )


async def pause(request: web.Request) -> web.Response:
    """POST /pause: runs no more steps. `mode`, as in vLLM: keep (running requests stay as they are)
    or wait (they end first)."""
    mode = _choice(request, "mode", PAUSE_MODES)
    await _refused(_accepting(request).engine.pause(finish=mode == "wait"))
    return json_response(Paused(is_paused=True))


async def resume(request: web.Request) -> web.Response:
    await _refused(_accepting(request).engine.resume())
    return json_response(Paused(is_paused=False))


async def is_paused(request: web.Request) -> web.Response:
    return json_response(Paused(is_paused=request.app[SERVICE].engine.weights.paused))


async def sleep(request: web.Request) -> web.Response:
    """POST /sleep: pauses and frees the KV cache. `level`: 1 keeps the weights, 2 drops them."""
    level = _choice(request, "level", SLEEP_LEVELS)
    await _refused(_accepting(request).engine.sleep(drop_weights=level == "2"))
    return json_response(Sleeping(is_sleeping=True))


async def wake_up(request: web.Request) -> web.Response:
    await _refused(_accepting(request).engine.wake())
    return json_response(Sleeping(is_sleeping=False))


async def is_sleeping(request: web.Request) -> web.Response:
    """GET /is_sleeping, which routers call with a client's key."""
    return json_response(Sleeping(is_sleeping=request.app[SERVICE].engine.weights.sleeping))


async def name_weights(request: web.Request, response: web.StreamResponse) -> None:
    """Adds a header with the version of the weights: the current one if the answer has not
    begun."""
    generation = request.get(GENERATION)
    if generation is not None:
        versions = generation.weights or {request.app[SERVICE].engine.weights.version}
        response.headers[WEIGHTS_HEADER] = named(versions)


def _accepting(request: web.Request) -> Service:
    service = request.app[SERVICE]
    service.check_accepting()
    return service


async def _refused[T](doing: Awaitable[T]) -> T:
    """Awaits `doing`. Turns errors about weights or the order of calls into errors of the
    caller."""
    try:
        return await doing
    except WeightsRefused as error:
        raise ApiError(400, str(error), code="weights_refused") from None


def _choice(request: web.Request, name: str, values: tuple[str, ...]) -> str:
    """Returns a query parameter; default: the first of `values`."""
    found = request.query.get(name, values[0])
    if found not in values:
        raise ApiError(400, f"{name} must be one of {', '.join(values)}", param=name)
    return found

"""Routes of probes and scrapers: liveness, readiness, metrics. They answer on the API's port, and
on the port of `--probe-port` from another thread."""

from __future__ import annotations

import time

from aiohttp import hdrs, web

from jaxserve.api import EngineFailed
from jaxserve.metrics.exposition import CONTENT_TYPE
from jaxserve.metrics.families import ROUTING
from jaxserve.server.errors import json_response
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.shapes import Health, Readiness

_RETRY = {"Retry-After": "1"}


class Pulse:
    """When the API's event loop last ran."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def beat(self) -> None:
        """Records that the loop runs. Called on that loop periodically."""
        self._at = time.monotonic()

    @property
    def age(self) -> float:
        """Returns the seconds since the last beat."""
        return time.monotonic() - self._at


PULSE = web.AppKey("pulse", Pulse)


async def health(request: web.Request) -> web.Response:
    """GET /health: whether the server serves requests, as load balancers expect of a 200. With
    `--health-means live` it is the same as /live."""
    if request.app[SERVICE].config.health_means == "live":
        return await live(request)
    return await _health(request, {"serving"})


async def live(request: web.Request) -> web.Response:
    """GET /live: whether the engine makes progress, is idle, or is starting."""
    return await _health(request, None)


async def _health(request: web.Request, well: set[str] | None) -> web.Response:
    """Answers a health probe. With `deep=1`, a serving engine must generate a token. `well`: the
    phases with status 200; None: all phases except `failed` and `stalled`."""
    service = request.app[SERVICE]
    status, phase = service.engine.status(), phase_of(request)
    healthy = phase not in ("failed", "stalled") if well is None else phase in well
    body = Health(
        phase=phase,
        running=status.running,
        waiting=status.waiting,
        last_step_age_s=round(status.last_step_age, 3),
    )
    if phase == "serving" and request.query.get("deep") == "1" and PULSE not in request.app:
        try:
            seconds = await service.probe.seconds()
            body.token_s = None if seconds is None else round(seconds, 3)
        except EngineFailed:
            healthy, body.phase = False, "no_token"
    return json_response(body, status=200 if healthy else 503, headers=None if healthy else _RETRY)


async def ready(request: web.Request) -> web.Response:
    """GET /ready: whether a request sent now would be served."""
    phase, status = phase_of(request), request.app[SERVICE].engine.status()
    serving = phase == "serving"
    body = Readiness(phase=phase, progress=status.progress)
    return json_response(body, status=200 if serving else 503, headers=None if serving else _RETRY)


def phase_of(request: web.Request) -> str:
    """Returns the engine's phase. Returns `stalled` if no step has finished for too long, or if the
    API's event loop does not run."""
    service = request.app[SERVICE]
    pulse = request.app.get(PULSE)
    if pulse is not None and pulse.age >= service.config.stall_timeout:
        return "stalled"
    return _phase(service)


def _phase(service: Service) -> str:
    status = service.engine.status()
    stalled = status.last_step_age >= service.config.stall_timeout and status.phase != "failed"
    return "stalled" if stalled else status.phase


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: all metrics, or those that `name[]` names."""
    service, names = request.app[SERVICE], request.query.getall("name[]", None)
    _observe(service)
    if names is None:
        # A scrape on another port is not among these requests.
        answers = sum(connection.answering for connection in list(service.connections))
        service.metrics.observe_answers(answers - (PULSE not in request.app))
        service.metrics.set_weights(service.engine.weights.version)
    return _text(service.metrics.exposition(names))


async def routing_metrics(request: web.Request) -> web.Response:
    """GET /metrics/routing: the metrics that routers read, 2 KB."""
    service = request.app[SERVICE]
    _observe(service)
    return _text(service.metrics.exposition(ROUTING))


def _observe(service: Service) -> None:
    service.metrics.observe_load(service.engine.status(), ready=_phase(service) == "serving")


def _text(body: bytes) -> web.Response:
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})


def routes(prefix: str = "") -> list[web.RouteDef]:
    """Returns the routes for probes and scrapers below a path."""
    return [
        web.get(f"{prefix}/health", health),
        web.get(f"{prefix}/live", live),
        web.get(f"{prefix}/ready", ready),
        web.get(f"{prefix}/metrics", metrics),
        web.get(f"{prefix}/metrics/routing", routing_metrics),
    ]


def probe_app(service: Service, pulse: Pulse) -> web.Application:
    """Makes the application of the probe port, without keys. It may run in another thread than the
    API. It reads shared state and awaits nothing of the API's loop, so it answers even while that
    loop is busy. `deep=1` has no effect there.
    """
    app = web.Application()
    app[SERVICE], app[PULSE] = service, pulse
    app.add_routes(routes())
    app.on_response_prepare.append(_name)
    return app


async def _name(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "jaxserve"  # hides the versions of Python and aiohttp

"""What operators and load balancers ask: health, readiness, load, metrics, models."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

import jaxserve
from jaxserve.api import EngineFailed, EngineStatus
from jaxserve.config import ServerConfig
from jaxserve.metrics.exposition import CONTENT_TYPE
from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.openapi import document
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.schema import EmbeddingsRequest
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.shapes import (
    AnthropicModel,
    AnthropicModelList,
    Health,
    Load,
    Model,
    ModelList,
    Readiness,
    Version,
)

ANTHROPIC_VERSION = "anthropic-version"
"""A header that Anthropic's clients send: models are told of in Anthropic's shape then."""


async def health(request: web.Request) -> web.Response:
    """GET /health: whether the engine thread makes progress or is idle. With `deep=1` an engine
    that serves must generate a token."""
    service = request.app[SERVICE]
    status = service.engine.status()
    phase = _phase(status, service.config)
    healthy = phase not in ("failed", "stalled")
    body = Health(
        phase=phase,
        running=status.running,
        waiting=status.waiting,
        last_step_age_s=round(status.last_step_age, 3),
    )
    if phase == "serving" and request.query.get("deep") == "1":
        try:
            seconds = await service.probe.seconds()
            body.token_s = None if seconds is None else round(seconds, 3)
        except EngineFailed:
            healthy, body.phase = False, "no_token"
    return json_response(body, status=200 if healthy else 503)


async def ready(request: web.Request) -> web.Response:
    """GET /ready: whether a request sent now is served now."""
    service = request.app[SERVICE]
    status = service.engine.status()
    serving = _is_ready(status, service.config)
    body = Readiness(phase=_phase(status, service.config), progress=status.progress)
    headers = None if serving else {"Retry-After": "1"}
    return json_response(body, status=200 if serving else 503, headers=headers)


def _is_ready(status: EngineStatus, config: ServerConfig) -> bool:
    return status.ready and _phase(status, config) not in ("draining", "failed", "stalled")


def _phase(status: EngineStatus, config: ServerConfig) -> str:
    """The engine's, or that it has not finished a step for too long."""
    stalled = status.last_step_age >= config.stall_timeout and status.phase != "failed"
    return "stalled" if stalled else status.phase


async def load(request: web.Request) -> web.Response:
    """GET /load."""
    status = request.app[SERVICE].engine.status()
    body = Load(
        server_load=status.running + status.waiting,
        running=status.running,
        waiting=status.waiting,
        free_pages=status.free_pages,
        total_pages=status.total_pages,
    )
    return json_response(body)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    service = request.app[SERVICE]
    status = service.engine.status()
    service.metrics.observe_load(status, ready=_is_ready(status, service.config))
    service.metrics.set_weights(service.engine.weights.version)
    answers = sum(connection.answering for connection in service.connections)
    service.metrics.observe_answers(answers - 1)  # without this one
    return web.Response(body=service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache, for benchmarks that start every point cold."""
    service = request.app[SERVICE]
    service.check_accepting()
    service.engine.reset_prefix_cache()
    return json_response({})


async def version(_request: web.Request) -> web.Response:
    """GET /version."""
    return json_response(Version(version=jaxserve.__version__))


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    body = document(request.app[SERVICE].config)
    return web.Response(body=body, content_type="application/json")


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models, in OpenAI's or Anthropic's shape."""
    service = request.app[SERVICE]
    if ANTHROPIC_VERSION in request.headers:
        return json_response(_anthropic_models(service))
    models = [_model(service, name) for name in service.config.model_names]
    return json_response(ModelList(object="list", data=models))


async def retrieve_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}."""
    service = request.app[SERVICE]
    name = service.model_name(request.match_info["model"])
    shape = _anthropic_model if ANTHROPIC_VERSION in request.headers else _model
    return json_response(shape(service, name))


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings: refused, because the model generates text.

    Raises:
      ApiError: always; 404.
    """
    service = request.app[SERVICE]
    fields = (await read_fields(request, EmbeddingsRequest)).fields
    name = service.model_name(fields.model)
    raise ApiError(
        404,
        f"the model {name!r} generates text and has no embeddings",
        param="model",
        code="model_not_supported",
    )


def _anthropic_models(service: Service) -> AnthropicModelList:
    names = service.config.model_names
    models = [_anthropic_model(service, name) for name in names]
    return AnthropicModelList(data=models, has_more=False, first_id=names[0], last_id=names[-1])


def _anthropic_model(service: Service, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(id=name, type="model", display_name=name, created_at=created)


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=service.started,
        owned_by="jaxserve",
        root=service.config.model_names[0],
        parent=None,
        max_model_len=service.engine.limits.max_model_len,
    )

"""Routes for operators: load, version, models, the API description."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

import jaxserve
from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.openapi import document
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.schema import EmbeddingsRequest
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.shapes import (
    AnthropicModel,
    AnthropicModelList,
    Load,
    Model,
    ModelList,
    ModelPermission,
    Version,
)

ANTHROPIC_VERSION = "anthropic-version"
"""A header of Anthropic's clients. With it, models are listed in Anthropic's format."""


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
    """GET /v1/models, in OpenAI's or Anthropic's format."""
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
    """POST /v1/embeddings: always refused, because the models generate text.

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
        permission=[ModelPermission(id=f"modelperm-{name}", created=service.started)],
    )

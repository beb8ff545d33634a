"""Routes that SGLang's routers call: model, limits and load of the server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from aiohttp import web

import jaxserve
from jaxserve.server.errors import json_response
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.shapes import Shape


class ServerInfo(Shape):
    """The fields of SGLang's `/server_info` that its routers read."""

    model_id: str
    model_path: str
    served_model_name: str
    version: str
    context_length: int
    max_total_tokens: int
    """Tokens that the KV cache holds; 0 before it is planned."""
    weight_version: str
    tp_size: Literal[1] = 1
    dp_size: Literal[1] = 1
    pp_size: Literal[1] = 1
    disaggregation_mode: Literal["null"] = "null"
    is_embedding: Literal[False] = False


class ModelInfo(Shape):
    """The fields of SGLang's `/model_info` that its routers read."""

    model_path: str
    tokenizer_path: str
    architectures: list[str]
    weight_version: str
    is_generation: Literal[True] = True
    has_image_understanding: Literal[False] = False
    has_audio_understanding: Literal[False] = False


class RankLoad(Shape):
    """Load of one data-parallel rank, with SGLang's field names."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    """Share of the KV cache in use, 0 to 1."""
    cache_hit_rate: float
    """Share of prompt tokens since the start that were cached, 0 to 1."""


class Loads(Shape):
    timestamp: str
    dp_rank_count: int
    loads: list[RankLoad]


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info, and /get_server_info, its former name."""
    service = request.app[SERVICE]
    name, status = service.config.model_names[0], service.engine.status()
    return json_response(
        ServerInfo(
            model_id=name,
            model_path=name,
            served_model_name=name,
            version=jaxserve.__version__,
            context_length=service.engine.limits.max_model_len,
            max_total_tokens=status.total_pages * service.metrics.page_size,
            weight_version=_weights(service),
        )
    )


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info, and /get_model_info, its former name."""
    service = request.app[SERVICE]
    name, architecture = service.config.model_names[0], service.config.architecture
    return json_response(
        ModelInfo(
            model_path=name,
            tokenizer_path=name,
            architectures=[architecture] if architecture else [],
            weight_version=_weights(service),
        )
    )


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads: the core section, which is the only one."""
    service = request.app[SERVICE]
    status, figures = service.engine.status(), service.metrics.figures()
    used, total = status.total_pages - status.free_pages, status.total_pages
    rank = RankLoad(
        dp_rank=0,
        num_running_reqs=status.running,
        num_waiting_reqs=status.waiting,
        num_total_reqs=status.running + status.waiting,
        num_used_tokens=used * service.metrics.page_size,
        max_total_num_tokens=total * service.metrics.page_size,
        token_usage=used / total if total else 0.0,
        cache_hit_rate=figures.found / figures.looked_up if figures.looked_up else 0.0,
    )
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json_response(Loads(timestamp=now, dp_rank_count=1, loads=[rank]))


def _weights(service: Service) -> str:
    return str(service.engine.weights.version)


def routes(prefix: str) -> list[web.RouteDef]:
    """Returns the routes below a path."""
    return [
        web.get(f"{prefix}/server_info", server_info),
        web.get(f"{prefix}/get_server_info", server_info),
        web.get(f"{prefix}/model_info", model_info),
        web.get(f"{prefix}/get_model_info", model_info),
        web.get(f"{prefix}/v1/loads", loads),
    ]

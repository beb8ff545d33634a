"""The aiohttp application, and the runner that serves it."""

from __future__ import annotations

import logging
import time

from aiohttp import web

from jaxserve.api import Engine
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import health, info, kv_event_sources, operations, weights
from jaxserve.server.access import require_key
from jaxserve.server.backlog import Backlog
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.chat_formats.choose import chat_format
from jaxserve.server.connection import Runner
from jaxserve.server.cors import allow_origin, preflight
from jaxserve.server.huge_bodies import BODIES_AT_ONCE, HugeBodies
from jaxserve.server.messages import count_tokens, messages
from jaxserve.server.middleware import (
    ClientErrorFilter,
    close_when_draining,
    echo_request_id,
    error_shape,
)
from jaxserve.server.openai.chat import chat_completions
from jaxserve.server.openai.completions import completions
from jaxserve.server.openai.render import render_chat, render_completion
from jaxserve.server.probe import Probe
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.responses import responses, stored
from jaxserve.server.sealed import Sealer
from jaxserve.server.service import SERVICE, Chats, Service
from jaxserve.server.telemetry.finished import Tracer
from jaxserve.server.telemetry.request_log import report_request
from jaxserve.server.tokenization import detokenize, tokenize
from jaxserve.server.ui import ui_routes
from jaxserve.server.ui.live import LIVE, Live, Startup
from jaxserve.structured import Guides
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.chat_template import ChatTemplate

MAX_HEADER_FIELDS = 256


def make_app(
    engine: Engine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    metrics: Metrics,
    tracer: Tracer | None = None,
    startup: Startup = tuple,
) -> web.Application:
    """Makes the HTTP application of one engine. It can serve while the engine is still starting.

    Args:
      startup: returns the start-up phases so far.

    Raises:
      ConfigError: the model's chat template is invalid, or a parser name is unknown.
    """
    app = web.Application(
        middlewares=[report_request, preflight, error_shape, require_key],
    )
    chats = _chats(tokenizer, config)
    app[SERVICE] = Service(
        engine=engine,
        tokenizer=tokenizer,
        chats=chats,
        guides=_guides(tokenizer, config, metrics, chats.format),
        responses=ResponseStore(config.response_store_bytes),
        sealer=Sealer(config.reasoning_keys),
        config=config,
        metrics=metrics,
        backlog=Backlog(config.max_queued_tokens),
        huge_bodies=HugeBodies(BODIES_AT_ONCE * config.max_request_bytes),
        probe=Probe(engine),
        tracer=tracer,
        started=int(time.time()),
    )
    app.on_shutdown.append(_end_grammars)
    app.on_response_prepare.append(echo_request_id)
    app.on_response_prepare.append(weights.name_weights)
    app.on_response_prepare.append(allow_origin)
    app.on_response_prepare.append(close_when_draining)
    for prefix in dict.fromkeys(("", config.root_path)):
        app.add_routes(_routes(prefix, admin=bool(config.admin_key_digests)))
    if config.ui:
        live = app[LIVE] = Live(engine, metrics, config, startup)
        app.on_shutdown.append(lambda app: live.close())
        for prefix in dict.fromkeys(("", config.root_path)):
            app.add_routes(ui_routes(prefix))
    return app


async def _end_grammars(app: web.Application) -> None:
    app[SERVICE].guides.close()


def _chats(tokenizer: Tokenizer, config: ServerConfig) -> Chats:
    source = tokenizer.chat_template if config.chat_template is None else config.chat_template
    template = _template(source, tokenizer, config) if source else None
    form = chat_format(
        tokenizer,
        template,
        source or "",
        architecture=config.architecture,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return Chats(template, form)


def _guides(
    tokenizer: Tokenizer, config: ServerConfig, metrics: Metrics, form: ChatFormat
) -> Guides:
    isolated = config.isolate_cache_by_key
    if form.reasoning is None:
        return Guides(tokenizer, metrics, isolated=isolated)
    markers = form.reasoning.markers
    return Guides(tokenizer, metrics, isolated=isolated, think_markers=markers)


def _template(source: str, tokenizer: Tokenizer, config: ServerConfig) -> ChatTemplate:
    try:
        return ChatTemplate(
            source, tokenizer.markers, config.template_variables, tokenizer.template_tokens
        )
    except ConfigError as error:
        where = "chat_template.jinja, or in tokenizer_config.json"
        raise ConfigError(f"the model's chat template ({where}): {error}") from None


def _routes(prefix: str, *, admin: bool) -> list[web.RouteDef]:
    routes = [
        web.post(f"{prefix}/v1/chat/completions", chat_completions),
        web.post(f"{prefix}/v1/chat/completions/render", render_chat),
        web.post(f"{prefix}/v1/completions", completions),
        web.post(f"{prefix}/v1/completions/render", render_completion),
        web.post(f"{prefix}/v1/responses", responses),
        web.get(f"{prefix}/v1/responses/{{response_id}}", stored.retrieve),
        web.delete(f"{prefix}/v1/responses/{{response_id}}", stored.delete),
        web.get(f"{prefix}/v1/responses/{{response_id}}/input_items", stored.input_items),
        web.post(f"{prefix}/v1/messages", messages),
        web.post(f"{prefix}/v1/messages/count_tokens", count_tokens),
        web.post(f"{prefix}/v1/embeddings", operations.embeddings),
        web.post(f"{prefix}/tokenize", tokenize),
        web.post(f"{prefix}/detokenize", detokenize),
        web.get(f"{prefix}/v1/models", operations.list_models),
        web.get(f"{prefix}/v1/models/{{model:.+}}", operations.retrieve_model),
        *health.routes(prefix),
        *info.routes(prefix),
        web.get(f"{prefix}/is_sleeping", weights.is_sleeping),
        web.get(f"{prefix}/version", operations.version),
        web.get(f"{prefix}/load", operations.load),
        web.get(f"{prefix}/openapi.json", operations.openapi),
    ]
    routes += kv_event_sources.routes(prefix)
    if admin:
        routes.append(web.post(f"{prefix}/reset_prefix_cache", operations.reset_prefix_cache))
        routes += weights.routes(prefix)
    return routes


def make_runner(app: web.Application, *, shutdown_timeout: float = 5.0) -> web.AppRunner:
    """Makes the runner that serves the application, in tests and in production.

    With `handler_cancellation`, aiohttp cancels a handler when its client disconnects, so the
    engine stops generating. `cleanup` waits `shutdown_timeout` seconds for handlers
    before it cancels them; the engine ends its streams earlier. aiohttp's keep-alive timeout counts
    from when a connection is ready for a request until the complete headers of that request have
    arrived.
    """
    web_log = logging.getLogger("jaxserve.server.http")
    if not web_log.filters:
        web_log.addFilter(ClientErrorFilter())
    return Runner(
        app,
        handler_cancellation=True,
        keepalive_timeout=app[SERVICE].config.header_timeout,
        max_headers=MAX_HEADER_FIELDS,
        shutdown_timeout=shutdown_timeout,
        access_log=None,
        auto_decompress=False,  # see `request.unpack`
        logger=web_log,
    )

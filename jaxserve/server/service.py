"""The objects that all handlers share, stored in the application under one typed key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from aiohttp import web

from jaxserve.api import Engine
from jaxserve.config import ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.backlog import Backlog
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.errors import ApiError
from jaxserve.server.huge_bodies import HugeBodies
from jaxserve.server.probe import Probe
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.sealed import Sealer
from jaxserve.server.telemetry.finished import Tracer
from jaxserve.structured import Guides
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.chat_template import ChatTemplate


class Connected(Protocol):
    """A connection to a client."""

    @property
    def answering(self) -> bool:
        """Whether a request has arrived whose answer is not completely sent."""
        ...


class Chats(NamedTuple):
    """Turns chats into prompts and parses their outputs."""

    template: ChatTemplate | None
    """None: the model has no chat template."""
    format: ChatFormat


@dataclass(frozen=True, kw_only=True)
class Service:
    """The objects that all handlers share: engine, tokenizer, limits, configuration, metrics."""

    engine: Engine
    tokenizer: Tokenizer
    chats: Chats
    guides: Guides
    responses: ResponseStore
    sealer: Sealer
    config: ServerConfig
    metrics: Metrics
    backlog: Backlog
    huge_bodies: HugeBodies
    probe: Probe
    tracer: Tracer | None
    started: int
    """Unix time, shown as the models' creation time."""
    connections: set[Connected] = field(default_factory=set["Connected"])
    """The open connections."""

    def check_accepting(self) -> None:
        """Raises ApiError (503) while the server loads, drains or has failed."""
        status = self.engine.status()
        if status.phase == "failed":
            raise ApiError(
                503, "the engine has failed; the server must be restarted", code="failed"
            )
        if not status.ready or status.phase == "draining":
            raise ApiError(
                503, f"the server is not ready: {status.phase}", code="not_ready", retry_after=5.0
            )

    def model_name(self, asked: str | None) -> str:
        """Returns the model name to report. Raises ApiError (404) if the model is not served
        here."""
        if asked is None:
            return self.config.model_names[0]
        if asked not in self.config.model_names:
            raise ApiError(
                404,
                f"the model {asked[:200]!r} is not served here; this server has "
                + ", ".join(map(repr, self.config.model_names)),
                param="model",
                code="model_not_found",
            )
        return asked


SERVICE = web.AppKey("service", Service)

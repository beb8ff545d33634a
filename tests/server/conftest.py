"""A server on a real socket, served exactly as in production."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from jaxserve.api import Engine
from jaxserve.config import ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app, make_runner
from jaxserve.server.telemetry.finished import Tracer
from jaxserve.startup.listen import bind
from jaxserve.tokenizer import Tokenizer
from tests.fakes import tiny_tokenizer

type Serve = Callable[..., Awaitable[str]]

MODEL = "tiny"


@asynccontextmanager
async def serving(
    engine: Engine,
    *,
    tokenizer: Tokenizer | None = None,
    tracer: Tracer | None = None,
    tls: ssl.SSLContext | None = None,
    metrics: Metrics | None = None,
    **settings: Any,
) -> AsyncGenerator[str]:
    """Gives the base URL."""
    config = ServerConfig(**{"model_names": (MODEL, "alias"), "port": 0, **settings})
    app = make_app(engine, tokenizer or tiny_tokenizer(), config, metrics or Metrics(MODEL), tracer)
    runner = make_runner(app, shutdown_timeout=0.2)
    await runner.setup()
    try:
        yield await bind(runner, config, tls)
    finally:
        await runner.cleanup()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(engine)` gives a base URL; the server ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(engine: Engine, **settings: Any) -> str:
            return await stack.enter_async_context(serving(engine, **settings))

        yield start


@asynccontextmanager
async def openai_client(serve: Serve, engine: Engine, **settings: Any) -> AsyncGenerator[Any]:
    """The official client of a server with this engine."""
    url = await serve(engine, **settings)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made

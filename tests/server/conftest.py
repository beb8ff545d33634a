"""A server on a real socket, served exactly as in production."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from jaxserve.api import Engine
from jaxserve.config import ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app, make_runner
from jaxserve.server.telemetry.finished import Tracer
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
    **settings: Any,
) -> AsyncIterator[str]:
    """Gives the base URL."""
    config = ServerConfig(**{"model_names": (MODEL, "alias"), **settings})
    app = make_app(engine, tokenizer or tiny_tokenizer(), config, Metrics(MODEL), tracer)
    runner = make_runner(app, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(engine)` gives a base URL; the server ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(engine: Engine, **settings: Any) -> str:
            return await stack.enter_async_context(serving(engine, **settings))

        yield start

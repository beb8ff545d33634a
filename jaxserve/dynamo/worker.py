"""Implements Dynamo's `LLMEngine` with `jaxserve.Engine`."""

# ai-dynamo is not a dependency of this project, so it has no types here.
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from importlib import import_module
from typing import Any

from jaxserve.api import EngineFailed, Overloaded, Rejected, Request
from jaxserve.cli.foreign_flags import translated
from jaxserve.cli.options import Options, parse_args
from jaxserve.dynamo.tokens import Json, to_chunk, to_request, usage
from jaxserve.library import Engine
from jaxserve.weights.model_source import find_weights

_common = "dynamo.common."
backend: Any = import_module(f"{_common}backend.engine")
errors: Any = import_module("dynamo.llm.exceptions")
health: Any = import_module(f"{_common}backend.health_check")
publisher: Any = import_module(f"{_common}backend.publisher")
runtime: Any = import_module(f"{_common}configuration.groups.runtime_args")
token_ids: Any = import_module(f"{_common}utils.token_ids")
workers: Any = import_module(f"{_common}backend.worker")

_SNAPSHOT_SECONDS = 1.0


class Worker(backend.LLMEngine):
    """An engine in this process, which Dynamo drives through these methods."""

    def __init__(self, options: Options):
        self._options = options
        self._engine: Engine | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reporting: Future[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, Any]:
        """Returns the engine for a command line with Dynamo's flags and those of serving."""
        parser = argparse.ArgumentParser(prog="python -m jaxserve.dynamo", allow_abbrev=False)
        runtime.DynamoRuntimeArgGroup().add_arguments(parser)
        given, rest = parser.parse_known_args(argv)
        settings = runtime.DynamoRuntimeConfig.from_cli_args(given)
        settings.validate()
        options = parse_args(translated(rest).argv)
        source = find_weights(options)
        config = workers.WorkerConfig.from_runtime_config(
            settings, model_name=str(source.folder), served_model_name=source.names[0]
        )
        return cls(options), config

    async def start(self, worker_id: int) -> Any:
        """Loads and compiles. Returns the facts about the model that Dynamo's routers use."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine = await asyncio.to_thread(Engine.of_options, self._options)
        return backend.EngineConfig(
            model=str(engine.source.folder),
            served_model_name=engine.source.names[0],
            model_aliases=list(engine.source.names[1:]),
            llm=backend.LlmRegistration(
                context_length=engine.limits.max_model_len,
                kv_cache_block_size=engine.page_size,
                total_kv_blocks=engine.status().total_pages,
                max_num_seqs=self._options.max_num_seqs,
            ),
        )

    async def generate(self, request: Json, context: Any) -> AsyncGenerator[Json]:
        """Yields token ids as they arrive. The last ones come with the finish reason and usage."""
        assert self._engine is not None
        token_ids.normalize_request_token_ids(request)
        name, limits = context.id(), self._engine.limits
        try:
            wanted = to_request(request, name, limits, self._engine.source.sampling_defaults)
        except Rejected as error:
            raise _to_dynamo(error) from error
        chunks: asyncio.Queue[Json | Exception | None] = asyncio.Queue()
        self._running[name] = answering = asyncio.create_task(self._answer(wanted, chunks))
        try:
            while (chunk := await chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    raise _to_dynamo(chunk) from chunk
                yield chunk
        finally:
            self._running.pop(name, None)
            answering.cancel()

    async def _answer(self, request: Request, chunks: asyncio.Queue[Any]) -> None:
        """Puts a request's chunks into the queue, and then an exception or None."""
        assert self._engine is not None
        ended: Exception | None = None
        cached, sampled = None, 0
        try:
            async with aclosing(self._engine.submit(request)) as steps:
                async for events in steps:
                    cached = events[0].cached_tokens if cached is None else cached
                    chunk = to_chunk(events)
                    sampled += len(chunk["token_ids"])
                    if "finish_reason" in chunk:
                        chunk["completion_usage"] = usage(len(request.prompt), sampled, cached)
                    chunks.put_nowait(chunk)
        except Exception as error:
            ended = error
        finally:
            chunks.put_nowait(ended)

    async def abort(self, context: Any) -> None:
        """Ends a request whose client has disconnected."""
        if answering := self._running.get(context.id()):
            answering.cancel()

    async def cleanup(self) -> None:
        """Ends the engine, if there is one."""
        if self._reporting is not None:
            self._reporting.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)

    async def health_check_payload(self) -> Json:
        """Returns a request for one token."""
        return health.build_health_check_payload(bos_token_id=0)

    async def kv_event_sources(self) -> list[Any]:
        """Returns the endpoints of KV cache events, from --kv-events-config."""
        config = self._options.kv_events_config
        if config is None or not config.active:
            return []
        address = config.endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
        return [publisher.ZmqSource(endpoint=address, topic=config.topic)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Returns the ranks that report their cache: one."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Starts to report the use of the cache. Dynamo calls it on a separate thread."""
        assert self._loop is not None
        self._reporting = asyncio.run_coroutine_threadsafe(self._report(publisher), self._loop)

    async def _report(self, snapshots: Any) -> None:
        while self._engine is not None:
            status = self._engine.status()
            used = status.total_pages - status.free_pages
            snapshot = publisher.ComponentSnapshot(
                kv_used_blocks=used,
                kv_total_blocks=status.total_pages,
                gpu_cache_usage=used / max(1, status.total_pages),
                dp_rank=0,
            )
            snapshots.publish(0, snapshot)
            await asyncio.sleep(_SNAPSHOT_SECONDS)


def _to_dynamo(error: Exception) -> Exception:
    """Converts an exception of the engine to Dynamo's."""
    if isinstance(error, Rejected):
        return errors.InvalidArgument(str(error))
    if isinstance(error, Overloaded):
        return errors.WorkerUnavailable(str(error))
    if isinstance(error, EngineFailed):
        return errors.EngineShutdown(str(error))
    return errors.Unknown(str(error))

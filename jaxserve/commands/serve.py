"""`jaxserve serve`: binds the port, starts the engine, waits for a signal, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop
from aiohttp import web

from jaxserve import logs
from jaxserve.api import EngineLimits
from jaxserve.cli.options import Options
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.engine.engine import AsyncEngine, Progress
from jaxserve.engine.loop import Parts
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app, make_runner
from jaxserve.server.service import SERVICE
from jaxserve.startup import heap, open_files
from jaxserve.startup.environment import prepare
from jaxserve.startup.kv_events import open_publisher
from jaxserve.startup.listen import bind, server_config
from jaxserve.startup.probe_port import probe_port
from jaxserve.startup.timeline import Pace, Timeline, show
from jaxserve.startup.tls import reload_when_changed, tls_context
from jaxserve.weights.model_source import ModelSource, find_model
from jaxserve_checkpoints.reader import CheckpointError

if TYPE_CHECKING:
    from jaxserve.kv_events.publisher import ZmqPublisher
    from jaxserve.runner.runner import Pending
    from jaxserve.server.telemetry.tracing import Tracing

log = logging.getLogger(__name__)


_PROGRESS_SECONDS = 5.0
_LOOK_SECONDS = 0.1


class _Stopped(Exception):
    """A signal arrived before the server was ready."""


class EngineDied(Exception):
    """The engine has failed. The message says why."""


def serve(options: Options, timeline: Timeline, without_effect: Sequence[str] = ()) -> int:
    """Serves until a signal arrives. Returns the exit status. Errors are one line on stderr.

    `without_effect`: flags on the command line that have no effect here.
    """
    logs.configure(options.log_level, options.log_format)
    if without_effect:
        log.warning("these flags have no effect here: %s", ", ".join(without_effect))
    open_files.raise_limit(options.max_num_queued_reqs + (options.max_num_seqs or 256))
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs every backend that is missing
    prepare(options.gpu_memory_utilization)
    timeline.add("python and imports", 0.0, timeline.now())
    imported = _begin_with_jax(timeline)
    try:
        uvloop.run(_serve(options, timeline, imported))
    except (ConfigError, CheckpointError, OSError) as error:  # OSError: unreadable files
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    except EngineDied as error:
        print(f"jaxserve: error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # with a failed device, an orderly exit may hang
    return 0


def _begin_with_jax(timeline: Timeline) -> threading.Event:
    """Imports jax and opens the device in parallel with the rest of the start. Returns an event
    that is set after the import.

    Errors occur again, and are reported, when the device is used.
    """
    imported = threading.Event()

    def run() -> None:
        try:
            with timeline.span("import of jax"):
                import jax
        finally:
            imported.set()
        with timeline.span("device"), contextlib.suppress(Exception):
            jax.devices()

    # Not a daemon thread: a process must not end during the driver's initialisation.
    threading.Thread(target=run, name="begin-with-jax").start()
    return imported


async def _serve(options: Options, timeline: Timeline, imported: threading.Event) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)
    try:
        await _serve_until(stop, options, timeline, imported)
        log.info("stopped")
    except _Stopped:
        log.info("stopped while starting")
    _leave()


async def _serve_until(
    stop: asyncio.Event, options: Options, timeline: Timeline, imported: threading.Event
) -> None:
    """Raises _Stopped if a signal arrives before the server is ready."""
    with timeline.span("model and tokenizer"):
        source = await _unless(stop, asyncio.to_thread(find_model, options))
    metrics = Metrics(source.names[0], legacy=options.legacy_metrics)
    publisher = open_publisher(options, metrics)
    engine = _make_engine(options, source, metrics, timeline, imported, publisher)
    config, tls = server_config(options, source), tls_context(options)
    if publisher is not None:
        config = replace(config, kv_event_sources=publisher.sources)
    tracing = _tracing(options, source)
    app = make_app(engine, source.tokenizer, config, metrics, tracing, timeline.spans)
    runner = make_runner(app)
    reloading = asyncio.ensure_future(reload_when_changed(tls, options)) if tls else None
    await runner.setup()
    try:
        url = await bind(runner, config, tls)
        log.info("listening on %s; loading %s", config.uds or url, source.names[0])
        async with _probes(options, app):
            await _start(engine, stop)
            _report(timeline, metrics, show_table=options.profile_startup)
            _greet(url, source.names[0], config)
            await _until_stopped(engine, stop)
            await _drain(engine, options.shutdown_timeout)
    finally:
        if reloading is not None:
            reloading.cancel()
        await engine.stop()
        await runner.cleanup()
        if publisher is not None:
            publisher.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.shutdown)


def _probes(options: Options, app: web.Application) -> AbstractAsyncContextManager[object]:
    """Returns the port for probes, if the flags ask for one."""
    if options.probe_port is None:
        return contextlib.nullcontext()
    return probe_port(app[SERVICE], options.host, options.probe_port)


def _leave() -> NoReturn:
    """Ends the process at once. An orderly exit would wait for XLA, which cannot interrupt a
    compilation. XLA could also abort the exit: its threads may ask for the interpreter lock, to
    release arrays, when the interpreter is gone."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)


def _make_engine(
    options: Options,
    source: ModelSource,
    metrics: Metrics,
    timeline: Timeline,
    imported: threading.Event,
    publisher: ZmqPublisher | None,
) -> AsyncEngine[Pending]:
    cache_events = None if publisher is None else publisher.publish

    def build(progress: Progress) -> Parts[Pending]:
        imported.wait()
        with timeline.span("import of the engine"):
            from jaxserve.startup.build import build_parts  # here, because the port already answers
        heap.imported()
        return build_parts(options, source, metrics, progress, timeline, cache_events=cache_events)

    limits = EngineLimits(
        max_model_len=options.max_model_len or source.spec.max_position,
        vocab_size=source.spec.vocab_size,
        sampled_vocab=source.sampled_vocab,
    )
    return AsyncEngine(build=build, limits=limits, metrics=metrics)


def _tracing(options: Options, source: ModelSource) -> Tracing | None:
    if options.otlp_traces_endpoint is None:
        return None
    try:
        from jaxserve.server.telemetry.tracing import Tracing  # needs an optional package
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): install the "
            "extra otel, as in pip install 'jaxserve[otel]'"
        ) from None
    return Tracing(options.otlp_traces_endpoint, source.names[0])


async def _start(engine: AsyncEngine[Pending], stop: asyncio.Event) -> None:
    """Waits until the engine serves. Raises _Stopped if a signal arrives first."""
    showing = asyncio.ensure_future(_show_progress(engine))
    try:
        await _unless(stop, engine.start())
    finally:
        showing.cancel()


async def _unless[T](stop: asyncio.Event, doing: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `doing`. Raises _Stopped if a signal arrives first; threads go on."""
    working, stopping = asyncio.ensure_future(doing), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Stopped
        return await working
    finally:
        working.cancel()
        stopping.cancel()


async def _show_progress(engine: AsyncEngine[Pending]) -> None:
    """Shows a bar on a terminal, else a line every few seconds, until cancelled."""
    if not sys.stderr.isatty():
        await _log_progress(engine)
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task, phase = bar.add_task("starting", total=1.0), "starting"
        while True:
            status = engine.status()
            if status.phase != phase:
                phase = status.phase
                bar.reset(task, description=phase)  # each phase has its own pace
            bar.update(task, completed=status.progress)
            await asyncio.sleep(_LOOK_SECONDS)


async def _log_progress(engine: AsyncEngine[Pending]) -> NoReturn:
    pace, said = Pace(), time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        status, now = engine.status(), time.monotonic()
        line = pace.describe(status.phase, status.progress, now)
        if now - said >= _PROGRESS_SECONDS:
            log.info("%s", line)
            said = now


def _report(timeline: Timeline, metrics: Metrics, *, show_table: bool) -> None:
    total = timeline.now()
    log.info("ready after %.2f s: %s", total, timeline.summary())
    for span in timeline.spans():
        metrics.set_startup(span.name, span.seconds)
    metrics.set_startup("total", total)
    if show_table:
        print(show(timeline), file=sys.stderr, flush=True)


def _greet(url: str, model: str, config: ServerConfig) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = "-H 'Authorization: Bearer KEY' " if config.api_key_digests else ""
    through = f"--unix-socket {config.uds} " if config.uds is not None else ""
    page = f"  {url}/ in a browser, or\n\n" if config.ui and config.uds is None else ""
    text = (
        f"\njaxserve is ready: {model} at {url}/v1\n\n{page}"
        f"  curl {through}{url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n\n"
    )
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the server
        os.write(1, text.encode())  # not through the buffer, which would be written again at exit


async def _until_stopped(engine: AsyncEngine[Pending], stop: asyncio.Event) -> None:
    """Waits for a signal. Raises EngineDied if the engine fails first."""
    stopping, dying = (asyncio.ensure_future(wait) for wait in (stop.wait(), engine.failure()))
    await asyncio.wait((stopping, dying), return_when=asyncio.FIRST_COMPLETED)
    died = dying.done()
    stopping.cancel()
    dying.cancel()
    if died:
        raise EngineDied(f"the engine died: {dying.result()}")


async def _drain(engine: AsyncEngine[Pending], timeout: float) -> None:
    """Refuses new requests, and lets running ones finish for up to `timeout` seconds."""
    engine.drain()
    log.info(
        "stopping: %d running answers get up to %g s to finish; signal again to stop at once",
        *(engine.num_streams, timeout),
    )
    deadline = asyncio.get_running_loop().time() + timeout
    while engine.num_streams and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)
    if engine.num_streams:
        log.warning(
            "%d answers have not finished after %g s and are cut off", engine.num_streams, timeout
        )


def _on_signal(stop: asyncio.Event) -> None:
    """Drains at the first signal, and ends the process at the second."""
    if stop.is_set():
        os._exit(130)
    stop.set()

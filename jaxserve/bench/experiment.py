"""Runs one experiment: starts its server if it has one, loads it, and sums up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import shlex
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp

from jaxserve.bench import arrivals, results, summary, traffic
from jaxserve.bench.client import Target, served_model
from jaxserve.bench.load import Limits, Run, closed_loop, open_loop
from jaxserve.bench.options import Experiment, as_json
from jaxserve.bench.traffic import Content, Prompt, Slo, TraceEntry, TrafficClass

_SERVER_START_SECONDS = 600.0


class ServerNotReady(RuntimeError):
    """The server could not be reached. The message says what was tried."""


async def run_experiment(
    experiment: Experiment, watch: Callable[[Run], contextlib.AbstractAsyncContextManager[None]]
) -> dict[str, Any]:
    """Runs one experiment. Returns its point in a result file.

    Args:
      watch: shows the run while it lasts.

    Raises:
      ServerNotReady: the server could not be reached.
      ValueError: settings conflict.
    """
    trace = (
        traffic.read_trace(experiment.trace, _content(experiment), experiment.content_seed)
        if experiment.trace
        else None
    )
    duration = trace[-1].time + 1e-3 if trace else experiment.duration
    window = summary.stable_window(duration, experiment.warmup, experiment.cooldown)
    run = Run(duration=duration)
    async with _server(experiment):
        target, room = await _target(experiment)
        _check_lengths(experiment, trace, target.model, room)
        async with watch(run):
            await _load(experiment, target, trace, run)
    if run.interrupted:
        window = summary.stable_window(min(duration, run.elapsed), 0.0, 0.0)
    cpu_share = run.client_cpu_seconds / max(run.elapsed, 1e-9)
    figures = summary.summarise(run.records, window, _slos(experiment))
    return {
        "name": experiment.name,
        "settings": {**as_json(experiment), "model": target.model},
        "summary": figures,
        "slos": {name: dataclasses.asdict(slo) for name, slo in _slos(experiment).items()},
        "elapsed_s": round(run.elapsed, 3),
        "client_cpu_share": round(cpu_share, 3),
        "errors": summary.errors(run.records),
        "interrupted": run.interrupted,
        "warnings": summary.warnings(figures, run.records, cpu_share)
        + ([f"interrupted after {run.elapsed:.1f} s of {duration:g} s"] if run.interrupted else []),
        "requests": [results.record_json(record) for record in run.records],
        "server_metrics": [results.sample_json(sample) for sample in run.samples],
    }


async def _load(
    experiment: Experiment, target: Target, trace: list[TraceEntry] | None, run: Run
) -> None:
    limits = Limits(drain=experiment.drain)
    slos = _slos(experiment)
    prompts = traffic.generate(_classes(experiment), _content(experiment), experiment.content_seed)
    if trace is not None:
        await open_loop(target, [(e.time, e.prompt) for e in trace], slos, limits, run)
    elif experiment.concurrency is not None:
        await closed_loop(target, prompts, experiment.concurrency, slos, limits, run)
    else:
        times = arrivals.schedule(
            _segments(experiment), burstiness=experiment.burstiness, seed=experiment.arrival_seed
        )
        scheduled: list[tuple[float, Prompt]] = list(zip(times, prompts, strict=False))
        await open_loop(target, scheduled, slos, limits, run)


def _segments(experiment: Experiment) -> list[arrivals.Segment]:
    if experiment.rate_steps:
        return arrivals.steps(experiment.rate_steps, experiment.duration)
    if experiment.rate_end is not None:
        return arrivals.ramp(experiment.rate, experiment.rate_end, experiment.duration)
    return arrivals.constant_rate(experiment.rate, experiment.duration)


def _classes(experiment: Experiment) -> tuple[TrafficClass, ...]:
    if experiment.traffic == "fixed":
        return (traffic.fixed(experiment.input_tokens, experiment.output_tokens),)
    chosen = [each for each in traffic.STUDY if experiment.traffic in ("study", each.name)]
    scaled = [traffic.scaled(each, experiment.length_scale) for each in chosen]
    return traffic.with_slo(scaled, experiment.slo)


def _slos(experiment: Experiment) -> dict[str, Slo]:
    slos = {each.name: each.slo for each in _classes(experiment)}
    if experiment.trace:  # a trace names its own classes; known ones keep their limits
        study = traffic.with_slo(traffic.STUDY, experiment.slo)
        slos = {each.name: each.slo for each in study} | {"trace": traffic.STRICT}
    return slos


def _content(experiment: Experiment) -> Content:
    return Content(
        kind=experiment.prompts,
        max_token_id=experiment.max_token_id,
        shared_prefix_tokens=experiment.shared_prefix_tokens,
        shared_prefix_share=experiment.shared_prefix_share,
    )


def _check_lengths(
    experiment: Experiment, trace: list[TraceEntry] | None, model: str, room: int | None
) -> None:
    """Raises ValueError if the server would have to refuse the longest requests."""
    if trace is not None:
        longest = max(entry.prompt.prompt_tokens + entry.prompt.output_tokens for entry in trace)
    else:
        longest = max(
            each.prompt_tokens[1] + each.output_tokens[1] + experiment.shared_prefix_tokens
            for each in _classes(experiment)
        )
    if room is not None and longest > room:
        raise ValueError(
            f"the longest requests have {longest} tokens, prompt and answer; the server says that "
            f"{model} takes {room} (max_model_len). --length-scale {room / longest:.2f} shortens "
            "all; --traffic fixed with --input-tokens and --output-tokens, or --traffic siso, may "
            "fit as well"
        )


async def _target(experiment: Experiment) -> tuple[Target, int | None]:
    """Returns the target, and the longest sequence that the server reports, in tokens."""
    url = _base(experiment)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            model, room = await served_model(session, url, experiment.api_key, experiment.model)
    except aiohttp.ClientResponseError as error:
        key = "; --api-key is sent as a bearer token" if error.status in (401, 403) else ""
        raise ServerNotReady(
            f"{url}/v1/models answers {error.status} {error.message}{key}"
        ) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise ServerNotReady(f"no server answers at {url}/v1/models: {why}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise ServerNotReady(f"{url}/v1/models names no model: {error!r}") from error
    target = Target(
        url=url,
        model=model,
        endpoint=experiment.endpoint,
        ignore_eos=experiment.ignore_eos,
        timeout=experiment.timeout,
        api_key=experiment.api_key,
        slo_headers=experiment.slo_headers,
    )
    return target, room


def _base(experiment: Experiment) -> str:
    """Returns the server's URL without a trailing /v1, which OpenAI's client needs."""
    return experiment.url.rstrip("/").removesuffix("/v1")


@contextlib.asynccontextmanager
async def _server(experiment: Experiment) -> AsyncGenerator[None]:
    """Starts the experiment's own server, if its settings have a command for one."""
    if not experiment.server:
        yield
        return
    if await _answers(_base(experiment)):
        raise ServerNotReady(f"another server answers at {experiment.url} already: stop it first")
    try:
        process = await asyncio.create_subprocess_exec(*shlex.split(experiment.server))
    except OSError as error:
        raise ServerNotReady(f"the server's command {experiment.server!r}: {error}") from error
    try:
        await _until_ready(experiment, process)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 60)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _answers(url: str) -> bool:
    """Returns whether any server answers; it would be measured in place of ours."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url):
            return True
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def _until_ready(experiment: Experiment, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + _SERVER_START_SECONDS
    for url in itertools.repeat(f"{_base(experiment)}/v1/completions"):
        if process.returncode is not None:
            raise ServerNotReady(f"the server ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise ServerNotReady(f"the server was not ready after {_SERVER_START_SECONDS:g} s")
        if await _completes(url, experiment):
            return
        await asyncio.sleep(0.05)


async def _completes(url: str, experiment: Experiment) -> bool:
    """Returns whether the server completes one token. An open port may still be loading."""
    headers = {"Authorization": f"Bearer {experiment.api_key}"} if experiment.api_key else {}
    try:
        async with aiohttp.ClientSession() as session:
            model, _ = await served_model(
                session, _base(experiment), experiment.api_key, experiment.model
            )
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
            async with session.post(url, json=body, headers=headers) as reply:
                return reply.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError, LookupError, TypeError, ValueError):
        return False

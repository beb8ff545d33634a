"""Runs one load: an open loop with an absolute schedule, or a closed loop of clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp

from jaxserve.bench import scrape
from jaxserve.bench.client import Client, Target
from jaxserve.bench.records import Outcome, Record
from jaxserve.bench.scrape import Sample
from jaxserve.bench.traffic import Prompt, Slo


@dataclass(kw_only=True)
class Run:
    """A load during and after its run. The live view reads it."""

    duration: float
    """Seconds in which requests are sent."""
    clock: Callable[[], float] | None = None
    """Returns the seconds since the start; None before the start."""
    records: list[Record] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    client_cpu_seconds: float = 0.0
    elapsed: float = 0.0
    """Seconds until the last request ended or was given up."""
    interrupted: bool = False
    _driving: asyncio.Future[None] | None = None

    def interrupt(self) -> None:
        """Sends nothing more and gives up running requests, which count as unfinished."""
        self.interrupted = True
        if self._driving is not None:
            self._driving.cancel()

    async def drive(self, load: Coroutine[None, None, None]) -> None:
        """Runs the load until it is over or interrupted."""
        self._driving = asyncio.ensure_future(load)
        if self.interrupted:
            self._driving.cancel()
        try:
            await self._driving
        except asyncio.CancelledError:
            if not self.interrupted:
                raise


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that end a load."""

    drain: float
    """Seconds that running requests get after the last intended send time."""
    scrape_interval: float = 1.0


async def open_loop(
    target: Target,
    arrivals: list[tuple[float, Prompt]],
    slos: Mapping[str, Slo],
    limits: Limits,
    run: Run,
) -> None:
    """Sends each prompt at its time, whatever happened to earlier ones."""
    async with _session() as session:
        clock = run.clock = _clock()
        client = Client(target, session, clock)

        async def drive() -> None:
            async with _Tasks(limits.drain) as tasks:
                for number, (when, prompt) in enumerate(arrivals):
                    record = _record(run, number, when, prompt)
                    await asyncio.sleep(max(0.0, when - clock()))
                    tasks.start(client.send(prompt, record, slos.get(prompt.traffic_class, Slo())))
                await asyncio.sleep(max(0.0, run.duration - clock()))

        await _measured(drive(), session, target, limits, run, clock)


async def closed_loop(
    target: Target,
    prompts: Iterator[Prompt],
    clients: int,
    slos: Mapping[str, Slo],
    limits: Limits,
    run: Run,
) -> None:
    """Runs `clients` clients. Each sends its next request when its last one has ended.

    A slow server gets fewer requests. The intended time of a request is when its client was free.
    """
    async with _session() as session:
        clock = run.clock = _clock()
        client = Client(target, session, clock)

        async def one() -> None:
            while (now := clock()) < run.duration:
                prompt = next(prompts)
                record = _record(run, len(run.records), now, prompt)
                await client.send(prompt, record, slos.get(prompt.traffic_class, Slo()))
                if record.outcome is not Outcome.COMPLETED:
                    await asyncio.sleep(0.1)  # a refused or lost client comes back, but not at once

        async def drive() -> None:
            async with _Tasks(limits.drain) as tasks:
                for _ in range(clients):
                    tasks.start(one())
                await asyncio.sleep(run.duration)

        await _measured(drive(), session, target, limits, run, clock)


def _record(run: Run, number: int, when: float, prompt: Prompt) -> Record:
    record = Record(
        id=number,
        traffic_class=prompt.traffic_class,
        intended=when,
        prompt_tokens=prompt.prompt_tokens,
        max_tokens=prompt.output_tokens,
    )
    run.records.append(record)
    return record


class _Tasks:
    """Tasks that get `drain` seconds at the end of the block. The rest is given up."""

    def __init__(self, drain: float):
        self._drain = drain
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> _Tasks:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._drain if error[0] is None else 0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _measured(
    drive: Coroutine[None, None, None],
    session: aiohttp.ClientSession,
    target: Target,
    limits: Limits,
    run: Run,
    clock: Callable[[], float],
) -> None:
    """Runs the load, and samples the server's metrics and our own CPU time meanwhile."""
    cpu = time.process_time()
    watch = asyncio.ensure_future(
        scrape.watch(session, target, run.samples, limits.scrape_interval, clock)
    )
    try:
        await run.drive(drive)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        run.elapsed = clock()
        if run.interrupted:  # a request was waiting for its time
            run.records = [record for record in run.records if record.sent is not None]
        run.client_cpu_seconds = time.process_time() - cpu


def _clock() -> Callable[[], float]:
    """Returns a function that returns the seconds from now on, by the event loop's clock."""
    time = asyncio.get_running_loop().time
    start = time()
    return lambda: time() - start


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        read_bufsize=2**20,
    )

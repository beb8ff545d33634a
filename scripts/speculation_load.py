"""HTTP load for `bench_speculation.py`: sends requests, and records when answers arrive."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import aiohttp
from speculation_workloads import body


@dataclasses.dataclass
class Run:
    """The answers of a load."""

    arm: str
    """The arm whose turn it is, "on" or "off"."""
    ttft: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"off": [], "on": []})
    gaps: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"off": [], "on": []})
    """By arm: seconds between consecutive events of a stream. An event may have several tokens."""
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    """Answers by the request's number. Some are cut off."""
    errors: list[str] = dataclasses.field(default_factory=list)


class Asked(NamedTuple):
    """The parameters of a load's requests."""

    workload: str
    clients: int
    prompt_tokens: int
    output_tokens: int
    salt: str
    """Salt of the prefix cache."""

    def body(self, seed: str) -> dict[str, Any]:
        """A request's body. It depends only on the seed, apart from the salt."""
        found = body(self.workload, seed, self.prompt_tokens, self.output_tokens)
        return {**found, "cache_salt": self.salt}


@contextlib.asynccontextmanager
async def closed_loop(
    session: aiohttp.ClientSession, url: str, asked: Asked, seed: str, arm: str
) -> AsyncGenerator[Run]:
    """Context manager: runs clients that each send the next request after an answer. `arm` has the
    first turn. At the end of the block running requests are aborted."""
    run, numbers = Run(arm), itertools.count()

    async def client() -> None:
        while len(run.errors) < 8:
            number = next(numbers)
            await ask(session, url, _numbered(asked, seed, number), run, number)

    tasks = [asyncio.create_task(client()) for _ in range(asked.clients)]
    try:
        yield run
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settled(session, url)


async def again(
    session: aiohttp.ClientSession, url: str, asked: Asked, seed: str, numbers: Sequence[int]
) -> dict[int, str]:
    """Sends some of a loop's requests again, all at once. Returns the answers."""
    run = Run("off")
    asks = (ask(session, url, _numbered(asked, seed, each), run, each) for each in numbers)
    await asyncio.gather(*asks)
    return run.texts


def _numbered(asked: Asked, seed: str, number: int) -> dict[str, Any]:
    """A loop's request. The first answers have different lengths, so that clients do not run in
    lockstep."""
    request = asked.body(f"{seed}/{number}")
    if number < asked.clients:
        request["max_tokens"] = 1 + asked.output_tokens * (number + 1) // (asked.clients + 1)
    return request


async def goodput(
    session: aiohttp.ClientSession,
    url: str,
    asked: Asked,
    requests: float,
    args: argparse.Namespace,
    *,
    seed: str,
) -> float:
    """Tokens per second of requests that were answered in time. Requests in the last part of the
    run get as much time as the others."""
    rng, tasks, at = random.Random(seed), list[asyncio.Task[Run]](), 0.0
    began = time.perf_counter()

    async def one(number: int) -> Run:
        run = Run("off")
        request = asked.body(f"{seed}/{number}")
        await ask(session, url, request, run, number)
        return run

    while (at := at + rng.expovariate(requests)) < args.arrivals:
        await asyncio.sleep(max(began + at - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(one(len(tasks))))
    await asyncio.wait(tasks, timeout=args.ttft + args.tpot * asked.output_tokens)
    for task in tasks:
        task.cancel()
    runs = await asyncio.gather(*tasks, return_exceptions=True)
    await settled(session, url)
    good = sum(in_time(run, args) for run in runs if isinstance(run, Run))
    return good * asked.output_tokens / args.arrivals


def in_time(run: Run, args: argparse.Namespace) -> bool:
    """Whether a request's only answer is complete and came in time."""
    first, gaps = run.ttft[run.arm], run.gaps[run.arm]
    if run.errors or not first:
        return False
    return first[0] <= args.ttft and sum(gaps) <= args.tpot * args.output_tokens


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's counters, by name and labels."""
    async with session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def settled(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until the server has dropped all aborted requests."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        async with session.get(f"{url}/load") as reply:
            load = await reply.json()
        if not load["running"] and not load["waiting"]:
            return
        await asyncio.sleep(0.02)


async def ask(
    session: aiohttp.ClientSession, url: str, request: dict[str, Any], run: Run, number: int
) -> None:
    """Streams one answer."""
    path = "chat/completions" if "messages" in request else "completions"
    last, first, pieces = time.perf_counter(), True, list[str]()
    try:
        async with session.post(f"{url}/v1/{path}", json=request) as reply:
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {(await reply.text())[:200]}")
            async for event in reply.content:
                if not event.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                pieces += [_text(choice) for choice in json.loads(event[6:])["choices"]]
                (run.ttft if first else run.gaps)[run.arm].append(now - last)
                first, last = False, now
    except (aiohttp.ClientError, ValueError, KeyError, TimeoutError) as error:
        run.errors.append(f"{type(error).__name__}: {error}"[:300])
    finally:
        run.texts[number] = "".join(pieces)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return choice.get("text", "") if delta is None else delta.get("content") or ""

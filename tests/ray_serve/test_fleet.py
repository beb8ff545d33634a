"""Two replicas of the embedded model on Ray Serve."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.ray_serve.fleet import ROOT, Fleet, Streamed, stream

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray Serve is not installed: pip install -c constraints.txt -e '.[ray]'",
    ),
]

SHAPES = ("--decode-buckets", "32", "--prefill-buckets", "128", "--max-model-len", "1024")
STREAMS, TOKENS = 200, 64
GROUPS, EACH, PREFIX = 16, 3, 256


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both fleets: the second loads what the first compiled."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def fleet(cache: Path) -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="r") as folder,
        Fleet(Path(folder), cache, *SHAPES) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def at_random(cache: Path) -> Iterator[Fleet]:
    flags = ("--no-affinity", "--shutdown-timeout", "1", *SHAPES)
    with (
        tempfile.TemporaryDirectory(prefix="r") as folder,
        Fleet(Path(folder), cache, *flags) as it,
    ):
        yield it


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300, 2000) for _ in range(12)] for _ in range(STREAMS)]


async def streams(
    fleet: Fleet, asked: list[list[int]], kill: signal.Signals | None = None, *, child: bool = False
) -> tuple[list[Streamed], int]:
    """All at once. With `kill` a replica, or its server, gets the signal when an eighth of the
    streams has begun. Returns what came, and the process that was killed."""
    begun, victim = asyncio.Semaphore(0), 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [
            asyncio.create_task(stream(session, fleet.url, each, TOKENS, begun)) for each in asked
        ]
        if kill is not None:
            for _ in range(STREAMS // 8):
                await begun.acquire()
            server, replica = next(iter(fleet.servers().items()))
            victim = server if child else replica
            os.kill(victim, kill)
        return await asyncio.gather(*tasks), victim


@pytest.mark.parametrize("child", [False, True], ids=["replica", "server"])
async def test_a_replica_that_is_killed_takes_only_streams_that_had_begun(
    fleet: Fleet, child: bool
) -> None:
    asked = prompts(1)
    before = await fleet.two()
    whole, _ = await streams(fleet, asked)
    assert all(one.done and not one.error for one in whole)
    assert {one.replica for one in whole} == before
    servers = fleet.servers()
    came, victim = await streams(fleet, asked, signal.SIGKILL, child=child)
    lost = [place for place, one in enumerate(came) if one.error]
    assert {came[place].error for place in lost} == {"replica_lost"}
    assert len({came[place].replica for place in lost}) == 1, "the others are untouched"
    for place, (one, undisturbed) in enumerate(zip(came, whole, strict=True)):
        assert one.done
        if place in lost:
            assert one.events and undisturbed.text.startswith(one.text)
        else:
            assert one.text == undisturbed.text
    dead = came[lost[0]].replica
    unharmed = sum(one.replica != dead and not one.error for one in came)
    print(f"\n{len(lost)} streams ended with an error, {unharmed} went on or were tried again")
    assert len(lost) < STREAMS / 2
    gone = next(server for server, replica in servers.items() if victim in (server, replica))
    assert gone not in fleet.servers(), "the server dies with its replica"
    now = await fleet.two(without=dead)
    served, _ = await streams(fleet, asked)
    assert [one.text for one in served] == [one.text for one in whole]
    assert {one.replica for one in served} == now


async def cached_tokens(fleet: Fleet) -> int:
    """Requests in groups with a common beginning, one at a time: of two idle replicas the router
    without affinity takes either."""
    draw = random.Random(2)

    def some(count: int) -> list[int]:
        return [draw.randrange(300, 2000) for _ in range(count)]

    beginnings = [some(PREFIX) for _ in range(GROUPS)]
    cached = 0
    async with aiohttp.ClientSession() as session:
        for _ in range(EACH):
            for begins in draw.sample(beginnings, GROUPS):
                cached += (await stream(session, fleet.url, begins + some(8), 2)).cached
    return cached


async def test_a_client_that_leaves_ends_its_sequence(fleet: Fleet) -> None:
    body = {"model": "jaxserve-embedded", "prompt": [5, 6, 7], "max_tokens": 1000, "stream": True}
    body["ignore_eos"] = True
    url = f"{fleet.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        await reply.content.readline()
        assert await fleet.running() == 1
    async with asyncio.timeout(5):
        while await fleet.running():
            await asyncio.sleep(0.1)


async def test_requests_find_the_replica_that_has_their_beginning(
    fleet: Fleet, at_random: Fleet
) -> None:
    with_affinity, without = await cached_tokens(fleet), await cached_tokens(at_random)
    most = GROUPS * (EACH - 1) * PREFIX
    print(f"\ncached tokens of {most}: {with_affinity} with affinity, {without} without")
    assert with_affinity == most
    assert without < 0.9 * most


async def streamed_at_the_end(fleet: Fleet, max_tokens: int) -> Streamed:
    """Returns what comes of a stream that has begun when the fleet is told to end."""
    begun = asyncio.Semaphore(0)
    async with aiohttp.ClientSession() as session:
        one = asyncio.create_task(stream(session, fleet.url, [5, 6, 7], max_tokens, begun))
        await begun.acquire()
        stopping = asyncio.create_task(asyncio.to_thread(fleet.stop))
        came = await one
    assert await stopping == 0
    assert not fleet.servers(), "no process stays"
    return came


async def test_at_the_end_streams_finish(fleet: Fleet) -> None:
    """It ends the fleet, as does the next one its own."""
    came = await streamed_at_the_end(fleet, 40)
    assert came.done and came.error is None


async def test_a_stream_that_takes_too_long_ends_with_an_error(at_random: Fleet) -> None:
    came = await streamed_at_the_end(at_random, 1000)
    assert came.done and came.error == "replica_lost" and came.events


async def test_requests_that_wait_start_another_replica(cache: Path) -> None:
    flags = ("--max-replicas", "2", "--max-num-seqs", "4", "--decode-buckets", "4", *SHAPES[2:])
    with (
        tempfile.TemporaryDirectory(prefix="r") as folder,
        Fleet(Path(folder), cache, *flags, replicas=1) as fleet,
    ):
        assert len(await fleet.replicas()) == 1
        working = asyncio.create_task(keep_busy(fleet, 24))
        try:
            await fleet.two()
        finally:
            working.cancel()


async def keep_busy(fleet: Fleet, clients: int) -> None:
    async def client(session: aiohttp.ClientSession) -> None:
        while True:
            await stream(session, fleet.url, [5, 6, 7], 50)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(session))


BUILD = """
import json, sys
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call
from ray.serve._private.build_app import build_app as build
import jaxserve.ray
app = call(jaxserve.ray.build_app, json.loads(sys.argv[1]))
for made in build(app, name="a").deployments:
    config = made._deployment_config
    print(made.name, config.max_ongoing_requests, config.autoscaling_config is not None)
"""


def test_serve_builds_the_application_of_a_config_file() -> None:
    settings = json.dumps({"replicas": 2, "max_replicas": 8, "max_num_seqs": 10, "gateways": 3})
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    command = [sys.executable, "-c", BUILD, settings]
    built = subprocess.check_output(command, text=True, env={**os.environ, "PYTHONPATH": path})
    made = sorted(line for line in built.splitlines() if line.startswith("jaxserve"))
    assert made == ["jaxserve 8272 False", "jaxserve-replica 1034 True"]

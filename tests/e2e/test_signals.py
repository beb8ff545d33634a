"""How the process ends: it finishes what runs, refuses what is new, and is gone in time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import aiohttp

from tests.e2e.process import FEW_BUCKETS, Server, finish, read_until, run, start

LONG = {"model": "jaxserve-embedded", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 1}


FULL_DISK = """
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
from jaxserve.__main__ import main
sys.exit(main())
"""


async def test_an_idle_server_ends_at_once_and_not_because_nobody_takes_its_greeting() -> None:
    process = run("-c", FULL_DISK, "--port", "0", *FEW_BUCKETS)
    try:
        url = (await asyncio.to_thread(read_until, process, r"listening on (http[^;\s]+)"))[1]
        await asyncio.to_thread(read_until, process, "ready after")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
            assert reply.status == 200
        process.send_signal(signal.SIGINT)
        status, output = await asyncio.to_thread(finish, process, timeout=5)
    finally:
        process.kill()
        process.communicate()
    assert status == 0, output
    assert "Traceback" not in output


async def test_a_server_without_standard_streams_serves_and_ends_in_order(tmp_path: Path) -> None:
    """Nothing that it opens takes their place: it would be written to as if it were one."""
    flags = ("-m", "jaxserve", "--uds", str(tmp_path / "socket"), *FEW_BUCKETS)
    process = run(*flags, before="import os; os.closerange(0, 3)")
    try:
        connector = aiohttp.UnixConnector(str(tmp_path / "socket"))
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(120):
            while not await is_ready(session):
                assert process.poll() is None
                await asyncio.sleep(0.1)
            descriptors = Path(f"/proc/{process.pid}/fd")
            assert {str((descriptors / f"{n}").readlink()) for n in range(3)} == {"/dev/null"}
            async with session.post("http://a/v1/completions", json=SHORT) as reply:
                assert reply.status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.communicate()


async def test_that_descriptors_run_out_is_said_once_with_their_limit() -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    process = run("-m", "jaxserve", "--port", "0", *FEW_BUCKETS, before=few)
    try:
        url = (await asyncio.to_thread(read_until, process, r"is ready: \S+ at (http\S+)/v1"))[1]
        address = "127.0.0.1", int(url.rpartition(":")[2])
        connections = [socket.create_connection(address) for _ in range(80)]
        await asyncio.sleep(0.5)
        for connection in connections:
            connection.close()
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
            assert reply.status == 200
        process.send_signal(signal.SIGTERM)
        status, output = await asyncio.to_thread(finish, process, timeout=10)
    finally:
        process.kill()
        process.communicate()
    assert status == 0, output
    assert output.count("the limit of 64 open files is reached") == 1, output


async def is_ready(session: aiohttp.ClientSession) -> bool:
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with session.get("http://a/ready") as reply:
            return reply.status == 200
    return False


async def test_a_server_that_is_starting_answers_and_ends_at_once() -> None:
    process = start(*FEW_BUCKETS, "--probe-port", "0")
    try:
        url = (await asyncio.to_thread(read_until, process, r"listening on (http[^;\s]+)"))[1]
        port = (await asyncio.to_thread(read_until, process, r"metrics on port (\d+)"))[1]
        async with aiohttp.ClientSession() as session:
            for place in (url, f"http://127.0.0.1:{port}"):
                async with session.get(f"{place}/live") as reply:
                    assert reply.status == 200
            async with session.get(f"{url}/health") as reply:
                assert reply.status == 503
            async with session.get(f"{url}/ready") as reply:
                assert reply.status == 503
                assert (await reply.json())["phase"] in ("starting", "loading", "compiling")
            async with session.post(f"{url}/v1/completions", json=LONG) as reply:
                assert reply.status == 503
                assert "Retry-After" in reply.headers
        process.send_signal(signal.SIGTERM)
        status, output = await asyncio.to_thread(finish, process, timeout=5)
    finally:
        process.kill()
        process.communicate()
    assert status == 0, output
    assert "Traceback" not in output


ENDLESS_DOWNLOAD = """
import sys, time
from jaxserve.commands import serve
from jaxserve.__main__ import main

def find_model(options):
    print("downloading", file=sys.stderr, flush=True)
    time.sleep(600)

serve.find_model = find_model
sys.exit(main())
"""


def test_a_server_that_looks_for_its_model_ends_at_once() -> None:
    process = run("-c", ENDLESS_DOWNLOAD, "--port", "0")
    try:
        read_until(process, "downloading")
        process.send_signal(signal.SIGINT)
        status, output = finish(process, timeout=5)
    finally:
        process.kill()
        process.communicate()
    assert (status, "Traceback" in output) == (0, False), output
    assert "stopped while starting" in output


async def test_what_runs_or_waits_is_finished_and_new_requests_are_refused() -> None:
    with Server("--shutdown-timeout", "200") as server:
        begun = asyncio.Semaphore(0)

        async def stream(session: aiohttp.ClientSession, index: int) -> str:
            body = {**LONG, "prompt": [5 + index], "max_tokens": 100 + index, "stream": True}
            async with session.post(f"{server.url}/v1/completions", json=body) as reply:
                assert reply.status == 200
                first = await reply.content.readline()
                begun.release()
                return (first + await reply.content.read()).decode()

        async with aiohttp.ClientSession() as session:
            # Twice as many as run at once.
            streams = [asyncio.ensure_future(stream(session, index)) for index in range(16)]
            for _ in range(8):
                await begun.acquire()
            server.process.send_signal(signal.SIGTERM)
            while (await server.get("/ready"))["phase"] != "draining":
                await asyncio.sleep(0.01)
            async with session.post(f"{server.url}/v1/completions", json=LONG) as reply:
                assert reply.status == 503
                assert "Retry-After" in reply.headers
                assert reply.headers["Connection"] == "close"
            texts = await asyncio.gather(*streams)
        for index, text in enumerate(texts):
            assert text.rstrip().endswith("data: [DONE]"), index
            assert '"finish_reason":"length"' in text, index
        status, output = await asyncio.to_thread(finish, server.process, timeout=20)
    assert status == 0, output
    assert "stopping: 16 running answers get up to 200 s" in output and "cut off" not in output
    assert output.splitlines()[-1].endswith("stopped")


async def test_what_the_drain_cuts_off_is_told_to_come_back() -> None:
    with Server("--shutdown-timeout", "0.3") as server:
        async with aiohttp.ClientSession() as session:
            body = {**LONG, "max_tokens": 4000}
            request = asyncio.ensure_future(session.post(f"{server.url}/v1/completions", json=body))
            while not (await server.load())["running"]:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            async with await request as reply:
                assert reply.status == 503
                assert int(reply.headers["Retry-After"]) > 0
                assert (await reply.json())["error"]["code"] == "not_ready"
        status, output = await asyncio.to_thread(finish, server.process, timeout=20)
    assert status == 0, output
    assert "1 answers have not finished after 0.3 s and are cut off" in output


FIRST_OF_A_CONTAINER = """
import os, sys, time
os.getpid = lambda: 1
from jaxserve import __main__ as command

def run(argv):
    print("running", flush=True)
    time.sleep(60)

command._run = run
sys.exit(command.main(["precompile"]))
"""


async def test_a_command_that_is_the_first_process_of_a_container_ends_on_sigterm() -> None:
    """As such it is not ended by signals that it does not handle: here SIGTERM is left to it."""
    process = run("-c", FIRST_OF_A_CONTAINER)
    await asyncio.to_thread(read_until, process, "running")
    process.send_signal(signal.SIGTERM)
    status, _ = await asyncio.to_thread(finish, process, timeout=20)
    assert status == 128 + signal.SIGTERM


DEVICE_LOST = """
import sys
from jaxserve.runner import runner
from jaxserve.startup import build
from jaxserve.__main__ import main

def lost(*_):
    raise RuntimeError("the device is lost")

def measured(*arguments):
    times = measure(*arguments)
    runner.Runner.launch = runner.Runner.reset = lost  # once it serves
    return times

measure, build.step_times = build.step_times, measured
sys.exit(main())
"""


async def test_an_engine_that_cannot_go_on_ends_the_process_with_the_reason_last() -> None:
    process = run("-c", DEVICE_LOST, "--port", "0", *FEW_BUCKETS)
    try:
        url = (await asyncio.to_thread(read_until, process, r"is ready: \S+ at (http\S+)/v1"))[1]
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=LONG) as reply,
        ):
            assert reply.status in (500, 503)
        status, output = await asyncio.to_thread(finish, process, timeout=20)
    finally:
        process.kill()
    assert status == 1, output
    assert output.splitlines()[-1].endswith("the engine died: RuntimeError: the device is lost")


async def test_a_second_signal_does_not_wait_for_streams() -> None:
    with Server() as server:
        async with aiohttp.ClientSession() as session:
            body = {**LONG, "max_tokens": 4000, "stream": True}
            async with session.post(f"{server.url}/v1/completions", json=body) as stream:
                await stream.content.readline()
                server.process.send_signal(signal.SIGINT)
                await asyncio.sleep(0.2)
                server.process.send_signal(signal.SIGINT)
                status, _ = await asyncio.to_thread(finish, server.process, timeout=3)
    assert status == 130


async def test_clients_that_go_away_free_their_pages(server: Server) -> None:
    free = (await server.settled())["free_pages"]
    async with aiohttp.ClientSession() as session:

        async def post(stream: bool) -> aiohttp.ClientResponse:
            body = {**LONG, "max_tokens": 3000, "stream": stream}
            return await session.post(f"{server.url}/v1/completions", json=body)

        streams = [await post(stream=True) for _ in range(3)]
        wholes = [asyncio.ensure_future(post(stream=False)) for _ in range(3)]
        while (await server.load())["running"] < 6:
            await asyncio.sleep(0.01)
        for stream in streams:
            stream.close()
        for whole in wholes:
            whole.cancel()
    assert (await server.settled())["free_pages"] == free

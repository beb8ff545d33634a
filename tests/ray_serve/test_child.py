"""A server as a child: its bytes pass as they come, and it dies with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from jaxserve.ray.call import Call, Head, ReplicaLost
from jaxserve.ray.child import Child, ChildFailed
from tests.e2e.process import SMALL_SHAPES, small_model
from tests.fast_compiles import FAST_COMPILES

FAKE = (str(Path(__file__).with_name("fake_server.py")),)


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    child = Child(["--marks", str(tmp_path)])
    await child.start(FAKE)
    yield child
    child.stop(5)
    await child.close()


def post(path: str, body: bytes = b"{}", **headers: str) -> Call:
    return Call("POST", path, tuple(headers.items()), body)


async def answer(child: Child, call: Call) -> tuple[Head, bytes]:
    head, *parts = [item async for item in child.exchange(call)]
    assert isinstance(head, Head)
    return head, b"".join(part for part in parts if isinstance(part, bytes))


async def until(path: Path) -> None:
    async with asyncio.timeout(5):
        while not path.exists():
            await asyncio.sleep(0.02)


async def test_path_body_and_headers_pass_but_not_those_of_the_connection(child: Child) -> None:
    asked = {"Authorization": "Bearer k", "Host": "a", "Expect": "100-continue", "TE": "gzip"}
    head, body = await answer(child, post("/echo?a=%2F&b", b"\x00\xff", **asked))
    headers = {name: value for name, value in head.headers if name != "X-Twice"}
    assert (head.status, body) == (418, b"\x00\xff")
    assert headers["X-Path"] == "/echo?a=%2F&b"
    assert headers["X-Asked"] == "authorization,content-length,host"
    assert [value for name, value in head.headers if name == "X-Twice"] == ["1", "2"]
    assert not {"X-Request-Id", "Date", "Server", "Connection"} & headers.keys()


async def test_bytes_pass_as_they_come(child: Child, tmp_path: Path) -> None:
    async with aclosing(child.exchange(post("/steps"))) as items:
        assert isinstance(await anext(items), Head)
        assert await anext(items) == b"data: 1\n\n"
        (tmp_path / "go on").touch()
        assert [item async for item in items] == [b"data: 2\n\n"]


async def test_who_stops_to_listen_ends_the_server_s_work(child: Child, tmp_path: Path) -> None:
    items: AsyncGenerator[Head | bytes] = child.exchange(post("/steps"))
    await anext(items)
    await anext(items)
    await items.aclose()
    await until(tmp_path / "left")


async def test_more_answers_at_once_than_clients_have_connections_by_default(
    child: Child, tmp_path: Path
) -> None:
    streams = [child.exchange(post("/steps")) for _ in range(120)]
    async with asyncio.timeout(20):
        heads = await asyncio.gather(*(anext(items) for items in streams))
    assert all(isinstance(head, Head) for head in heads)
    (tmp_path / "go on").touch()
    for items in streams:
        assert b"".join([item async for item in items if isinstance(item, bytes)])


async def test_a_server_that_dies_loses_its_answers(child: Child) -> None:
    came: list[Head | bytes] = []
    with pytest.raises(ReplicaLost):
        async for item in child.exchange(post("/die")):
            came.append(item)
    assert came[1:] == [b"data: 1\n\ndata: ha"]
    assert "status -9" in str(await child.ended())
    with pytest.raises(ReplicaLost):
        await child.check()


async def test_its_queue_is_read_from_its_health(child: Child) -> None:
    queue = await child.queue()
    assert (queue.running, queue.waiting) == (3, 4)


async def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ChildFailed, match=r"status 3\nno such model"):
        await Child(["--say", "no such model"]).start(FAKE)


async def test_a_server_that_does_not_obey_is_killed(child: Child) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    begun = time.monotonic()
    child.stop(0.2)
    assert time.monotonic() - begun < 2
    await child.ended()


PARENT = """
import asyncio, sys
from jaxserve.ray.child import Child
async def main():
    child = Child([])
    await child.start(sys.argv[1:])
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_kernel_ends_it_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *FAKE], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    parent.kill()
    parent.communicate()
    async with asyncio.timeout(5):
        while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            await asyncio.sleep(0.02)


async def test_a_real_server(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    flags = ["--model", str(model), *SMALL_SHAPES, "--cache-dir", str(tmp_path / "cache")]
    child = Child(["--no-ui", *flags], {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILES})
    try:
        await child.start()
        await child.check()
        body = {"model": str(model), "prompt": [5, 6, 7], "max_tokens": 4, "stream": True}
        call = post(
            "/v1/completions", json.dumps(body).encode(), **{"Content-Type": "application/json"}
        )
        head, text = await answer(child, call)
        assert head.status == 200 and text.endswith(b"data: [DONE]\n\n"), text
    finally:
        child.stop(10)
        assert "status 0" in str(await child.ended())
        await child.close()

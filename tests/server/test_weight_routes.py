"""Routes that change weights, pause and sleep; and the header that names the weights."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from jaxserve.api import Running, WeightChange, WeightsRefused
from jaxserve.server.access import digest
from tests.fakes import FakeEngine
from tests.server.conftest import Serve

ADMIN: dict[str, Any] = {"admin_key_digests": (digest("root"),)}
HEADERS = {"Authorization": "Bearer root"}


async def call(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.request(method, url + path, headers=HEADERS, json=body) as reply:
        return reply.status, json.loads(await reply.read())


async def test_weights_change(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(), **ADMIN)
    assert await call(url, "GET", "/v1/weights") == (
        200,
        {"version": 0, "model": "served", "paused": False, "sleeping": False},
    )
    body = {"model": "/runs/a", "step": 7, "running": "restart", "in_place": True}
    assert await call(url, "POST", "/v1/weights", body) == (
        200,
        {"version": 1, "model": "/runs/a", "load_seconds": 1.5, "gap_seconds": 0.01},
    )
    assert engine.weight_changes == [WeightChange("/runs/a", 7, Running.RESTART, in_place=True)]
    await call(url, "POST", "/v1/weights", {"model": "/runs/b"})
    assert engine.weight_changes[-1] == WeightChange("/runs/b")
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        assert 'jaxserve_weights_version{engine="0",model_name="tiny"} 2.0' in await reply.text()


async def test_weights_that_do_not_fit_are_an_error_of_the_caller(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(), **ADMIN)
    engine.refuse_weights = WeightsRefused("/runs/a: damaged")
    status, body = await call(url, "POST", "/v1/weights", {"model": "/runs/a"})
    assert status == 400 and body["error"]["message"] == "/runs/a: damaged"
    assert body["error"]["code"] == "weights_refused"


@pytest.mark.parametrize(
    "body", [{}, {"model": 3}, {"model": "a", "running": "abort"}, {"model": "a", "steps": 3}]
)
async def test_wrong_bodies_are_refused(serve: Serve, body: Any) -> None:
    url = await serve(engine := FakeEngine(), **ADMIN)
    status, _ = await call(url, "POST", "/v1/weights", body)
    assert status == (200 if "steps" in body else 400)
    assert len(engine.weight_changes) == ("steps" in body)


async def test_pause_resume_sleep_and_wake(serve: Serve) -> None:
    url = await serve(FakeEngine(), **ADMIN)
    assert await call(url, "POST", "/pause") == (200, {"is_paused": True})
    assert await call(url, "GET", "/is_paused") == (200, {"is_paused": True})
    assert await call(url, "POST", "/resume") == (200, {"is_paused": False})
    assert await call(url, "POST", "/sleep?level=2") == (200, {"is_sleeping": True})
    assert await call(url, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert await call(url, "POST", "/wake_up") == (200, {"is_sleeping": False})
    for path in ("/pause?mode=abort", "/sleep?level=0"):
        status, body = await call(url, "POST", path)
        assert status == 400 and "must be one of" in body["error"]["message"]


EVERY_API = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
    ],
)


@pytest.mark.parametrize("stream", [False, True])
@EVERY_API
async def test_answers_name_their_weights(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    url = await serve(engine := FakeEngine(b"abc", step=asyncio.Semaphore(9)), **ADMIN)
    engine.version = 4
    url, body = url + path, {"model": "tiny", "stream": stream} | body
    async with aiohttp.request("POST", url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["x-jaxserve-weights"] == "4"
    async with aiohttp.request("GET", url.removesuffix(path) + "/health") as reply:
        assert "x-jaxserve-weights" not in reply.headers


@pytest.mark.parametrize("fails", [False, True])
@EVERY_API
async def test_the_end_of_a_stream_names_weights_that_its_header_could_not(
    serve: Serve, path: str, body: dict[str, Any], fails: bool
) -> None:
    step = asyncio.Semaphore(0)
    url = await serve(engine := FakeEngine(b"abc", step=step, fail_after=2 if fails else None))
    engine.version = 4
    step.release()
    body = {"model": "tiny", "stream": True} | body
    async with aiohttp.request("POST", url + path, json=body) as reply:
        assert reply.headers["x-jaxserve-weights"] == "4"
        engine.version = 5
        for _ in range(9):
            step.release()
        blocks = (await reply.text()).removesuffix("\n\n").split("\n\n")
    named = [number for number, block in enumerate(blocks) if block.startswith(":")]
    assert [blocks[number] for number in named] == [": x-jaxserve-weights: 4,5"]
    after = "".join(blocks[named[0] :])
    assert "error" in after if fails else after.count("data: ") >= 1


async def test_a_stream_of_one_version_has_no_comment(serve: Serve) -> None:
    url = await serve(FakeEngine(b"abc"))
    body = {"model": "tiny", "stream": True, "prompt": "a"}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        assert not [line for line in (await reply.text()).splitlines() if line.startswith(":")]

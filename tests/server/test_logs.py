"""Log lines: JSON that parses, one per request, and nothing in them of the client's making."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest

from jaxserve.api import FinishReason
from jaxserve.logs import JsonFormatter
from jaxserve.server.access import digest
from tests.fakes import FakeEngine
from tests.server.conftest import Serve


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    form = JsonFormatter()
    requests = [record for record in caplog.records if record.name == "jaxserve.requests"]
    return [json.loads(form.format(record)) for record in requests]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_a_line(
    serve: Serve, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    url = await serve(FakeEngine(), log_requests=True, api_key_digests=(digest("k"),))
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer k"}
    body = {"prompt": "secret", "stream": stream}
    path = f"{url}/v1/completions?also=secret"
    async with aiohttp.request("POST", path, json=body, headers=headers) as reply:
        await reply.read()
    (line,) = lines(caplog)
    assert line.pop("seconds") >= line.pop("ttft_seconds") >= 0
    assert line.pop("itl_seconds") >= 0 and line.pop("queue_seconds") == 0.25
    assert line.pop("time").endswith("+00:00")
    assert "secret" not in line.pop("message")
    assert line == {
        "level": "info",
        "logger": "jaxserve.requests",
        "request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "client": "127.0.0.1",
        "key": digest("k").hex()[:8],
        "finish_reason": "length",
        "prompt_tokens": 6,
        "cached_tokens": 0,
        "completion_tokens": 5,
    }


async def test_clients_that_leave_and_errors_are_lines_too(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = await serve(engine := FakeEngine(hang=True), log_requests=True)
    async with aiohttp.ClientSession() as session:
        post = session.post(f"{url}/v1/completions", json={"prompt": "Hi"})
        leaving = asyncio.ensure_future(post)
        while not engine.running:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.wait_for(engine.aborted.wait(), 5)
    async with aiohttp.request("GET", f"{url}/a%0Ab\u00e9") as reply:
        assert reply.status == 404
    shown = [(line["status"], line["path"]) for line in lines(caplog)]
    assert shown == [(499, "/v1/completions"), (404, "/a%0Ab%C3%A9")]
    assert not any("\n" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.GRAMMAR])
async def test_a_failure_is_no_client_that_left(
    serve: Serve, caplog: pytest.LogCaptureFixture, finish: FinishReason
) -> None:
    caplog.set_level(logging.INFO)
    url = await serve(FakeEngine(b"ab", finish=finish), log_requests=True)
    async with aiohttp.request("POST", f"{url}/v1/completions", json={"prompt": "Hi"}) as reply:
        await reply.read()
    assert [line["finish_reason"] for line in lines(caplog)] == ["error"]


async def test_requests_are_not_logged_unasked(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = await serve(FakeEngine())
    async with aiohttp.request("GET", f"{url}/health"):
        assert not lines(caplog)


def test_exceptions_are_part_of_their_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        given = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "f.py", 1, "did %d", (7,), given)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["level"]) == ("did 7", "error")
    assert "ValueError: two" in line["exception"]

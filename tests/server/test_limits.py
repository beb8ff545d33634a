"""Limits of load and time: each is hit, says when to come back, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from jaxserve.api import Overloaded, Request, SamplingParams
from jaxserve.server.backlog import LONGEST_WAIT, UNKNOWN_RATE_WAIT, Backlog
from jaxserve.server.output.generation import Choice, TextOptions
from tests.fakes import THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve

TOKENIZER = tiny_tokenizer()


def choices(*sizes: int) -> list[Choice]:
    params = SamplingParams(max_tokens=1)
    requests = [Request(id=str(i), prompt=(1,) * n, params=params) for i, n in enumerate(sizes)]
    return [Choice(i, r, TOKENIZER, TextOptions()) for i, r in enumerate(requests)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_backlog_is_bounded_and_empties_by_first_tokens_and_by_leaving() -> None:
    backlog = Backlog(100)
    first, second = choices(30, 30), choices(40)
    with backlog.holding(first):
        with backlog.holding(second):
            assert backlog.waiting == 100
            with pytest.raises(Overloaded, match="100 prompt tokens"), backlog.holding(choices(1)):
                pass
            first[1].on_first_token()
            assert backlog.waiting == 70
        assert backlog.waiting == 30
    assert backlog.waiting == 0


def test_a_request_that_finds_nothing_waiting_is_let_in() -> None:
    backlog = Backlog(10)
    with backlog.holding(choices(50)):
        assert backlog.waiting == 50


def test_the_time_to_come_back_is_what_waits_over_the_rate_of_service() -> None:
    clock = Clock()
    backlog = Backlog(None, clock)
    assert backlog.seconds_to_drain() == UNKNOWN_RATE_WAIT
    waiting = choices(*[100] * 10)
    with ExitStack() as stack:
        stack.enter_context(backlog.holding(waiting))
        for choice in waiting[:4]:
            choice.on_first_token()
            clock.now += 0.5
        # 400 tokens in 2 seconds; 600 wait
        assert backlog.seconds_to_drain() == pytest.approx(3.0)
        stack.enter_context(backlog.holding(choices(10**6)))
        assert backlog.seconds_to_drain() == LONGEST_WAIT
        clock.now += 60
        assert backlog.seconds_to_drain() == UNKNOWN_RATE_WAIT


async def test_too_many_waiting_tokens_are_a_429(serve: Serve) -> None:
    step = asyncio.Semaphore(0)
    url = await serve(engine := FakeEngine(step=step), max_queued_tokens=8)
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "123456"}
        held = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        while not engine.requests:
            await asyncio.sleep(0.01)
        for stream in (False, True):
            reply = await session.post(f"{url}/v1/completions", json=body | {"stream": stream})
            assert (reply.status, reply.headers["Retry-After"]) == (429, "5")
            assert (await reply.json())["error"]["code"] == "overloaded"
        for _ in range(10):
            step.release()
        assert (await held).status == 200
        assert len(engine.requests) == 1
        reply = await session.post(f"{url}/v1/completions", json=body | {"max_tokens": 1})
        assert reply.status == 200


async def test_a_request_that_takes_too_long_is_a_504(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(hang=True), request_timeout=0.2)
    async with aiohttp.request("POST", f"{url}/v1/completions", json={"prompt": "Hi"}) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["type"], error["code"]) == (504, "timeout_error", "timeout")
    await asyncio.wait_for(engine.aborted.wait(), 5)
    assert engine.running == 0


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(hang=True), request_timeout=0.2)
    body: dict[str, Any] = {"prompt": "Hi", "stream": True}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        text = await reply.text()
    assert reply.status == 200
    assert '"code":"timeout"' in text
    assert text.endswith("data: [DONE]\n\n")
    await asyncio.wait_for(engine.aborted.wait(), 5)
    assert engine.running == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_waits_too_long_for_its_first_token_is_a_503(
    serve: Serve, stream: bool
) -> None:
    url = await serve(engine := FakeEngine(step=asyncio.Semaphore(0)), max_queue_time=0.2)
    body = {"prompt": "Hi", "stream": stream}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (503, "queue_timeout")
    assert int(reply.headers["Retry-After"]) >= 1
    await asyncio.wait_for(engine.aborted.wait(), 5)


async def test_a_request_that_has_begun_may_take_longer_than_the_queue_allows(
    serve: Serve,
) -> None:
    async def answer(step: asyncio.Semaphore, path: str, body: dict[str, Any]) -> None:
        url = await serve(FakeEngine([THINK, *b"Hello"], step=step), max_queue_time=2)
        async with aiohttp.request("POST", f"{url}/v1/{path}", json=body) as reply:
            assert reply.status == 200
            assert '"finish_reason":"length"' in await reply.text()

    chat = {"messages": [{"role": "user", "content": "Hi"}], "include_reasoning": False}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "Hi", "stream": True}),
        ("completions", {"prompt": "Hi"}),
        ("chat/completions", {**chat, "stream": True}),  # nothing to be seen yet
    ]
    steps = [asyncio.Semaphore(1) for _ in requests]
    answers = [
        asyncio.ensure_future(answer(step, *request))
        for step, request in zip(steps, requests, strict=True)
    ]
    await asyncio.sleep(2.2)
    for step in steps * 10:
        step.release()
    await asyncio.gather(*answers)


async def test_a_request_whose_first_token_is_held_back_has_begun(serve: Serve) -> None:
    """`<` may begin a tool call: there is nothing to send yet."""
    step = asyncio.Semaphore(1)
    url = await serve(FakeEngine(b"<b>", step=step), max_queue_time=0.5)
    asyncio.get_running_loop().call_later(0.7, lambda: [step.release() for _ in range(3)])
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "stream": True,
    }
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert '"finish_reason":"length"' in await reply.text()


@pytest.mark.parametrize(("sent", "status"), [("0.2", 504), ("nan", 200), ("x", 200)])
async def test_nothing_is_computed_for_a_client_that_does_not_wait_for_it(
    serve: Serve, sent: str, status: int
) -> None:
    """A proxy may keep the connection that its own client has left."""
    url = await serve(FakeEngine(step_seconds=0.1))
    headers = {"x-stainless-read-timeout": sent}
    body = {"prompt": "Hi"}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body, headers=headers) as it:
        assert it.status == status


async def test_a_body_that_comes_too_slowly_is_a_408(serve: Serve) -> None:
    url = await serve(FakeEngine(), body_timeout=0.2)
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"408"
    writer.close()


@pytest.mark.parametrize(("fields", "status"), [(256, b"200"), (257, b"400")])
async def test_a_header_may_have_so_many_fields(serve: Serve, fields: int, status: bytes) -> None:
    url = await serve(FakeEngine())
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = ["GET /health HTTP/1.1", "Host: a", *(f"X-{i}: 1" for i in range(fields - 1)), "", ""]
    writer.write("\r\n".join(lines).encode())
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
    writer.close()


async def test_a_header_that_comes_too_slowly_ends_the_connection(serve: Serve) -> None:
    """Byte by byte: what has come does not buy more time, for the next request neither."""
    url = await serve(FakeEngine(), header_timeout=0.2)
    host, port = url.removeprefix("http://").split(":")
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(before)
        drip = asyncio.create_task(_drip(writer))
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # there are bytes that nobody has read
            while more := await asyncio.wait_for(reader.read(4096), 30):
                answer += more
        assert not drip.done(), "the server closed it, not the client"
        assert answer.count(b"HTTP/1.1") == bool(before)
        drip.cancel()
        writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    for byte in b"GET /health HTTP/1.1\r\nHost: " + b"a" * 7000:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)


async def test_an_answer_that_takes_longer_than_headers_may_is_not_cut_off(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hi", step_seconds=0.3), header_timeout=0.1)
    body = {"prompt": "Hi", "stream": True}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        assert (await reply.text()).endswith("data: [DONE]\n\n")

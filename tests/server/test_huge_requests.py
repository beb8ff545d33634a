"""What requests of megabytes cost: little where they cannot be served, and never others' time."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
import tokenizers

from jaxserve.server.off_loop import HUGE_BYTES
from jaxserve.tokenizer import HfTokenizer, huggingface
from jaxserve_checkpoints.resolve import embedded_model
from tests.fakes import FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve

LONG = "some words " * (HUGE_BYTES // 5)
MESSAGE = {"role": "user", "content": "Hi"}
MANY_TOOLS = [
    {"type": "function", "function": {"name": f"f{n}", "description": LONG[:100_000]}}
    for n in range(40)
]


def sent(body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Arguments of a request; aiohttp wants large ones as a stream."""
    content = io.BytesIO(msgspec.json.encode(body))
    return {"data": content, "headers": {"Content-Type": "application/json", **headers}}


class Encoding:
    """The calls of the library by which texts are encoded, which can be held."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    @property
    def chars(self) -> int:
        return sum(map(len, self.texts))


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    watch, merge = Encoding(), huggingface.merge

    def watched(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        watch.texts.append(text)
        assert len(text) < 1000 or watch.go_on.wait(60)
        return merge(tokenizer, text)

    monkeypatch.setattr(huggingface, "merge", watched)
    yield watch
    watch.go_on.set()


async def until_encoding(encoding: Encoding) -> None:
    async with asyncio.timeout(10):
        while not encoding.texts:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": [LONG, LONG]}),
        ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [MESSAGE] * 1000 + [{**MESSAGE, "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [MESSAGE], "tools": MANY_TOOLS}),
        ("/v1/responses", {"input": LONG}),
    ],
)
async def test_what_cannot_fit_is_encoded_no_further(
    serve: Serve, encoding: Encoding, path: str, body: dict[str, Any]
) -> None:
    tokenizer = HfTokenizer.from_folder(embedded_model())
    url = await serve(engine := FakeEngine(max_model_len=2048), tokenizer=tokenizer)
    async with aiohttp.request("POST", url + path, **sent(body)) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (400, "context_length_exceeded")
    assert "the prompt has more than" in error["message"] and "2048 tokens" in error["message"]
    assert encoding.chars < 300_000
    assert not engine.requests


async def test_what_is_cut_to_fit_is_encoded_whole(serve: Serve, encoding: Encoding) -> None:
    url = await serve(engine := FakeEngine(), tokenizer=tiny_tokenizer())
    body = {"prompt": LONG, "truncate_prompt_tokens": 7, "max_tokens": 1}
    async with aiohttp.request("POST", f"{url}/v1/completions", **sent(body)) as reply:
        assert reply.status == 200
    assert engine.requests[0].prompt == tuple(LONG[-7:].encode())
    assert encoding.chars == len(LONG)


async def test_work_ends_with_its_client(serve: Serve, encoding: Encoding) -> None:
    """That which runs at its next piece, that which waits at once."""
    url = await serve(FakeEngine(), tokenizer=tiny_tokenizer())
    encoding.go_on.clear()
    async with aiohttp.ClientSession() as session:
        leaving = [
            asyncio.create_task(session.post(f"{url}/tokenize", **sent({"prompt": LONG})))
            for _ in range(3)
        ]
        await until_encoding(encoding)
        await asyncio.sleep(0.3)
        for each in leaving:
            each.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.sleep(0.3)
        encoding.go_on.set()
        async with session.post(f"{url}/tokenize", **sent({"prompt": "x" * HUGE_BYTES})) as reply:
            assert (await reply.json())["count"] == HUGE_BYTES
    assert encoding.chars < HUGE_BYTES + len(LONG) / 2


async def test_other_requests_do_not_wait_for_huge_ones(serve: Serve, encoding: Encoding) -> None:
    url = await serve(FakeEngine(max_model_len=10**7), tokenizer=tiny_tokenizer())
    encoding.go_on.clear()
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        body = {"prompt": LONG, "max_tokens": 1}
        huge = [
            asyncio.create_task(session.post(f"{url}/v1/completions", **sent(body)))
            for _ in range(3)
        ]
        await until_encoding(encoding)
        body = {"prompt": "y " * 400 + "<|im_end|>" * 1000, "max_tokens": 1}  # of 10 kB
        async with session.post(f"{url}/v1/completions", **sent(body)) as reply:
            assert reply.status == 200
        assert not any(each.done() for each in huge)
        encoding.go_on.set()
        assert [(await each).status for each in huge] == [200] * 3


async def test_so_many_bytes_of_huge_bodies_are_held_and_no_more(
    serve: Serve, encoding: Encoding
) -> None:
    url = await serve(
        FakeEngine(max_model_len=10**7), tokenizer=tiny_tokenizer(), max_request_bytes=3_000_000
    )
    encoding.go_on.clear()
    body = {"prompt": LONG, "max_tokens": 1}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(60):
        waiting = {
            asyncio.create_task(session.post(f"{url}/v1/completions", **sent(body)))
            for _ in range(12)
        }
        refused, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        reply = await refused.pop()
        assert (reply.status, reply.headers["Retry-After"]) == (429, "5")
        assert "bytes of large requests" in (await reply.json())["error"]["message"]
        small = {"prompt": "Hi", "max_tokens": 1}
        async with session.post(f"{url}/v1/completions", json=small) as reply:
            assert reply.status == 200
        encoding.go_on.set()
        statuses = [(await each).status for each in waiting]
        assert 200 in statuses
        async with session.post(f"{url}/v1/completions", **sent(body)) as reply:
            assert reply.status == 200, "what was held is given back"


@pytest.mark.parametrize(("isolated", "times"), [(True, 2), (False, 1)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG[:5000], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": LONG[:5000]}]}),
        ("/tokenize", {"prompt": LONG[:5000]}),
    ],
)
async def test_a_text_of_another_key_is_encoded_again_where_caches_are_isolated(
    serve: Serve, encoding: Encoding, path: str, body: dict[str, Any], isolated: bool, times: int
) -> None:
    url = await serve(
        FakeEngine(max_model_len=10_000), tokenizer=tiny_tokenizer(), isolate_cache_by_key=isolated
    )
    for key in ("one", "two", "one", "two"):
        async with aiohttp.request(
            "POST", url + path, **sent(body, Authorization=f"Bearer {key}")
        ) as reply:
            assert reply.status == 200, await reply.text()
    assert sum(LONG[:5000] in text for text in encoding.texts) == times


async def test_memory_is_given_back_a_while_after_a_huge_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all requests of the while, in a thread."""
    given_back = list[str]()

    class Library:
        def malloc_trim(self, _: int) -> None:
            given_back.append(threading.current_thread().name)

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    monkeypatch.setattr("jaxserve.server.off_loop.GIVE_BACK_SECONDS", 0.5)
    url = await serve(FakeEngine(b"Hi"))
    async with aiohttp.ClientSession() as session:
        for text in ("Hi", LONG, LONG):
            assert not given_back
            async with session.post(f"{url}/tokenize", **sent({"prompt": text})) as reply:
                await reply.read()
        async with asyncio.timeout(10):
            while not given_back:
                await asyncio.sleep(0.01)
    (thread,) = given_back
    assert thread.startswith("huge requests")

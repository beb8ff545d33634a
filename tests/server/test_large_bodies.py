"""While a large request is read the event loop goes on: other streams must not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from jaxserve.server.off_loop import MAX_THREADS, Lane, off_loop
from jaxserve.tokenizer import Progress, incremental, nothing
from tests.fakes import FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve

MANY = 40_000
PART = {"type": "text", "text": "a"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
ITEM = {"role": "user", "content": [{"type": "input_text", "text": "a"}] * MANY}
MESSAGE = {"role": "user", "content": "a"}
LONG_TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 10_000}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1, "messages": list(messages), **fields}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "parts": ("/v1/chat/completions", chat({"role": "user", "content": [PART] * MANY})),
    "calls": ("/v1/chat/completions", chat({"role": "assistant", "tool_calls": [CALL] * MANY})),
    "unknown fields": (
        "/v1/chat/completions",
        chat({**MESSAGE, **{f"f{i}": 1 for i in range(3 * MANY)}}),
    ),
    "other unknown fields": (
        "/v1/completions",
        {"prompt": "a", **{f"f{i}": 1 for i in range(3 * MANY)}},
    ),
    "blocks": ("/v1/messages", chat({"role": "user", "content": [PART] * MANY})),
    "system": ("/v1/messages/count_tokens", {**chat(MESSAGE), "system": [PART] * MANY}),
    "items": ("/v1/responses", {"input": [ITEM]}),
    "logprobs of a prompt": (
        "/v1/completions",
        {"prompt": "a" * MANY, "prompt_logprobs": 20, "max_tokens": 1},
    ),
    "logprobs of a chat's prompt": (
        "/v1/chat/completions",
        chat({**MESSAGE, "content": "a" * MANY}, prompt_logprobs=20),
    ),
    "tokens": ("/detokenize", {"tokens": [65] * 20 * MANY}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_the_loop_does_a_small_part_of_the_work_at_once(serve: Serve, name: str) -> None:
    """By the clocks of its thread and of the process: others may keep the machine busy."""
    path, body = BODIES[name]
    url = await serve(FakeEngine(max_model_len=2 * MANY))
    sent = io.BytesIO(msgspec.json.encode(body))
    headers = {"Content-Type": "application/json"}
    longest = 0.0

    async def look_at_the_clock() -> None:
        nonlocal longest
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begun)

    looking = asyncio.create_task(look_at_the_clock())
    begun = time.process_time()
    async with aiohttp.request("POST", f"{url}{path}", data=sent, headers=headers) as reply:
        await reply.read()
        assert reply.status in (200, 400)
    took = time.process_time() - begun
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    assert longest < took / 2, f"{longest:.3f} of {took:.3f} s"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 10_000}),
        ("/v1/chat/completions", chat({**MESSAGE, "content": "x" * 10_000})),
        ("/v1/chat/completions", chat(MESSAGE, tools=[LONG_TOOL])),
        ("/v1/responses", {"input": "x" * 10_000}),
        ("/v1/messages/count_tokens", chat({**MESSAGE, "content": "x" * 10_000})),
        ("/tokenize", {"prompt": "x" * 10_000}),
    ],
)
async def test_long_texts_are_encoded_off_the_event_loop(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    go_on = threading.Event()
    tokenizer = tiny_tokenizer()
    encode = tokenizer.encode

    def held(text: str, breaker: str = "", progress: Progress = nothing) -> list[int]:
        assert go_on.wait(60), "the loop was held up"
        return encode(text, breaker, progress)

    tokenizer.encode = held
    url = await serve(FakeEngine(), tokenizer=tokenizer)
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(30):
        reading = asyncio.create_task(session.post(path, json=body))
        async with session.get("/health") as reply:
            assert reply.status == 200
        assert not reading.done()
        go_on.set()
        await (await reading).read()


async def test_few_are_worked_on_at_once() -> None:
    """Beside 20 threads, 3.5 ms of an engine thread's waits and Python took 250 ms, beside 4 70."""
    working, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal working, most
        with lock:
            working += 1
            most = max(most, working)
        time.sleep(0.01)
        with lock:
            working -= 1

    await asyncio.gather(*(off_loop(Lane.LARGE, work) for _ in range(20)))
    assert 1 < most <= MAX_THREADS


async def test_the_tables_of_stop_strings_are_made_once_for_all_choices(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(incremental, "_next", counting_ends(made))
    body = {"prompt": ["a"] * 8, "n": 16, "stop": [f"{'b' * 400}{i}" for i in range(4)]}
    async with aiohttp.request(
        "POST", f"{await serve(FakeEngine())}/v1/completions", json=body
    ) as reply:
        assert reply.status == 200
    assert sorted(made) == body["stop"]


def counting_ends(made: list[str]) -> Callable[[str, Sequence[int], int, str], int]:
    """A step of the matcher that notes each pattern whose table it completes."""
    step = incremental._next

    def counted(pattern: str, fallback: Sequence[int], state: int, char: str) -> int:
        if char == pattern[-1]:
            made.append(pattern)
        return step(pattern, fallback, state, char)

    return counted


async def test_choices_share_their_allowed_tokens(serve: Serve) -> None:
    engine = FakeEngine()
    body = {"prompt": ["a"] * 64, "allowed_token_ids": list(range(256)) * 256}
    async with aiohttp.request("POST", f"{await serve(engine)}/v1/completions", json=body) as reply:
        assert reply.status == 200
    first, *others = engine.requests
    assert len(others) == 63
    assert all(other.params.allowed_token_ids is first.params.allowed_token_ids for other in others)

"""Chats with grammars and tools, and what the engine is given of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import numpy as np

from tests.fakes import CALL, END_CALL, IM_END, FakeEngine
from tests.server.conftest import Serve

USER = {"role": "user", "content": "Hi"}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool_with(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool_with(SCHEMA, name) for name in ("f", "g")]


CALLED = [CALL, *b'\n{"name": "f", "arguments": {"a": 1}}\n', END_CALL, IM_END]


async def chat(serve: Serve, engine: FakeEngine, **fields: Any) -> tuple[int, Any]:
    url = await serve(engine)
    body = {"messages": [USER], **fields}
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
        return reply.status, await reply.json()


def first_tokens(engine: FakeEngine) -> set[int]:
    guide = engine.requests[-1].params.guide
    assert guide is not None
    bits = np.unpackbits(np.frombuffer(guide.start().mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def follower(engine: FakeEngine) -> Callable[[Iterable[int]], bool]:
    """Whether the last request's guide lets these tokens through."""
    guide = engine.requests[-1].params.guide
    assert guide is not None

    def followed(tokens: Iterable[int]) -> bool:
        state = guide.start()
        for token in tokens:
            assert state.wait(10)
            allowed = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
            if not allowed[token]:
                return False
            state.advance(token)
        return True

    return followed


def call_of(name: str, text: str) -> list[int]:
    return [CALL, *f'\n{{"name": "{name}", "arguments": {text}'.encode(), END_CALL]

"""/tokenize and /detokenize, and the clear no of /v1/embeddings."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.fakes import IM_END, IM_START, THINK, FakeEngine
from tests.server.conftest import Serve

USER = {"role": "user", "content": "Hi"}


async def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.request("POST", url + path, json=body) as reply:
        return reply.status, await reply.json()


async def test_a_text_is_tokenized(serve: Serve) -> None:
    url = await serve(FakeEngine())
    status, reply = await post(url, "/tokenize", {"model": "tiny", "prompt": "é<think>"})
    assert status == 200
    assert reply == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [0xC3, 0xA9, THINK],
        "token_strs": None,
    }
    body = {"prompt": "a<think>", "return_token_strs": True, "add_special_tokens": False}
    assert (await post(url, "/tokenize", body))[1]["token_strs"] == ["a", "<think>"]
    assert (await post(url, "/tokenize", {"prompt": ""}))[1]["tokens"] == []
    null = {"prompt": "a", "messages": None}
    assert (await post(url, "/tokenize", null))[1]["tokens"] == [ord("a")]


async def test_a_chat_is_tokenized_as_it_would_be_for_its_answer(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine)
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        chat = {"messages": [USER], **extra}
        await post(url, "/v1/chat/completions", chat)
        status, reply = await post(url, "/tokenize", chat)
        assert status == 200
        assert tuple(reply["tokens"]) == engine.requests[-1].prompt
    assert reply["tokens"][0] == IM_START


async def test_tokens_become_text_again_with_their_markers(serve: Serve) -> None:
    url = await serve(FakeEngine())
    body = {"tokens": [*b"Hi", IM_END]}
    assert await post(url, "/detokenize", body) == (200, {"prompt": "Hi<|im_end|>"})
    assert await post(url, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_what_cannot_be_tokenized_is_refused(serve: Serve) -> None:
    url = await serve(FakeEngine())
    for path, body, status, param in (
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"messages": 1}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/v1/embeddings", {"input": "a", "model": "tiny"}, 404, "model"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "model"),
    ):
        got, reply = await post(url, path, body)
        assert (got, reply["error"]["param"]) == (status, param), (path, body, reply)


async def test_a_message_can_be_continued(serve: Serve) -> None:
    engine = FakeEngine(b" is")
    url = await serve(engine)
    messages = [USER, {"role": "assistant", "content": "<The sky"}]
    body = {"messages": messages, "continue_final_message": True}
    status, reply = await post(url, "/v1/chat/completions", body)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, " is")
    text = bytes(t for t in engine.requests[0].prompt if t < 256)
    assert text.endswith(b"assistant\n<The sky"), text
    body["messages"] = [USER]
    assert (await post(url, "/v1/chat/completions", body))[0] == 400

"""What load generators and evaluation harnesses put on the wire, and what they read of answers.

Bodies and headers as captured from `vllm bench serve`, inference-perf, guidellm and lm-eval.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from tests.e2e.process import Server

MODEL = "jaxserve-embedded"


async def events_of(server: Server, path: str, body: Any, **headers: str) -> list[Any]:
    """As the clients read them: the literal prefix stripped, comments skipped, JSON parsed."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body, headers=headers) as reply,
    ):
        assert reply.status == 200, await reply.text()
        raw = (await reply.read()).decode()
    lines = [line for line in raw.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def post(server: Server, path: str, body: Any) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def test_vllm_bench_serve_completions(server: Server) -> None:
    tokens = await post(server, "/tokenize", {"model": MODEL, "prompt": "key: value\n" * 9})
    text = await post(server, "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})
    body = {
        "model": MODEL,
        "prompt": text["prompt"],
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    events = await events_of(server, "/v1/completions", body, **{"x-request-id": "bench-1f-0"})
    assert len([event for event in events if event["choices"]]) == 12, "one event per token"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert events[-1]["usage"]["prompt_tokens"] == tokens["count"]
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as reply:
        assert "vllm:num_requests_running" in await reply.text()


async def test_vllm_bench_serve_chat(server: Server) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
        "repetition_penalty": 1.0,
        "max_completion_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    events = await events_of(server, "/v1/chat/completions", body)
    assert all("delta" in event["choices"][0] for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_inference_perf(server: Server) -> None:
    body = {
        "model": MODEL,
        "prompt": "Hello",
        "max_tokens": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "20"}
    events = await events_of(server, "/v1/completions", body, **headers)
    assert events[-1]["usage"]["completion_tokens"] == 7
    assert "cached_tokens" in events[-1]["usage"]["prompt_tokens_details"]


async def test_guidellm(server: Server) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as reply:
        assert reply.status == 200
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
        "max_completion_tokens": 7,
        "stop": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    events = await events_of(server, "/v1/chat/completions", body)
    assert [event["usage"]["completion_tokens"] for event in events][-1] == 7


async def test_lm_eval_generate_until(server: Server) -> None:
    """`local-completions`, several contexts in one request."""
    body = {
        "model": MODEL,
        "prompt": ["What is 4 + 3?", "Hello"],
        "max_tokens": 16,
        "temperature": 0,
        "stop": ["\n\n", "Question:"],
        "seed": 1234,
    }
    reply = await post(server, "/v1/completions", body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    tokenized = [
        (await post(server, "/tokenize", {"prompt": text}))["tokens"] for text in body["prompt"]
    ]
    again = await post(server, "/v1/completions", body | {"prompt": tokenized})
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in reply["choices"]]


async def test_lm_eval_loglikelihood(server: Server) -> None:
    """Context and continuation as ids, echoed; the client reads `[ctxlen:-1]` and its offsets."""
    context = (await post(server, "/tokenize", {"prompt": "The capital of France"}))["tokens"]
    ending = (await post(server, "/tokenize", {"prompt": " is Paris"}))["tokens"]
    body = {
        "model": MODEL,
        "prompt": [context + ending, ending],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    first, _ = (await post(server, "/v1/completions", body))["choices"]
    logprobs = first["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(context) + len(ending) + 1
    scored = logprobs["token_logprobs"][len(context) : -1]
    assert len(scored) == len(ending)
    assert all(value <= 0 for value in scored)
    tops = logprobs["top_logprobs"][len(context) : -1]
    assert all(value <= max(top.values()) for value, top in zip(scored, tops, strict=True))


async def test_llm_d_s_renderer_beside_a_busy_device(server: Server) -> None:
    """The tokens of the same request, within llm-d's timeout, while every slot decodes."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "What is 4 + 3? <|im_end|>"}], "model": MODEL}
    asked = [chat, chat | {"tools": [tool]}, chat | {"reasoning_effort": "none"}]
    long = {"prompt": "one two", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    timeout = aiohttp.ClientTimeout(sock_read=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        streams = [await session.post(url, json=long) for _ in range(8)]
        async with asyncio.timeout(5):
            rendered = [await post(server, "/v1/chat/completions/render", body) for body in asked]
        assert (await server.load())["running"] == 8
        for reply in streams:
            reply.close()
    for body, tokens in zip(asked, rendered, strict=True):
        whole = body | {"max_tokens": 1, "return_token_ids": True}
        answer = await post(server, "/v1/chat/completions", whole)
        assert answer["choices"][0]["prompt_token_ids"] == tokens["token_ids"]
    assert len({len(tokens["token_ids"]) for tokens in rendered}) == 3

"""Small things that clients trip over, at the level where they were seen."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest

from jaxserve.tokenizer import decode
from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

USER: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = [CALL, *b'\n{"name": "f", "arguments": {}}\n', END_CALL]
THOUGHT = [THINK, *b"\nhm\n", END_THINK, *b"\n\n"]


def prompt_of(engine: FakeEngine) -> str:
    return decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)


async def test_anthropics_client_lists_models_in_its_own_shape(serve: Serve) -> None:
    url = await serve(FakeEngine())
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as api:
        models = [model async for model in await api.models.list()]
        assert [(m.id, m.type, m.display_name) for m in models] == [
            (MODEL, "model", MODEL),
            ("alias", "model", "alias"),
        ]
        assert (await api.models.retrieve(MODEL)).created_at.year > 2000
    async with aiohttp.request("GET", f"{url}/v1/models") as reply:
        assert (await reply.json())["object"] == "list", "others get OpenAI's"


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": None, "refusal": "I will not."},
    ],
)
async def test_what_the_assistant_refused_is_a_part_of_the_history(
    serve: Serve, said: dict[str, Any]
) -> None:
    async with client(serve, engine := FakeEngine(b"x")) as api:
        history: Any = [*USER, {"role": "assistant", **said}, *USER]
        await api.chat.completions.create(model=MODEL, messages=history)
    assert "assistant\nI will not.<|im_end|>" in prompt_of(engine)


async def test_only_tokens_of_the_content_are_among_its_logprobs(serve: Serve) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "tools": TOOLS, "logprobs": True}
    script = [*THOUGHT, *"é\n".encode(), *CALLED, *b"b", IM_END]
    async with client(serve, FakeEngine(script)) as api:
        (choice,) = (await api.chat.completions.create(**fields)).choices
        whole = choice.logprobs.content
        chunks = [c async for c in await api.chat.completions.create(stream=True, **fields)]
        every = await api.chat.completions.create(**fields, extra_body={"return_token_ids": True})
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.bytes for entry in whole] == [entry.bytes for entry in streamed]
    assert b"".join(bytes(entry.bytes) for entry in whole).decode() == "éb"
    assert choice.message.content == "éb"
    ids = every.choices[0].token_ids
    assert len(every.choices[0].logprobs.content) == len(ids) == len(script), "one of every token"


@pytest.mark.parametrize("before", [[], THOUGHT], ids=["at once", "after a thought"])
async def test_a_call_has_no_content_before_it(serve: Serve, before: list[int]) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "tools": TOOLS}
    async with client(serve, FakeEngine([*before, *CALLED, IM_END])) as api:
        chunks = [c async for c in await api.chat.completions.create(stream=True, **fields)]
        (choice,) = (await api.chat.completions.create(**fields)).choices
    assert {chunk.choices[0].delta.content for chunk in chunks} == {None}
    assert choice.message.content is None
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/responses", "/v1/responses"),
        ("/v1/tokenize", None),
        ("/nothing", None),
    ],
)
@pytest.mark.parametrize("root", ["", "/llm"])
async def test_a_wrong_base_url_is_told_what_was_meant(
    serve: Serve, path: str, meant: str | None, root: str
) -> None:
    url = await serve(FakeEngine(), root_path=root)
    async with aiohttp.request("POST", url + root + path, json={}) as reply:
        assert reply.status == 404
        error = (await reply.json())["error"]
    hint = f"; {root}{meant} was probably meant: mind the base URL;"
    assert (hint in error["message"]) == (meant is not None), error


async def test_thinking_can_be_switched_at_the_top_level(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(b"x"))
    inner = {"chat_template_kwargs": {"enable_thinking": True}}
    for more, thinks in (({}, False), (inner, True), ({"reasoning_effort": "high"}, False)):
        body = {"messages": USER, "enable_thinking": False, **more}
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200 and "x-jaxserve-ignored-params" not in reply.headers
        assert prompt_of(engine).endswith("</think>\n\n") != thinks

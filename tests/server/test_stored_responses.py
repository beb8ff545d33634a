"""Responses that are kept: the official client goes on from their ids, and from their items'."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import aiohttp
import openai
import pytest

from jaxserve.server.access import digest
from jaxserve.server.response_store import ENTRY_BYTES, ResponseStore, Stored
from jaxserve.server.sealed import Sealer
from jaxserve.tokenizer import decode
from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

CALLED = [CALL, *b'\n{"name": "add", "arguments": {"a": 1}}\n', END_CALL]
SCRIPT = [THINK, *b"hm", END_THINK, *b"Well", *CALLED, IM_END]
TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]


def prompt_of(engine: FakeEngine) -> str:
    return decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_a_response(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(SCRIPT)
    fields: Any = {"model": MODEL, "tools": TOOLS}
    async with client(serve, engine) as api:
        if stream:
            events = await api.responses.create(
                input="Hi", instructions="Be brief", stream=True, **fields
            )
            first = [event async for event in events][-1].response
        else:
            first = await api.responses.create(input="Hi", instructions="Be brief", **fields)
        assert first.store
        result = {
            "type": "function_call_output",
            "call_id": first.output[-1].call_id,
            "output": "2",
        }
        second = await api.responses.create(input=[result], previous_response_id=first.id, **fields)
        assert second.previous_response_id == first.id
        await api.responses.create(input="And?", previous_response_id=second.id, **fields)
    prompt = prompt_of(engine)
    assert "Be brief" not in prompt, "instructions are those of each request"
    turn = "<|im_start|>assistant\n<think>\nhm\n</think>\n\nWell<tool_call>"
    assert prompt.count(turn) == 2
    parts = ("user\nHi<|im_end|>", turn, "tool\n2<|im_end|>", "user\nAnd?<|im_end|>")
    assert sorted(parts, key=prompt.index) == list(parts)


async def test_items_are_referred_to_as_the_ai_sdk_does(serve: Serve) -> None:
    engine = FakeEngine(SCRIPT)
    async with client(serve, engine) as api:
        first = await api.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
        del references[0]["type"]  # it need not be said
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id}
        history = [{"role": "user", "content": "Hi"}, *references, {**result, "output": "2"}]
        await api.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert '<think>\nhm\n</think>\n\nWell<tool_call>\n{"a": 1}' in prompt_of(engine)


async def test_a_response_is_shown_and_forgotten(serve: Serve) -> None:
    async with client(serve, FakeEngine(SCRIPT)) as api:
        made = await api.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        shown = await api.responses.retrieve(made.id)
        assert shown.to_dict() == made.to_dict()
        items = [item async for item in await api.responses.input_items.list(made.id)]
        assert [(item.role, item.content) for item in items] == [("user", "Hi")]
        await api.responses.delete(made.id)
        for gone in (api.responses.retrieve, api.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await gone(made.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.input_items.list(made.id)


async def test_input_items_come_in_pages(serve: Serve) -> None:
    texts: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    async with client(serve, FakeEngine(b"x")) as api:
        made = await api.responses.create(model=MODEL, input=texts)
        pages = await api.responses.input_items.list(made.id, limit=2)
        assert [item.content async for item in pages] == ["4", "3", "2", "1", "0"]
        first = await api.responses.input_items.list(made.id, limit=2, order="asc")
        assert [item.content for item in first.data] == ["0", "1"]
        with pytest.raises(openai.BadRequestError):
            await api.responses.input_items.list(made.id, limit=1000)


async def test_what_is_not_to_be_stored_is_not(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"x")) as api:
        made = await api.responses.create(model=MODEL, input="Hi", store=False)
        assert not made.store
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(made.id)
        for wrong, param in (
            ({"input": "Hi", "previous_response_id": made.id}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": made.output[0].id}]}, "input[0].id"),
        ):
            with pytest.raises(openai.BadRequestError, match="store: false") as caught:
                await api.responses.create(model=MODEL, **wrong)
            assert caught.value.param == param


async def test_without_a_store_the_error_says_what_to_set(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"x"), response_store_bytes=0) as api:
        made = await api.responses.create(model=MODEL, input="Hi")
        assert not made.store
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        with pytest.raises(openai.BadRequestError, match="--response-store-bytes") as caught:
            await api.responses.create(model=MODEL, input=reference)
        assert "store: false" in caught.value.message
        with pytest.raises(openai.NotFoundError, match="--response-store-bytes"):
            await api.responses.retrieve(made.id)


async def test_a_response_belongs_to_the_key_that_asked_for_it(serve: Serve) -> None:
    url = await serve(FakeEngine(b"x"), api_key_digests=(digest("mine"), digest("yours")))
    body = {"input": "Hi"}

    async def ask(method: str, path: str, key: str, **fields: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.request(method, url + path, headers=headers, **fields) as reply:
            return reply.status, await reply.json()

    _, made = await ask("POST", "/v1/responses", "mine", json=body)
    path = f"/v1/responses/{made['id']}"
    assert (await ask("GET", path, "yours"))[0] == 404
    assert (await ask("DELETE", path, "yours"))[0] == 404
    taken = {**body, "previous_response_id": made["id"]}
    assert (await ask("POST", "/v1/responses", "yours", json=taken))[0] == 400
    assert (await ask("GET", path, "mine"))[0] == 200
    assert (await ask("POST", "/v1/responses", "mine", json=taken))[0] == 200


def stored(size: int) -> Stored:
    return Stored(response=b"x" * (size - ENTRY_BYTES), input=(), output=())


def test_the_store_is_bounded_and_the_largest_tenant_pays() -> None:
    store = ResponseStore(10_000)
    store.put("small", "old", stored(2000))
    for number in range(9):
        store.put("large", str(number), stored(2000))
    assert store.size <= 10_000
    assert store.get("small", "old"), "though it is the oldest"
    kept = [number for number in range(9) if store.get("large", str(number))]
    assert kept == [5, 6, 7, 8]
    assert store.get("large", "5")
    store.put("large", "new", stored(2000))
    assert not store.get("large", "6") and store.get("large", "5"), "used since"
    store.put("large", "huge", stored(10_001))
    assert not store.get("large", "huge") and store.get("large", "new")
    assert store.delete("small", "old") and not store.delete("small", "old")


async def test_a_thought_is_sealed_and_taken_back(serve: Serve) -> None:
    words = "a thought"  # so long that no sealed text has it by chance
    engine = FakeEngine([THINK, *words.encode(), *SCRIPT[SCRIPT.index(END_THINK) :]])
    fields: Any = {"model": MODEL, "tools": TOOLS, "store": False}
    fields["include"] = ["reasoning.encrypted_content"]
    async with client(serve, engine) as api:
        made = await api.responses.create(input="Hi", **fields)
        stream = await api.responses.create(input="Hi", stream=True, **fields)
        events = [event async for event in stream]
        done = next(e.item for e in events if e.type == "response.output_item.done")
        final = events[-1].response.output[0]
        assert done.encrypted_content == final.encrypted_content
        sealed = made.output[0].encrypted_content
        assert sealed and words.encode() not in base64.urlsafe_b64decode(sealed)
        # As Codex sends it back: without the text.
        thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        history: Any = [{"role": "user", "content": "Hi"}, thought, *made.output[1:]]
        await api.responses.create(input=history, **fields)
        assert f"<think>\n{words}\n</think>\n\nWell" in prompt_of(engine)
        thought["encrypted_content"] = sealed[:-9] + "A" * 9
        raw = await api.responses.with_raw_response.create(input=history, **fields)
        assert raw.headers["x-jaxserve-ignored-params"] == "input.encrypted_content"
        assert words not in prompt_of(engine)


async def test_a_key_of_the_server_s_own_opens_thoughts_of_another_start(serve: Serve) -> None:
    fields: Any = {"model": MODEL, "include": ["reasoning.encrypted_content"]}
    async with client(serve, FakeEngine(SCRIPT), reasoning_keys=("a" * 32,)) as api:
        made = await api.responses.create(input="Hi", **fields)
    thought = {**made.output[0].to_dict(), "content": None}
    for keys, opened in ((("b" * 32, "a" * 32), True), (("b" * 32,), False), ((), False)):
        engine = FakeEngine(SCRIPT)
        async with client(serve, engine, reasoning_keys=keys) as api:
            await api.responses.create(input=[thought, {"role": "user", "content": "?"}], **fields)
        assert ("hm" in prompt_of(engine)) == opened


def test_a_sealed_text_is_for_whom_it_was_sealed() -> None:
    sealer = Sealer()
    sealed = sealer.seal("hm", "mine")
    assert sealer.open(sealed, "mine") == "hm"
    assert sealer.open(sealed, "yours") is None
    for changed in ("", "é", "x" * 99, sealed[:-1], sealed.swapcase()):
        assert sealer.open(changed, "mine") is None


async def test_requests_at_once_share_the_store(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"x"), response_store_bytes=20_000) as api:
        calls = (api.responses.create(model=MODEL, input="Hi" * 99) for _ in range(30))
        made = await asyncio.gather(*calls)
        found = 0
        for one in made:
            try:
                found += (await api.responses.retrieve(one.id)).id == one.id
            except openai.NotFoundError:
                continue
    assert 0 < found < 30

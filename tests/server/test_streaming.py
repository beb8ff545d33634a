"""The bytes of a stream, and what becomes of it when one of the two sides goes away."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from jaxserve.api import FinishReason
from jaxserve.server.openai.completion_reply import CompletionReply
from tests.fakes import END_THINK, IM_END, THINK, FakeEngine
from tests.server.conftest import MODEL, Serve, serving

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
COMPLETION = {"prompt": "Hi", "stream": True}


async def post(url: str, path: str, body: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    async with aiohttp.request("POST", f"{url}{path}", json=body) as reply:
        return reply, await reply.read()


def payloads(raw: bytes) -> list[Any]:
    events = raw.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event]


def shown(raw: bytes) -> list[str]:
    return [choice["text"] for event in payloads(raw) for choice in event["choices"]]


async def test_the_bytes_of_a_chat_stream_are_exactly_these(serve: Serve) -> None:
    reply, raw = await post(await serve(FakeEngine([*b"A", IM_END])), "/v1/chat/completions", CHAT)
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Accel-Buffering"] == "no"
    raw = re.sub(rb"chatcmpl-[0-9a-f]{32}", b"ID", raw)
    raw = re.sub(rb'"created":\d+', b'"created":0', raw)
    head = '{"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{'
    tail = '"logprobs":null,"finish_reason":'
    assert raw.decode().split("\n\n") == [
        f'data: {head}"index":0,"delta":{{"role":"assistant","content":""}},{tail}null}}]}}',
        f'data: {head}"index":0,"delta":{{"content":"A"}},{tail}null}}]}}',
        f'data: {head}"index":0,"delta":{{"content":""}},{tail}"stop"}}]}}',
        "data: [DONE]",
        "",
    ]


@pytest.mark.parametrize("together", [1, 2, 9])
async def test_tokens_that_are_there_at_once_are_events_of_their_own(
    serve: Serve, together: int
) -> None:
    """Up to the one that completes a stop string, whatever came with it."""
    url = await serve(FakeEngine(b"abcdXYef", together=together))
    _, raw = await post(url, "/v1/completions", {**COMPLETION, "stop": ["XY"]})
    assert shown(raw) == ["a", "b", "c", "d", "", ""]
    assert payloads(raw)[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize(
    ("finish", "code"),
    [(FinishReason.ERROR, "generation_failed"), (FinishReason.GRAMMAR, "grammar_limit")],
)
async def test_what_was_computed_before_a_failure_is_shown(
    serve: Serve, finish: FinishReason, code: str, together: int
) -> None:
    engine = FakeEngine(b"abcd", finish=finish, together=together)
    _, raw = await post(await serve(engine), "/v1/completions", COMPLETION)
    *texts, error = payloads(raw)
    assert [event["choices"][0]["text"] for event in texts] == ["a", "b", "c"]
    assert error["error"]["code"] == code


async def test_the_role_comes_in_the_same_write_as_the_first_text(serve: Serve) -> None:
    step = asyncio.Semaphore(1)
    url = await serve(FakeEngine(b"AB", step=step))
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=CHAT) as reply:
        first = await reply.content.readany()
        assert first.count(b"data: ") == 2
        step.release()


async def test_an_unfinished_character_gives_events_without_text(serve: Serve) -> None:
    _, raw = await post(await serve(FakeEngine("aé€".encode())), "/v1/completions", COMPLETION)
    assert shown(raw) == ["a", "", "é", "", "", "€"]


async def test_a_character_that_stays_unfinished_becomes_a_replacement(serve: Serve) -> None:
    _, raw = await post(await serve(FakeEngine("é".encode()[:1])), "/v1/completions", COMPLETION)
    assert shown(raw) == ["\ufffd"]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_stream_and_the_work_for_it(
    serve: Serve, include: bool
) -> None:
    engine = FakeEngine(b"Hello, END of it", hang=True)
    body = COMPLETION | {"stop": ["END", "no"], "include_stop_str_in_output": include}
    _, raw = await post(await serve(engine), "/v1/completions", body | {"max_tokens": 99})
    assert shown(raw) == [*"Hello, ", "", "", "END" if include else ""]
    assert payloads(raw)[-1]["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted.is_set()
    assert engine.running == 0


async def test_text_held_back_for_a_stop_string_appears_when_it_does_not_come(
    serve: Serve,
) -> None:
    body = COMPLETION | {"stop": "END"}
    _, raw = await post(await serve(FakeEngine(b"aENxE")), "/v1/completions", body)
    assert shown(raw) == ["a", "", "", "ENx", "E"]


async def test_stop_strings_wait_for_min_tokens(serve: Serve) -> None:
    body = COMPLETION | {"stop": "a", "min_tokens": 2}
    _, raw = await post(await serve(FakeEngine(b"aaabb")), "/v1/completions", body)
    assert "".join(shown(raw)) == "aa"


async def test_usage_can_be_the_servers_wish(serve: Serve) -> None:
    url = await serve(FakeEngine(b"abc"), force_include_usage=True)
    _, raw = await post(url, "/v1/completions", COMPLETION)
    assert payloads(raw)[-1]["usage"]["completion_tokens"] == 3
    _, raw = await post(url, "/v1/completions", COMPLETION | {"stream": False})
    assert json.loads(raw)["usage"]["completion_tokens"] == 3


async def test_usage_can_come_with_every_chunk(serve: Serve) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = COMPLETION | {"stream_options": options}
    _, raw = await post(await serve(FakeEngine(b"abc")), "/v1/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in payloads(raw)]
    assert counts == [1, 2, 3, 3]
    assert payloads(raw)[-1]["choices"] == []


async def test_token_ids_come_on_request_with_the_stop_token(serve: Serve) -> None:
    url = await serve(FakeEngine([*b"ab", IM_END]))
    body = COMPLETION | {"return_token_ids": True}
    _, raw = await post(url, "/v1/completions", body)
    choices = [event["choices"][0] for event in payloads(raw)]
    assert choices[0]["prompt_token_ids"] == list(b"Hi")
    assert [choice["token_ids"] for choice in choices] == [[97], [98], [IM_END]]
    _, raw = await post(url, "/v1/chat/completions", CHAT | {"return_token_ids": True})
    choices = [event["choices"][0] for event in payloads(raw)]
    assert [c.get("token_ids") for c in choices] == [None, [97], [98], [IM_END]]


async def test_a_silent_stream_is_kept_alive_by_comments(serve: Serve) -> None:
    step = asyncio.Semaphore(0)
    url = await serve(FakeEngine(b"A", step=step), keep_alive_interval=0.03)
    async with aiohttp.request("POST", f"{url}/v1/completions", json=COMPLETION) as reply:
        assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        step.release()
        rest = (await reply.read()).replace(b": keep-alive\n\n", b"")
    assert shown(rest) == ["A"]


async def test_a_failure_ends_the_stream_with_an_error_and_done(serve: Serve) -> None:
    for engine in (FakeEngine(b"ab", fail_after=1), FakeEngine(b"ab", finish=FinishReason.ERROR)):
        _, raw = await post(await serve(engine), "/v1/completions", COMPLETION)
        assert raw.endswith(b"\n\ndata: [DONE]\n\n")
        error = payloads(raw)[-1]["error"]
        assert error["type"] == "server_error"
        assert error["code"] == "generation_failed"


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/completions", COMPLETION, b"data: [DONE]\n\n"),
        ("/v1/chat/completions", CHAT, b"data: [DONE]\n\n"),
        ("/v1/responses", {"input": "Hi", "stream": True}, b"event: response.failed\n"),
        ("/v1/messages", {**CHAT, "model": MODEL, "max_tokens": 9}, b"event: error\n"),
    ],
)
async def test_a_defect_in_mid_stream_is_told_in_the_protocol_s_words(
    serve: Serve, path: str, body: Any, end: bytes
) -> None:
    """And not in a second answer inside of the first."""
    url = await serve(FakeEngine(b"abc", fail_after=2, failure=ZeroDivisionError))
    reply, raw = await post(url, path, body)
    assert reply.status == 200
    assert b"HTTP/1.1" not in raw and b"secret" not in raw
    assert raw.count(b"internal server error") == 1
    assert end in raw


async def test_where_not_even_an_error_can_be_told_the_connection_is_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise ZeroDivisionError

    for name in ("last_events", "error_events"):
        monkeypatch.setattr(CompletionReply, name, fail)
    url = await serve(FakeEngine(b"ab"))
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    body = json.dumps(COMPLETION).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    raw = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert raw.count(b"HTTP/1.1") == 1
    assert b'"text":"b"' in raw
    assert not raw.endswith(b"0\r\n\r\n"), "it would be taken for whole"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("script", [b"", b"a"], ids=["queued", "decoding"])
async def test_a_client_that_leaves_silently_frees_its_sequences(
    serve: Serve, stream: bool, n: int, script: bytes
) -> None:
    engine = FakeEngine(script, hang=True)
    url = await serve(engine)
    body = CHAT | {"stream": stream, "n": n}
    request = asyncio.create_task(post(url, "/v1/chat/completions", body))
    async with asyncio.timeout(30):
        while engine.running < n:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        request.cancel()
        await engine.aborted.wait()
        while engine.running:
            await asyncio.sleep(0.005)


async def test_a_client_that_leaves_between_tokens_is_noticed_without_a_write(
    serve: Serve,
) -> None:
    engine = FakeEngine(b"a", hang=True)
    url = await serve(engine)
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=CHAT) as reply:
        await reply.content.readline()
    await asyncio.wait_for(engine.aborted.wait(), 30)


async def test_shutdown_ends_streams_in_time() -> None:
    engine = FakeEngine(b"a", hang=True)
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        async with serving(engine) as url:
            reply = await session.post(f"{url}/v1/completions", json=COMPLETION)
            await reply.content.readline()
        assert engine.running == 0
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()


async def test_a_draining_engine_ends_its_streams_with_an_error_event(serve: Serve) -> None:
    url = await serve(FakeEngine(b"ab", finish=FinishReason.ABORT))
    _, raw = await post(url, "/v1/completions", COMPLETION)
    assert "error" in payloads(raw)[-1]


async def test_more_choices_share_one_stream_and_end_together(serve: Serve) -> None:
    engine = FakeEngine(b"ab", step_seconds=0.001)
    _, raw = await post(await serve(engine), "/v1/completions", COMPLETION | {"n": 3})
    choices = [event["choices"][0] for event in payloads(raw)]
    assert sorted(choice["index"] for choice in choices) == [0, 0, 1, 1, 2, 2]
    assert raw.count(b"[DONE]") == 1
    assert engine.running == 0


async def test_padded_events_say_nothing_by_their_size(serve: Serve) -> None:
    url = await serve(FakeEngine([*"aé€x".encode(), IM_END]))
    options = {"include_obfuscation": True, "include_usage": True}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        _, raw = await post(url, path, body | {"stream_options": options})
        events = raw.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
        assert len({len(event) for event in events}) == 1
        assert len({event["obfuscation"] for event in payloads(raw)}) == len(events)


async def test_calls_are_streamed_name_first_then_their_arguments(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    url = await serve(FakeEngine([*f"Well\n{call}\n{call}".encode(), IM_END]))
    _, raw = await post(url, "/v1/chat/completions", CHAT | {"tools": tools})
    choices = [event["choices"][0] for event in payloads(raw)]
    calls = [c["delta"]["tool_calls"][0] for c in choices if "tool_calls" in c["delta"]]
    openings = [call for call in calls if "id" in call]
    assert [c["index"] for c in openings] == [0, 1]
    assert all(
        set(c) == {"index", "id", "type", "function"}
        and c["function"] == {"name": "f", "arguments": ""}
        for c in openings
    )
    grown = [c["function"]["arguments"] for c in calls if c["index"] == 1]
    assert grown == ["", *'{"x": 1}']
    assert {tuple(c) for c in calls if "id" not in c} == {("index", "function")}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(c["delta"].get("content", "") for c in choices) == "Well"


async def test_one_call_ends_the_work_where_no_more_are_wanted(serve: Serve) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    engine = FakeEngine(f"{call}\n{call}".encode(), hang=True)
    body = CHAT | {"tools": tools, "parallel_tool_calls": False, "stream": False}
    _, raw = await post(await serve(engine), "/v1/chat/completions", body)
    (choice,) = json.loads(raw)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert engine.aborted.is_set()


async def test_thoughts_may_be_left_out(serve: Serve) -> None:
    url = await serve(FakeEngine([THINK, *b"hm", END_THINK, *b"Yes", IM_END]))
    body = CHAT | {"include_reasoning": False}
    _, raw = await post(url, "/v1/chat/completions", body)
    assert b"reasoning" not in raw
    _, raw = await post(url, "/v1/chat/completions", body | {"stream": False})
    reply = json.loads(raw)
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes",
        "refusal": None,
    }
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_a_client_that_leaves_while_it_is_written_to_is_no_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """The write fails before anything cancels the handler; here the engine stands for it."""
    url = await serve(FakeEngine(refuse=aiohttp.ClientConnectionResetError("closing transport")))
    body = {"prompt": "Hi", "stream": True}
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

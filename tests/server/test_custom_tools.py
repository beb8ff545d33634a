"""Custom tools: calls whose input is text, free or of a grammar."""

from __future__ import annotations

from typing import Any

from jaxserve.tokenizer import decode
from tests.fakes import CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve, openai_client
from tests.server.constrained import (
    CALLED,
    FORMAT,
    TOOLS,
    USER,
    call_of,
    chat,
    follower,
)

PATCH = {
    "type": "grammar",
    "grammar": {"syntax": "lark", "definition": 'start: "+" /[^\\n]*/ LF\n%import common.LF'},
}


DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}


def custom(name: str, form: dict[str, Any] | None = None) -> dict[str, Any]:
    format_ = {} if form is None else {"format": form}
    return {"type": "custom", "custom": {"name": name, "description": "Does it", **format_}}


async def test_a_custom_tool_is_called_with_text_of_its_grammar(serve: Serve) -> None:
    tools = [custom("patch", PATCH), custom("digits", DIGITS), custom("any"), *TOOLS]
    engine = FakeEngine([*b"Well", *call_of("patch", "+a\n"), IM_END])
    _, body = await chat(serve, engine, tools=tools)
    message = body["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "+a\n"})
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    followed = follower(engine)
    assert followed([*b"Well, \n", IM_END])
    assert followed([THINK, *b"hm", END_THINK, *b"\n\nWell", *call_of("patch", "+a\n"), IM_END])
    assert followed([*call_of("digits", "42}\n"), *b"\n", *CALLED])
    assert followed([*call_of("any", 'what "ever"\n}}\n'), IM_END])
    for wrong in (
        call_of("patch", "a"),
        call_of("patch", '{"input"'),
        call_of("digits", "x"),
        call_of("other", ""),
        [CALL, *b'\n{"name": "f", "arguments": {"a": "x"'],
    ):
        assert not followed(wrong)


async def test_a_custom_call_streams_and_comes_back_as_history(serve: Serve) -> None:
    engine = FakeEngine([*call_of("any", "two\nlines}\n"), IM_END])
    async with openai_client(serve, engine) as api:
        fields: Any = {"model": MODEL, "tools": [custom("any")]}
        whole = await api.chat.completions.create(messages=[USER], **fields)
        (call,) = whole.choices[0].message.tool_calls
        assert (call.type, call.custom.input) == ("custom", "two\nlines")
        stream = await api.chat.completions.create(messages=[USER], stream=True, **fields)
        deltas = [
            part.to_dict()
            async for chunk in stream
            for part in chunk.choices[0].delta.tool_calls or ()
        ]
        assert deltas[0]["custom"]["name"] == "any"
        assert "".join(part["custom"]["input"] for part in deltas) == "two\nlines"
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        history = [USER, whole.choices[0].message.to_dict(), result]
        await api.chat.completions.create(messages=history, **fields)
    prompt = decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)
    assert "<tool_call>\ntwo\nlines\n</tool_call>" in prompt


async def test_a_custom_tool_can_be_forced_and_be_called_beside_a_format(serve: Serve) -> None:
    engine = FakeEngine(call_of("digits", "42}\n"))
    named = {"type": "custom", "custom": {"name": "digits"}}
    tools = [custom("digits", DIGITS), *TOOLS]
    for more in ({"tool_choice": named}, {"response_format": FORMAT}):
        _, body = await chat(serve, engine, tools=tools, **more)
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["custom"]["input"] == "42"
        assert follower(engine)(call_of("digits", "42}\n"))


async def test_a_bad_grammar_of_a_tool_is_refused(serve: Serve) -> None:
    bad = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}}
    status, body = await chat(serve, FakeEngine(), tools=[custom("a", bad)])
    assert (status, body["error"]["param"]) == (400, "tools")
    status, body = await chat(serve, FakeEngine(), tools=[custom("a", {"type": "grammar"})])
    assert body["error"]["param"] == "tools[0].custom.format.grammar"

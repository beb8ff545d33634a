"""Which format a model's chats have, and a whole chat in each."""

from __future__ import annotations

import json
import logging
from typing import Any

import aiohttp
import pytest

from jaxserve.config import NO_PARSER, REASONING_PARSERS, TOOL_CALL_PARSERS, ConfigError
from jaxserve.server.chat_formats.choose import REASONING_FORMATS, TOOL_FORMATS, chat_format
from jaxserve.server.chat_formats.history import INVALID, History
from jaxserve.structured import Thinking
from jaxserve.tokenizer import ByteTokenizer, HfTokenizer, decode
from jaxserve.tokenizer.chat_template import ChatTemplate
from jaxserve_checkpoints.resolve import embedded_model
from tests.fakes import CHATML, END_THINK, IM_END, FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve, serving

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}

LLAMA = """\
{%- if tools %}Environment: ipython{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- message.role + ': ' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL = """\
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""
XML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
TEXT_ONLY = """\
{%- for message in messages %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}{{ call.function.arguments + ';' }}{% endfor %}
{%- endfor %}
"""


def chosen(template: str, **settings: Any) -> tuple[str, str]:
    tokenizer = tiny_tokenizer(template)
    form = chat_format(tokenizer, ChatTemplate(template), template, **settings)
    calls = form.tools.name if form.tools is not None else NO_PARSER
    return calls, form.reasoning.name if form.reasoning is not None else NO_PARSER


def test_the_names_of_the_flags_are_those_of_the_formats() -> None:
    assert set(TOOL_CALL_PARSERS) == {*TOOL_FORMATS, NO_PARSER}
    assert set(REASONING_PARSERS) == {*REASONING_FORMATS, NO_PARSER}


def test_a_format_is_found_by_the_template() -> None:
    assert chosen(CHATML) == ("hermes", "qwen3")
    assert chosen(LLAMA, architecture="MistralForCausalLM")[0] == "llama3_json"
    assert chosen(MISTRAL + "[THINK]") == ("mistral", "mistral")
    assert chosen(XML) == ("qwen3_xml", "qwen3")


def test_else_by_the_architecture_and_else_it_is_hermes() -> None:
    names = {
        "Qwen3ForCausalLM": "hermes",
        "Qwen2ForCausalLM": "hermes",
        "Qwen3_5ForConditionalGeneration": "qwen3_xml",
        "LlamaForCausalLM": "llama3_json",
        "MistralForCausalLM": "mistral",
        "Mistral3ForConditionalGeneration": "mistral",
        "": "hermes",
        "OtherForCausalLM": "hermes",
    }
    for architecture, name in names.items():
        assert chosen("{{ messages }}", architecture=architecture)[0] == name


def test_a_flag_goes_before_and_may_turn_it_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(CHATML, tool_call_parser="qwen3_coder", reasoning_parser="deepseek_r1") == (
            *("qwen3_xml", "deepseek_r1"),
        )
    assert "chat format: tool calls qwen3_xml (by --tool-call-parser)" in caplog.text
    assert chosen(CHATML, tool_call_parser="none", reasoning_parser="none") == ("none", "none")
    for flag in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match="known: "):
            chosen(CHATML, **{flag: "pythonic"})


def test_a_tokenizer_without_markers_has_no_reasoning() -> None:
    tokenizer = ByteTokenizer()
    form = chat_format(tokenizer, None, "")
    assert form.reasoning is None and not form.turn_ends
    assert not form.shown_tokens(Thinking.OPEN, calls=True)


async def test_markers_that_are_special_are_shown_only_to_a_parser() -> None:
    tokenizer = tiny_tokenizer(MISTRAL, SPECIAL)
    engine = FakeEngine([*b"a", CALLS, *b"b", IM_END])
    async with serving(engine, tokenizer=tokenizer) as url:
        for tools, wanted in (([], "ab"), ([TOOL], "a[TOOL_CALLS]b")):
            body = {"messages": [USER], "tools": tools}
            async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
                answer = await reply.json()
            assert answer["choices"][0]["message"]["content"] == wanted


def test_the_embedded_model_is_read_as_before() -> None:
    tokenizer = HfTokenizer.from_folder(embedded_model())
    source = tokenizer.chat_template or ""
    form = chat_format(tokenizer, ChatTemplate(source, tokenizer.markers), source)
    assert (form.tools, form.reasoning) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    assert form.history == History() and form.turn_ends <= tokenizer.eos_token_ids


# Earlier turns.


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, History()),
        (LLAMA, History(takes_text=False, takes_several=False)),
        (MISTRAL, History(takes_text=False)),
        (XML, History(takes_text=False)),
        (TEXT_ONLY, History(takes_objects=False)),
        ("{{ messages[0].content }}", History()),
        ("{{ raise_exception('no') }}", History()),
    ],
    ids=["chatml", "llama", "mistral", "xml", "text", "no calls", "refuses"],
)
def test_what_a_template_renders_is_tried_out(template: str, expected: History) -> None:
    assert History.of(ChatTemplate(template)) == expected


def test_arguments_are_rendered_whatever_the_model_wrote() -> None:
    objects, text = History(takes_text=False), History(takes_objects=False)
    for written in ('{"a": ', "[1]", "nonsense", "\ud800"):
        assert objects.arguments(written) == {INVALID: written}
        assert History().arguments(written) == written
    assert objects.arguments('{"a":  1}') == {"a": 1}
    assert History().arguments('{"a":  1}') == '{"a":  1}', "as it was generated"
    assert text.arguments({"a": "é"}) == '{"a": "é"}'
    assert History().arguments({"a": 1}) == {"a": 1}
    assert History().arguments(None) == objects.arguments("") == {}


def call(call_id: str, arguments: Any, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


TURNS: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "Well",
        "tool_calls": [call("call_one", '{"a": "x"}'), call("call_two", '{"a": cut')],
    },
    {"role": "tool", "tool_call_id": "call_two", "content": "second"},
    {"role": "tool", "tool_call_id": "call_one", "content": "first"},
    USER,
]


async def prompt_of(template: str, markers: tuple[str, ...], **fields: Any) -> str:
    tokenizer, engine = tiny_tokenizer(template, markers), FakeEngine(b"Hi")
    async with serving(engine, tokenizer=tokenizer) as url:
        body = {"messages": TURNS, "tools": [TOOL], **fields}
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
    return decode(tokenizer, engine.requests[-1].prompt, skip_special=False)


async def test_calls_with_malformed_arguments_are_rendered() -> None:
    prompt = await prompt_of(XML, ())
    assert "<parameter=a>\nx\n</parameter>" in prompt
    assert f'<parameter={INVALID}>\n{{"a": cut\n</parameter>' in prompt
    assert '<tool_call>\n{"a": cut\n</tool_call>' in await prompt_of(CHATML, ())


async def test_a_template_of_one_call_gets_one_at_a_time() -> None:
    prompt = await prompt_of(LLAMA, ("<|eot_id|>",))
    one, two = prompt.index('"parameters": {"a": "x"}'), prompt.index(INVALID)
    assert one < prompt.index("first") < two < prompt.index("second")
    assert prompt.count("first") == prompt.count("second") == 1


async def test_ids_are_of_the_form_that_the_template_asks_for() -> None:
    prompt = await prompt_of(MISTRAL, ("[TOOL_CALLS]", "[ARGS]"))
    form = TOOL_FORMATS["mistral"]
    assert f"[TOOL_RESULTS]{form.history_id('call_one')}first[/TOOL_RESULTS]" in prompt
    assert form.history_id("abcdefgh1") == "abcdefgh1"
    assert len({form.history_id(f"call_{n}") for n in range(100)}) == 100


# A chat in each format, over HTTP.

SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|eot_id|>", "<|eom_id|>")
CALLS, ARGS, PYTHON_TAG, EOT, EOM = range(262, 267)
CHATS = {
    "hermes": (CHATML, [*b'<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>']),
    "llama": (LLAMA, [*b'{"name": "f", "parameters": {"a": "x"}}', EOT]),
    "llama_tagged": (LLAMA, [PYTHON_TAG, *b'{"name": "f", "parameters": {"a": "x"}}', EOM]),
    "mistral": (MISTRAL, [CALLS, *b"f", ARGS, *b'{"a": "x"}']),
    "mistral_list": (MISTRAL, [CALLS, *b' [{"name": "f", "arguments": {"a": "x"}}]']),
    "qwen_xml": (
        XML,
        [
            *(*b"hm\n", END_THINK, *b"\n\n<tool_call>\n<function=f>\n<parameter=a>\nx"),
            *b"\n</parameter>\n</function>\n</tool_call>",
        ],
    ),
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_call_of_each_format_is_told_apart_and_replayed(name: str, choice: str) -> None:
    template, script = CHATS[name]
    tokenizer = tiny_tokenizer(template, SPECIAL)
    engine = FakeEngine([*script, IM_END])
    async with serving(engine, tokenizer=tokenizer) as url, aiohttp.ClientSession(url) as session:
        body: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "tool_choice": choice}
        async with session.post("/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            (answer,) = (await reply.json())["choices"]
        message = answer["message"]
        assert answer["finish_reason"] == "tool_calls" and not message["content"]
        (made,) = message["tool_calls"]
        assert made["function"]["name"] == "f"
        assert json.loads(made["function"]["arguments"]) == {"a": "x"}
        async with session.post("/v1/chat/completions", json={**body, "stream": True}) as reply:
            text = await reply.text()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.split("\n\n")[:-2]]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
        assert json.loads("".join(part["arguments"] for part in parts)) == {"a": "x"}
        result = {"role": "tool", "tool_call_id": made["id"], "content": "done"}
        history = {**body, "messages": [USER, message, result, USER]}
        async with session.post("/v1/chat/completions", json=history) as reply:
            assert reply.status == 200, await reply.text()


async def test_reasoning_that_the_template_has_opened_needs_no_marker() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    engine = FakeEngine([*b"hm", END_THINK, *b"Yes", IM_END])
    body = {"messages": [USER]}
    for parser, wanted in (("deepseek_r1", ("Yes", "hm")), ("none", ("hm</think>Yes", None))):
        async with (
            serving(engine, tokenizer=tokenizer, reasoning_parser=parser) as url,
            aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply,
        ):
            message = (await reply.json())["choices"][0]["message"]
        assert (message["content"], message.get("reasoning")) == wanted


async def test_without_a_tool_parser_calls_are_text_and_cannot_be_forced() -> None:
    engine = FakeEngine([*b'<tool_call>{"name": "f", "arguments": {}}</tool_call>', IM_END])
    async with serving(engine, tool_call_parser="none") as url:
        body: dict[str, Any] = {"messages": [USER], "tools": [TOOL]}
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
            message = (await reply.json())["choices"][0]["message"]
        assert message["content"].startswith("<tool_call>") and "tool_calls" not in message
        body["tool_choice"] = "required"
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "tools")


async def test_a_budget_ends_reasoning_whatever_marks_it() -> None:
    template = MISTRAL + "{# [THINK] #}"
    tokenizer = tiny_tokenizer(template, ("[THINK]", "[/THINK]", "[TOOL_CALLS]"))
    engine = FakeEngine([262, *b"hm", 263, *b"Yes", IM_END])
    async with serving(engine, tokenizer=tokenizer) as url:
        body = {"messages": [USER], "thinking_token_budget": 1, "max_tokens": 50}
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
            message = (await reply.json())["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Yes")
    guide = engine.requests[-1].params.guide
    assert guide is not None
    state = guide.start()
    state.advance(262)
    state.advance(ord("h"))
    assert state.mask[263 // 8] == 1 << 263 % 8 and sum(state.mask) == 1 << 263 % 8


async def test_the_log_of_a_start_says_which_format_it_is(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await serve(FakeEngine())
    assert (
        "chat format: tool calls hermes (by the chat template), reasoning qwen3 "
        "(by the chat template)" in caplog.text
    )

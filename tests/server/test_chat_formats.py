"""Each format: what is written is read, however it is cut up; what its grammar allows is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    Content,
    Reasoning,
)
from jaxserve.server.chat_formats.reasoning import (
    DEEPSEEK_R1,
    MISTRAL_THINK,
    QWEN3,
    ReasoningFormat,
)
from jaxserve.server.request.schema import ToolFunction
from tests.server.chat_strategies import (
    NOW,
    ROME,
    cut,
    parse,
    parser_of,
    read,
    several,
    writings,
)
from tests.server.chat_texts import WRITINGS, Call, Writing


@given(writings, several, st.data())
def test_what_is_written_is_read_however_it_is_cut_up(
    writing: Writing, wanted: list[Call], data: st.DataObject
) -> None:
    text = writing.write(wanted)
    whole = parse(parser_of(writing), [text])
    assert read(whole) == wanted and len(whole) == len(wanted)
    assert parse(parser_of(writing), cut(data, text)) == whole
    assert parse(parser_of(writing), list(text)) == whole


THOUGHTS: list[tuple[ReasoningFormat, str, bool]] = [
    (QWEN3, "<think>\nhm\n</think>\n\n", False),
    (QWEN3, "hm\n</think>\n\n", True),
    (DEEPSEEK_R1, "\nhm\n</think>\n\n", True),
    (DEEPSEEK_R1, "<think>\nhm\n</think>\n\n", True),
    (MISTRAL_THINK, "[THINK]hm[/THINK]", False),
]


@pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS)
@pytest.mark.parametrize(("reasoning", "thought", "opened"), THOUGHTS)
def test_any_reasoning_goes_with_any_calls(
    writing: Writing, reasoning: ReasoningFormat, thought: str, opened: bool
) -> None:
    call = Call("get_weather", {"city": "Rome"})
    for text in (thought + writing.write([call]), f"{thought}\n{writing.write([call, call])}"):
        for parts in ([text], list(text)):
            parser = parser_of(writing, reasoning=reasoning, opened=opened)
            found = parse(parser, parts)
            assert found[0] == Reasoning("hm")
            assert set(map(str, read(found[1:]))) == {str(call)}
    parser = parser_of(writing, reasoning=reasoning, opened=opened)
    assert parse(parser, list(f"{thought}Yes")) == [Reasoning("hm"), Content("Yes")]


words = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "get_weather", ">", "<parameter=city>"),
        *("<parameter=tags>\n", "\n</parameter>", "</parameter>", "</function>", "note", "\n", " "),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ",", ";", '"', "\\", "<", "x"),
        *('{"name": "get_time", "parameters": {', '{"name": "get_time", "arguments": {', "{}"),
        *('{"name": "note", "parameters": {"input": "a"}}', '{"type": "function", "name": "f"'),
        *(
            "<|python_tag|>",
            "<think>",
            "</think>",
            "[THINK]",
            "[/THINK]",
            "é",
            '"a": ["</parameter>',
        ),
        *("<tool_call>\n<function=get_weather>\n<parameter=city>\n", "x" * 1100),
    ]
)


@settings(max_examples=600)
@given(
    writings,
    st.lists(words, max_size=12).map("".join),
    st.data(),
    st.fixed_dictionaries(
        {
            "reasoning": st.sampled_from([None, QWEN3, DEEPSEEK_R1, MISTRAL_THINK]),
            "text_or_calls": st.booleans(),
            "parallel_calls": st.booleans(),
        }
    ),
    st.booleans(),
)
def test_any_cut_of_any_text_gives_the_same_pieces(
    writing: Writing, text: str, data: st.DataObject, options: dict[str, Any], opened: bool
) -> None:
    options["opened"] = opened and options["reasoning"] is not None
    whole = parse(parser_of(writing, **options), [text])
    assert parse(parser_of(writing, **options), cut(data, text)) == whole
    assert parse(parser_of(writing, **options), list(text)) == whole


@given(writings, st.text('ab<[{ \n;]}>"', max_size=30))
def test_text_without_calls_is_shown_as_it_was_written(writing: Writing, text: str) -> None:
    shown = parse(parser_of(writing), list(text))
    assert shown == ([Content(text)] if text else [])


@pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS)
def test_only_the_first_call_is_kept_where_one_is_wanted(writing: Writing) -> None:
    call = Call("get_weather", {"city": "Rome"})
    text = writing.write([call, call])
    for parts in ([text], list(text)):
        parser = parser_of(writing, parallel_calls=False)
        assert read(parse(parser, parts)) == [call] and parser.ended


@pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS)
def test_a_call_is_shown_as_it_grows(writing: Writing) -> None:
    parser = parser_of(writing)
    text = writing.write([Call("get_weather", {"city": "Rome"})])
    begun = text[: text.index("Rome") + 2]
    pieces = parser.push(begun)
    assert "".join(p.text for p in pieces if isinstance(p, CallArguments)).endswith("Ro")
    assert parser.push("ma") == [CallArguments(0, "ma")]


# Exact texts, as models write them.

TEXTS = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Rome"}}'),
    ("llama", '\n\n{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}'),
    ("llama", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]'),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "a1"}]'),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}'),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Rome"}'),
    (
        "qwen_xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    (
        "qwen_xml",
        "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>",
    ),
]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_published_texts_are_read(name: str, text: str) -> None:
    assert parse(parser_of(WRITINGS[name]), [text]) == [("get_weather", '{"city": "Rome"}')]


def test_two_calls_of_each_format_are_read() -> None:
    for writing in WRITINGS.values():
        assert read(parse(parser_of(writing), [writing.write([ROME, NOW])])) == [ROME, NOW]


def test_an_answer_that_is_json_is_no_call() -> None:
    for text in (
        '{"name": "Rome", "parameters": {}}',
        '{"a": 1}',
        "{",
        "<|python_tag|>print(1)",
        '{"name": "get_time", "parameters": 3}',
    ):
        assert parse(parser_of(WRITINGS["llama"]), list(text)) == [Content(text)]


def test_what_is_no_call_of_mistral_is_text() -> None:
    for text in ("[TOOL_CALLS]", "[TOOL_CALLS] [1]", "[TOOL_CALLS]f(x)[", "a [TOOL_CALLS]{}"):
        assert parse(parser_of(WRITINGS["mistral"]), list(text)) == [Content(text)]


def test_values_get_the_types_of_the_schema() -> None:
    schema: dict[str, Any] = {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "flag": {"type": "boolean"},
        }
    }
    cases = {
        "text": [("5", "5"), ("", ""), ("\na\n", "\na\n"), ("true", "true"), ('a"\\', 'a"\\')],
        "count": [("5", 5), (" 7 ", 7), ("many", "many")],
        "either": [("null", None), ("5", "5"), ("a", "a")],
        "flag": [("true", True), ("True", True)],
        "unknown": [("5", 5), ("[1, 2]", [1, 2]), ("Rome", "Rome"), ("None", None)],
    }
    for name, pairs in cases.items():
        for value, wanted in pairs:
            text = f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n"
            parser = parser_of(
                WRITINGS["qwen_xml"], tools=[ToolFunction(name="f", parameters=schema)]
            )
            (call,) = read(parse(parser, [f"{text}</function>\n</tool_call>"]))
            assert call.arguments == {name: wanted}


def test_tags_in_strings_of_json_values_are_text() -> None:
    for tags in (["</parameter>", "</tool_call>"], ['a\\"</parameter>'], []):
        wanted = [Call("get_weather", {"city": "Rome", "tags": tags}), NOW]
        text = WRITINGS["qwen_xml"].write(wanted)
        for parts in ([text], list(text)):
            assert read(parse(parser_of(WRITINGS["qwen_xml"]), parts)) == wanted
    broken = WRITINGS["qwen_xml"].write([ROME, NOW]).replace("city>\nRome", 'tags>\n["Rome')
    made = parse(parser_of(WRITINGS["qwen_xml"]), list(broken))
    assert made == [("get_weather", json.dumps({"tags": '["Rome'})), ("get_time", "{}")]


def test_a_call_ends_reasoning_that_was_not_closed() -> None:
    text = f"hm\n{WRITINGS['qwen_xml'].write([ROME])}"
    parser = parser_of(WRITINGS["qwen_xml"], reasoning=QWEN3, opened=True)
    assert parse(parser, list(text)) == [Reasoning("hm"), ("get_weather", '{"city": "Rome"}')]


@pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS)
def test_a_custom_tool_is_called_with_its_input(writing: Writing) -> None:
    text = writing.write([Call("note", {"input": 'two\n"lines"'})])
    if writing.format.name == "hermes":
        text = '<tool_call>\n{"name": "note", "arguments": two\n"lines"}\n</tool_call>'
    for parts in ([text], list(text)):
        assert parse(parser_of(writing), parts) == [("note", 'two\n"lines"')]

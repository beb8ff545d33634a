"""Each format: what is written is read, however it is cut up; what its grammar allows is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Guide
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.chat_formats.output_parser import OutputParser
from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    CallOpened,
    Content,
    Piece,
    Reasoning,
)
from jaxserve.server.chat_formats.reasoning import (
    DEEPSEEK_R1,
    MISTRAL_THINK,
    QWEN3,
    ReasoningFormat,
)
from jaxserve.server.request.schema import CustomFormat, CustomGrammar, CustomTool, ToolFunction
from jaxserve.structured import GrammarError, Guides
from jaxserve.tokenizer import decode
from tests.fakes import IM_END, tiny_tokenizer
from tests.server.chat_texts import WRITINGS, Call, Writing

type Summary = list[Content | Reasoning | tuple[str, str]]
"""Neighbours of one kind joined; a call as its name and arguments."""

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"$ref": "#/$defs/tags"},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = [ToolFunction(name="get_weather", parameters=WEATHER), ToolFunction(name="get_time")]
NOTE = CustomTool(name="note")
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "get_time": {"type": "object"}}
MARKERS = (
    *("</parameter>", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "[CALL_ID]", "<|im_start|>", "<|im_end|>"),
)

plain = st.text("aé€😀 <>{}[]\"'\\\n;,:=/|1", max_size=12)
texts = plain.filter(lambda text: not any(marker in text for marker in MARKERS))
calls = st.one_of(
    st.fixed_dictionaries(
        {"city": texts},
        optional={
            "days": st.integers(-5, 10**20),
            "tags": st.lists(texts, max_size=3),
            "exact": st.booleans() | st.none(),
        },
    ).map(
        lambda given: Call(
            "get_weather", {n: given[n] for n in WEATHER["properties"] if n in given}
        )
    ),
    st.just(Call("get_time", {})),
)
several = st.lists(calls, min_size=1, max_size=3)
writings = st.sampled_from(list(WRITINGS.values()))


def parser_of(writing: Writing, **options: Any) -> OutputParser:
    return OutputParser(tool_format=writing.format, **{"tools": [*TOOLS, NOTE], **options})


def parse(parser: OutputParser, parts: list[str]) -> Summary:
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    return summary(pieces)


def summary(pieces: list[Piece]) -> Summary:
    joined: Summary = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, CallOpened):
            joined.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert isinstance(last, tuple), "arguments come behind their call"
            assert not isinstance(last, Content | Reasoning)
            joined[-1] = (last[0], last[1] + piece.text)
        elif isinstance(last, Content | Reasoning) and type(last) is type(piece):
            joined[-1] = type(piece)(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def read(summarised: Summary) -> list[Call]:
    made = [each for each in summarised if not isinstance(each, Content | Reasoning)]
    return [Call(name, json.loads(arguments)) for name, arguments in made]


def cut(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


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

ROME = Call("get_weather", {"city": "Rome"})
NOW = Call("get_time", {})
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


# Grammars.


@pytest.fixture(scope="module")
def guides() -> Iterator[dict[str, Guides]]:
    made = {
        name: Guides(tiny_tokenizer(more_special=writing.tokens), Metrics("tiny"))
        for name, writing in WRITINGS.items()
    }
    yield made
    for each in made.values():
        each.close()


def form_of(writing: Writing) -> ChatFormat:
    tokenizer = tiny_tokenizer(more_special=writing.tokens)
    return ChatFormat(tools=writing.format, reasoning=None, markers=tokenizer.markers)


def allowed(guide: Guide, tokens: list[int]) -> set[int]:
    """What may come behind these tokens; nothing: one of them was not allowed."""
    state = guide.start()
    for token in [*tokens, None]:
        assert state.wait(10) and state.error is None, state.error
        bits = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
        if token is None:
            return set(np.flatnonzero(bits).tolist())
        if not bits[token]:
            return set()
        state.advance(token)
    raise AssertionError


@pytest.mark.parametrize("name", WRITINGS)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(wanted=several)
async def test_the_grammar_takes_what_is_written(
    guides: dict[str, Guides], name: str, wanted: list[Call]
) -> None:
    writing = WRITINGS[name]
    form, tokenizer = form_of(writing), tiny_tokenizer(more_special=writing.tokens)
    tokens = tokenizer.encode(writing.write(wanted))
    guide = await guides[name].compile(form.calls(TOOLS, 16, forced=True))
    assert IM_END in allowed(guide, tokens)
    guide = await guides[name].compile(form.calls(TOOLS, 16, forced=False))
    assert IM_END in allowed(guide, tokens)


def walk(guide: Guide, seed: int, most: int) -> list[int] | None:
    """Tokens at random, as the grammar allows them; None: it goes on for too long."""
    rng, state, tokens = np.random.default_rng(seed), guide.start(), list[int]()
    while len(tokens) < most:
        assert state.wait(10) and state.error is None, state.error
        bits = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
        choices = np.flatnonzero(bits)
        if IM_END in choices:
            return tokens
        likely = [token for token in choices if chr(token % 256) in '"}]<>/\npf' or token >= 256]
        from_these = likely if likely and rng.random() < 0.8 else choices
        tokens.append(int(rng.choice(from_these)))
        state.advance(tokens[-1])
    return None


@pytest.mark.parametrize("name", WRITINGS)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
async def test_whatever_the_forced_grammar_allows_is_read_as_calls(
    guides: dict[str, Guides], name: str, seed: int
) -> None:
    writing = WRITINGS[name]
    tokenizer = tiny_tokenizer(more_special=writing.tokens)
    guide = await guides[name].compile(form_of(writing).calls(TOOLS, 2, forced=True))
    tokens = walk(guide, seed, 1500)
    if tokens is None:
        return
    found = parse(parser_of(writing), list(decode(tokenizer, tokens, skip_special=False)))
    assert found and not any(isinstance(each, Content | Reasoning) for each in found)
    for call in read(found):
        jsonschema.validate(call.arguments, SCHEMAS[call.name])


@pytest.mark.parametrize("name", WRITINGS)
async def test_forced_calls_are_nothing_but_calls_of_the_tools(
    guides: dict[str, Guides], name: str
) -> None:
    writing = WRITINGS[name]
    tokenizer, form = tiny_tokenizer(more_special=writing.tokens), form_of(writing)
    guide = await guides[name].compile(form.calls(TOOLS, 1, forced=True))
    for text in (
        "Well",
        writing.write([Call("other", {})]),
        writing.write([Call("get_weather", {"city": "Rome", "days": "many"})]),
        writing.write([Call("get_weather", {"days": 1})]),
        writing.write([ROME, NOW]),
    ):
        assert IM_END not in allowed(guide, tokenizer.encode(text)), text
    either = await guides[name].compile(form.calls(TOOLS, 16, forced=False))
    assert IM_END in allowed(either, list(b"Well, no"))


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{}]},
        {"type": "array"},
        {"required": 7},
        {"properties": {"a": {"type": "string", "pattern": "b"}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a>": {}}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
    ],
)
def test_what_raw_values_cannot_follow_is_refused_and_not_ignored(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        form_of(WRITINGS["qwen_xml"]).calls(
            [ToolFunction(name="f", parameters=schema)], 1, forced=True
        )


async def test_raw_values_follow_what_their_schemas_say(guides: dict[str, Guides]) -> None:
    writing = WRITINGS["qwen_xml"]
    schema: dict[str, Any] = {
        "properties": {
            "unit": {"$ref": "#/$defs/unit"},
            "days": {"type": "integer", "maximum": 9},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["unit"],
        "$defs": {"unit": {"enum": ["C", "F", 1]}},
    }
    tool = ToolFunction(name="f", parameters=schema)
    guide = await guides["qwen_xml"].compile(form_of(writing).calls([tool], 1, forced=True))
    tokenizer = tiny_tokenizer()
    for arguments, follows in (
        ({"unit": "C"}, True),
        ({"unit": 1, "days": 9, "note": "a\n\nb"}, True),
        ({"unit": "K"}, False),
        ({"unit": "C", "days": 10}, False),
        ({"days": 9}, False),
        ({"unit": "C", "other": "x"}, False),
    ):
        tokens = tokenizer.encode(writing.write([Call("f", arguments)]))
        assert (IM_END in allowed(guide, tokens)) == follows, arguments


async def test_custom_tools_that_a_format_cannot_hold_are_refused() -> None:
    lark = CustomFormat(type="grammar", grammar=CustomGrammar(syntax="lark", definition="start:"))
    digits = CustomFormat(
        type="grammar", grammar=CustomGrammar(syntax="regex", definition="[0-9/]+\n")
    )
    for name in ("llama", "mistral", "qwen_xml"):
        with pytest.raises(GrammarError):
            form_of(WRITINGS[name]).calls([CustomTool(name="t", format=lark)], 1, forced=True)
    guides = Guides(tiny_tokenizer(), Metrics("tiny"))
    form = form_of(WRITINGS["qwen_xml"])
    guide = await guides.compile(form.calls([CustomTool(name="t", format=digits)], 1, forced=True))
    text = WRITINGS["qwen_xml"].write([Call("t", {"input": "4/2"})])
    assert IM_END in allowed(guide, tiny_tokenizer().encode(text))
    assert not allowed(guide, tiny_tokenizer().encode(text.replace("4/2", "x")))
    guides.close()

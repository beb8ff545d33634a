"""One incremental parser for thoughts and tool calls: any split of the text, the same pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.chat_formats.choose import HERMES
from jaxserve.server.chat_formats.output_parser import OutputParser
from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    CallOpened,
    Content,
    Piece,
    Reasoning,
)
from jaxserve.server.chat_formats.reasoning import QWEN3
from jaxserve.server.request.schema import CustomFormat, CustomGrammar, CustomTool

type Summary = list[Content | Reasoning | str]
"""Neighbours of one kind joined; a call as its name and arguments."""


LARK = CustomFormat(type="grammar", grammar=CustomGrammar(syntax="lark", definition="start:"))
CUSTOM = [CustomTool(name="raw"), CustomTool(name="lark", format=LARK)]


def hermes(*, thinking: bool = True, **options: Any) -> OutputParser:
    reasoning = QWEN3 if thinking else None
    return OutputParser(tool_format=HERMES, tools=CUSTOM, reasoning=reasoning, **options)


def parse(
    parts: list[str], *, thinking: bool = True, opened: bool = False, text_or_calls: bool = False
) -> Summary:
    thinking = thinking or opened
    parser = hermes(thinking=thinking, opened=opened, text_or_calls=text_or_calls)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    return summary(pieces)


def summary(pieces: list[Piece]) -> Summary:
    joined: Summary = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, CallOpened):
            joined.append(f"{piece.name}:")
        elif isinstance(piece, CallArguments):
            assert isinstance(last, str), "arguments come behind their call"
            joined[-1] = last + piece.text
        elif last is not None and type(last) is type(piece):
            joined[-1] = type(piece)(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def shown(piece: Piece) -> str:
    return piece.name if isinstance(piece, CallOpened) else piece.text


WORDS = [
    *('{"name": "raw", "arguments": ', '{"name": "lark", "arguments": ', "}\n"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a<", "<tool", "b"),
    '{"name": "f", "arguments": {"x": "é"}}',
    *('{"name": "f", "arguments": ', "{", "}", '"', "\\", "[", "{}", "null"),
]


@given(
    st.lists(st.sampled_from(WORDS)).map("".join),
    st.data(),
    st.fixed_dictionaries(dict.fromkeys(("thinking", "opened", "text_or_calls"), st.booleans())),
)
def test_any_split_of_the_text_gives_the_same_pieces(
    text: str, data: st.DataObject, options: dict[str, bool]
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], **options)
    assert parse(parts, **options) == whole
    assert parse(list(text), **options) == whole


def test_free_text_ends_at_a_marker_without_its_brace_too() -> None:
    text = '<tool_call>{"name": "raw", "arguments": a</tool_call>'
    assert parse([text]) == ["raw:a"] == parse(list(text))


def test_a_thought_and_an_answer() -> None:
    assert parse(["\n<think>\nhm\n\nhm\n</think>\n\nYes\n"]) == [
        Reasoning("hm\n\nhm"),
        Content("Yes\n"),
    ]


def test_a_thought_that_the_prompt_opened() -> None:
    expected = [Reasoning("hm"), Content("Yes")]
    assert parse(["\nhm</think>Yes"], opened=True) == expected


def test_a_thought_that_was_cut_short_is_all_reasoning() -> None:
    assert parse(["<think>\nhm</thi"]) == [Reasoning("hm</thi")]


def test_a_think_marker_behind_content_is_content() -> None:
    assert parse(["Use <think>"]) == [Content("Use <think>")]


def test_several_calls_with_text_before_them() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n</tool_call>'
    assert parse([f"Let me see.\n{call}\n{call}"]) == [
        Content("Let me see."),
        'f:{"x":  1}',
        'f:{"x":  1}',
    ]


def test_what_is_no_call_is_shown_as_it_was_written() -> None:
    for text in (
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>\n{"name": "f", "argu',
        '<tool_call>\n{"name": "f", "arguments": [',
        '<tool_call>{"name": "f", "other": {"x": 1}, "arguments": 3}</tool_call> and more',
        "<tool_call>" + "x" * 5000 + "</tool_call>",
    ):
        assert parse([text]) == [Content(text)]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for arguments in ("", ', "arguments": null', ', "arguments": {}'):
        text = f'<tool_call>{{"name": "f"{arguments}}}</tool_call>'
        assert parse([text]) == ["f:{}"]


def test_without_tools_or_thinking_nothing_is_touched() -> None:
    text = "\n<think>\n<tool_call>{}</tool_call>\n"
    parser = OutputParser(tool_format=None)
    assert summary(parser.push(text) + parser.finish()) == [Content(text)]


def test_a_call_is_shown_as_it_grows() -> None:
    parser = hermes()
    seen = [
        [shown(piece) for piece in parser.push(part)]
        for part in ("<tool", '_call>\n{"na', 'me": "add", "argum', 'ents": {"a": "', "<", "/b")
    ]
    assert seen == [[], [], [], ["add", '{"a": "'], ["<"], ["/b"]]
    seen = [shown(piece) for piece in parser.push('"}}\n</tool_call>')]
    assert seen == ['"}']
    assert parser.num_calls == 1


def test_arguments_may_spell_the_closing_marker() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>\\"{"}}\n</tool_call>'
    assert parse([text]) == ['f:{"x": "</tool_call>\\"{"}']


def test_arguments_that_have_begun_are_passed_on_as_written() -> None:
    for arguments in ('{"x": ', '{"x": }', '{"x": "a\n', '{"x": ]'):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}</tool_call>Yes'
        assert parse([text]) == [f"f:{arguments}", Content("Yes")], text
    assert parse(['<tool_call>{"name": "f", "arguments": {"x": 1']) == ['f:{"x": 1']


def test_the_order_and_the_spelling_of_a_call_may_differ() -> None:
    for call in (
        '{"arguments": {"x": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '{"id": 3, "name": "f", "arguments": {"x": 1}}',
        '{"name": "\\u0066" , "arguments" : {"x": 1}, "id": 3}',
    ):
        parsed = [
            str(piece).replace(" ", "") for piece in parse([f"<tool_call>{call}</tool_call>"])
        ]
        assert parsed == ['f:{"x":1}'], call


def test_only_the_first_call_is_kept_where_one_is_wanted() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = hermes(thinking=False, parallel_calls=False)
    assert summary(parser.push(f"{call}\n{call} more") + parser.finish()) == ["f:{}"]
    assert parser.ended


def test_free_text_of_a_call_is_passed_on_as_it_is() -> None:
    text = 'Well\n<tool_call>\n{"name": "raw", "arguments": a "b}\n c}\n</tool_call>\n'
    assert parse([text]) == [Content("Well"), 'raw:a "b}\n c']
    assert parse([text.replace("raw", "lark")]) == [Content("Well"), 'lark:a "b}\n c}\n']
    assert parse(['<tool_call>{"name": "raw", "arguments": cut']) == ["raw:cut"]


def test_an_answer_or_calls_has_no_calls_unless_it_begins_with_one() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = f'{{"a": "{call}"}}'
    assert parse([f"\n\n{answer}"], text_or_calls=True) == [Content(answer)]
    assert parse([f"\n\n{call}\n{call}"], text_or_calls=True) == ["f:{}", "f:{}"]

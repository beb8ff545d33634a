"""One incremental parser for thoughts and tool calls: any split of the text, the same pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.output_parser import Kind, OutputParser, Piece

type Summary = list[tuple[Kind, str]]


def parse(parts: list[str], *, thinking: bool = True, opened: bool = False) -> Summary:
    parser = OutputParser(thinking=thinking, tools=True, opened=opened)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    return summary(pieces)


def summary(pieces: list[Piece]) -> Summary:
    """Neighbours of one kind joined; a call as its name and arguments."""
    joined: Summary = []
    for piece in pieces:
        text = f"{piece.call.name}({piece.call.arguments})" if piece.call else piece.text
        if joined and piece.call is None and joined[-1][0] is piece.kind:
            joined[-1] = (piece.kind, joined[-1][1] + text)
        else:
            joined.append((piece.kind, text))
    return joined


WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a<", "<tool", "b"),
    '{"name": "f", "arguments": {"x": "é"}}',
]


@given(st.lists(st.sampled_from(WORDS)).map("".join), st.data(), st.booleans(), st.booleans())
def test_any_split_of_the_text_gives_the_same_pieces(
    text: str, data: st.DataObject, thinking: bool, opened: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], thinking=thinking, opened=opened)
    assert parse(parts, thinking=thinking, opened=opened) == whole
    assert parse(list(text), thinking=thinking, opened=opened) == whole


def test_a_thought_and_an_answer() -> None:
    assert parse(["\n<think>\nhm\n\nhm\n</think>\n\nYes\n"]) == [
        (Kind.REASONING, "hm\n\nhm"),
        (Kind.CONTENT, "Yes\n"),
    ]


def test_a_thought_that_the_prompt_opened() -> None:
    expected = [(Kind.REASONING, "hm"), (Kind.CONTENT, "Yes")]
    assert parse(["\nhm</think>Yes"], opened=True) == expected


def test_a_thought_that_was_cut_short_is_all_reasoning() -> None:
    assert parse(["<think>\nhm</thi"]) == [(Kind.REASONING, "hm</thi")]


def test_a_think_marker_behind_content_is_content() -> None:
    assert parse(["Use <think>"]) == [(Kind.CONTENT, "Use <think>")]


def test_several_calls_with_text_before_them() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n</tool_call>'
    assert parse([f"Let me see.\n{call}\n{call}"]) == [
        (Kind.CONTENT, "Let me see."),
        (Kind.TOOL_CALL, 'f({"x":  1})'),
        (Kind.TOOL_CALL, 'f({"x":  1})'),
    ]


def test_what_is_no_call_is_shown_as_it_was_written() -> None:
    for text in (
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>\n{"name": "f", "argu',
    ):
        assert parse([text]) == [(Kind.CONTENT, text)]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for arguments in ("", ', "arguments": null', ', "arguments": {}'):
        text = f'<tool_call>{{"name": "f"{arguments}}}</tool_call>'
        assert parse([text]) == [(Kind.TOOL_CALL, "f({})")]


def test_without_tools_or_thinking_nothing_is_touched() -> None:
    text = "\n<think>\n<tool_call>{}</tool_call>\n"
    parser = OutputParser(thinking=False, tools=False)
    assert summary(parser.push(text) + parser.finish()) == [(Kind.CONTENT, text)]

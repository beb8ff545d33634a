"""Harmony: channels are reasoning, content and calls, however the text is cut up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.chat_formats.choose import HARMONY, chat_format
from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    CallOpened,
    Content,
    Piece,
    Reasoning,
)
from jaxserve.server.chat_formats.tool_format import CallableTool
from jaxserve.server.request.schema import CustomTool, ToolFunction
from jaxserve.structured import Guides, Thinking
from tests.fakes import IM_END, tiny_tokenizer
from tests.server.test_grammars_of_calls import allowed

type Summary = list[Content | Reasoning | tuple[str, str]]

TOOLS: list[CallableTool] = [
    ToolFunction(name="get_weather"),
    ToolFunction(name="get_time"),
    CustomTool(name="note"),
]
ROME = '{"city":"Rome"}'
ANALYSIS = "<|channel|>analysis<|message|>It rains.<|end|>"
WEATHER = (
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>"
)


def parse(parts: Sequence[str], tools: Sequence[CallableTool] = TOOLS, **options: bool) -> Summary:
    given = {"reasoning": True, "parallel_calls": True, "text_or_calls": False} | options
    parser = HARMONY.parser(tools, **given)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    return summary(pieces)


def summary(pieces: list[Piece]) -> Summary:
    joined: Summary = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, CallOpened):
            joined.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert isinstance(last, tuple) and not isinstance(last, Content | Reasoning)
            joined[-1] = (last[0], last[1] + piece.text)
        elif isinstance(last, Content | Reasoning) and type(last) is type(piece):
            joined[-1] = type(piece)(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Take a coat.<|return|>",
            [Reasoning("It rains."), Content("Take a coat.")],
        ),
        (
            f"{ANALYSIS}<|start|>assistant{WEATHER}",
            [Reasoning("It rains."), ("get_weather", ROME)],
        ),
        # The recipient may stand before the channel, calls may stand in the analysis.
        (
            f" to=functions.get_weather<|channel|>commentary<|message|>{ROME}<|call|>",
            [("get_weather", ROME)],
        ),
        (
            f"<|channel|>analysis to=functions.get_weather code<|message|>{ROME}",
            [("get_weather", ROME)],
        ),
        # Where <|call|> does not stop the model, the next call follows.
        (
            f"{WEATHER}<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>"
            "{}<|call|>",
            [("get_weather", ROME), ("get_time", "{}")],
        ),
        # A preamble is for the user, and apart from the answer.
        (
            "<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Done.",
            [Content("I look.\n\nDone.")],
        ),
        (
            "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>"
            "two",
            [Reasoning("onetwo")],
        ),
        # Ends and beginnings that a model has left out.
        (
            "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes",
            [Reasoning("Hm"), Content("Yes")],
        ),
        (
            "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes",
            [Reasoning("Hm"), Content("Yes")],
        ),
        ("<|channel|>analysis<|message|>Hm<|end|>Yes", [Reasoning("Hm"), Content("Yes")]),
        ("Plain text.", [Content("Plain text.")]),
        ("<|message|>Yes", [Content("Yes")]),
        ("a < b <| c", [Content("a < b <| c")]),
        ("", []),
        ("<|channel|>anal", []),
        # A custom tool's input is what its object holds.
        (
            '<|channel|>commentary to=functions.note<|message|>{"input": "a\\nb"}<|call|>',
            [("note", "a\nb")],
        ),
        # The client answers calls of tools that there are not.
        (
            "<|channel|>commentary to=functions.other<|message|>{}<|call|>",
            [("other", "{}")],
        ),
        ("<|channel|>commentary to=all<|message|>Hello", [Content("Hello")]),
    ],
)
def test_what_models_write(text: str, expected: Summary) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected


WORDS = [
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|constrain|>", "assistant", "analysis", "final", "commentary", " to=functions.get_time"),
    *(" to=functions.note", "{}", '{"input": "x"}', " ", "\n", "a<", "<|", "b", "to="),
]


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([*WORDS, 1020 * "x"])).map("".join),
    st.data(),
    st.fixed_dictionaries(
        dict.fromkeys(("reasoning", "parallel_calls", "text_or_calls"), st.booleans())
    ),
)
def test_any_split_of_the_text_gives_the_same_pieces(
    text: str, data: st.DataObject, options: dict[str, bool]
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(parts, **options) == parse([text], **options)


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = HARMONY.parser(TOOLS, reasoning=True, parallel_calls=True, text_or_calls=False)
    assert parser.push("<|channel|>analysis<|message|>It") == [Reasoning("It")]
    assert parser.in_reasoning
    assert parser.push(" rains<") == [Reasoning(" rains")]
    assert parser.holding
    header = "<|start|>assistant<|channel|>final<|message|>"
    assert parser.push(f"|end|>{header}Take") == [Content("Take")]
    assert not parser.in_reasoning
    assert parser.push("<|end|>") == []
    call = parser.push("<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{")
    assert [type(piece) for piece in call] == [CallOpened, CallArguments]
    assert parser.num_calls == 1


def test_one_call_is_enough_if_no_more_are_wanted() -> None:
    text = f"{WEATHER}<|start|>assistant{WEATHER}"
    assert parse([text], parallel_calls=False) == [("get_weather", ROME)]
    parser = HARMONY.parser(TOOLS, reasoning=True, parallel_calls=False, text_or_calls=False)
    parser.push(WEATHER)
    assert parser.ended


def test_without_tools_and_without_reasoning_all_is_content() -> None:
    text = f"{ANALYSIS}<|start|>assistant{WEATHER}"
    assert parse([text], [], reasoning=False) == [Content(f"It rains.\n\n{ROME}")]


def test_an_answer_that_a_grammar_forced_may_spell_markers() -> None:
    text = '{"a": "<|end|><|channel|>"}'
    assert parse([text], text_or_calls=True) == [Content(text)]


@pytest.mark.parametrize("architecture", ["", "GptOssForCausalLM"])
def test_the_template_or_the_architecture_chooses_it(architecture: str) -> None:
    template = "" if architecture else "<|start|>assistant<|channel|>final<|message|>"
    found = chat_format(tiny_tokenizer(), None, template, architecture=architecture)
    assert found.tools is HARMONY
    assert found.reasoning is not None and found.reasoning.name == "openai_gptoss"
    parser = found.parser(Thinking.MAY_OPEN, [], parallel_calls=True, text_or_calls=False)
    assert parser.push(ANALYSIS) == [Reasoning("It rains.")]


def test_markers_are_shown_and_turns_end_also_where_nothing_is_called() -> None:
    words = ("start", "channel", "message", "constrain", "end", "call", "return")
    ids = {f"<|{word}|>": index for index, word in enumerate(words)}
    tokenizer: Any = type("Tokens", (), {"markers": ids})()
    found = chat_format(tokenizer, None, "", architecture="GptOssForCausalLM")
    assert found.shown_tokens(Thinking.NONE, calls=False) == frozenset(range(7))
    assert found.turn_ends == {5, 6}
    rules = HARMONY.rules(TOOLS[:2], ids, 4)
    assert rules.among_text == "analysis? (calls | final)"
    assert '<[1]> "commentary to=functions.get_time " <[3]> "json" <[2]> arguments_1' in "".join(
        rules.lines
    )
    assert json.loads(ROME) == {"city": "Rome"}


async def test_the_grammars_take_what_models_write() -> None:
    tokenizer = tiny_tokenizer(more_special=HARMONY.markers)
    form = ChatFormat(tools=HARMONY, reasoning=None, markers=tokenizer.markers)
    call = WEATHER.removesuffix("<|call|>")
    answer = "<|start|>assistant<|channel|>final<|message|>Well."
    guides = Guides(tokenizer, Metrics("tiny"))
    try:
        forced = await guides.compile(form.calls(TOOLS[:2], 4, forced=True))
        free = await guides.compile(form.calls(TOOLS[:2], 4, forced=False))
        for guide, text, taken in (
            (forced, call, True),
            (forced, answer.removeprefix("<|start|>assistant"), False),
            (free, call, True),
            (free, f"{ANALYSIS}<|start|>assistant{call}", True),
            (free, ANALYSIS + answer, True),
            (free, f"{ANALYSIS}{call}", False),
        ):
            assert (IM_END in allowed(guide, tokenizer.encode(text))) == taken, text
    finally:
        guides.close()

"""Each format's grammar allows calls as they are written, and all it allows is read as calls."""

from __future__ import annotations

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
from jaxserve.server.chat_formats.pieces import (
    Content,
    Reasoning,
)
from jaxserve.server.request.schema import CustomFormat, CustomGrammar, CustomTool, ToolFunction
from jaxserve.structured import GrammarError, Guides
from jaxserve.tokenizer import decode
from tests.fakes import IM_END, tiny_tokenizer
from tests.server.chat_strategies import (
    NOW,
    ROME,
    SCHEMAS,
    TOOLS,
    parse,
    parser_of,
    read,
    several,
)
from tests.server.chat_texts import WRITINGS, Call, Writing


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

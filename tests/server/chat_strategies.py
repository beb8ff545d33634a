"""Calls of tools for tests of chat formats: what is written, and what is read of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from jaxserve.server.chat_formats.output_parser import OutputParser
from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    CallOpened,
    Content,
    Piece,
    Reasoning,
)
from jaxserve.server.request.schema import CustomTool, ToolFunction
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


ROME = Call("get_weather", {"city": "Rome"})
NOW = Call("get_time", {})
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

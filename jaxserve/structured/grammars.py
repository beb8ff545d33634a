"""Grammars in llguidance's words: JSON schemas, regular expressions, choices, tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from jaxserve.structured.worker import GrammarError

MAX_SOURCE = 256 * 1024
"""Characters of a grammar."""
MAX_CALLS = 16
"""Tool calls in one answer whose calls are forced: a small model might never stop."""

_JSON_OPTIONS: Any = {
    # A bound on white space: without it a model can go on with line breaks until its limit.
    "whitespace_pattern": r"[ \n\r\t]{1,64}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    # Refuse what is not implemented: whatever is accepted gives valid JSON. All options are set,
    # or a schema could set them itself, under "x-guidance".
    "lenient": False,
    "coerce_one_of": False,
}


def json_object() -> str:
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> str:
    """Raises GrammarError: it is too large, or holds a number that is."""
    try:
        return LLMatcher.grammar_from_json_schema(_encoded(schema), overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def regex(pattern: str) -> str:
    """Of the whole text, in the syntax of Rust's regex crate: without look-around."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, options)))


def grammar(text: str) -> str:
    """Lark in llguidance's dialect, or llama.cpp's GBNF (rules written with `::=`).

    Raises:
      GrammarError: it is neither.
    """
    if "::=" not in text:
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except (GbnfToLarkError, ValueError) as error:
        raise GrammarError(str(error)) from None


def tool_calls(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    markers: Mapping[str, int],
    *,
    most: int = MAX_CALLS,
) -> str:
    """One call or more in Qwen3's (Hermes) format, of functions by (name, schema of parameters).

    Args:
      markers: token ids by spelling; a marker that is no token is spelled out.
    """

    def marker(spelling: str) -> str:
        return f"<[{markers[spelling]}]>" if spelling in markers else _literal(spelling)

    bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
    lines = [
        f'start: call ("\\n" call){{0,{most - 1}}}' if most > 1 else "start: call",
        f'call: {marker("<tool_call>")} "\\n" ({bodies}) "\\n" {marker("</tool_call>")}',
    ]
    for index, (name, parameters) in enumerate(tools):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        schema = {"type": "object", **parameters, "x-guidance": _JSON_OPTIONS}
        lines += [
            f"body_{index}: {_literal(head)} arguments_{index} {_literal('}')}",
            f"arguments_{index}: %json {_encoded(schema)}",
        ]
    return LLMatcher.grammar_from_lark("\n".join(lines))


def _encoded(schema: Mapping[str, Any]) -> str:
    """As JSON. Other ways to write it out take twenty times as long, and hold Python's lock.

    Raises:
      GrammarError: it is larger than any grammar may be.
    """
    encoded = msgspec.json.encode(schema)
    if len(encoded) > MAX_SOURCE:
        raise GrammarError(f"it has {len(encoded)} bytes, the most are {MAX_SOURCE}")
    return encoded.decode()


def _literal(text: str) -> str:
    """A string of Lark, which escapes as JSON does, and DEL, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Grammars as text: JSON schemas, regular expressions, choices, tool calls in any format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.grammar_server.wire import Grammar, Kind
from jaxserve.structured.errors import GrammarError

MAX_SOURCE = 256 * 1024
"""The most characters of a grammar."""
MAX_CALLS = 16
"""The most tool calls in one answer with forced calls: a small model might never stop."""

ANY_TEXT = "(?s:.)"
"""A regular expression for one character, line breaks included."""

_JSON_OPTIONS: Any = {
    # Limits white space. Otherwise a model can write line breaks until its token limit.
    "whitespace_pattern": r"[ \n\r\t]{1,64}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    # Refuse unsupported features, so that every accepted schema gives valid JSON. All options are
    # or a schema could set them itself, under "x-guidance".
    "lenient": False,
    "coerce_one_of": False,
}


def json_object() -> Grammar:
    """Returns a grammar for any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """Returns a grammar for JSON with this schema. Raises GrammarError if the schema, or a number
    in it, is too large."""
    return Grammar(Kind.JSON_SCHEMA, _encoded({**schema, "x-guidance": _JSON_OPTIONS}))


def regex(pattern: str) -> Grammar:
    """Returns a grammar for texts that match as a whole, in the syntax of Rust's regex crate: no
    look-around."""
    return Grammar(Kind.REGEX, pattern)


def choice(options: Sequence[str]) -> Grammar:
    """Returns a grammar for one of these texts."""
    return Grammar(Kind.LARK, "start: " + " | ".join(map(literal, options)))


def grammar(text: str) -> Grammar:
    """Returns a grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF (with `::=`)."""
    return Grammar(Kind.GBNF if "::=" in text else Kind.LARK, text)


class CallRules(NamedTuple):
    """The grammar of tool calls in one format."""

    lines: Sequence[str]
    """Lark rules. The rule `calls` matches one or more calls."""
    inputs: Mapping[str, Grammar]
    """Grammars that the rules refer to as `@name`."""
    among_text: str | None
    """The right side of a rule for text (rule `text`) with calls in it; None: calls cannot be told
    from text."""


def tool_calls(rules: CallRules) -> Grammar:
    """Returns a grammar for one or more calls and nothing else."""
    return _with_parts(["start: calls", *rules.lines], rules.inputs)


def tool_calls_or(answer: Grammar, rules: CallRules) -> Grammar:
    """Returns a grammar for calls, or for the text of the grammar `answer`. Line breaks may precede
    both, because models write them after reasoning."""
    start = r"start: /\n{1,2}/? (calls | @answer)"
    return _with_parts([start, *rules.lines], {**rules.inputs, "answer": answer})


def text_and_tool_calls(rules: CallRules) -> Grammar:
    """Returns a grammar for any text with calls in it.

    Raises:
      GrammarError: calls cannot be told from text.
    """
    if rules.among_text is None:
        raise GrammarError("this model has no token that begins a tool call")
    start = [f"start: {rules.among_text}", f"text: /{ANY_TEXT}+/"]
    return _with_parts([*start, *rules.lines], rules.inputs)


def marker(spelling: str, markers: Mapping[str, int]) -> str:
    """Returns a marker for a Lark rule: its token, or its spelling if it is not a token.

    Args:
      markers: token ids by spelling.
    """
    return f"<[{markers[spelling]}]>" if spelling in markers else literal(spelling)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns JSON of a schema as the right side of a Lark rule."""
    return f"%json {_encoded({**schema, 'x-guidance': _JSON_OPTIONS})}"


def arguments_rule(schema: Mapping[str, Any]) -> str:
    """Returns a JSON object of a schema as the right side of a Lark rule."""
    return json_rule({"type": "object", **schema})


def literal(text: str) -> str:
    """Returns a Lark string. Lark escapes like JSON, and also escapes DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_parts(rules: Sequence[str], parts: Mapping[str, Grammar]) -> Grammar:
    """Returns a grammar of Lark rules that may refer to the grammars in `parts`."""
    main = Grammar(Kind.LARK, "\n".join(rules))
    if not parts:
        return main
    return Grammar(Kind.PARTS, msgspec.json.encode({"main": main, **parts}).decode())


def _encoded(schema: Mapping[str, Any]) -> str:
    """Encodes a schema as JSON. Other ways to write it take twenty times as long and hold Python's
    lock.

    Raises:
      GrammarError: the schema exceeds the limit on grammars.
    """
    encoded = msgspec.json.encode(schema)
    if len(encoded) > MAX_SOURCE:
        raise GrammarError(f"it has {len(encoded)} bytes, the most are {MAX_SOURCE}")
    return encoded.decode()

"""Grammars as texts: JSON schemas, regular expressions, choices, tool calls of any format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.grammar_server.wire import Grammar, Kind
from jaxserve.structured.errors import GrammarError

MAX_SOURCE = 256 * 1024
"""Characters of a grammar."""
MAX_CALLS = 16
"""Tool calls in one answer whose calls are forced: a small model might never stop."""

ANY_TEXT = "(?s:.)"
"""A regular expression of one character, line breaks included."""

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


def json_object() -> Grammar:
    """Returns a grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """Returns a grammar of JSON of this schema. Raises GrammarError if the schema is too large, or
    holds a number that is."""
    return Grammar(Kind.JSON_SCHEMA, _encoded({**schema, "x-guidance": _JSON_OPTIONS}))


def regex(pattern: str) -> Grammar:
    """Returns a grammar of texts that match as a whole, in the syntax of Rust's regex crate: no
    look-around."""
    return Grammar(Kind.REGEX, pattern)


def choice(options: Sequence[str]) -> Grammar:
    """Returns a grammar of one of these texts."""
    return Grammar(Kind.LARK, "start: " + " | ".join(map(literal, options)))


def grammar(text: str) -> Grammar:
    """Returns a grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF (with `::=`)."""
    return Grammar(Kind.GBNF if "::=" in text else Kind.LARK, text)


class CallRules(NamedTuple):
    """The grammar of tool calls in one format, made by it."""

    lines: Sequence[str]
    """Rules of Lark, of which `calls` is one call or more."""
    inputs: Mapping[str, Grammar]
    """Grammars that the rules name, as `@name`."""
    among_text: str | None
    """The right side of a rule: any text, of the rule `text`, and calls in it; None: calls cannot
    be told from text."""


def tool_calls(rules: CallRules) -> Grammar:
    """Returns a grammar of one or more calls and nothing else."""
    return _with_parts(["start: calls", *rules.lines], rules.inputs)


def tool_calls_or(answer: Grammar, rules: CallRules) -> Grammar:
    """Returns a grammar of calls, or of the text `answer`, which is a grammar of this module.
    Either may follow line breaks: models write them after a thought."""
    start = r"start: /\n{1,2}/? (calls | @answer)"
    return _with_parts([start, *rules.lines], {**rules.inputs, "answer": answer})


def text_and_tool_calls(rules: CallRules) -> Grammar:
    """Returns a grammar of any text with calls in it.

    Raises:
      GrammarError: calls cannot be told from text.
    """
    if rules.among_text is None:
        raise GrammarError("this model has no token that begins a tool call")
    start = [f"start: {rules.among_text}", f"text: /{ANY_TEXT}+/"]
    return _with_parts([*start, *rules.lines], rules.inputs)


def marker(spelling: str, markers: Mapping[str, int]) -> str:
    """Returns a marker in a rule of Lark: its token, or its spelling if it is no token.

    Args:
      markers: token ids by spelling.
    """
    return f"<[{markers[spelling]}]>" if spelling in markers else literal(spelling)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns JSON of a schema as the right side of a rule of Lark."""
    return f"%json {_encoded({**schema, 'x-guidance': _JSON_OPTIONS})}"


def arguments_rule(schema: Mapping[str, Any]) -> str:
    """The same of an object."""
    return json_rule({"type": "object", **schema})


def literal(text: str) -> str:
    """Returns a string of Lark, which escapes as JSON does, and DEL, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_parts(rules: Sequence[str], parts: Mapping[str, Grammar]) -> Grammar:
    """Rules of Lark, which may name the grammars of `parts`."""
    main = Grammar(Kind.LARK, "\n".join(rules))
    if not parts:
        return main
    return Grammar(Kind.PARTS, msgspec.json.encode({"main": main, **parts}).decode())


def _encoded(schema: Mapping[str, Any]) -> str:
    """As JSON. Other ways to write it out take twenty times as long, and hold Python's lock.

    Raises:
      GrammarError: it is larger than any grammar may be.
    """
    encoded = msgspec.json.encode(schema)
    if len(encoded) > MAX_SOURCE:
        raise GrammarError(f"it has {len(encoded)} bytes, the most are {MAX_SOURCE}")
    return encoded.decode()

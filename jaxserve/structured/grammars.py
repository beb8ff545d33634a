"""Grammars as texts: JSON schemas, regular expressions, choices, tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.grammar_server.wire import Grammar, Kind
from jaxserve.structured.errors import GrammarError

MAX_SOURCE = 256 * 1024
"""Characters of a grammar."""
MAX_CALLS = 16
"""Tool calls in one answer whose calls are forced: a small model might never stop."""

ANY_TEXT = "(?s:.)"
"""A regular expression of one character, line breaks included."""

type Tool = tuple[str, Mapping[str, Any] | Grammar]
"""A name, and the schema of the arguments or a grammar of this module: that of free text, which
stands in the call as it is and in place of JSON."""

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
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """Raises GrammarError: it is too large, or holds a number that is."""
    return Grammar(Kind.JSON_SCHEMA, _encoded({**schema, "x-guidance": _JSON_OPTIONS}))


def regex(pattern: str) -> Grammar:
    """Of the whole text, in the syntax of Rust's regex crate: without look-around."""
    return Grammar(Kind.REGEX, pattern)


def choice(options: Sequence[str]) -> Grammar:
    return Grammar(Kind.LARK, "start: " + " | ".join(map(_literal, options)))


def grammar(text: str) -> Grammar:
    """Lark in llguidance's dialect, or llama.cpp's GBNF (rules written with `::=`)."""
    return Grammar(Kind.GBNF if "::=" in text else Kind.LARK, text)


def tool_calls(
    tools: Sequence[Tool], markers: Mapping[str, int], *, most: int = MAX_CALLS
) -> Grammar:
    """One call or more in Qwen3's (Hermes) format.

    Args:
      markers: token ids by spelling; a marker that is no token is spelled out.
    """
    rules, inputs = _calls(tools, markers, most)
    return _with_parts(["start: calls", *rules], inputs)


def tool_calls_or(
    answer: Grammar, tools: Sequence[Tool], markers: Mapping[str, int], *, most: int = MAX_CALLS
) -> Grammar:
    """Calls, or else a text of the grammar `answer`, which is one of this module's. Either may come
    after line breaks: models write them after a thought."""
    rules, inputs = _calls(tools, markers, most)
    start = r"start: /\n{1,2}/? (calls | @answer)"
    return _with_parts([start, *rules], {**inputs, "answer": answer})


def text_and_tool_calls(
    tools: Sequence[Tool], markers: Mapping[str, int], *, most: int = MAX_CALLS
) -> Grammar:
    """Any text, and calls in it.

    Raises:
      GrammarError: calls cannot be told from text.
    """
    if "<tool_call>" not in markers:
        raise GrammarError("this model has no token that begins a tool call")
    rules, inputs = _calls(tools, markers, most)
    start = "start: text? call?" if most == 1 else f"start: text? (call text?){{0,{most}}}"
    return _with_parts([start, f"text: /{ANY_TEXT}+/", *rules], inputs)


def _calls(
    tools: Sequence[Tool], markers: Mapping[str, int], most: int
) -> tuple[list[str], dict[str, Grammar]]:
    """Rules of Lark for `call` and `calls`, and the grammars that they name."""

    def marker(spelling: str) -> str:
        return f"<[{markers[spelling]}]>" if spelling in markers else _literal(spelling)

    bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
    lines = [
        f'calls: call ("\\n" call){{0,{most - 1}}}' if most > 1 else "calls: call",
        f'call: {marker("<tool_call>")} "\\n" ({bodies}) {marker("</tool_call>")}',
    ]
    inputs: dict[str, Grammar] = {}
    for index, (name, arguments) in enumerate(tools):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        if isinstance(arguments, Grammar):
            if "</tool_call>" not in markers:
                raise GrammarError("this model has no token that ends a tool call with free text")
            inputs[f"input_{index}"] = arguments
            lines.append(f"body_{index}: {_literal(head)} @input_{index}")
            continue
        schema = {"type": "object", **arguments, "x-guidance": _JSON_OPTIONS}
        lines += [
            f"body_{index}: {_literal(head)} arguments_{index} {_literal('}' + chr(10))}",
            f"arguments_{index}: %json {_encoded(schema)}",
        ]
    return lines, inputs


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


def _literal(text: str) -> str:
    """A string of Lark, which escapes as JSON does, and DEL, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

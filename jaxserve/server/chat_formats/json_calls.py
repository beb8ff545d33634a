"""Parses calls that are JSON objects while the model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import msgspec

from jaxserve.server.chat_formats.pieces import CallPart
from jaxserve.server.chat_formats.tool_format import (
    INPUT,
    MAX_HEADER,
    CallableTool,
    CallWriter,
    input_schema,
)
from jaxserve.structured import grammars

_SPACE = " \t\r\n"

type Key = tuple[str, ...]
"""Possible names of a field of a call."""


class ObjectScanner:
    """Finds the end of a JSON object that arrives in parts."""

    def __init__(self, marker: str = "", depth: int = 0):
        """
        Args:
          marker: ends a broken object early, if it appears outside of strings.
          depth: number of braces and brackets that are already open.
        """
        self.complete = False
        """The closing brace of the object has arrived."""
        self.cut = False
        """The marker arrived instead of the closing brace."""
        self._marker = marker
        self._depth = depth
        self._in_string = self._escaped = self._broken = False

    def push(self, text: str) -> int:
        """Returns how many characters of the text belong to the object. Unless the object has
        ended, push the other characters again, followed by more text."""
        end = 0
        while end < len(text) and not self.complete:
            if self._marker and text[end] == self._marker[0] and not self._in_string:
                if text.startswith(self._marker, end):
                    self.cut = True
                    break
                if self._marker.startswith(text[end:]):
                    break
            self._step(text[end])
            end += 1
        return end

    def _step(self, char: str) -> None:
        if self._broken:
            return
        if self._in_string:
            if char < " ":
                # JSON strings have no line breaks, so the quotes cannot be trusted.
                self._broken, self._in_string = True, False
            elif self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.complete = self._depth == 0


class NoHeader:
    """The text cannot become the beginning of a call."""


NO_HEADER = NoHeader()


_TYPED = (('"type"',), (":",), ('"function"',), (",",))


def header(
    text: str,
    arguments: Key,
    takes_any: Callable[[str], bool] | None = None,
    *,
    typed: bool = False,
) -> tuple[str, int] | NoHeader | None:
    """Parses the beginning of a call: `{"name": …, "arguments": {`.

    Args:
      arguments: possible keys of the arguments.
      takes_any: whether the arguments of the named tool may be of any form, beginning after one
        space; None: all arguments are JSON objects.
      typed: whether the first field is `"type": "function"`.

    Returns:
      The name, and the position where the arguments begin; None if more text is needed.
    """
    position, name = 0, ""
    lead = _TYPED if typed else ()
    key = tuple(f'"{each}"' for each in arguments)
    for expected in (("{",), *lead, ('"name"',), (":",), None, (",",), key, (":",), ("{",)):
        if expected == ("{",) and position and takes_any is not None and takes_any(name):
            start = position + text.startswith(" ", position)
            return (name, start) if start < len(text) else None
        while position < len(text) and text[position] in _SPACE:
            position += 1
        if expected is None:
            end = _string_end(text, position)
            if end is None:
                return None if text[position : position + 1] in ("", '"') else NO_HEADER
            try:
                name = msgspec.json.decode(text[position:end].encode(), type=str)
            except (msgspec.MsgspecError, UnicodeError):
                return NO_HEADER
            position = end
            continue
        found = next((each for each in expected if text.startswith(each, position)), None)
        if found is None:
            may_come = any(each.startswith(text[position:]) for each in expected)
            return None if may_come else NO_HEADER
        position += len(found)
    return name, position - 1


def _string_end(text: str, start: int) -> int | None:
    """Returns the position after the closing quote of the string at `start`; None if it is open."""
    position = start + 1
    if text[start : start + 1] != '"':
        return None
    while position < len(text):
        if text[position] == '"':
            return position + 1
        position += 2 if text[position] == "\\" else 1
    return None


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def parse_call(text: str) -> tuple[str, str] | None:
    """Returns the name and arguments of a complete call; None if the text is not a call."""
    try:
        call = msgspec.json.decode(text.encode(), type=_Call)
        arguments: Any = msgspec.json.decode(call.arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if isinstance(arguments, str):
        return call.name, arguments
    if not isinstance(arguments, dict | None):
        return None
    return call.name, bytes(call.arguments).decode() if arguments is not None else "{}"


def unwrapped(arguments: str) -> str:
    """Returns the input of a custom tool that was called like a function. Returns any other text
    unchanged."""
    try:
        return msgspec.json.decode(arguments.encode(), type=dict[str, str])[INPUT]
    except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError):
        return arguments


class _State(Enum):
    HEADER = auto()
    ARGUMENTS = auto()
    REST = auto()
    """After the arguments, inside the call."""
    ENDED = auto()


class Arguments:
    """Reads the arguments of one call, a JSON object, and passes them on as they are written."""

    def __init__(self, writer: CallWriter, *, custom: bool, marker: str = ""):
        """`custom`: the tool takes free text under the key INPUT."""
        self.ended = False
        self._writer = writer
        self._custom = custom
        self._scanner = ObjectScanner(marker)
        self._text = ""
        """Arguments so far of a custom tool."""

    def push(self, text: str, parts: list[CallPart]) -> str:
        """Adds text. Returns text that is not, or may not be, part of the arguments; push it again
        with more."""
        end = self._scanner.push(text)
        self.ended = self._scanner.complete or self._scanner.cut
        self._add(text[:end], parts)
        if self.ended:
            self._flush(parts)
        return text[end:]

    def finish(self, rest: str, parts: list[CallPart]) -> None:
        self._add(rest, parts)
        self._flush(parts)

    def _add(self, text: str, parts: list[CallPart]) -> None:
        if self._custom:
            self._text += text
        elif text:
            parts.append(self._writer.arguments(text))

    def _flush(self, parts: list[CallPart]) -> None:
        if self._text:
            parts.append(self._writer.arguments(unwrapped(self._text)))
            self._text = ""


class ObjectCall:
    """One call that is a JSON object without markers around it."""

    def __init__(self, writer: CallWriter, arguments: Key, *, only_known: bool):
        """`only_known`: an object is a call only if it names a tool of the request."""
        self.opened = False
        self.refused = False
        """The text is not a call."""
        self._writer = writer
        self._keys = arguments
        self._only_known = only_known
        self._state = _State.HEADER
        self._arguments = Arguments(writer, custom=False)
        self._outside = ObjectScanner(depth=1)

    @property
    def ended(self) -> bool:
        return self._state is _State.ENDED

    def push(self, text: str, parts: list[CallPart]) -> str:
        """Returns the unread text. Push it again with more, unless the call has ended or the text
        is not a call."""
        if self._state is _State.HEADER:
            text = self._read_header(text, parts)
        if self._state is _State.ARGUMENTS:
            text = self._arguments.push(text, parts)
            if self._arguments.ended:
                self._state = _State.REST
        if self._state is _State.REST:
            text = text[self._outside.push(text) :]
            if self._outside.complete:
                self._state = _State.ENDED
        return text

    def finish(self, rest: str, parts: list[CallPart]) -> None:
        if self._state is _State.ARGUMENTS:
            self._arguments.finish(rest, parts)

    def _read_header(self, text: str, parts: list[CallPart]) -> str:
        found = header(text[:MAX_HEADER], self._keys)
        if isinstance(found, NoHeader):
            found = header(text[:MAX_HEADER], self._keys, typed=True)
        if found is None:
            self.refused = len(text) >= MAX_HEADER
            return text
        if isinstance(found, NoHeader) or (self._only_known and found[0] not in self._writer.tools):
            self.refused = True
            return text
        name, start = found
        parts.append(self._writer.open(name))
        self.opened = True
        self._arguments = Arguments(self._writer, custom=self._writer.is_custom(name))
        self._state = _State.ARGUMENTS
        return text[start:]


def any_body(tools: Sequence[CallableTool]) -> str:
    """Returns a Lark rule for a call of any of the tools. Each tool has its own rule."""
    return "body: " + " | ".join(f"body_{index}" for index in range(len(tools)))


def json_head(name: str, key: str) -> str:
    """Returns the beginning of a call in Lark: `{"name": …, "arguments": `."""
    written = json.dumps(name, ensure_ascii=False)
    return grammars.literal(f'{{"name": {written}, "{key}": ')


def json_body(index: int, tool: CallableTool, key: str, end: str = "}") -> list[str]:
    """Returns the Lark rules of one tool's call as a JSON object. Raises GrammarError if its input
    has a grammar."""
    head, closing = json_head(tool.name, key), grammars.literal(end)
    return [
        f"body_{index}: {head} arguments_{index} {closing}",
        f"arguments_{index}: {grammars.arguments_rule(input_schema(tool))}",
    ]


def skip_space(text: str) -> str:
    return text.lstrip(_SPACE)


def first_of(text: str, options: Sequence[str]) -> str | None:
    """Returns the option that the text begins with; empty if it may still become one."""
    for option in options:
        if text.startswith(option):
            return option
    return "" if any(option.startswith(text) for option in options) else None

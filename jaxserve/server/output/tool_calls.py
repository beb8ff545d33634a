"""One Hermes tool call, `{"name": …, "arguments": …}` between two markers, read as it comes."""

from __future__ import annotations

import uuid
from collections.abc import Container, Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

CALL, END_CALL = "<tool_call>", "</tool_call>"
MAX_HEADER = 1024
"""Characters in which the name and the start of the arguments must appear to be streamed."""

_HEADER = ("{", '"name"', ":", None, ",", '"arguments"', ":", "{")
_SPACE = " \t\r\n"


class CallOpened(NamedTuple):
    position: int
    id: str
    name: str
    custom: bool = False
    """The arguments are free text."""


class CallArguments(NamedTuple):
    """The next part of a call's arguments, as the model wrote it: JSON, or free text."""

    position: int
    text: str
    custom: bool = False


class NotACall(NamedTuple):
    """Text between (or after) the markers that is no call, markers included."""

    text: str


type CallPart = CallOpened | CallArguments | NotACall


class _State(Enum):
    HEADER = auto()
    WHOLE = auto()
    """No header to be streamed: what it is will be seen at its end."""
    ARGUMENTS = auto()
    FREE_TEXT = auto()
    REST = auto()
    """Behind the arguments; whatever comes up to the closing marker is dropped."""


class CallReader:
    """Whatever the splits of the text, the same parts in sum.

    Text is a call as soon as its name and the opening brace of its arguments were seen; from then
    on the arguments are passed on as written, complete or not. Text that does not get there is
    returned as it was.
    """

    def __init__(self, position: int, free_text: Mapping[str, str]):
        """`free_text`: what stands between the arguments and the closing marker of tools whose
        arguments are not JSON, by name."""
        self._position = position
        self._free_text = free_text
        self._end = ""
        """Of the free text that is being read."""
        self._state = _State.HEADER
        self._text = ""
        """HEADER, WHOLE: all so far. Later: what may be the start of the closing marker."""
        self._depth = 0
        self._in_string = self._escaped = self._broken = False
        self.opened = False

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        """The text behind the closing marker; None as long as that has not come."""
        self._text += text
        if self._state is _State.HEADER:
            self._read_header(parts)
        if self._state is _State.ARGUMENTS:
            return self._read_arguments(parts)
        if self._state is _State.FREE_TEXT:
            return self._read_free_text(parts)
        before, found, after = self._text.partition(END_CALL)
        if not found:
            if self._state is _State.REST:
                self._text = self._text[len(self._text) - partial(self._text, END_CALL) :]
            return None
        if self._state is not _State.REST:
            parts += self._whole(before, END_CALL)
        return after

    def finish(self, parts: list[CallPart]) -> None:
        """The output ended without the closing marker."""
        if self._state in (_State.HEADER, _State.WHOLE):
            parts += self._whole(self._text, "")
        elif self._state is _State.ARGUMENTS and self._text:
            parts.append(CallArguments(self._position, self._text))
        elif self._state is _State.FREE_TEXT and self._text:
            parts.append(CallArguments(self._position, self._text, custom=True))

    def _read_header(self, parts: list[CallPart]) -> None:
        header = _header(self._text, self._free_text)
        if header is None:
            closed = END_CALL in self._text
            if closed or len(self._text) > MAX_HEADER:
                self._state = _State.WHOLE
        elif isinstance(header, _NoHeader):
            self._state = _State.WHOLE
        else:
            name, end = header
            custom = name in self._free_text
            parts.append(self._open(name, custom=custom))
            self._text = self._text[end:]
            self._state = _State.FREE_TEXT if custom else _State.ARGUMENTS
            self._end = self._free_text.get(name, "")

    def _open(self, name: str, *, custom: bool = False) -> CallOpened:
        self.opened = True
        return CallOpened(self._position, f"call_{uuid.uuid4().hex[:24]}", name, custom)

    def _read_free_text(self, parts: list[CallPart]) -> str | None:
        closing = self._end + END_CALL
        text, found, after = self._text.partition(END_CALL)
        if found:
            text = text.removesuffix(self._end)
        else:
            text = text[: len(text) - partial(text, closing)]
            self._text = self._text[len(text) :]
        if text:
            parts.append(CallArguments(self._position, text, custom=True))
        return after if found else None

    def _read_arguments(self, parts: list[CallPart]) -> str | None:
        """Up to the brace that closes them, or to the closing marker where no string can be."""
        text, end = self._text, 0
        while end < len(text) and self._state is _State.ARGUMENTS:
            if text[end] == "<" and not self._in_string:
                if text.startswith(END_CALL, end):
                    break
                if END_CALL.startswith(text[end:]):
                    break
            self._step(text[end])
            end += 1
        if end:
            parts.append(CallArguments(self._position, text[:end]))
        self._text = text[end:]
        if self._state is _State.REST:
            return self.push("", parts)
        if self._text.startswith(END_CALL):
            return self._text[len(END_CALL) :]
        return None

    def _step(self, char: str) -> None:
        if self._broken:
            return
        if self._in_string:
            if char < " ":
                # A line break cannot be in a JSON string: the quotes are not to be trusted.
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
            if self._depth == 0:
                self._state = _State.REST

    def _whole(self, text: str, closing: str) -> Iterator[CallPart]:
        call = parse_call(text)
        if call is None:
            yield NotACall(CALL + text + closing)
        else:
            name, arguments = call
            yield self._open(name)
            yield CallArguments(self._position, arguments)


class _NoHeader:
    """The text cannot become a header any more."""


_NO_HEADER = _NoHeader()


def _header(text: str, free_text: Container[str]) -> tuple[str, int] | _NoHeader | None:
    """The name and where the arguments begin; None if more text is needed. `free_text`: names of
    tools whose arguments begin after one space, whatever they are."""
    position, name = 0, ""
    for expected in _HEADER:
        if expected == "{" and position and name in free_text:
            start = position + text.startswith(" ", position)
            return (name, start) if start < len(text) else None
        while position < len(text) and text[position] in _SPACE:
            position += 1
        if expected is None:
            end = _string_end(text, position)
            if end is None:
                return None if text[position : position + 1] in ("", '"') else _NO_HEADER
            try:
                name = msgspec.json.decode(text[position:end].encode(), type=str)
            except (msgspec.MsgspecError, UnicodeError):
                return _NO_HEADER
            position = end
            continue
        seen = text[position : position + len(expected)]
        if not expected.startswith(seen):
            return _NO_HEADER
        if seen != expected:
            return None
        position += len(expected)
    return name, position - 1


def _string_end(text: str, start: int) -> int | None:
    """Behind the closing quote of the string that starts there."""
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
    """Name and arguments of a whole Hermes call; None if the model wrote something else."""
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


def partial(text: str, marker: str) -> int:
    """Length of the longest start of the marker, short of all of it, that ends the text."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

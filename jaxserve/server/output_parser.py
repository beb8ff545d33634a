"""A Qwen3-style model's text as it comes: reasoning, content and tool calls told apart."""

from __future__ import annotations

import uuid
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class Kind(Enum):
    CONTENT = auto()
    REASONING = auto()
    TOOL_CALL = auto()


class ToolCallText(NamedTuple):
    """A complete call; `arguments` is JSON as the model wrote it."""

    position: int
    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """A stretch of output of one kind."""

    kind: Kind
    text: str = ""
    call: ToolCallText | None = None


class _State(Enum):
    START = auto()
    """Only white space so far; a think block may open."""
    REASONING = auto()
    AFTER = auto()
    """Behind a block, before content: white space is dropped."""
    CONTENT = auto()
    CALL = auto()


class OutputParser:
    """Whatever the splits of the text, the same pieces in sum.

    Line breaks around the markers belong to the format, not to the text: the chat template puts
    them back when the message returns as history.
    """

    def __init__(self, *, thinking: bool, tools: bool, opened: bool = False):
        """`opened`: the prompt already ended with `<think>`."""
        self._tools = tools
        self._state = _State.START if thinking else _State.CONTENT
        if opened:
            self._state = _State.REASONING
        self._fresh = opened
        self._pending = ""
        self._call: list[str] = []
        self.num_calls = 0

    @property
    def reasoning(self) -> bool:
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """What is still held, once the text is complete."""
        text, self._pending = self._pending, ""
        if self._state is _State.CALL:
            text = CALL + "".join(self._call) + text
        if self._state is _State.REASONING:
            return [Piece(Kind.REASONING, text)] if text else []
        return [Piece(Kind.CONTENT, text)] if text and self._state is not _State.AFTER else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Consume up to the next marker; False when more text is needed."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.AFTER:
                self._pending = self._pending.lstrip()
                self._state = _State.CONTENT if self._pending else _State.AFTER
                return bool(self._pending)
            case _State.REASONING:
                if self._fresh:
                    self._pending = self._pending.lstrip("\n")
                    self._fresh = not self._pending
                return self._until(END_THINK, Kind.REASONING, _State.AFTER, pieces)
            case _State.CONTENT:
                marker = CALL if self._tools else ""
                return self._until(marker, Kind.CONTENT, _State.CALL, pieces)
            case _State.CALL:
                return self._collect_call(pieces)

    def _start(self) -> bool:
        seen = self._pending.lstrip()
        if seen.startswith(THINK):
            self._pending, self._state, self._fresh = seen[len(THINK) :], _State.REASONING, True
            return True
        if THINK.startswith(seen):
            return False
        self._state = _State.CONTENT
        return True

    def _until(self, marker: str, kind: Kind, after: _State, pieces: list[Piece]) -> bool:
        text, found, rest = self._pending.partition(marker) if marker else (self._pending, "", "")
        if found:
            shown, self._pending, self._state = text.rstrip("\n"), rest, after
        elif marker:
            ready = text[: len(text) - _partial(text, marker)]
            shown = ready.rstrip("\n")
            self._pending = text[len(shown) :]
        else:
            shown, self._pending = text, ""
        if shown:
            pieces.append(Piece(kind, shown))
        return bool(found)

    def _collect_call(self, pieces: list[Piece]) -> bool:
        text, found, rest = self._pending.partition(END_CALL)
        if not found:
            held = _partial(text, END_CALL)
            self._call.append(text[: len(text) - held])
            self._pending = text[len(text) - held :]
            return False
        self._call.append(text)
        pieces.append(self._finished_call("".join(self._call)))
        self._call, self._pending, self._state = [], rest, _State.AFTER
        return True

    def _finished_call(self, text: str) -> Piece:
        call = parse_call(text)
        if call is None:
            return Piece(Kind.CONTENT, CALL + text + END_CALL)
        name, arguments = call
        position, self.num_calls = self.num_calls, self.num_calls + 1
        return Piece(
            Kind.TOOL_CALL,
            call=ToolCallText(position, f"call_{uuid.uuid4().hex[:24]}", name, arguments),
        )


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a Hermes call; None if the model wrote something else."""
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


def _partial(text: str, marker: str) -> int:
    """Length of the longest start of the marker, short of all of it, that ends the text."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

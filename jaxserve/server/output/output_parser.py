"""A Qwen3-style model's text as it comes: reasoning, content and tool calls told apart."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.server.output.tool_calls import (
    CALL,
    CallArguments,
    CallOpened,
    CallPart,
    CallReader,
    NotACall,
    partial,
)

THINK, END_THINK = "<think>", "</think>"


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


type Piece = Content | Reasoning | CallOpened | CallArguments
"""A stretch of output of one kind."""


class _State(Enum):
    START = auto()
    """Only white space so far; a think block may open."""
    REASONING = auto()
    AFTER = auto()
    """Behind a block, before content: white space is dropped."""
    CONTENT = auto()
    CALL = auto()
    ENDED = auto()
    """The only call allowed is complete."""


class OutputParser:
    """Whatever the splits of the text, the same pieces in sum.

    Line breaks around the markers belong to the format, not to the text: the chat template puts
    them back when the message returns as history.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: bool,
        opened: bool = False,
        parallel_calls: bool = True,
        free_text: Mapping[str, str] = MappingProxyType({}),
        text_or_calls: bool = False,
    ):
        """
        Args:
          opened: the prompt already ended with `<think>`.
          free_text: what ends the input of tools whose arguments are not JSON, by name.
          text_or_calls: what does not begin with a call has none, whatever markers it spells.
        """
        self._tools = tools
        self._free_text = free_text
        self._undecided = tools and text_or_calls
        self._parallel_calls = parallel_calls
        self._state = _State.START if thinking else _State.CONTENT
        if opened:
            self._state = _State.REASONING
        self._fresh = opened
        self._pending = ""
        self._call = CallReader(0, free_text)
        self.num_calls = 0

    @property
    def reasoning(self) -> bool:
        return self._state is _State.REASONING

    @property
    def holding(self) -> bool:
        """Text was pushed that may yet turn out to be content."""
        return bool(self._pending) or (self._state is _State.CALL and not self._call.opened)

    @property
    def ended(self) -> bool:
        """Nothing that comes can be shown any more: further calls are not wanted."""
        return self._state is _State.ENDED

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
            parts: list[CallPart] = []
            self._call.finish(parts)
            return self._call_pieces(parts)
        if self._state is _State.REASONING:
            return [Reasoning(text)] if text else []
        shown = text and self._state not in (_State.AFTER, _State.ENDED)
        return [Content(text)] if shown else []

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
                text, found = self._until(END_THINK, _State.AFTER)
                pieces += [Reasoning(text)] if text else []
                return found
            case _State.CONTENT if self._undecided:
                return self._decide()
            case _State.CONTENT:
                text, found = self._until(CALL if self._tools else "", _State.CALL)
                pieces += [Content(text)] if text else []
                if found:
                    self._call = CallReader(self.num_calls, self._free_text)
                return found
            case _State.CALL:
                return self._read_call(pieces)
            case _State.ENDED:
                self._pending = ""
                return False

    def _start(self) -> bool:
        seen = self._pending.lstrip()
        if seen.startswith(THINK):
            self._pending, self._state, self._fresh = seen[len(THINK) :], _State.REASONING, True
            return True
        if THINK.startswith(seen):
            return False
        self._state = _State.CONTENT
        return True

    def _decide(self) -> bool:
        """Whether the answer begins with a call."""
        seen = self._pending.lstrip("\n")
        if seen != CALL and CALL.startswith(seen):
            return False
        self._tools = seen.startswith(CALL)
        self._undecided, self._pending = False, seen
        return True

    def _until(self, marker: str, after: _State) -> tuple[str, bool]:
        """The text that is safe to show, and whether the marker came behind it."""
        text, found, rest = self._pending.partition(marker) if marker else (self._pending, "", "")
        if found:
            self._pending, self._state = rest, after
            return text.rstrip("\n"), True
        if not marker:
            self._pending = ""
            return text, False
        shown = text[: len(text) - partial(text, marker)].rstrip("\n")
        self._pending = text[len(shown) :]
        return shown, False

    def _read_call(self, pieces: list[Piece]) -> bool:
        parts: list[CallPart] = []
        rest = self._call.push(self._pending, parts)
        self._pending = rest or ""
        pieces += self._call_pieces(parts)
        if rest is None:
            return False
        if not self._call.opened:
            self._state = _State.CONTENT
        else:
            self._state = _State.AFTER if self._parallel_calls else _State.ENDED
        return True

    def _call_pieces(self, parts: list[CallPart]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            self.num_calls += isinstance(part, CallOpened)
            pieces.append(Content(part.text) if isinstance(part, NotACall) else part)
        return pieces

"""Harmony, the format of gpt-oss: messages whose header has a channel and a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a":1}<|call|>

The channel `analysis` is reasoning and `final` is the answer. `commentary` is a call if it has a
recipient, else text for the user. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from jaxserve.server.chat_formats.json_calls import any_body, unwrapped
from jaxserve.server.chat_formats.pieces import Content, Piece, Reasoning, first_marker, partial
from jaxserve.server.chat_formats.tool_format import (
    MAX_HEADER,
    CallableTool,
    CallWriter,
    MessageFormat,
    input_schema,
)
from jaxserve.structured import grammars

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
"""Precedes the name of a tool from the request."""

_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_HEADER_BEGINS = (START, CHANNEL, MESSAGE, "to=", CONSTRAIN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony(MessageFormat):
    """Harmony. A turn ends with its first call, because the next call comes after the result."""

    name = "openai"
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    turn_ends = (RETURN, CALL)

    def parser(
        self,
        tools: Sequence[CallableTool],
        *,
        reasoning: bool,
        parallel_calls: bool,
        text_or_calls: bool,
    ) -> HarmonyParser:
        writer = CallWriter(tools, self.make_id)
        return HarmonyParser(
            writer, reasoning=reasoning, one_call=not parallel_calls, text_or_calls=text_or_calls
        )

    def rules(
        self, tools: Sequence[CallableTool], markers: Mapping[str, int], most: int
    ) -> grammars.CallRules:
        channel, message, constrain = (
            grammars.marker(each, markers) for each in (CHANNEL, MESSAGE, CONSTRAIN)
        )
        lines = ["calls: body", any_body(tools)]
        for index, tool in enumerate(tools):
            head = grammars.literal(f"commentary to={FUNCTIONS}{tool.name} ")
            lines += [
                f'body_{index}: {channel} {head} {constrain} "json" {message} arguments_{index}',
                f"arguments_{index}: {grammars.arguments_rule(input_schema(tool))}",
            ]
        if not markers.keys() >= set(self.markers):
            return grammars.CallRules(lines, {}, None)
        end, start = grammars.marker(END, markers), grammars.marker(START, markers)
        lines += [
            f'analysis: {channel} "analysis" {message} text? {end} {start} "assistant"',
            f'final: {channel} "final" {message} text?',
        ]
        return grammars.CallRules(lines, {}, "analysis? (calls | final)")


class _State(Enum):
    BEGIN = auto()
    """No text yet, or the possible beginning of a header."""
    HEADER = auto()
    BODY = auto()
    BETWEEN = auto()
    """After the end of a message."""
    PLAIN = auto()
    """Text without any header. Markers in it are plain text."""
    ENDED = auto()


class _Kind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class HarmonyParser:
    """Implements `Parser`. Text without a header is content, and so is a message to an unknown
    tool."""

    def __init__(self, writer: CallWriter, *, reasoning: bool, one_call: bool, text_or_calls: bool):
        self._writer = writer
        self._reasoning = reasoning
        self._one_call = one_call
        self._text_or_calls = text_or_calls
        self._state = _State.BEGIN
        self._kind = _Kind.CONTENT
        self._pending = ""
        self._input = ""
        """Input so far of the call of a custom tool."""
        self._custom = False
        self._spoken = False
        """Whether an earlier message had content."""
        self._gap = ""
        """Text that separates this message's content from an earlier one's."""

    @property
    def num_calls(self) -> int:
        return self._writer.num_calls

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.BODY and self._kind is _Kind.REASONING

    @property
    def holding(self) -> bool:
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        return self._state is _State.ENDED

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        text, self._pending = self._pending, ""
        if self._state in (_State.BEGIN, _State.PLAIN):
            self._kind = _Kind.CONTENT
            self._add(text, pieces)
        elif self._state is _State.BODY:
            self._add(text, pieces)
            self._end_message(pieces)
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Parses the next part. Returns whether it can go on without more text."""
        match self._state:
            case _State.BEGIN:
                return self._begin()
            case _State.HEADER:
                return self._read_header(pieces)
            case _State.BODY:
                return self._read_body(pieces)
            case _State.BETWEEN:
                return self._between()
            case _State.PLAIN:
                text, self._pending = self._pending, ""
                self._add(text, pieces)
                return False
            case _State.ENDED:
                self._pending = ""
                return False

    def _begin(self) -> bool:
        seen = self._pending.lstrip()
        if any(seen.startswith(each) for each in _HEADER_BEGINS):
            self._state = _State.HEADER
        elif any(each.startswith(seen) for each in _HEADER_BEGINS):
            return False
        elif self._text_or_calls:
            self._state = _State.PLAIN
        else:
            self._state = _State.BODY
        return True

    def _between(self) -> bool:
        """Handles text after a message. Text that follows without a header is content, too."""
        self._pending = self._pending.lstrip()
        seen, begins = self._pending, (START, CHANNEL)
        if any(seen.startswith(each) for each in begins):
            self._state = _State.HEADER
        elif any(each.startswith(seen) for each in begins):
            return False
        else:
            self._open(_Kind.CONTENT)
        return True

    def _read_header(self, pieces: list[Piece]) -> bool:
        header, found, _ = self._pending[:MAX_HEADER].partition(MESSAGE)
        if found:
            self._pending = self._pending[len(header) + len(MESSAGE) :]
        elif len(self._pending) < MAX_HEADER:
            return False
        else:  # longer than any header: it is text, and its markers are plain text
            self._open(_Kind.CONTENT)
            self._add(self._pending[:1], pieces)
            self._pending = self._pending[1:]
            return True
        channel = match[1] if (match := _CHANNEL.search(header)) else ""
        match = _RECIPIENT.search(header)
        recipient = match[1] if match else ""
        name = recipient.removeprefix(FUNCTIONS)
        if recipient and (name in self._writer.tools or self._is_call(recipient)):
            self._open(_Kind.CALL)
            self._custom, self._input = self._writer.is_custom(name), ""
            pieces.append(self._writer.open(name))
        else:
            thought = channel == "analysis" and self._reasoning
            self._open(_Kind.REASONING if thought else _Kind.CONTENT)
        return True

    def _is_call(self, recipient: str) -> bool:
        """Whether the message is a call. A call of an unknown tool counts: the client reports it to
        the model."""
        return bool(self._writer.tools) and recipient.startswith(FUNCTIONS)

    def _open(self, kind: _Kind) -> None:
        self._state, self._kind = _State.BODY, kind
        self._gap = "\n\n" if kind is _Kind.CONTENT and self._spoken else ""

    def _read_body(self, pieces: list[Piece]) -> bool:
        found = first_marker(self._pending, _BODY_ENDS)
        if found is None:
            held = max(partial(self._pending, each) for each in _BODY_ENDS)
            shown = len(self._pending) - held
            text, self._pending = self._pending[:shown], self._pending[shown:]
            self._add(text, pieces)
            return False
        place, marker = found
        text, self._pending = self._pending[:place], self._pending[place:]
        self._add(text, pieces)
        called = self._kind is _Kind.CALL
        self._end_message(pieces)
        if marker in (START, CHANNEL):  # a new header, although the message has no end
            self._state = _State.HEADER
        else:
            self._pending = self._pending.removeprefix(marker)
            self._state = _State.BETWEEN
        if called and self._one_call:
            self._state = _State.ENDED
        return True

    def _add(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._kind is _Kind.REASONING:
            pieces.append(Reasoning(text))
        elif self._kind is _Kind.CONTENT:
            pieces.append(Content(self._gap + text))
            self._gap, self._spoken = "", True
        elif self._custom:
            self._input += text
        else:
            pieces.append(self._writer.arguments(text))

    def _end_message(self, pieces: list[Piece]) -> None:
        if self._kind is _Kind.CALL and self._custom and self._input:
            pieces.append(self._writer.arguments(unwrapped(self._input)))
            self._input = ""
        self._kind = _Kind.CONTENT

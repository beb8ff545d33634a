"""Splits a model's text into reasoning, content and tool calls as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from jaxserve.server.chat_formats.pieces import (
    CallPart,
    Content,
    Piece,
    Reasoning,
    first_marker,
    partial,
)
from jaxserve.server.chat_formats.reasoning import ReasoningFormat
from jaxserve.server.chat_formats.tool_format import (
    CallableTool,
    CallReader,
    CallWriter,
    ToolFormat,
)

_ALL_CALLS = 2**31
"""More calls than any output has."""


class _State(Enum):
    START = auto()
    """Only white space so far; reasoning may begin."""
    REASONING = auto()
    AFTER = auto()
    """After reasoning or a call, before content. White space is dropped."""
    CONTENT = auto()
    CALL = auto()
    ENDED = auto()
    """The only allowed call is complete."""


class OutputParser:
    """Splits a model's text into reasoning, content and tool calls as it arrives. The result does
    not depend on how the text is split into parts.

    Line breaks around the markers belong to the format, not to the text. The chat template adds
    them when the message returns as history.
    """

    def __init__(
        self,
        *,
        tool_format: ToolFormat | None,
        tools: Sequence[CallableTool] = (),
        reasoning: ReasoningFormat | None = None,
        opened: bool = False,
        parallel_calls: bool = True,
        text_or_calls: bool = False,
    ):
        """
        Args:
          tool_format: the format of calls; None: there are no calls.
          tools: the tools that may be called.
          reasoning: the format of reasoning; None: there is no reasoning.
          opened: the output begins inside of reasoning.
          text_or_calls: an output that does not begin with a call has no calls, even if it contains
            their markers.
        """
        self._tools = tool_format
        self._reasoning = reasoning
        self._text_or_calls = text_or_calls
        self._at_start = tool_format is not None and (text_or_calls or tool_format.bare)
        """Whether to check if the content begins with a call."""
        self._most_calls = _ALL_CALLS if parallel_calls else 1
        self._state = _State.CONTENT if reasoning is None else _State.START
        if opened:
            self._state = _State.REASONING
        self._fresh = opened
        """Whether no reasoning has arrived yet."""
        self._repeats = opened and reasoning is not None and reasoning.begins_open
        """Whether the opening marker may still come: some templates leave it to the model."""
        self._pending = ""
        make_id = tool_format.make_id if tool_format is not None else str
        self._calls = CallWriter(tools, make_id)
        self._reader: CallReader | None = None

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._state is _State.REASONING

    @property
    def holding(self) -> bool:
        """Whether text is held back that may turn out to be content."""
        if self._state is _State.CALL and self._reader is not None and not self._reader.opened:
            return True
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        """Whether nothing more will be shown, because no further calls are wanted."""
        return self._state is _State.ENDED

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Returns the held text at the end of the output."""
        text, self._pending = self._pending, ""
        if self._state is _State.CALL and self._reader is not None:
            parts: list[CallPart] = []
            self._reader.finish(parts)
            return [*parts]
        if self._state is _State.REASONING:
            return [Reasoning(text)] if text else []
        shown = text and self._state not in (_State.AFTER, _State.ENDED)
        return [Content(text)] if shown else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Parses up to the next marker. Returns False if more text is needed."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.AFTER:
                self._pending = self._pending.lstrip()
                self._state = _State.CONTENT if self._pending else _State.AFTER
                return bool(self._pending)
            case _State.REASONING:
                return self._reason(pieces)
            case _State.CONTENT if self._at_start:
                return self._begin_content()
            case _State.CONTENT:
                text, found = self._until([self._tools.begins] if self._tools is not None else [])
                pieces += [Content(text)] if text else []
                if found:
                    self._begin_calls(found)
                return bool(found)
            case _State.CALL:
                return self._read_calls(pieces)
            case _State.ENDED:
                self._pending = ""
                return False

    def _start(self) -> bool:
        seen, opens = self._pending.lstrip(), self._reasoning.opens if self._reasoning else ""
        if seen.startswith(opens):
            self._pending, self._state, self._fresh = seen[len(opens) :], _State.REASONING, True
            return True
        if opens.startswith(seen):
            return False
        self._state = _State.CONTENT
        return True

    def _reason(self, pieces: list[Piece]) -> bool:
        if self._fresh:
            self._pending = self._pending.lstrip("\n")
            if self._repeats and self._reasoning is not None:
                opens = self._reasoning.opens
                if opens.startswith(self._pending) and self._pending != opens:
                    return False
                self._pending = self._pending.removeprefix(opens).lstrip("\n")
                self._repeats = False
            self._fresh = not self._pending
        ends = [self._reasoning.closes] if self._reasoning is not None else []
        if self._tools is not None and self._tools.ends_reasoning:
            ends.append(self._tools.begins)
        text, found = self._until(ends)
        pieces += [Reasoning(text)] if text else []
        if found and found == ends[0]:
            self._state = _State.AFTER
        elif found:
            self._begin_calls(found)
        return bool(found)

    def _begin_content(self) -> bool:
        """Returns whether the answer begins with a call."""
        assert self._tools is not None
        seen = self._pending.lstrip("\n")
        unspaced = seen.lstrip() if self._tools.bare else seen
        marker = self._tools.begins
        if unspaced.startswith(marker):
            self._pending = unspaced
        elif marker.startswith(unspaced):
            return False
        elif self._tools.bare and unspaced.startswith("{"):
            self._pending = seen if self._text_or_calls else self._pending
            self._begin_calls("")
        elif self._text_or_calls:
            self._tools, self._pending = None, seen
        self._at_start = False
        return True

    def _begin_calls(self, marker: str) -> None:
        assert self._tools is not None
        self._state = _State.CALL
        self._reader = self._tools.reader(self._calls, self._most_calls, marker)

    def _until(self, markers: Sequence[str]) -> tuple[str, str]:
        """Returns the text that is safe to show, and the marker after it, if one has arrived."""
        text, found = self._pending, first_marker(self._pending, markers)
        if found is not None:
            place, marker = found
            self._pending = text[place + len(marker) :]
            return text[:place].rstrip("\n"), marker
        if not markers:
            self._pending = ""
            return text, ""
        held = max([partial(text, marker) for marker in markers])
        shown = text[: len(text) - held].rstrip("\n")
        self._pending = text[len(shown) :]
        return shown, ""

    def _read_calls(self, pieces: list[Piece]) -> bool:
        assert self._reader is not None
        parts: list[CallPart] = []
        rest = self._reader.push(self._pending, parts)
        self._pending = rest or ""
        pieces += parts
        if rest is None:
            return False
        if not self._reader.opened:
            self._state = _State.CONTENT
            if self._text_or_calls and self._tools is not None and self._tools.bare:
                self._tools = None
        else:
            self._state = _State.AFTER if self.num_calls < self._most_calls else _State.ENDED
        return True

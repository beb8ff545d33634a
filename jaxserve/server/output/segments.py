"""A choice's pieces as a list of blocks, for APIs that number the parts of an output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    CallOpened,
    Content,
    Piece,
    Reasoning,
)


class Segment:
    """A block of reasoning, of text, or a call."""

    def __init__(self, index: int, first: Piece):
        self.index = index
        self.first = first
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far. For a call, its arguments."""
        return "".join(self._parts)

    def append(self, text: str) -> None:
        """Appends text."""
        self._parts.append(text)

    def takes(self, piece: Piece) -> bool:
        """Returns whether the piece continues this block."""
        if isinstance(piece, CallArguments):
            return isinstance(self.first, CallOpened)
        return type(piece) is type(self.first) and not isinstance(piece, CallOpened)


class Opened(NamedTuple):
    """A block begins."""

    segment: Segment


class Grew(NamedTuple):
    """A block has more text."""

    segment: Segment
    text: str


class Closed(NamedTuple):
    """A block is complete."""

    segment: Segment


type Change = Opened | Grew | Closed


class Segments:
    """Blocks in the order of the output. Each one is closed before the next one opens."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._open: Segment | None = None

    def push(self, pieces: Iterable[Piece]) -> Iterator[Change]:
        """Yields the changes that the pieces cause."""
        for piece in pieces:
            if self._open is None or not self._open.takes(piece):
                yield from self.close()
                self._open = Segment(len(self.all), piece)
                self.all.append(self._open)
                yield Opened(self._open)
            if isinstance(piece, Content | Reasoning | CallArguments) and piece.text:
                self._open.append(piece.text)
                yield Grew(self._open, piece.text)

    def close(self) -> Iterator[Change]:
        """Yields the end of the open block, if there is one."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

"""What a model's output is made of: content, reasoning and tool calls."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallOpened(NamedTuple):
    """A tool call begins; its arguments follow."""

    position: int
    """Of the call among those of the answer, from 0."""
    id: str
    name: str
    custom: bool = False
    """The arguments are free text."""


class CallArguments(NamedTuple):
    """The next part of a call's arguments: JSON, or free text."""

    position: int
    text: str
    custom: bool = False


type CallPart = Content | CallOpened | CallArguments
"""What stands where calls are expected. Content: it is no call."""

type Piece = CallPart | Reasoning
"""A stretch of output of one kind."""


def partial(text: str, marker: str) -> int:
    """Length of the longest start of the marker, short of all of it, that ends the text."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

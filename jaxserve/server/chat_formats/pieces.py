"""What a model's output is made of: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's thoughts."""

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


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Returns position and spelling of the first marker in the text, if there is one."""
    found = None
    for marker in markers:
        place = text.find(marker)
        if place >= 0 and (found is None or place < found[0]):
            found = place, marker
    return found


def partial(text: str, marker: str) -> int:
    """Returns the length of the longest proper prefix of the marker that ends the text."""
    if text.find(marker[0], max(0, len(text) - len(marker) + 1)) < 0:
        return 0  # so it is with nearly all texts
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

"""The pieces of a model's output: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class CallOpened(NamedTuple):
    """The beginning of a tool call. Its arguments follow."""

    position: int
    """Index of the call in the answer, from 0."""
    id: str
    name: str
    custom: bool = False
    """Whether the arguments are free text."""


class CallArguments(NamedTuple):
    """The next part of a call's arguments: JSON or free text."""

    position: int
    text: str
    custom: bool = False


type CallPart = Content | CallOpened | CallArguments
"""The output where calls are expected. Content means that it is not a call."""

type Piece = CallPart | Reasoning
"""A part of the output that is of one kind."""


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
        return 0  # the case of nearly all texts
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

"""What the server, the grammar server and its processes tell each other: MessagePack in frames."""

from __future__ import annotations

import os
import struct
from enum import StrEnum, auto

import msgspec

_MAX_ATOMIC = 4096
"""Bytes that a pipe takes as a whole."""

_LENGTH = struct.Struct("<I")


class Kind(StrEnum):
    """Of a grammar's text."""

    LARK = auto()
    """llguidance's dialect."""
    GBNF = auto()
    REGEX = auto()
    JSON_SCHEMA = auto()
    PARTS = auto()
    """A JSON object of grammars, of which the first is Lark that names the others: `@name`."""


class Grammar(msgspec.Struct, frozen=True):
    """What an output must look like, as text."""

    kind: Kind
    text: str


class Limits(msgspec.Struct, frozen=True):
    """Of what grammars may take."""

    process_bytes: int = 256 * 2**20
    """Memory of one process beyond that of the vocabulary, which all share."""
    total_bytes: int = 4 * 2**30
    """Memory of all processes together, without the vocabulary. Beyond it the largest is ended."""
    stack_bytes: int = 64 * 2**20
    """Of each thread that compiles or computes masks."""
    mask_seconds: float = 5.0
    """Processor time of one mask."""
    threads: int = 1
    """That compute masks of one grammar for several sequences."""


class Setup(msgspec.Struct, frozen=True):
    """The first message: all that a grammar server has to know of the model."""

    tokenizer: bytes
    """Pickled."""
    num_tokens: int
    """The tokenizer's, and one more where it has none that ends a sequence."""
    end_token_ids: list[int]
    masks: int
    """Descriptor of the shared memory that masks are written to, in slots."""
    num_slots: int
    limits: Limits


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compile a grammar in a new process, whose first mask goes into `slot`."""

    process: int
    grammar: Grammar
    slot: int
    seconds: float
    """Of processor time."""
    niceness: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A sequence got tokens; the mask of its next one goes into the first slot, and those after
    drafts into the others."""

    process: int
    sequence: int
    tokens: list[int]
    slots: list[int]
    drafts: list[int]
    """Guesses of the tokens that come next."""


class Advance(msgspec.Struct, frozen=True, tag=True, array_like=True):
    jobs: list[Job]


class Drop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sequences that have ended."""

    process: int
    sequences: list[int]


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody needs the grammar any more."""

    process: int


type Order = Start | Advance | Drop | End


class Cause(StrEnum):
    """Why a process ended."""

    TIME = auto()
    MEMORY = auto()
    """Its own limit."""
    TOTAL_MEMORY = auto()
    STACK = auto()
    NOT_STARTED = auto()
    """The system has no room for another process."""
    OTHER = auto()


class Compiled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    process: int
    error: str | None
    """None: the first mask is in its slot."""
    size: int
    """Bytes of memory that it took."""


class Masks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These slots hold their masks."""

    slots: list[int]


class LookedAhead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A job's first slot holds its mask, and the next ones those after each of the drafts."""

    slot: int
    drafts: list[int]
    forced: int
    """So many first drafts are all that the grammar allows there."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The mask of this slot cannot be computed."""

    slot: int
    error: str


class Defect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process met what it should not; it ends."""

    process: int
    error: str


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process is not there any more: what it has not answered it never will."""

    process: int
    cause: Cause


type Report = Compiled | Masks | LookedAhead | Failed | Defect | Ended


def frame(message: msgspec.Struct) -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


def tell(reports: int, report: msgspec.Struct) -> None:
    """Into a pipe that many processes write to: their frames are not to cut up each other."""
    data = frame(report)
    assert len(data) <= _MAX_ATOMIC, "a report must be short"
    os.write(reports, data)


def write(descriptor: int, data: bytes) -> None:
    """All of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Frames:
    """Reads messages from a pipe."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._buffer = bytearray()

    def read(self) -> list[bytes] | None:
        """Waits for data; the messages that are complete by now. None: the other side has ended."""
        data = os.read(self._descriptor, 1 << 20)
        if not data:
            return None
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            messages.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return messages

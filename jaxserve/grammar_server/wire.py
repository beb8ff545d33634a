"""Messages between the client, the grammar server and its processes: MessagePack in frames."""

from __future__ import annotations

import os
import struct
from enum import StrEnum, auto

import msgspec

_MAX_ATOMIC = 4096
"""The most bytes that a write to a pipe transfers atomically."""

_LENGTH = struct.Struct("<I")


class Kind(StrEnum):
    """Syntax of a grammar's text."""

    LARK = auto()
    """llguidance's dialect."""
    GBNF = auto()
    REGEX = auto()
    JSON_SCHEMA = auto()
    PARTS = auto()
    """A JSON object of grammars. The first one is Lark and refers to the others as `@name`."""


class Grammar(msgspec.Struct, frozen=True):
    """A grammar for an output, as text."""

    kind: Kind
    text: str


class Limits(msgspec.Struct, frozen=True):
    """Limits on the resources of grammars."""

    process_bytes: int = 256 * 2**20
    """Memory of one process, without the vocabulary that all share."""
    total_bytes: int = 4 * 2**30
    """Memory of all processes together, without the vocabulary. Above it, the largest one is
    ended."""
    stack_bytes: int = 64 * 2**20
    """Stack size of each thread that compiles or computes masks."""
    mask_seconds: float = 5.0
    """CPU time of one mask."""
    threads: int = 1
    """Threads that compute masks of one grammar for several sequences."""


class Setup(msgspec.Struct, frozen=True):
    """The first message: all facts about the model that a grammar server needs."""

    tokenizer: bytes
    """The pickled tokenizer."""
    num_tokens: int
    """The tokenizer's number of tokens, plus one if it has no end token."""
    end_token_ids: list[int]
    masks: int
    """File descriptor of the shared memory for masks, which is divided into slots."""
    num_slots: int
    limits: Limits


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compiles a grammar in a new process and writes its first mask to `slot`."""

    process: int
    grammar: Grammar
    slot: int
    seconds: float
    """The limit of CPU time."""
    niceness: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of a sequence. The mask of its next token goes to the first slot, and the masks
    after drafts to the other slots."""

    process: int
    sequence: int
    tokens: list[int]
    slots: list[int]
    drafts: list[int]
    """Guesses of the next tokens."""


class Advance(msgspec.Struct, frozen=True, tag=True, array_like=True):
    jobs: list[Job]


class Drop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sequences that have ended."""

    process: int
    sequences: list[int]


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends the process of a grammar that is no longer needed."""

    process: int


type Order = Start | Advance | Drop | End


class Cause(StrEnum):
    """Why a process ended."""

    TIME = auto()
    MEMORY = auto()
    """The process exceeded its own limit."""
    TOTAL_MEMORY = auto()
    STACK = auto()
    NOT_STARTED = auto()
    """The system could not start another process."""
    OTHER = auto()


class Compiled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    process: int
    error: str | None
    """None: the first mask is in its slot."""
    size: int
    """Bytes of memory that the compilation took."""


class Masks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These slots hold their masks."""

    slots: list[int]


class LookedAhead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A job's first slot holds its mask, and the next slots the masks after each draft."""

    slot: int
    drafts: list[int]
    forced: int
    """This many first drafts are forced: the grammar allows no other token."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The mask of this slot cannot be computed."""

    slot: int
    error: str


class Defect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process met an unexpected error and ends."""

    process: int
    error: str


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process has ended. It will answer no further orders."""

    process: int
    cause: Cause


type Report = Compiled | Masks | LookedAhead | Failed | Defect | Ended


def frame(message: msgspec.Struct) -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


def tell(reports: int, report: msgspec.Struct) -> None:
    """Writes a report to a pipe that many processes share. The frame is written atomically."""
    data = frame(report)
    assert len(data) <= _MAX_ATOMIC, "a report must be short"
    os.write(reports, data)


def write(descriptor: int, data: bytes) -> None:
    """Writes all data."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Frames:
    """Reads messages from a pipe."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._buffer = bytearray()

    def read(self) -> list[bytes] | None:
        """Waits for data. Returns the complete messages; None: the other side has ended."""
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

"""What the grammar server is asked for: grammars in their processes, and orders to these."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxserve.api import Ahead, GuideError
from jaxserve.grammar_server.wire import Cause, Drop, End, Grammar


class ProcessEnded(Exception):
    """A grammar's process ended before its first mask was there."""

    def __init__(self, cause: Cause):
        super().__init__(cause)
        self.cause = cause


class NotCompiled(Exception):
    """A fault of the grammar, in llguidance's words."""


class Waiting(Protocol):
    """A sequence that needs a mask."""

    @property
    def ready(self) -> bool: ...
    def finish(self, mask: bytes, error: GuideError | None, ahead: Ahead) -> None:
        """Reports that the mask is known, or that the sequence cannot go on. Called on the thread
        that reads the grammar server's results."""
        ...


class GrammarServer(Protocol):
    """What a grammar's process needs of the server that runs it; `processes.Processes` is it."""

    def order(self, order: Order | None) -> None: ...
    def wait_for(self, waiting: Waiting, timeout: float) -> bool: ...


@dataclass(eq=False, kw_only=True)
class GrammarProcess:
    """A grammar in its process, which ends when nothing refers to this object any more. What its
    sequences share are the states that llguidance has found, and the limit of these: what many
    have followed has no room left for the next one."""

    server: GrammarServer
    number: int
    mask: bytes
    """Of the first token."""
    tenant: str
    """For whom it was compiled."""
    size: int
    """Bytes of memory that compiling took."""
    num_tokens: int = 0
    """Those of all sequences that followed it."""
    at_limit: bool = False
    """It is of no use to new sequences: one has met a limit, or the process has ended."""

    def advance(self, step: MaskStep, waiting: Waiting) -> None:
        """Ask for the mask after these tokens. A sequence's number is new to the process with its
        first token. Returns at once."""
        self.num_tokens += len(step.tokens)
        self.server.order(MaskOrder(self, step, waiting))

    def wait_for(self, waiting: Waiting, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the sequence's mask; returns whether it is there."""
        return self.server.wait_for(waiting, timeout)

    def drop(self, sequence: int) -> None:
        """Forgets a sequence that has ended."""
        self.server.order(Drop(self.number, [sequence]))

    def __del__(self) -> None:
        self.server.order(End(self.number))


class MaskStep(NamedTuple):
    """More tokens of a sequence; see `api.GuideState.advance`."""

    sequence: int
    tokens: list[int]
    drafts: list[int]
    most: int


class MaskOrder(NamedTuple):
    """The mask after more tokens of a sequence."""

    process: GrammarProcess
    step: MaskStep
    waiting: Waiting


class CompileOrder(NamedTuple):
    """A grammar to compile, in a process of its own."""

    number: int
    grammar: Grammar
    seconds: float
    """Of processor time, at most."""
    niceness: int
    tenant: str
    made: Future[GrammarProcess]

    def fail(self, error: Exception) -> None:
        """Reports that there will be no process."""
        with suppress(InvalidStateError):  # nobody waits for it any more
            self.made.set_exception(error)


type Order = CompileOrder | MaskOrder | Drop | End

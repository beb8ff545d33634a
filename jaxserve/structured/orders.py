"""Orders to the grammar server, and the objects that represent its processes."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxserve.api import Ahead, GuideError
from jaxserve.grammar_server.wire import Cause, Drop, End, Grammar


class ProcessEnded(Exception):
    """A grammar's process ended before its first mask was computed."""

    def __init__(self, cause: Cause):
        super().__init__(cause)
        self.cause = cause


class NotCompiled(Exception):
    """The grammar is at fault. The message is llguidance's."""


class Waiting(Protocol):
    """A sequence that waits for a mask."""

    @property
    def ready(self) -> bool: ...
    def finish(self, mask: bytes, error: GuideError | None, ahead: Ahead) -> None:
        """Reports that the mask is known, or that the sequence cannot continue. Called on the
        thread that reads the grammar server's results."""
        ...


class GrammarServer(Protocol):
    """The methods of the grammar server that a grammar's process uses; implemented by
    `processes.Processes`."""

    def order(self, order: Order | None) -> None: ...
    def wait_for(self, waiting: Waiting, timeout: float) -> bool: ...


@dataclass(eq=False, kw_only=True)
class GrammarProcess:
    """A grammar in its process, which ends when nothing refers to this object any more. Its
    sequences share llguidance's states and the limit on them. After many tokens, no room is left
    for further sequences."""

    server: GrammarServer
    number: int
    mask: bytes
    """Mask of the first token."""
    tenant: str
    """The tenant it was compiled for."""
    size: int
    """Bytes of memory that the compilation took."""
    num_tokens: int = 0
    """Tokens of all sequences that followed it."""
    at_limit: bool = False
    """Whether new sequences cannot use it: one has met a limit, or the process has ended."""

    def advance(self, step: MaskStep, waiting: Waiting) -> None:
        """Requests the mask after these tokens. The first tokens of a sequence make its number
        known to the process. Returns at once."""
        self.num_tokens += len(step.tokens)
        self.server.order(MaskOrder(self, step, waiting))

    def wait_for(self, waiting: Waiting, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the sequence's mask. Returns whether it is ready."""
        return self.server.wait_for(waiting, timeout)

    def drop(self, sequence: int) -> None:
        """Drops a sequence that has ended."""
        self.server.order(Drop(self.number, [sequence]))

    def __del__(self) -> None:
        self.server.order(End(self.number))


class MaskStep(NamedTuple):
    """New tokens of a sequence; see `api.GuideState.advance`."""

    sequence: int
    tokens: list[int]
    drafts: list[int]
    most: int


class MaskOrder(NamedTuple):
    """A request for the mask after new tokens of a sequence."""

    process: GrammarProcess
    step: MaskStep
    waiting: Waiting


class CompileOrder(NamedTuple):
    """A request to compile a grammar in its own process."""

    number: int
    grammar: Grammar
    seconds: float
    """The limit of CPU time."""
    niceness: int
    tenant: str
    made: Future[GrammarProcess]

    def fail(self, error: Exception) -> None:
        """Reports that the process will not exist."""
        with suppress(InvalidStateError):  # the request was cancelled
            self.made.set_exception(error)


type Order = CompileOrder | MaskOrder | Drop | End

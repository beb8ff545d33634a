"""Commands from the event loop to the engine thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxserve.api import Request


class Submit(NamedTuple):
    """A new request."""

    request: Request


class Abort(NamedTuple):
    """A request whose client has disconnected."""

    request_id: str


class ResetPrefixCache(NamedTuple):
    """Empties the prefix cache."""


class Between(NamedTuple):
    """A function to run between two steps, with no step in flight."""

    run: Callable[[], object]
    done: Callable[[BaseException | None], object]
    """Called with the exception that `run` raised, or None."""
    drain: bool
    """Let the running sequences end first. Waiting sequences keep waiting."""


type Command = Submit | Abort | ResetPrefixCache | Between


class Inbox:
    """A queue of commands from any thread to the engine thread."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._closed = False

    @property
    def num_submitted(self) -> int:
        """Submitted requests that the engine thread has not taken yet. Callable from any thread."""
        commands = tuple(self._commands)  # a copy: the other thread takes commands meanwhile
        return sum(isinstance(command, Submit) for command in commands)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def send(self, command: Command) -> None:
        """Adds a command and wakes the engine thread. Callable from any thread."""
        self._commands.append(command)
        self._wake.set()

    def close(self) -> None:
        """Tells the engine thread to end."""
        self._closed = True
        self._wake.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a command after the last `take`. Returns False if none came in time."""
        return self._wake.wait(timeout)

    def take_requests(self) -> Iterator[Request]:
        """Yields the waiting requests that came before any other command, oldest first."""
        self._wake.clear()
        while self._commands:
            if not isinstance(first := self._commands[0], Submit):
                self._wake.set()  # it still waits to be taken
                return
            self._commands.popleft()
            yield first.request

    def take(self) -> Iterator[Command]:
        """Yields all waiting commands, oldest first."""
        self._wake.clear()
        while self._commands:
            yield self._commands.popleft()

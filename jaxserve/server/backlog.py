"""Prompt tokens that wait for their first output token: how many, and how fast they are served."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from jaxserve.api import Overloaded
from jaxserve.server.output.generation import Choice

WINDOW = 10.0
"""Seconds of the past that the rate is taken from."""
UNKNOWN_RATE_WAIT = 5.0
"""Seconds to come back in where nothing was served lately."""
SHORTEST_WAIT, LONGEST_WAIT = 1.0, 60.0


class Backlog:
    """Used on the event loop's thread only."""

    def __init__(self, max_tokens: int | None, clock: Callable[[], float] = time.monotonic):
        """`max_tokens` may wait at once; None: any number."""
        self.waiting = 0
        self._max_tokens = max_tokens
        self._clock = clock
        self._served: deque[tuple[float, int]] = deque()

    @contextmanager
    def holding(self, choices: Sequence[Choice]) -> Generator[None]:
        """Counts the prompts of one request as waiting, each until its first token or the end of
        the block.

        Raises Overloaded where too much waits already. A request that finds nothing waiting is
        let in whatever its size: it would be refused for ever.
        """
        sizes = {choice.index: len(choice.request.prompt) for choice in choices}
        more = sum(sizes.values())
        if self._max_tokens is not None and 0 < self.waiting > self._max_tokens - more:
            raise Overloaded(
                f"{self.waiting} prompt tokens are waiting and this request has {more}; at most "
                f"{self._max_tokens} may wait (--max-num-queued-tokens)"
            )
        self.waiting += more
        for choice in choices:
            choice.on_first_token = partial(self._leave, sizes, choice.index)
        try:
            yield
        finally:
            self.waiting -= sum(sizes.values())

    def seconds_to_drain(self) -> float:
        """Returns what `Retry-After` says: waiting tokens over tokens served per second lately."""
        now = self._clock()
        self._forget(now)
        if not self._served:
            return UNKNOWN_RATE_WAIT
        seconds = max(now - self._served[0][0], 1.0)
        rate = sum(tokens for _, tokens in self._served) / seconds
        return min(max(self.waiting / rate, SHORTEST_WAIT), LONGEST_WAIT)

    def _leave(self, sizes: dict[int, int], index: int) -> None:
        now, tokens = self._clock(), sizes.pop(index)
        self.waiting -= tokens
        self._forget(now)
        self._served.append((now, tokens))

    def _forget(self, now: float) -> None:
        while self._served and self._served[0][0] < now - WINDOW:
            self._served.popleft()

"""Counts prompt tokens that wait for their first output token, and the rate at which they are
served."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from jaxserve.api import Overloaded
from jaxserve.server.output.generation import Choice

WINDOW = 10.0
"""Seconds of the past over which the rate is computed."""
UNKNOWN_RATE_WAIT = 5.0
"""Value of Retry-After if no token was served recently."""
SHORTEST_WAIT, LONGEST_WAIT = 1.0, 60.0


class Backlog:
    """Used on the event loop's thread only."""

    def __init__(self, max_tokens: int | None, clock: Callable[[], float] = time.monotonic):
        """`max_tokens`: the most tokens that may wait at once; None: no limit."""
        self.waiting = 0
        self._max_tokens = max_tokens
        self._clock = clock
        self._served: deque[tuple[float, int]] = deque()

    @contextmanager
    def holding(self, choices: Sequence[Choice]) -> Generator[None]:
        """Counts the prompts of one request as waiting, each until its first token or the end of
        the block.

        Raises Overloaded if too many tokens are waiting. If nothing waits, a request of any size is
        accepted, because it would otherwise be refused for ever.
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
        """Returns the value of `Retry-After`: waiting tokens divided by the recent rate."""
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

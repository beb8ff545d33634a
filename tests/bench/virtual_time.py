"""Tests that take no time and cannot be late: a clock that stands still while anything happens.

Everything but the clock is real, sockets included: what is sent on this machine is there at once,
so when nothing can be read or written, and no thread is at work, nothing will happen before the
next timer; and the clock goes there.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

_GRACE = 0.002
"""Real seconds without anything to do after which there is taken to be nothing."""


class _Selector(selectors.DefaultSelector):
    """Moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.at_work = 0
        """Threads."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0 or self.at_work:
            return super().select(0 if timeout is not None and timeout <= 0 else None)
        # The second look is for a machine that stood still during the first.
        if ready := super().select(_GRACE) or super().select(0):
            return ready
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor[*Ts, T](
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._virtual.at_work += 1
        future.add_done_callback(self._done)
        return future

    def _done(self, _: object) -> None:
        self._virtual.at_work -= 1


def at_virtual_time[**P](test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a loop of its own with such a clock."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run

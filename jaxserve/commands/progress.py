"""How commands show work under way: a bar with an estimate, or lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_SECONDS = 5.0
_PACE_SECONDS = 600.0
"""The pace is that of so long: work may come in bursts, as layers do whose factors are searched."""
_TELLING = 0.01
"""Of all the work: what says something about the pace."""


class Work:
    """One piece of work, shown on stderr; to be used in a `with`."""

    def __init__(self, verb: str, *, clock: Callable[[], float] = time.monotonic):
        """`verb` is what is being done, "converting"; `clock` gives seconds."""
        self.console = Console(stderr=True)
        self._clock = clock
        self._bar = Progress(
            TextColumn(verb),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("about"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            get_time=clock,
            speed_estimate_period=_PACE_SECONDS,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(verb, total=None, state="")
        self._next_line = clock() + _LINE_SECONDS
        self._before: float | None = None
        """What was done when this began, by an earlier process."""

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: float, total: float, state: str, *, say: bool = False) -> None:
        """So much of all the work is done, in whatever unit is proportional to time.

        Args:
          state: that in words, "3 of 47". Where there is no bar it is a line with an estimate every
            few seconds, and whenever `say` is true.
        """
        self._before = done if self._before is None else self._before
        self._bar.update(self._task, completed=done, total=total, state=state)
        if self.console.is_terminal or not (say or self._clock() >= self._next_line):
            return
        self._next_line = self._clock() + _LINE_SECONDS
        telling = done - self._before >= _TELLING * total
        left = self._bar.tasks[0].time_remaining if telling else None
        rest = "" if left is None else f", about {left:.0f} s left"
        self.console.print(f"{state}{rest}", highlight=False, soft_wrap=True)

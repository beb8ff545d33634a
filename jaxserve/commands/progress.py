"""Progress of commands: a bar with an estimate, or lines if there is no terminal."""

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
"""Seconds over which the pace is averaged, because work may come in bursts, such as layers whose
factors are searched."""
_TELLING = 0.01
"""Share of the work that must be done before its pace predicts the rest."""


class Work:
    """One piece of work, shown on stderr. Use it in a `with` statement."""

    def __init__(self, verb: str, *, clock: Callable[[], float] = time.monotonic):
        """`verb` names the activity, such as "converting". `clock` returns seconds."""
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
        """Amount that an earlier process had done when this one began."""

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: float, total: float, state: str, *, say: bool = False) -> None:
        """Reports that `done` of `total` is done, in a unit that is proportional to time.

        Args:
          state: the amount in words, such as "3 of 47". Without a bar, prints it as a line with an
            estimate every few seconds, and whenever `say` is true.
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

"""Work under way, where there is no terminal: lines, not too many, with an estimate."""

from __future__ import annotations

import re

import pytest

from jaxserve.commands import progress
from jaxserve.startup.timeline import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_every_few_seconds_and_estimate_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with progress.Work("converting", clock=clock) as work:
        for second in range(12):
            clock.now = 100.0 + second
            work.update(second * 10, 200, f"{second * 10} of 200")
    assert capsys.readouterr().err.splitlines() == [
        "50 of 200, about 15 s left",
        "100 of 200, about 10 s left",
    ]


def test_work_that_was_done_before_says_nothing_about_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor does the first hundredth, which may be little after long: a norm behind a search."""
    clock = Clock()
    with progress.Work("converting", clock=clock) as work:
        for second, done in ((0, 80), (6, 81), (12, 100), (18, 120)):
            clock.now = 100.0 + second
            work.update(done, 200, f"{done} of 200")
    assert capsys.readouterr().err.splitlines() == [
        "81 of 200",
        "100 of 200, about 60 s left",
        "120 of 200, about 36 s left",
    ]


def test_a_pace_outlives_a_minute_without_news(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers come in bursts: the time before one counts, not that of its parts alone."""
    clock = Clock()
    with progress.Work("converting", clock=clock) as work:
        for minute in range(3):
            for part in range(10):
                clock.now = 100.0 + 60 * minute + 0.1 * part
                work.update(10 * minute + part, 100, f"{10 * minute + part} of 100")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["10 of 100", "20 of 100"]
    estimates = [float(re.findall("about ([0-9]+) s", line)[0]) for line in lines]
    assert estimates == pytest.approx([540, 480], rel=0.15)


def test_what_is_to_be_said_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with progress.Work("compiling", clock=clock) as work:
        for done in range(1, 4):
            clock.now += 0.5
            work.update(done, 3, f"{done} of 3", say=True)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
    ]


def test_a_phase_of_the_start_is_judged_by_its_own_pace() -> None:
    pace = Pace()
    assert pace.describe("loading", 0.0, 10.0) == "loading, 0 % done"
    assert pace.describe("compiling", 0.0, 20.0) == "compiling, 0 % done"
    assert pace.describe("compiling", 0.05, 28.0) == "compiling, 5 % done"  # too early to say
    assert pace.describe("compiling", 0.25, 30.0) == "compiling, 25 % done, about 30 s left"
    assert pace.describe("compiling", 0.25, 35.0) == "compiling, 25 % done, about 25 s left"
    assert pace.describe("warming", 1.0, 60.0) == "warming, 100 % done"

"""Step times are measured once per set of programs, and again where the file is of no use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.plan import StepPlan
from jaxserve.startup import measure
from jaxserve.startup.measure import step_times
from jaxserve.step_times import StepTimes, VerifyTime
from tests.tiny_model import make_config

CONFIG = make_config(decode=(1, 4), prefill=(8, 32))
MEASURED = StepTimes(decode={1: 0.1, 4: 0.2}, mixed={8: 0.3, 32: 0.4}, chunk_pair=1e-6)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[StepTimes]:
    """One more entry for each measurement."""
    made: list[StepTimes] = []

    def measured(*_: Any) -> StepTimes:
        made.append(MEASURED)
        return MEASURED

    monkeypatch.setattr(measure, "measure", measured)
    return made


def times(file: Path, config: Any = CONFIG) -> StepTimes:
    runner: Any = None
    return step_times(runner, config, file)


def test_times_of_verify_steps_are_kept_and_those_of_others_are_of_no_use(
    tmp_path: Path, measurements: list[StepTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifying = replace(MEASURED, verify={(1, 8): VerifyTime(0.1, 1e-6)})
    monkeypatch.setattr(measure, "measure", lambda *_: measurements.append(verifying) or verifying)
    file = tmp_path / "step_times.json"
    config = make_config(decode=(1, 4), prefill=(8, 32), verify=((1, 8),))
    assert times(file, config) == times(file, config) == verifying
    assert len(measurements) == 1
    times(file)
    assert len(measurements) == 2, "this start verifies nothing"


def test_a_second_start_takes_what_the_first_one_measured(
    tmp_path: Path, measurements: list[StepTimes]
) -> None:
    file = tmp_path / "step_times.json"
    assert times(file) == times(file) == MEASURED
    assert len(measurements) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text(file.read_text()[:-10]),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text("{}"),
        lambda file: file.write_bytes(b"\xff\x00"),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)
def test_a_file_of_no_use_costs_a_measurement(
    tmp_path: Path, measurements: list[StepTimes], damage: Callable[[Path], None]
) -> None:
    file = tmp_path / "step_times.json"
    times(file)
    damage(file)
    assert times(file) == MEASURED
    assert len(measurements) == 2


def test_times_of_other_buckets_are_not_taken(
    tmp_path: Path, measurements: list[StepTimes]
) -> None:
    file = tmp_path / "step_times.json"
    times(file)
    times(file, make_config(decode=(1, 2, 4), prefill=(8, 32)))
    assert len(measurements) == 2


class _Recorder:
    """Stands for a runner whose steps take 5 ms, every second one `others` seconds more. Keeps
    their plans."""

    def __init__(self, clock: SimpleNamespace, others: float = 0.0) -> None:
        self.plans: list[StepPlan] = []
        self._clock, self._others = clock, others

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        seconds = 0.005 + len(self.plans) % 2 * self._others

        def wait() -> None:
            self._clock.now += seconds

        return SimpleNamespace(results=SimpleNamespace(block_until_ready=wait))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Goes on only while somebody waits for a step."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_measured_prompts_end_with_their_rows(clock: SimpleNamespace) -> None:
    """Recurrent layers compute only a prompt's tokens in blocks, as they do in serving."""
    runner: Any = _Recorder(clock)
    measure.measure(runner, CONFIG)
    rows = [
        (row, admission)
        for plan in runner.plans
        for row, admission in zip(plan.rows, plan.admissions, strict=False)
    ]
    prompts = [(row, admission) for row, admission in rows if row.tokens]
    assert prompts
    assert all(
        admission.num_prompt == row.start + len(row.tokens) and admission.slot == row.slot
        for row, admission in prompts
    )


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (16, 2)])
def test_measured_steps_have_as_few_prompts_as_served_ones(
    clock: SimpleNamespace, most: int, expected: int
) -> None:
    """A bucket of 32 tokens holds two of the longest sequences."""
    made = make_config(max_model_len=16)
    config = replace(made, cache=replace(made.cache, most_prompts=most))
    runner: Any = _Recorder(clock)
    measure.measure(runner, config)
    prompts = [sum(bool(row.tokens) for row in plan.rows) for plan in runner.plans]
    assert max(prompts) == expected


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("slow", ["decode", "mixed"])
def test_a_busy_gpu_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, slow: str
) -> None:
    """Another server starts during a part of the first measurement, and not after it."""
    idle = StepTimes(decode={1: 0.005, 4: 0.006}, mixed={8: 0.005, 32: 0.005})
    times: dict[int, float] = getattr(idle, slow)
    shared = replace(idle, **{slow: {size: 2.5 * each for size, each in times.items()}})
    made = iter([shared, idle])
    monkeypatch.setattr(measure, "measure", lambda *_: next(made))
    runner: Any = _Recorder(clock)
    file = tmp_path / "step_times.json"
    assert step_times(runner, CONFIG, file) == StepTimes.load(file) == idle


@pytest.mark.usefixtures("gpu")
def test_the_fastest_measurement_of_a_busy_gpu_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    made = [StepTimes(decode={1: each, 4: each}, mixed={8: each, 32: each}) for each in (3, 1, 2)]
    left = iter(made)
    monkeypatch.setattr(measure, "measure", lambda *_: next(left))
    runner: Any = _Recorder(clock)
    assert step_times(runner, CONFIG, tmp_path / "step_times.json") == made[1]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("others", "kept"), [(0.0, True), (0.02, False)])
def test_times_of_a_busy_gpu_are_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    others: float,
    kept: bool,
) -> None:
    """Every second step waits for the work of another process."""
    made = StepTimes(decode={1: 0.005, 4: 0.2}, mixed={8: 0.005, 32: 0.005})
    monkeypatch.setattr(measure, "measure", lambda *_: made)
    runner: Any = _Recorder(clock, others)
    file = tmp_path / "step_times.json"
    assert step_times(runner, CONFIG, file) == made
    assert file.exists() == kept
    assert ("busy with other work" in caplog.text) != kept

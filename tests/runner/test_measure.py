"""The table that is measured at the start is the device's, also where its clocks change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from jaxserve.plan import StepPlan
from jaxserve.startup import measure
from jaxserve.step_times import StepTimes, VerifyTime
from tests.tiny_model import make_config

MS = 1e-3
CONFIG = make_config(
    max_num_seqs=64,
    max_model_len=8192,
    num_pages=4000,
    page_size=64,
    decode=(1, 16, 64),
    prefill=(64, 256, 512, 1024, 2048),
)
TRUE = StepTimes(
    decode={1: 3 * MS, 16: 3.2 * MS, 64: 3.5 * MS},
    mixed={64: 4 * MS, 256: 6 * MS, 512: 8 * MS, 1024: 14 * MS, 2048: 27 * MS},
    decode_context=34e-9,
    mixed_row=5e-6,
    mixed_context=30e-9,
    chunk_pair=1e-9,
    chunk_depth=2e-7,
)
LAUNCH = 0.5 * MS


def test_no_verify_bucket_is_slower_than_one_that_holds_it() -> None:
    """As on a busy CPU: with 39 ms one row would never be verified, and its time never learned."""
    seconds = {(1, 4): 39 * MS, (4, 4): 9 * MS, (8, 2): 8 * MS, (4, 8): 12 * MS}
    times = {shape: VerifyTime(each, 1e-6) for shape, each in seconds.items()}
    found = measure.no_slower(times)
    assert {shape: each.seconds for shape, each in found.items()} == {**seconds, (1, 4): 9 * MS}
    assert all(each.per_context == 1e-6 for each in found.values())


class Launched(NamedTuple):
    results: Launched | None
    block_until_ready: Callable[[], None]


class Device:
    """Takes what `TRUE` says, times what `slowness` says at that time of the clock."""

    def __init__(self, slowness: Callable[[float], float]):
        self.now = self.busy_until = 0.0
        self.plans: list[StepPlan] = []
        self._slowness = slowness

    def clock(self) -> float:
        return self.now

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        self.now += LAUNCH
        begun = max(self.now, self.busy_until)
        done = self.busy_until = begun + TRUE.of(plan) * self._slowness(begun)

        def wait() -> None:
            self.now = max(self.now, done)

        return Launched(Launched(None, wait), wait)


def measured(monkeypatch: pytest.MonkeyPatch, slowness: Callable[[float], float]) -> StepTimes:
    device: Any = Device(slowness)
    monkeypatch.setattr(measure.time, "perf_counter", device.clock)
    times = measure.measure(device, CONFIG)
    assert device.now < 2.5, "the first start would wait"
    return times


def within(times: StepTimes, share: float) -> None:
    for name in ("decode", "mixed"):
        assert getattr(times, name) == pytest.approx(getattr(TRUE, name), rel=share)
    for tokens in TRUE.mixed:
        wanted = TRUE.of_mixed(tokens, 60, 60 * 1024)
        assert times.of_mixed(tokens, 60, 60 * 1024) == pytest.approx(wanted, rel=share)


def test_a_steady_device_is_measured_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    times = measured(monkeypatch, lambda now: 1.0)
    within(times, 0.01)
    assert times.mixed_context == pytest.approx(TRUE.mixed_context, rel=0.01)
    assert times.decode_context == pytest.approx(TRUE.decode_context, rel=0.05)


def test_higher_clocks_at_first_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    within(measured(monkeypatch, lambda now: 0.85 if now < 0.15 else 1.0), 0.01)


def test_clocks_that_rise_while_the_device_rests_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenth faster for the first 40 ms of work after every rest."""

    class Rested(Device):
        began = 0.0

        def launch(self, plan: StepPlan) -> Any:
            if self.now + LAUNCH > self.busy_until:
                self.began = self.now + LAUNCH
            return super().launch(plan)

    device = Rested(lambda now: 0.9 if now < device.began + 40 * MS else 1.0)
    monkeypatch.setattr(measure.time, "perf_counter", device.clock)
    runner: Any = device
    assert measure.measure(runner, CONFIG).mixed == pytest.approx(TRUE.mixed, rel=0.01)


def test_a_stall_now_and_then_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0] * 1000)
    within(measured(monkeypatch, lambda now: next(stalls)), 0.01)


def test_a_slow_device_is_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device(lambda now: 100.0)
    monkeypatch.setattr(measure.time, "perf_counter", device.clock)
    measure.measure(device, CONFIG)
    assert len(device.plans) < 40


@pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(1, 512), (3, 500), (64, 100)])
def test_steps_larger_than_a_sequence_are_of_several_sequences(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_model_len: int
) -> None:
    """Pages beyond a slot's table would be those of the next slot, or of padding."""
    config = make_config(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_pages=600,
        page_size=64,
        decode=(max_num_seqs,),
        prefill=(64, 1024, 2048),
    )
    device: Any = Device(lambda now: 1.0)
    monkeypatch.setattr(measure.time, "perf_counter", device.clock)
    times = measure.measure(device, config)
    row = TRUE.mixed_row if max_num_seqs > 1 else 0.0
    assert times.mixed_row == pytest.approx(row, rel=0.05)
    largest = max(plan.num_tokens for plan in device.plans)
    assert largest == min(2048, max_num_seqs * max_model_len)
    for plan in device.plans:
        assert all(row.start + row.num_tokens <= max_model_len for row in plan.rows)
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots) and max(slots) < max_num_seqs

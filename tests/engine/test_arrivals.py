"""Requests that arrive while the device computes a step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from jaxserve.api import Request, SamplingParams
from jaxserve.engine.inbox import Abort, Inbox, Submit
from jaxserve.plan import Sampled, StepPlan
from jaxserve.step_times import StepTimes
from tests.engine.driver import GatedRunner, serving
from tests.scheduler.fake_runner import Pending

STEP = 0.06
TIMES = StepTimes(decode={4: STEP}, mixed={16: STEP})


class SlowRunner(GatedRunner):
    """A device whose steps take time. Reports the order of launches and results."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.order: list[str] = []
        self.free_at = 0.0

    def launch(self, plan: StepPlan) -> Pending:
        self.order.append("launch")
        return super().launch(plan)

    def is_done(self, pending: Pending) -> bool:
        return False

    def collect(self, pending: Pending) -> list[Sampled | None]:
        self.free_at = max(self.free_at + STEP, time.perf_counter())
        time.sleep(max(self.free_at - time.perf_counter(), 0.001))
        self.order.append("results")
        return super().collect(pending)


class Device(GatedRunner):
    """A device that computes steps one after the other, beside the host."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._ends: deque[float] = deque([0.0])
        self.late = 0

    def launch(self, plan: StepPlan) -> Pending:
        now = time.perf_counter()
        self.late += now > self._ends[-1]
        self._ends.append(max(self._ends[-1], now) + STEP / 4)
        return super().launch(plan)

    def is_done(self, pending: Pending) -> bool:
        return time.perf_counter() >= self._ends[1]

    def collect(self, pending: Pending) -> list[Sampled | None]:
        self._ends.popleft()
        time.sleep(max(self._ends[0] - time.perf_counter(), 0.0))
        time.sleep(0.0005)  # reading results takes time, too
        return super().collect(pending)


def request(name: str, tokens: int) -> Request:
    return Request(id=name, prompt=(1, 2, 3), params=SamplingParams(max_tokens=tokens))


async def test_requests_are_queued_while_a_step_runs() -> None:
    runner = SlowRunner()
    async with serving(runner, times=TIMES) as engine:
        steps: Any = engine._steps  # pyright: ignore[reportPrivateUsage]
        add = steps.scheduler.add

        def noted(request: Request) -> None:
            runner.order.append(request.id)
            add(request)

        steps.scheduler.add = noted
        stream = engine.generate(request("first", 20))
        for _ in range(4):
            await anext(stream)
        await asyncio.sleep(STEP / 4)  # into the next step
        async for _ in engine.generate(request("second", 1)):
            pass
        await stream.aclose()
    at = runner.order.index("second")
    assert runner.order[at - 1 : at + 2] == ["launch", "second", "results"]


async def test_steps_that_are_faster_than_expected_are_rarely_late() -> None:
    """A table that was measured on a busy GPU: steps take a quarter of its times. With a constant
    share of them every second one is late."""
    device = Device()
    async with serving(device, times=TIMES) as engine:
        async for _ in engine.generate(request("only", 60)):
            pass
    assert device.late < 15


def test_only_requests_ahead_of_other_commands_are_taken() -> None:
    inbox, first, second = Inbox(), request("first", 1), request("second", 1)
    for command in (Submit(first), Abort("first"), Submit(second)):
        inbox.send(command)
    assert list(inbox.take_requests()) == [first]
    assert inbox.wait(0.0)  # the others still wait
    assert list(inbox.take_requests()) == []
    assert list(inbox.take()) == [Abort("first"), Submit(second)]
    assert not inbox.wait(0.0)

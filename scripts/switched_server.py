"""A server for measurements that stops verifying drafts on one signal, and resumes on another.

    python scripts/switched_server.py --model FOLDER --speculative-config '{"method": "ngram"}'

SIGUSR1 turns drafts off: when drafts in flight have returned, the scheduler plans the same steps as
a server without drafts. SIGUSR2 turns them on. Signals may be sent at any time; a line on standard
output confirms them. Each signal begins a turn, even if nothing changes. When a turn ends, another
line summarises its steps, from the first step that ends at least `SETTLED` seconds after its
beginning to the last one:

    turn {"arm": "on", "seconds": 0.29, "decode_s": 0.21, "expected_s": 0.2, "tokens": 3700,
     "steps": 81, "verify_steps": 0}

`decode_s` is the duration of the turn's decode steps, and `expected_s` their duration by the step
times measured at the start.

Weights of `--load-format dummy` are those of `chain_weights.py`. Step times go to the file that the
variable STEP_TIMES names, as `jaxserve.step_times` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jaxserve.scheduler
from jaxserve import __main__ as server
from jaxserve.api import TokenEvent
from jaxserve.commands import serve
from jaxserve.plan import Sampled, StepPlan
from jaxserve.step_times import StepTimes

SETTLED = 0.1
"""Seconds at the beginning of a turn that are not counted."""


class _Turn:
    """Counts the steps and tokens of a turn."""

    def __init__(self, number: int, *, on: bool):
        self.number, self.on = number, on
        self._counts_from = time.perf_counter() + SETTLED
        self._first = self._last = 0.0
        self._decode = self._expected = 0.0
        self._tokens = self._steps = self._verify_steps = 0

    def step_ended(self, plan: StepPlan, tokens: int, times: StepTimes | None) -> None:
        """Counts a step."""
        now = time.perf_counter()
        if self._first:
            if times is not None and plan.kind == "decode":
                self._decode += now - self._last
                self._expected += times.of(plan)
            self._last = now
            self._tokens += tokens
            self._steps += 1
            self._verify_steps += plan.verify
        elif now >= self._counts_from:
            self._first = self._last = now

    def end(self) -> None:
        """Writes the line, if any step was counted."""
        if self._steps:
            found = {
                "arm": "on" if self.on else "off",
                "seconds": self._last - self._first,
                "decode_s": self._decode,
                "expected_s": self._expected,
                "tokens": self._tokens,
                "steps": self._steps,
                "verify_steps": self._verify_steps,
            }
            os.write(1, f"turn {json.dumps(found)}\n".encode())


_asked = [0, True]
"""The number of signals so far, and whether drafts should be on."""


class Switched(jaxserve.scheduler.Scheduler):
    """A scheduler with a switch for the verification of drafts."""

    def __init__(self, *args: Any, **kwargs: Any):
        verification = kwargs.get("verification")
        if verification is not None:
            propose = verification.proposer
            kwargs["verification"] = dataclasses.replace(
                verification, proposer=lambda found: propose(found) if self._turn.on else {}
            )
        super().__init__(*args, **kwargs)
        self._drafting, self._turn = self._verify, _Turn(0, on=True)
        if (file := os.environ.get("STEP_TIMES")) and (times := kwargs.get("times")):
            times.save(Path(file))

    def plan(self) -> StepPlan | None:
        if self._turn.number != _asked[0]:
            self._turn.end()
            self._turn = _Turn(_asked[0], on=bool(_asked[1]))
            self._verify = self._drafting
        if not self._turn.on and self._verify is not None and not self._verify.in_flight:
            self._verify = None
        return super().plan()

    def commit(self, plan: StepPlan, sampled: Iterable[Sampled | None]) -> list[TokenEvent]:
        events = super().commit(plan, sampled)
        self._turn.step_ended(plan, len(events), self._times)
        return events


def _switch(number: int, _: object) -> None:
    on = number == signal.SIGUSR2
    _asked[:] = [_asked[0] + 1, on]
    os.write(1, b"drafts are to be on\n" if on else b"drafts are to be off\n")


def _prepare(gpu_memory_utilization: float, prepare: Any = serve.prepare) -> None:
    """Replaces random weights by `chained` ones. Called only after the variables that jax reads at
    import are set."""
    prepare(gpu_memory_utilization)
    from chain_weights import chained

    from jaxserve.weights import loading

    random = loading.dummy_params
    setattr(loading, "dummy_params", lambda *shapes: chained(random(*shapes)))  # noqa: B010


def main() -> int:
    setattr(jaxserve.scheduler, "Scheduler", Switched)  # noqa: B010
    setattr(serve, "prepare", _prepare)  # noqa: B010
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _switch)
    return server.main()


if __name__ == "__main__":
    sys.exit(main())

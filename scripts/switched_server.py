"""A server that stops verifying drafts on a signal, and goes on with another; for measurements.

    python scripts/switched_server.py --model FOLDER --speculative-config '{"method": "ngram"}'

SIGUSR1: drafts are off, and the scheduler plans what a server without drafts plans. SIGUSR2: they
are on. Send them while no request runs. A line on standard output says that it was done. Weights of
`--load-format dummy` are those of `chain_weights.py`. Step times go to the file that the variable
STEP_TIMES names, as `jaxserve.step_times` reads it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jaxserve.scheduler
from jaxserve import __main__ as server
from jaxserve.commands import serve

_schedulers: list[tuple[Any, Any]] = []
"""Each with what plans its verify rows."""


class Switched(jaxserve.scheduler.Scheduler):
    """A scheduler that can be told not to verify."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _schedulers.append((self, self._verify))
        if (file := os.environ.get("STEP_TIMES")) and (times := kwargs.get("times")):
            times.save(Path(file))


def _switch(number: int, _: object) -> None:
    on = number == signal.SIGUSR2
    for scheduler, verify in _schedulers:
        scheduler._verify = verify if on else None
    os.write(1, b"drafts are on\n" if on else b"drafts are off\n")


def _prepare(gpu_memory_utilization: float, prepare: Any = serve.prepare) -> None:
    """Changes random weights; not before what jax reads when it is imported is set."""
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

"""One compiled runner for all tests that need no special one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.runner.runner import Runner
from tests.runner.driver import CONFIG, METRICS
from tests.tiny_model import COMPILES, make_runner


@pytest.fixture(scope="session")
def compiled() -> Runner:
    return make_runner(CONFIG, metrics=METRICS)


@pytest.fixture
def runner(compiled: Runner) -> Iterator[Runner]:
    """Warm and with nothing in its memory; whatever the test does must not compile."""
    compiled.reset()
    METRICS.steps.clear()
    before = COMPILES.count
    yield compiled
    assert COMPILES.count == before, "something was compiled while serving"

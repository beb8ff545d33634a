"""Compiled runners for all tests that need no special one: see `tests.shared_fixtures`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxserve.config import Buckets
from jaxserve.runner.runner import Runner
from tests.runner.driver import CONFIG, METRICS, VERIFY_SHAPES
from tests.tiny_model import COMPILES, make_runner


@pytest.fixture(scope="session")
def compiled() -> Runner:
    return make_runner(CONFIG, metrics=METRICS)


@pytest.fixture(scope="session")
def verifying() -> Runner:
    """Verifies drafts, too."""
    buckets = Buckets(decode=(4,), prefill=(32,), verify=VERIFY_SHAPES)
    return make_runner(replace(CONFIG, buckets=buckets))


@pytest.fixture
def runner(compiled: Runner) -> Iterator[Runner]:
    """Warm and with nothing in its memory; whatever the test does must not compile."""
    compiled.reset()
    METRICS.steps.clear()
    before = COMPILES.count
    yield compiled
    assert COMPILES.count == before, "something was compiled while serving"

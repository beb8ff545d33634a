"""One server process for the tests that need no flags of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running

"""One server process for the tests that need no flags of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    # Two programs in place of seven: the start compiles them.
    with Server("--decode-buckets", "8", "--prefill-buckets", "128") as running:
        yield running

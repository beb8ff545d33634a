"""A cache of compiled programs with one entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.programs.executable_cache import ExecutableCache
from jaxserve.programs.executables import obtain
from tests.programs.small_program import cache_at, program


@pytest.fixture
def cache(tmp_path: Path) -> ExecutableCache:
    """Holds `program()`."""
    cache = cache_at(tmp_path)
    obtain([program()], cache, 1, lambda phase, done: None)
    return cache

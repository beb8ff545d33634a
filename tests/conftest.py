"""Settings of all tests: by environment, so that tests without arrays do not import jax."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import settings

FAST_COMPILES = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)

settings.register_profile("jaxserve", deadline=None)
settings.load_profile("jaxserve")


def pytest_configure(config: pytest.Config) -> None:
    """Strict promotion makes every cast visible where it matters for the numerics. Compiling is
    most of what the tests do, so XLA's CPU code is left as it comes, and made by the emitters that
    need no MLIR: the tests of `runner` take a third of the processor time."""
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ.setdefault("XLA_FLAGS", FAST_COMPILES)
    selected: str = config.option.markexpr
    if selected and ("gpu" not in selected or "not gpu" in selected):
        os.environ["JAX_PLATFORMS"] = "cpu"


@pytest.fixture(autouse=True)
def _level_of_logs() -> None:
    """Commands that ran in this process may have silenced the engine's log."""
    logging.getLogger("jaxserve").setLevel(logging.NOTSET)

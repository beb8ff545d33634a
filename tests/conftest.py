"""Settings of all tests: by environment, so that tests without arrays do not import jax."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from hypothesis import settings

from tests.fast_compiles import FAST_COMPILES

settings.register_profile("jaxserve", deadline=None)
settings.load_profile("jaxserve")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """This hook runs before a folder's own conftest imports jax, which reads the environment."""
    config = pluginmanager.get_plugin("pytestconfig")
    assert isinstance(config, pytest.Config)
    selected: str = config.known_args_namespace.markexpr
    if selected and ("gpu" not in selected or "not gpu" in selected):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
        if "not slow" in selected:  # slow ones compare bits, which are those of users' emitters
            os.environ.setdefault("XLA_FLAGS", FAST_COMPILES)


def pytest_configure() -> None:
    """Strict promotion makes every cast visible where it matters for the numerics."""
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.shared_fixtures import FilesThatShare

    return FilesThatShare(config, log)


@pytest.fixture(autouse=True)
def _level_of_logs() -> None:
    """Commands that ran in this process may have silenced the engine's log."""
    logging.getLogger("jaxserve").setLevel(logging.NOTSET)

"""Kernels run on the emulator. It takes their sources from Triton: without it there is nothing."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.emulator.launch import emulate

    emulate(monkeypatch)

"""Mixed requests with disconnects and malformed bodies leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.process import ROOT


def soak(requests: int, *flags: str, timeout: float) -> None:
    command = [sys.executable, "scripts/soak.py", "--requests", str(requests), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_small_soak_leaves_nothing_behind() -> None:
    # Too short to tell growth from what the allocators keep.
    soak(200, "--without-device", "--max-growth", "256", "--seed", "3", timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    soak(10_000, "--without-device", timeout=1700)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_requests_to_the_embedded_model_leave_nothing_behind() -> None:
    soak(10_000, timeout=7000)

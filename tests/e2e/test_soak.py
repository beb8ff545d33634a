"""Mixed requests with disconnects and malformed bodies leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.process import ROOT, Server


def soak(*flags: str, timeout: float) -> None:
    command = [sys.executable, "scripts/soak.py", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_small_soak_leaves_nothing_behind(server: Server) -> None:
    # Too short to tell growth from what the allocators keep.
    flags = ("--requests", "60", "--max-growth", "256", "--seed", "3")
    soak(*flags, "--url", server.url, "--pid", str(server.process.pid), timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    soak("--requests", "10000", timeout=3500)

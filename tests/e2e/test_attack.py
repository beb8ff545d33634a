"""What `scripts/attack.py` sends leaves a server as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.process import ROOT, Server


def attack(url: str, *flags: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/attack.py", url, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_a_server_elsewhere_is_not_attacked_by_mistake() -> None:
    ended = attack("http://192.0.2.1:8000", timeout=60)
    assert ended.returncode == 2
    assert "--not-local" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hostile_requests_leave_a_server_as_it_was(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"
    with Server("--write-timeout", "5") as server:
        pid = str(server.process.pid)
        ended = attack(server.url, "--pid", pid, "--json", str(outcomes), timeout=1700)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert server.process.poll() is None
    assert all(json.loads(outcomes.read_text())["checks"].values())

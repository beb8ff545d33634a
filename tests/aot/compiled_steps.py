"""Steps compiled for an H100 that is not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve_kernels import ptxas

ROOT = Path(__file__).parents[2]
NEEDED = ("jax_plugins.xla_cuda13", "triton", "jax_triton")


def missing() -> list[str]:
    """Pieces of the GPU compiler that are not installed."""

    def found(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    lacking = [module for module in NEEDED if not found(module)]
    return lacking if ptxas.available() else [*lacking, "ptxas"]


def inspect(*flags: str) -> dict[str, dict[str, Any]]:
    """What scripts/inspect_steps.py reports for the flags, by bucket."""
    if lacking := missing():
        pytest.skip(f"cannot compile for a GPU here, missing: {', '.join(lacking)}")
    command = [sys.executable, "scripts/inspect_steps.py", *flags]
    command += ["--target", "tests/aot/h100_80gb_hbm3.textproto"]
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "does not compile" not in result.stderr, result.stderr[-3000:]  # no kernel gave way
    return {report["bucket"]: report for report in json.loads(result.stdout)}

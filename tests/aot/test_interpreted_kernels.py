"""The Triton kernels against their references on a CPU, in Triton's interpreter.

In a process of its own, because Triton decides when a kernel is defined. float32 only: the
interpreter's bfloat16 is not faithful. The GPU tests in tests/kernels cover that and real sizes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("tests/kernels/interpreted_kernels.py", "tests/kernels/interpreted_quantized.py")
"""Those of the KV formats take too long for every run: see tests/kernels/interpreted_kv_formats.py.
"""


def test_the_kernels_equal_their_references_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
        pytest.skip("Triton and jax-triton are not installed")
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.interpreter"]
    result = subprocess.run(
        [*command, *FILES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-3000:]

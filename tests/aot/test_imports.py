"""Programs are compiled by many threads, and each begins with another kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

KERNELS = (
    "dense_matmul.triton",
    "dense_matmul.hopper",
    "dense_matmul.triton_streaming",
    "paged_attention.hopper",
    "add_rms_norm.triton",
    "quantized_matmul.triton_arguments",
    "quantized_matmul.e4m3.hopper",
    "kv_format.kvarn.triton_streaming",
)

BEGIN = """
import importlib, sys, threading
from jaxserve_kernels.target import Target
import jaxserve.models.decoder  # the packages, as whoever compiles a model has them

def begin(name):
    together.wait()
    assert Target.for_gpu(90).uses_triton()
    importlib.import_module(f"jaxserve_kernels.{name}")
    imported.append(name)

names, imported = sys.argv[1:], []
together = threading.Barrier(len(names))
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=begin, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(imported) == sorted(names), imported
"""


def test_threads_may_begin_with_any_kernel() -> None:
    """Without `uses_triton`, seven or eight of them fail: Triton is half imported."""
    pytest.importorskip("triton")
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", BEGIN, *KERNELS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]

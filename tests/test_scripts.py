"""The type checker does not read scripts: what they take from the packages must be there."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_profile
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "lab").rglob("*.py")])
OURS = ("jaxserve", "jaxserve_kernels", "jaxserve_checkpoints", "lab", "scripts")
ABSENT = ("triton", "jax_triton", "torch", "matplotlib", "flax", "optax")
"""Packages that need not be here; modules that need them are not looked into."""


def taken(script: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of all imports from our packages."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_script_imports_exists(script: Path) -> None:
    for name, attribute in taken(script):
        try:
            module = importlib.import_module(name)
            if not hasattr(module, attribute):
                importlib.import_module(f"{name}.{attribute}")
        except ModuleNotFoundError as error:
            assert error.name in ABSENT


def test_the_study_of_swapped_kernels_leaves_the_device_to_the_step_that_it_times() -> None:
    code = "import os, lab.studies.swap_kernels; print(os.environ.get('JAX_PLATFORMS', 'any'))"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "any", done.stderr


@pytest.mark.slow
def test_recurrent_layers_are_timed_in_a_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "recurrent.json"
    command = [sys.executable, "scripts/bench_recurrent.py", "--dry-run", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert {"card", "versions", "commit", "copy_tb_per_s"} <= found.keys()
    kinds = [(each["kind"], each["tokens"]) for each in found["cases"]]
    assert kinds == [("decode", 1), ("decode", 2), ("blocks", 40), ("one_by_one", 40)]
    assert all(each["us"] > 0 for each in found["cases"])


def test_kernels_of_a_trace_add_what_they_run_alone() -> None:
    """Of a chain each kernel starts early and waits; a host's events and others' are none."""

    def event(name: str, start: float, us: float, pid: int = 7, **args: int) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "ts": start, "dur": us, "name": name, "args": args}

    events = [
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 8, "name": "process_name", "args": {"name": "/host:CPU"}},
        event("_second_12", 12.0, 10.0, correlation_id=2),
        event("_first", 10.0, 8.0, correlation_id=1),
        event("_third_3_4", 30.0, 5.0, correlation_id=3),
        event("a line of all", 10.0, 25.0),
        event("cuGraphLaunch", 0.0, 100.0, pid=8, correlation_id=1),
    ]
    found = kernel_profile.runs_of(events)
    expected = [("_first", 8.0, 8.0), ("_second", 10.0, 4.0), ("_third", 5.0, 5.0)]
    assert [tuple(each) for each in found] == expected


def test_a_kernel_that_a_layer_has_twice_is_told_apart() -> None:
    layers = [("order", 2.0, 4.0), ("product", 5.0, 7.0), ("product", 9.0, 11.0)]
    runs = [
        kernel_profile.KernelRun(name, both[index], both[index])
        for index in range(2)
        for name, *both in layers
    ]
    expected = {"order": 3.0, "product 1": 6.0, "product 2": 10.0}
    assert kernel_profile.per_layer(runs, 2) == expected

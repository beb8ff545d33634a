"""What users install is what these tests compile with."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

import pytest
from resolve import COMPILING, pins, resolve

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
SHARED = ("jax", "jaxlib", "jax-triton", "triton")
"""Of both extras, and installed here."""

pytest.importorskip("triton", reason="the compilers for GPUs are not installed")
pytestmark = pytest.mark.timeout(1200)  # pip may have to download what it only looks at


def unpinned(resolved: dict[str, str], constraints: Path) -> dict[str, str]:
    """Packages whose version is not the pinned one, or that have no pin."""
    pinned = pins(constraints)
    return {name: found for name, found in resolved.items() if pinned.get(name) != found}


@functools.cache
def resolved_for(extra: str) -> dict[str, str]:
    """pip takes a minute."""
    return resolve(extra, CONSTRAINTS)


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_what_a_gpu_gets_is_pinned_and_is_what_is_compiled_with_here(extra: str) -> None:
    resolved = resolved_for(extra)
    assert unpinned(resolved, CONSTRAINTS) == {}
    here = SHARED if extra == "cuda12" else (*SHARED, *COMPILING)
    assert {name: resolved[name] for name in here} == {n: metadata.version(n) for n in here}


def test_a_pin_that_is_missing_is_found(tmp_path: Path) -> None:
    """pip then chooses by the range in pyproject.toml, today perhaps the same version."""
    loose = tmp_path / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines()
    loose.write_text("\n".join(line for line in lines if not line.startswith("triton==")))
    assert set(unpinned(resolved_for("cuda13"), loose)) == {"triton"}

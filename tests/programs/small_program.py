"""A program that takes no time to compile, and its place in a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.programs.executable_cache import ExecutableCache, Program

KEY = {"jaxlib": "1.0", "device": "one"}


def double(x: Any) -> Any:
    return x * 2


def program(name: str = "double", size: int = 4, function: Any = double) -> Program:
    return Program(
        name=name, function=function, arguments=(jax.ShapeDtypeStruct((size,), jnp.float32),)
    )


def cache_at(folder: Path, **changes: str) -> ExecutableCache:
    return ExecutableCache(folder, {**KEY, **changes}, "model")


def entry(cache: ExecutableCache) -> Path:
    return cache.folder / "double.exe"


def check(executable: Any, size: int = 4) -> None:
    ones = np.ones(size, np.float32)
    assert np.asarray(executable(ones)).tolist() == [2.0] * size


def solve(a: Any, b: Any) -> Any:
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def solving() -> Program:
    """A program that calls LAPACK."""
    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return Program(name="solve", function=solve, arguments=(square, square))

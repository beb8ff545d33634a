"""Which implementation of the operations to use: the device decides, a context overrides it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import jax

MULTIPROCESSORS = 132
"""Of an H100 or H200, on which grids were measured. Other GPUs get the same ones."""

type Implementation = Literal["reference", "triton"]


class Target(NamedTuple):
    """What a program is traced for."""

    implementation: Implementation
    compute_capability: int | None = None
    """Of the GPU to compile for, e.g. 90; None: the GPU of this process."""
    device: str | None = None
    """Its name, for tuned launch parameters; None: the GPU of this process."""


_override: ContextVar[Target | None] = ContextVar("target", default=None)


def current() -> Target:
    """Triton on a GPU, the plain-JAX references elsewhere, unless `use` says otherwise."""
    override = _override.get()
    if override is not None:
        return override
    return Target("triton" if jax.default_backend() == "gpu" else "reference")


_importing = threading.Lock()


def uses_triton() -> bool:
    """Whether operations are kernels; if so, Triton has been imported, whole.

    Its packages import each other: of threads that begin with different ones, as those that compile
    a model's programs do, some would find others half imported.
    """
    if current().implementation == "reference":
        return False
    with _importing:
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    return True


@contextmanager
def use(target: Target) -> Generator[None]:
    """Trace for another target in this context: compiling without a GPU, comparing both."""
    token = _override.set(target)
    try:
        yield
    finally:
        _override.reset(token)


def compute_capability() -> int:
    """Of the GPU that is traced for, e.g. 90."""
    given = current().compute_capability
    return given or int(jax.devices()[0].compute_capability.replace(".", ""))

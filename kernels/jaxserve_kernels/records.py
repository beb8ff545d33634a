"""What a program's calls of Triton kernels hold: machine code, or PTX for jaxlib to assemble."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_KNOWN = {"jaxlib": ("0.11",), "jax-triton": ("0.4",), "triton": ("3.6", "3.9")}
"""Versions whose private surfaces are known: jaxlib's handler of Triton calls, which takes machine
code that a record brings and keeps it by the record's PTX, and its foreign functions, of which
`pdl` has the structures; jax-triton's way from a kernel to a record; the parameters that Triton
adds to a kernel. None is documented. With others every record holds PTX, made by jax-triton's own
code, and there is no programmatic dependent launch and no kernels in Gluon."""

_source: ContextVar[bool] = ContextVar("source", default=False)


@functools.cache
def installed(package: str) -> str | None:
    """The version of a package, e.g. "0.11.2"; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unknown_package() -> str | None:
    """A package in a version whose private surfaces are not known, in words; None: none is."""
    for package, known in _KNOWN.items():
        version = installed(package)
        if version is not None and ".".join(version.split(".")[:2]) not in known:
            return f"{package} {version} is not known, but {' and '.join(known)}"
    return None


def hold_source() -> bool:
    """Records must hold PTX: with these packages, or in this context."""
    return _source.get() or unknown_package() is not None


@contextmanager
def with_source() -> Generator[None]:
    """Programs lowered in this context hold PTX in every call."""
    token = _source.set(True)
    try:
        yield
    finally:
        _source.reset(token)

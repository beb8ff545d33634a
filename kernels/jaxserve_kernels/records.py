"""Decides whether a program's Triton calls hold machine code, or PTX that jaxlib assembles."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_KNOWN = {"jaxlib": ("0.11",), "jax-triton": ("0.4",), "triton": ("3.6", "3.9")}
"""Versions whose undocumented interfaces this package relies on:

- jaxlib's handler of Triton calls, which accepts machine code in a call's record and caches it by
  the record's PTX; and the structures of its foreign function interface (`pdl`);
- jax-triton's way from a kernel to a record;
- the parameters that Triton adds to a kernel.

With other versions every record holds PTX and is made by jax-triton's own code. There is no
programmatic dependent launch, and no Gluon kernel runs."""

_source: ContextVar[bool] = ContextVar("source", default=False)


@functools.cache
def installed(package: str) -> str | None:
    """The version of a package, e.g. "0.11.2"; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unknown_package() -> str | None:
    """Names a package whose version is not in _KNOWN, for messages; None if all versions are
    known."""
    for package, known in _KNOWN.items():
        version = installed(package)
        if version is not None and ".".join(version.split(".")[:2]) not in known:
            return (
                f"{package} {version} is not known, but {' and '.join(known)}: install jaxserve's "
                "extra cuda13 (driver 580 or newer) or cuda12, which has known versions"
            )
    return None


def hold_source() -> bool:
    """Whether records must hold PTX: with unknown package versions, or inside `with_source`."""
    return _source.get() or unknown_package() is not None


@contextmanager
def with_source() -> Generator[None]:
    """Context manager: programs lowered inside it hold PTX in every call."""
    token = _source.set(True)
    try:
        yield
    finally:
        _source.reset(token)

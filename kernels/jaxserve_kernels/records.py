"""What a program's calls of Triton kernels hold: machine code, or PTX for jaxlib to assemble."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import jaxlib.version

_KNOWN_JAXLIBS = ((0, 11),)
"""Versions whose handler of Triton calls is known to take machine code that a record brings, and to
keep it by the record's PTX, and whose foreign functions have the structures of `chain`. Neither
is documented; with others, every record holds PTX, and there are no chains."""

_source: ContextVar[bool] = ContextVar("source", default=False)


def hold_source() -> bool:
    """Records must hold PTX: with this jaxlib, or in this context."""
    return _source.get() or jaxlib.version.__version_info__[:2] not in _KNOWN_JAXLIBS


@contextmanager
def with_source() -> Generator[None]:
    """Programs lowered in this context hold PTX in every call."""
    token = _source.set(True)
    try:
        yield
    finally:
        _source.reset(token)

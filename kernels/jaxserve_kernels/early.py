"""Whether kernels are traced for a chain, in which each is started before its predecessor ends."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_starts: ContextVar[bool] = ContextVar("early_starts", default=False)


def starts() -> bool:
    """Kernels called now must wait themselves for the results of those before them."""
    return _starts.get()


@contextmanager
def use(*, starts: bool = True) -> Generator[None]:
    """Kernels called in this context become part of a chain, or of none."""
    token = _starts.set(starts)
    try:
        yield
    finally:
        _starts.reset(token)

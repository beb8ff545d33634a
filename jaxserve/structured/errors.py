"""Why there is no guide for a grammar. The messages are for the client."""

from __future__ import annotations


class GrammarError(ValueError):
    """It cannot be compiled, or not within the limits."""


class GrammarsBusy(RuntimeError):
    """It could not be compiled now: that is not its fault, and it may be sent again."""

    def __init__(self, message: str, *, retry_after: float):
        """`retry_after`: seconds."""
        super().__init__(message)
        self.retry_after = retry_after

"""Why there is no guide for a grammar. The messages are for the client."""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar cannot be compiled, or not within the limits."""


class GrammarsBusy(RuntimeError):
    """The grammar could not be compiled now. That is not its fault; it may be sent again."""

    def __init__(self, message: str, *, retry_after: float):
        """`retry_after`: seconds."""
        super().__init__(message)
        self.retry_after = retry_after

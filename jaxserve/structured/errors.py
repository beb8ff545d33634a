"""Errors of grammars. Their messages are for the client."""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar cannot be compiled, or exceeds a limit."""


class GrammarsBusy(RuntimeError):
    """The grammar could not be compiled now. It is not at fault, and the client may retry."""

    def __init__(self, message: str, *, retry_after: float):
        """`retry_after`: seconds."""
        super().__init__(message)
        self.retry_after = retry_after

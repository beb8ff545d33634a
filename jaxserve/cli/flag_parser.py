"""A flag parser with one-line errors that suggest the flag that the user probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, override


class FlagParser(argparse.ArgumentParser):
    """Accepts only complete flag names. If prefixes worked, a new flag of a later version could
    make an old command line ambiguous."""

    def __init__(
        self,
        *,
        prog: str,
        description: str,
        epilog: str | None = None,
        usage: str | None = None,
        commands: str = "",
    ):
        """`commands`: the commands that the first word may name, separated by commas."""
        super().__init__(
            prog=prog,
            usage=usage or f"{prog} [flags]",
            description=textwrap.fill(description, 80),
            epilog=epilog,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._commands = commands

    @override
    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]  (its overloads)
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0], first=unknown[0] == (args or [""])[0]))
        return parsed

    def _unknown(self, word: str, *, first: bool) -> str:
        if not word.startswith("-"):
            if first and self._commands:
                names = [name for name in re.findall(r"\w+", self._commands) if name != "and"]
                meant = _meant(word, names) or (
                    f"; commands are {self._commands}. To serve a model: {self.prog} serve MODEL"
                )
                return f"unknown command {word!r}{meant}"
            return f"unexpected argument {word!r}"
        name = word.partition("=")[0]
        return f"unknown flag {name}{_meant(name, self._option_string_actions)}"

    @override
    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and one line. The usage text would push the error off the screen."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists all flags)\n")


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a default only if the flag has one, and names each value by one word."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        if action.default is True:
            return f"{action.help} (default: on)"
        return super()._get_help_string(action)

    @override
    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """Returns the last word of the flag in capitals: --cache-dir DIR."""
        return action.dest.rpartition("_")[2].upper()

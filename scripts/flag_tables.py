"""Makes tables of flags from the argument parsers: name, default and meaning."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from jaxserve.cli.options import _convert_parser, _parser


def flags(title: str) -> str:
    """The serving flags in one group of the parser."""
    return _flags(next(group for group in _parser(None)._action_groups if group.title == title))


def flags_of(command: str) -> str:
    """The flags that only this command has."""
    return _flags(next(g for g in _parser(command)._action_groups if g.title == command))


def flags_of_convert() -> str:
    """The flags of `convert`. Flags with the same meaning as in serving are listed by name only."""
    rows = _rows(_convert_parser()._action_groups[1])
    serving = {row for group in _parser(None)._action_groups for row in _rows(group)}
    same = ", ".join(row.split(" | ")[0].removeprefix("| ") for row in rows if row in serving)
    table = _table([row for row in rows if row not in serving])
    return f"{table}\n\nThe same as for serving: {same}."


def _flags(group: argparse._ArgumentGroup) -> str:
    return _table(_rows(group))


def _table(rows: list[str]) -> str:
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def _rows(group: argparse._ArgumentGroup) -> list[str]:
    rows: list[str] = []
    for action in group._group_actions:
        name = max(action.option_strings, key=len) if action.option_strings else ""
        if name in ("--help", ""):
            continue
        name = name.replace("--no-", "--")
        text, default = _default(action)
        values = _values(text, action.choices or ())
        rows.append(f"| `{name}` | {default} | {_sentence(text)}{values} |")
    return rows


def _values(text: str, choices: Iterable[str]) -> str:
    """The choices of a flag, if its help text does not name all of them."""
    if all(re.search(rf"\b{value}\b", text) for value in choices):
        return ""
    return f" One of {', '.join(f'`{value}`' for value in choices)}."


def _default(action: argparse.Action) -> tuple[str, str]:
    """Meaning and default of a flag. The default is the parser's, or the one at the end of the help
    text."""
    text = action.help or ""
    if match := re.search(r" \(default: (.*)\)$", text):
        return text[: match.start()], match[1]
    if action.default is None:
        return text, "required" if action.required else "none"
    if isinstance(action.default, bool):
        return text, "on" if action.default else "off"
    if isinstance(action.default, float):
        return text, f"{action.default:g}"
    return text, str(action.default)


def _sentence(text: str) -> str:
    text = text.replace("%%", "%").replace("|", "\\|").replace("*", "\\*")
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")

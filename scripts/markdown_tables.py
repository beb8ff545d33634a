"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TEXT = "pick it when"
TEXTS = ("", TEXT, "GPU", "short names")
"""Heads of the columns that contain text."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *sources: str) -> str:
    """A Markdown table, whose first column is text and the others numbers, then links to
    `sources`."""
    ends = ["---" if name in TEXTS else "---:" for name in head[1:]]
    lines = [f"| {' | '.join(head)} |", f"|---|{'|'.join(ends)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if sources:
        links = ", ".join(f"[{name}.json](measurements/{name}.json)" for name in sources)
        lines += ["", f"Source: {links}."]
    return "\n".join(lines)

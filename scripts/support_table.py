"""Writes the tables of supported GPUs into the documentation, from the output of
`support_matrix.py`.

    python scripts/support_table.py

The tables are between two comments: a row per GPU in README.md, a row per format in docs/models.md.
A test compares both with this script's output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "measurements" / "support.json"
BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"

GENERATIONS = {
    "8.0": "A100",
    "8.6": "A10, A40, RTX 30",
    "8.9": "L4, L40S, RTX 40",
    "9.0": "H100, H200",
    "10.0": "B200",
    "12.0": "RTX 50, RTX PRO 6000",
}
MEASURED = {"9.0"}
"""Compute capabilities of the cards that were used for tests and measurements."""


def table(found: dict[str, Any]) -> str:
    """A Markdown table with a row for formats with the same support, and a column per generation of
    GPUs."""
    cards = {capability: found["cards"].get(capability, {}) for capability in GENERATIONS}
    formats = [
        (kind, name)
        for kind in ("weights", "kv")
        for name in dict.fromkeys(name for card in cards.values() for name in card.get(kind, {}))
    ]
    names = [f"{gpus} ({capability})" for capability, gpus in GENERATIONS.items()]
    rows: dict[str, list[str]] = {}
    for kind, name in formats:
        cells = [cell(each, card.get(kind, {}).get(name)) for each, card in cards.items()]
        rows.setdefault(" | ".join(cells), []).append(f"{'KV ' * (kind == 'kv')}`{name}`")
    lines = [f"| formats | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| {', '.join(formats)} | {cells} |" for cells, formats in rows.items()]
    return "\n".join(lines)


def summary(found: dict[str, Any]) -> str:
    """A Markdown table with a row for each generation of GPUs, and the support of all formats
    together."""
    lines = ["| GPU | compute capability | kernels |", "|---|---|---|"]
    for capability, cards in GENERATIONS.items():
        card = found["cards"].get(capability, {})
        entries = {
            f"{'KV ' if kind == 'kv' else ''}`{name}`": entry
            for kind in ("weights", "kv")
            for name, entry in card.get(kind, {}).items()
        }
        known = {name: cell(capability, entry) for name, entry in entries.items()}
        usual = cell(capability, {"failed": {}}) if known else cell(capability, None)
        others = [f"{name} {text}" for name, text in known.items() if text != usual]
        text = "; ".join([f"{usual}, in all formats" if not others else usual, *others])
        lines.append(f"| {cards} | {capability} | {text if known else usual} |")
    return "\n".join(lines)


def cell(capability: str, entry: dict[str, Any] | None) -> str:
    """The support of a format on a GPU, in words."""
    if entry is not None and entry["failed"]:
        return f"falls back ({len(entry['failed'])} of {entry['kernels']} kernels)"
    if capability in MEASURED:
        return "measured"
    return "compiles" if entry is not None else "not tried"


def with_table(page: str, text: str) -> str:
    """The page with this text between the comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"a page has no place for the table: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


PAGES = {ROOT / "README.md": summary, ROOT / "docs" / "models.md": table}


def main() -> None:
    found = json.loads(SOURCE.read_text(encoding="utf-8"))
    for path, made in PAGES.items():
        text = with_table(path.read_text(encoding="utf-8"), made(found))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

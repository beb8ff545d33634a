"""Count the words of each page, and the words of its sentences.

    python -m lab.words
    python -m lab.words README.md docs/api.md

Tables, code, headings and links' targets are no sentences. A page whose median sentence has 20
words or more is marked.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
MOST = 20
"""Words that the median sentence of a page should stay below."""


def pages() -> list[Path]:
    """Those that users and contributors read: neither the logs nor the list of changes."""
    root = [page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"]
    return [*root, *sorted((ROOT / "docs").glob("*.md"))]


def prose(text: str) -> str:
    """What is left without code, tables, comments, headings and targets of links."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(\||#|!\[|    ).*$", "", text, flags=re.M)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[int]:
    """Words of each sentence, list item or line that ends a paragraph."""
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*(?:[-*>]|\d+\.)\s+", prose(text))
    lengths = [len(re.findall(r"[\w'`/.-]+", part)) for part in parts]
    return [length for length in lengths if length > 1]


def main() -> None:
    given = [Path(name) for name in sys.argv[1:]] or pages()
    total = site = 0
    for page in given:
        text = page.read_text(encoding="utf-8")
        words, lengths = len(re.findall(r"\S*\w\S*", text)), sentences(text)
        total += words
        site += words if page.resolve().parent == ROOT / "docs" else 0
        middle = median(lengths) if lengths else 0
        mark = "" if middle < MOST else "  too long"
        print(f"{page.name:24} {words:6,} words, sentences: median {middle:4.1f}{mark}")
    print(f"{'the site':24} {site:6,} words")
    print(f"{'all':24} {total:6,} words")


if __name__ == "__main__":
    main()

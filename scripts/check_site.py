"""Checks every link of the built site: pages, pictures, style sheets and anchors.

    python scripts/check_site.py

`make docs` runs it after the build. Links to other sites are counted, but not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import override
from urllib.parse import unquote, urlparse

SITE = Path(__file__).parents[1] / "build" / "site"


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """Returns a line for each link whose file or anchor does not exist."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    return [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        for link in page.links
        if not urlparse(link).scheme and not _is_there(link, file, site, pages)
    ]


def _is_there(link: str, file: Path, site: Path, pages: dict[Path, Page]) -> bool:
    url = urlparse(link)
    path = unquote(url.path)
    target = site / path.lstrip("/") if path.startswith("/") else file.parent / path
    target = file if not path else target.resolve()
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return False
    return not url.fragment or target not in pages or url.fragment in pages[target].anchors


def main() -> None:
    found = broken(SITE)
    for line in found:
        print(f"broken link: {line}", file=sys.stderr)
    if found or not SITE.is_dir():
        raise SystemExit(f"{len(found)} broken links in {SITE}")


if __name__ == "__main__":
    main()

"""Rewrites links out of docs/ for the site. mkdocs calls this hook for each page.

A page may link to `../SECURITY.md`, which works on GitHub, but the site has no such page. With
`repo_url` in mkdocs.yml the link goes to the repository; without it, the name becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
_ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Returns the page with its links out of docs/ rewritten.

    Raises:
      FileNotFoundError: the target of a link does not exist.
    """

    def linked(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2].removeprefix("../"), match[3] or ""
        if not (_ROOT / target).exists():
            raise FileNotFoundError(f"linked, but not there: {target}")
        if not config.repo_url:
            return text if target in text else f"{text} (`{target}` in the repository)"
        kind = "tree" if (_ROOT / target).is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{target}{anchor})"

    return _LINK.sub(linked, markdown)

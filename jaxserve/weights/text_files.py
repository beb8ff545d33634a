"""Copies the files of a model other than its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""Settings and tokenizer files."""


def copy_text_files(source: Path, target: Path) -> None:
    """Copies config.json, tokenizer files and similar ones. Raises OSError if a file cannot be read
    or written."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _TEXT_FILES:
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)

"""What belongs to a model beside its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""Settings and tokenizer; without the index of files of weights."""


def copy_text_files(source: Path, target: Path) -> None:
    """Copy config.json, the tokenizer's files and the like. OSError: they cannot be read, or the
    target cannot be written."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _TEXT_FILES:
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)

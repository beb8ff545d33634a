"""Of which commit a result is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """From git, with -dirty where the tree differs, or from COMMIT in the environment, where the
    tree is a copy."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
        return found.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")

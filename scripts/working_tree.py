"""Finds the commit that a result belongs to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The commit according to git, with -dirty if the tree has changes; or the environment variable
    COMMIT, if the tree is a copy without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
        return found.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")

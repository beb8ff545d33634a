"""Reads settings files whole. A file that cannot be read gives a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.config import ConfigError


def read_text(path: Path, flag: str = "") -> str:
    """Reads a UTF-8 file. `flag` is the flag that names it.

    Raises:
      ConfigError: the file cannot be read or is not UTF-8.
    """
    what = f"{flag} {path}".strip()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}: cannot be read: it is not UTF-8: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      ConfigError: the file is missing, cannot be read, or holds no JSON object.
    """
    if not path.exists():
        raise ConfigError(f"{path} is missing")
    try:
        content: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content

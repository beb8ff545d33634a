"""Files of settings beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.config import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ConfigError: it is missing, cannot be read, or holds no object."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content

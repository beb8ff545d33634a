"""`--config FILE`: flags in a YAML file, in vLLM's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def with_config_file(argv: list[str]) -> list[str]:
    """Returns the command line with the flags of its `--config FILE` in front. Flags on the command
    line win.

    `flags_of` says how keys and values become flags.

    Raises:
      ValueError: the file cannot be read or holds no flags; the message is one line.
    """
    path, rest = _split(argv)
    if path is None:
        return argv
    commands = rest[:1] if rest and not rest[0].startswith("-") else []
    return [*commands, *_flags(path), *rest[len(commands) :]]


def _split(argv: list[str]) -> tuple[str | None, list[str]]:
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--config":
            if not equals and place + 1 == len(argv):
                raise ValueError("--config needs a file")
            end = place + (1 if equals else 2)
            return value if equals else argv[place + 1], [*argv[:place], *argv[end:]]
    return None, argv


def _flags(path: str) -> Iterator[str]:
    import yaml  # not for command lines without a file

    try:
        content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold flags and values, such as 'port: 8000'")
    yield from flags_of(content)


def flags_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the command line for settings. Keys are flags without leading dashes; `_` may replace
    `-`.

    A list gives several values, `true` the bare flag, `false` its `--no-` form, a mapping JSON, and
    None nothing.
    """
    for key, value in settings.items():
        name = f"--{str(key).replace('_', '-')}"
        if value is True:
            yield name
        elif value is False:
            yield name.replace("--", "--no-", 1)
        elif isinstance(value, list):
            yield name
            yield from map(str, value)
        elif isinstance(value, dict):
            yield f"{name}={json.dumps(value)}"
        elif value is not None:
            yield f"{name}={value}"

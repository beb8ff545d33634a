"""Merges the metrics of all replicas into one exposition."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)")


def merged(expositions: Mapping[str, str]) -> str:
    """Returns the samples of all expositions with a label `replica`, with each family once.

    Args:
      expositions: texts in Prometheus's format, by the name of the replica.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, family, _ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(each.startswith(f"# {kind} ") for each in known):
                    known.append(line)
            elif match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                named = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{named}}} {value}")
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join(lines) + "\n"

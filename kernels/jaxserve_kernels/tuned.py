"""Launch parameters found by measurement: a JSON file for each device beside each operation.

`scripts/tune_kernels.py` writes them. Where there is no entry the operation's heuristic decides.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

from jaxserve_kernels.target import Parameters, Shape, Target


def find(operation: str, shape: Shape, tokens: int, *, target: Target) -> Parameters | None:
    """The entry of this shape for the fewest tokens that are not below `tokens`."""
    for override in target.tuned:
        if (override.operation, override.shape) == (operation, shape):
            return dict(override.parameters)
    entries = _table(operation, file_name(target.gpu.name)).get(shape, {})
    enough = [most for most in entries if most >= tokens]
    return entries[min(enough)] if enough else None


def file_name(device: str) -> str:
    return device.lower().replace(" ", "_") + ".json"


@functools.cache
def _table(operation: str, name: str) -> Mapping[Shape, Mapping[int, Parameters]]:
    file = resources.files("jaxserve_kernels") / operation / "tuned" / name
    if not file.is_file():
        return {}
    table: dict[Shape, dict[int, Parameters]] = {}
    for entry in json.loads(file.read_text())["entries"]:
        table.setdefault(tuple(entry["shape"]), {})[entry["tokens"]] = entry["parameters"]
    return table

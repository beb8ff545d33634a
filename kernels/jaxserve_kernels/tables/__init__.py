"""Tables of measured limits, by which operations choose kernels, and of launch parameters.

There is a JSON file for each operation and device, `<operation>/<device>.json`. It holds

- `device`, `compute_capability`: the GPU of the measurements;
- `limits`: for each name a `value`, its `unit` and `meaning`, and in `source` the log or commit
  that chose it. Programs and warps are given per multiprocessor, so that they scale to other cards;
- `launches`: launch parameters by shape and largest number of tokens, which
  `scripts/tune_kernels.py --write` found. Without an entry the operation's own rule decides.

Limits come from the nearest card: the same name, else the nearest compute capability. Launch
parameters come from the same card only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib import resources
from typing import Any

from jaxserve_kernels.device import Device
from jaxserve_kernels.target import Parameters, Shape, Target

LIMITS: Shape = ()
"""Shape under which `Target.with_tuned` overrides an operation's limits, by name."""


def limits[Limits](operation: str, kind: type[Limits], target: Target) -> Limits:
    """An operation's limits for a target, as `kind`: a NamedTuple whose fields are limits'
    names."""
    return _limits(operation, kind, target.device, target.tuned)


def launch(operation: str, shape: Shape, tokens: int, *, target: Target) -> Parameters | None:
    """Launch parameters of a shape: the entry with the smallest token limit that is at least
    `tokens`. None if there is none."""
    for override in target.tuned:
        if (override.operation, override.shape) == (operation, shape):
            return dict(override.parameters)
    table = _tables(operation).get(target.gpu.name, {})
    entries = {
        entry["tokens"]: entry["parameters"]
        for entry in table.get("launches", [])
        if tuple(entry["shape"]) == shape
    }
    enough = [most for most in entries if most >= tokens]
    return entries[min(enough)] if enough else None


def file_name(device: str) -> str:
    """The file name of a card's table."""
    return device.lower().replace(" ", "_") + ".json"


@functools.cache
def _limits(operation: str, kind: type[Any], device: Device | None, tuned: Any) -> Any:
    table = nearest([each for each in _tables(operation).values() if each["limits"]], device)
    values = {name: _number(each["value"]) for name, each in table["limits"].items()}
    for override in tuned:
        if (override.operation, override.shape) == (operation, LIMITS):
            values |= dict(override.parameters)
    return kind(**values)


def nearest(tables: Sequence[Mapping[str, Any]], device: Device | None) -> Mapping[str, Any]:
    """The table of the nearest card. Of two at the same distance, that of the lower capability."""
    if device is None:
        return tables[0]

    def distance(table: Mapping[str, Any]) -> tuple[bool, int, bool]:
        apart = table["compute_capability"] - device.compute_capability
        return table["device"] != device.name, abs(apart), apart > 0

    return min(tables, key=distance)


@functools.cache
def _tables(operation: str) -> Mapping[str, Mapping[str, Any]]:
    """An operation's tables, by the device's name."""
    folder = resources.files(__name__) / operation
    files = sorted(each.name for each in folder.iterdir() if each.name.endswith(".json"))
    tables = [json.loads((folder / name).read_text(encoding="utf-8")) for name in files]
    return {table["device"]: table for table in tables}


def _number(value: int | str) -> int | Fraction:
    return Fraction(value) if isinstance(value, str) else value

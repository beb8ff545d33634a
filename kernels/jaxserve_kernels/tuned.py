"""Launch parameters found by measurement: a JSON file for each device beside each operation.

`scripts/tune_kernels.py` writes them. Where there is no entry the operation's heuristic decides.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import resources
from types import MappingProxyType

import jax

from jaxserve_kernels import target

type Shape = tuple[str | int, ...]
"""What a configuration depends on beside the number of tokens; its meaning is the operation's."""

type Parameters = Mapping[str, int]

_override: ContextVar[Mapping[tuple[str, Shape], Parameters]] = ContextVar(
    "tuned", default=MappingProxyType({})
)


def find(operation: str, shape: Shape, tokens: int) -> Parameters | None:
    """The entry of this shape for the fewest tokens that are not below `tokens`."""
    override = _override.get().get((operation, shape))
    if override is not None:
        return override
    current = target.current()
    if current.device is None and current.compute_capability is not None:
        return None  # compiled for a card that is not here and has no name
    device = current.device or jax.devices()[0].device_kind
    entries = _table(operation, file_name(device)).get(shape, {})
    enough = [most for most in entries if most >= tokens]
    return entries[min(enough)] if enough else None


@contextmanager
def use(parameters: Mapping[tuple[str, Shape], Parameters]) -> Generator[None]:
    """Trace with these parameters, by operation and shape: for the tuner."""
    token = _override.set({**_override.get(), **parameters})
    try:
        yield
    finally:
        _override.reset(token)


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

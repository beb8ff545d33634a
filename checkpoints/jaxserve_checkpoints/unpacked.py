"""The engine's own tensors as Hugging Face's: what the rules put together is taken apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.native import NativeCheckpoint
from jaxserve_checkpoints.reader import AnyArray, CheckpointError
from jaxserve_checkpoints.rules import WORD, AnyRule, Rule

type RowsOf = Callable[[str], tuple[int, ...] | None]
"""From the last part of a leaf's path to the rows of each source; None: it has one source."""


class _Rows(NamedTuple):
    """Rows [start, stop) of a native tensor."""

    tensor: str
    start: int
    stop: int


class UnpackedCheckpoint:
    """A checkpoint of the engine's own that is not quantised, by Hugging Face's names."""

    def __init__(
        self, native: NativeCheckpoint, rules: Sequence[AnyRule], abstract: Any, rows_of: RowsOf
    ):
        """`abstract`: the tree of ShapeDtypeStructs that was converted.

        Raises:
          CheckpointError: it is quantised, or made of tensors in a way that cannot be undone.
        """
        if native.description.types:
            raise CheckpointError(
                f"{native.place}: quantised; only --to native and --to orbax keep it as it is"
            )
        self._native = native
        by_leaf = {rule.leaf: rule for rule in rules if isinstance(rule, Rule)}
        self._places: dict[str, _Rows] = {}
        for part in leaf_parts(abstract):
            layer = "{layer}" if part.layer is not None else None
            path = part.path
            generic = part.owner.replace("layers.", "layers.{layer}.", 1) if layer else path
            rule = by_leaf[generic]
            if rule.transforms or rule.axis:
                raise CheckpointError(f"{native.place}: {generic} cannot be taken apart again")
            rows = rows_of(path.rpartition(".")[2]) or part.leaf.shape[:1]
            start = 0
            for source, count in zip(rule.sources, rows, strict=True):
                name = WORD.sub(str(part.layer), source)
                self._places[name] = _Rows(path, start, start + count)
                start += count

    @property
    def folder(self) -> Path:
        return self._native.tensors.folder

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._places))

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        return (place.stop - place.start, *self._native.tensors.shape(place.tensor)[1:])

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._native.tensors.dtype(self._places[name].tensor)

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> AnyArray:
        place = self._places[name]
        return self._native.tensors.read(place.tensor)[place.start : place.stop]

    def release(self, name: str) -> None:
        self._native.tensors.release(self._places[name].tensor)

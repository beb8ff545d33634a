"""Converts the engine's own tensors back to Hugging Face's, by inverting the naming rules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve_checkpoints.naming import leaf_parts, leaf_paths, substitute, with_words
from jaxserve_checkpoints.native import NativeCheckpoint
from jaxserve_checkpoints.quantized.writing import (
    Scheme,
    Unwritable,
    configuration,
    scheme_of,
    tensors_of,
)
from jaxserve_checkpoints.reader import AnyArray, CheckpointError
from jaxserve_checkpoints.rules import AnyRule, Rule
from jaxserve_kernels.weights import is_quantized

type RowsOf = Callable[[str], tuple[int, ...] | None]
"""Maps the last component of a leaf's path to the rows of each source; None: one source."""


class _Rows(NamedTuple):
    """Rows [start, stop) of a native tensor."""

    tensor: str
    start: int
    stop: int


class _Part(NamedTuple):
    """A part of the engine's tree."""

    path: str
    owner: str
    rows: Mapping[str, int]
    """Number of rows of each of its tensors, in order, by Hugging Face's name."""
    is_matrix: bool


def _parts_of(rules: Sequence[AnyRule], abstract: Any, rows_of: RowsOf, place: Path) -> list[_Part]:
    """Returns the tensors of each part. CheckpointError: a rule cannot be inverted."""
    by_leaf = {rule.leaf: rule for rule in rules if isinstance(rule, Rule)}
    found: list[_Part] = []
    for part in leaf_parts(abstract):
        generic = with_words(part.path)
        rule = by_leaf[generic]
        if rule.transforms or rule.axis:
            raise CheckpointError(f"{place}: {generic} cannot be taken apart again")
        counts = rows_of(part.path) or part.leaf.shape[:1]
        names = [substitute(source, part.numbers) for source in rule.sources]
        rows = dict(zip(names, counts, strict=True))
        found.append(_Part(part.path, part.owner, rows, len(part.leaf.shape) == 2))
    return found


class UnpackedCheckpoint:
    """An unquantised checkpoint in the engine's own format, under Hugging Face's tensor names."""

    def __init__(
        self, native: NativeCheckpoint, rules: Sequence[AnyRule], abstract: Any, rows_of: RowsOf
    ):
        """`abstract`: the tree of ShapeDtypeStructs that was converted.

        Raises:
          CheckpointError: it is quantised, or a rule cannot be inverted.
        """
        if native.description.types:
            raise CheckpointError(
                f"{native.place}: quantised, which nothing here reads as plain numbers: take the "
                "original"
            )
        self._native = native
        self._places: dict[str, _Rows] = {}
        for part in _parts_of(rules, abstract, rows_of, native.place):
            start = 0
            for name, count in part.rows.items():
                self._places[name] = _Rows(part.path, start, start + count)
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


def public_configuration(
    rules: Sequence[AnyRule], abstract: Any, encoded: Any, rows_of: RowsOf, place: Path
) -> dict[str, Any]:
    """Returns the `quantization_config` for weights that are written as PublicTensors.

    Args:
      abstract, encoded: the trees of ShapeDtypeStructs before and after quantising.
      place: location of the weights, for errors.

    Raises:
      CheckpointError: no layout can store the weights, or a rule cannot be inverted.
    """
    nodes = jax.tree.structure(abstract).flatten_up_to(encoded)
    owners = dict(zip((path for path, _ in leaf_paths(abstract)), nodes, strict=True))
    modules: dict[str, Scheme | None] = {}
    with _named(place):
        for part in _parts_of(rules, abstract, rows_of, place):
            weight = owners[part.owner]
            scheme = scheme_of(weight) if is_quantized(weight) else None
            if part.is_matrix:
                modules |= {name.rpartition(".")[0]: scheme for name in part.rows}
        return configuration(modules)


class PublicTensors:
    """A quantised checkpoint in the engine's own format, as tensors that other servers can read.

    One part is unpacked at a time: read the tensors in the order of `names`.
    """

    def __init__(
        self,
        native: NativeCheckpoint,
        rules: Sequence[AnyRule],
        abstract: Any,
        rows_of: RowsOf,
        dtype: np.dtype[Any] | None = None,
    ):
        """Unpacks one layer, to find the shapes.

        Args:
          native, rules, abstract, rows_of: see UnpackedCheckpoint.
          dtype: cast tensors that are not quantised to this; None: do not cast.

        Raises:
          CheckpointError: see `public_configuration`.
        """
        self._native = native
        self._dtype = dtype
        encoded = native.encoded(abstract)
        self.configuration = public_configuration(rules, abstract, encoded, rows_of, native.place)
        self._parts: dict[str, _Part] = {}
        """The part of each tensor, by the tensor's name, in order."""
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._now: tuple[_Part, dict[str, AnyArray]] | None = None
        forms: dict[str, list[dict[str, tuple[tuple[int, ...], np.dtype[Any]]]]] = {}
        for part in _parts_of(rules, abstract, rows_of, native.place):
            if part.owner not in forms:
                forms[part.owner] = [
                    {suffix: (array.shape, array.dtype) for suffix, array in each.items()}
                    for each in self._made(part)
                ]
            for name, suffixes in zip(part.rows, forms[part.owner], strict=True):
                for suffix, form in suffixes.items():
                    tensor = f"{name.rpartition('.')[0]}{suffix}"
                    self._shapes[tensor], self._parts[tensor] = form, part

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name][0]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._shapes[name][1]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    def read(self, name: str) -> AnyArray:
        part = self._parts[name]
        if self._now is None or self._now[0] is not part:
            arrays = {
                f"{each.rpartition('.')[0]}{suffix}": array
                for each, made in zip(part.rows, self._made(part), strict=True)
                for suffix, array in made.items()
            }
            self._now = part, arrays
        return self._now[1][name]

    def release(self, name: str) -> None:
        self._native.release_part(self._parts[name].path)

    def _made(self, part: _Part) -> list[dict[str, AnyArray]]:
        """Returns each module's tensors, by their suffix after the module's name."""
        weight = self._native.part(part.path)
        if is_quantized(weight):
            with _named(self._native.place):
                return tensors_of(weight, list(part.rows.values()))
        whole: AnyArray = weight if self._dtype is None else weight.astype(self._dtype, copy=False)
        edges = np.cumsum(list(part.rows.values()))[:-1]
        suffixes = [f".{name.rpartition('.')[2]}" for name in part.rows]
        pieces = zip(suffixes, np.split(whole, edges), strict=True)
        return [{suffix: piece} for suffix, piece in pieces]


@contextlib.contextmanager
def _named(place: Path) -> Generator[None]:
    """Context manager: turns Unwritable into a CheckpointError that names the place."""
    try:
        yield
    except Unwritable as error:
        raise CheckpointError(f"{place}: {error}") from None

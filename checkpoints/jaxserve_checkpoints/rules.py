"""Rules, as data, for building the leaves of a parameter tree from a checkpoint's tensors. No
jax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"\{(\w+)\}")
"""A braced word in a leaf's path or a tensor's name: it stands for a number."""


type Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transpose:
    """Swaps the last two axes: [..., a, b] becomes [..., b, a]."""

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of `apply`'s result for an array of this shape."""
        return (*shape[:-2], shape[-1], shape[-2])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array transformed, a view where that is possible."""
        return array.swapaxes(-1, -2)


@dataclass(frozen=True)
class Split:
    """Takes part `index` of `parts` equal parts along `axis`. Other leaves take the other parts."""

    parts: int
    index: int
    axis: int = 0

    def shape(self, shape: Shape) -> Shape:
        _check_divisible(shape, self.axis, self.parts)
        return _resized(shape, self.axis, shape[self.axis] // self.parts)

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        size = array.shape[self.axis] // self.parts
        return array[_along(self.axis, slice(self.index * size, (self.index + 1) * size))]


@dataclass(frozen=True)
class Element:
    """Takes one entry along `axis`, and removes the axis. Other leaves take the other entries."""

    index: int | str
    """A number, or in a rule the name of the braced word that stands for it: "expert"."""
    axis: int = 0

    def shape(self, shape: Shape) -> Shape:
        if len(shape) <= self.axis or shape[self.axis] <= int(self.index):
            raise ValueError(f"{list(shape)} has no entry {self.index} along axis {self.axis}")
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array[_along(self.axis, int(self.index))]


@dataclass(frozen=True)
class Reorder:
    """Moves entries that are `groups` apart along `axis` next to each other: 0, groups, 2 groups,
    ..., then 1, 1 + groups, ... With 2 groups, interleaved gate and up become gate, then up."""

    groups: int
    axis: int = 0

    def shape(self, shape: Shape) -> Shape:
        _check_divisible(shape, self.axis, self.groups)
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        every = [
            array[_along(self.axis, slice(first, None, self.groups))]
            for first in range(self.groups)
        ]
        return np.concatenate(every, axis=self.axis)


@dataclass(frozen=True)
class Scale:
    """Multiplies by `factor` in float32, and rounds to the tensor's dtype."""

    factor: float

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return (array.astype(np.float32) * np.float32(self.factor)).astype(array.dtype)


@dataclass(frozen=True)
class Offset:
    """Adds `summand`; the result is float32. Turns weights around 0 into weights around 1 without
    rounding."""

    summand: float

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(np.float32) + np.float32(self.summand)


@dataclass(frozen=True)
class Squeeze:
    """Removes an axis of size 1."""

    axis: int

    def shape(self, shape: Shape) -> Shape:
        if len(shape) <= self.axis or shape[self.axis] != 1:
            raise ValueError(f"{list(shape)} has no axis {self.axis} of size 1")
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.squeeze(self.axis)


type Transform = Transpose | Split | Element | Reorder | Scale | Offset | Squeeze


def _check_divisible(shape: Shape, axis: int, parts: int) -> None:
    """Raises ValueError if the axis does not exist, or is not divisible into `parts`."""
    if len(shape) <= axis or shape[axis] % parts:
        raise ValueError(f"{list(shape)} has no {parts} equal parts along axis {axis}")


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _along(axis: int, part: slice | int) -> tuple[slice | int, ...]:
    return (*(slice(None),) * axis, part)


@dataclass(frozen=True)
class Rule:
    """Builds a leaf: applies `transforms` in order to each of `sources`, and concatenates the
    results along `axis`.

    `{layer}` (or any other braced word) in `leaf` stands for a number, which replaces the same word
    in `sources`. Tensors of quantised modules cannot be transformed.
    """

    leaf: str
    sources: tuple[str, ...]
    axis: int = 0
    transforms: tuple[Transform, ...] = ()
    otherwise: Rule | None = None
    """The rule to use if the checkpoint has none of the sources."""

    def __post_init__(self) -> None:
        known = set(WORD.findall(self.leaf))
        used = {word for source in self.sources for word in WORD.findall(source)}
        indices = {each.index for each in self.transforms if isinstance(each, Element)}
        unknown = (used | {each for each in indices if isinstance(each, str)}) - known
        if unknown or not self.sources:
            what = f"{sorted(unknown)} in its sources only" if unknown else "no sources"
            raise ValueError(f"rule for {self.leaf!r} has {what}")


@dataclass(frozen=True)
class Ignore:
    """Tensors whose names match `pattern` (`*`, `?`) may stay unused."""

    pattern: str
    only_zeros: bool = False
    """Only if all their elements are 0."""


@dataclass(frozen=True)
class Repeat:
    """A checkpoint may contain `tensor` as a copy of `original`, with the same shape."""

    tensor: str
    original: str


type AnyRule = Rule | Ignore | Repeat

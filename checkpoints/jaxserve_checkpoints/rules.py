"""How tensors of a checkpoint make up the leaves of a parameter tree, as data. Without jax."""

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
    """The last two axes change places: [..., a, b] becomes [..., b, a]."""

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of `apply`'s result for an array of this shape."""
        return (*shape[:-2], shape[-1], shape[-2])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array transformed, a view where that is possible."""
        return array.swapaxes(-1, -2)


@dataclass(frozen=True)
class Split:
    """Part number `index` of `parts` equal ones along `axis`. Other leaves take the other parts."""

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
    """One entry along `axis`, which is gone then. Other leaves take the other entries."""

    index: int | str
    """In a rule the braced word of its leaf that stands for the number: "expert"."""
    axis: int = 0

    def shape(self, shape: Shape) -> Shape:
        if len(shape) <= self.axis or shape[self.axis] <= int(self.index):
            raise ValueError(f"{list(shape)} has no entry {self.index} along axis {self.axis}")
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array[_along(self.axis, int(self.index))]


@dataclass(frozen=True)
class Reorder:
    """Entries `groups` apart along `axis` come next to each other: 0, groups, 2 groups, ..., then
    1, 1 + groups, ... Two groups turn interleaved gate and up into gate, then up."""

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
    """Times `factor`, computed in float32 and rounded to the tensor's dtype."""

    factor: float

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return (array.astype(np.float32) * np.float32(self.factor)).astype(array.dtype)


@dataclass(frozen=True)
class Offset:
    """Plus `summand`, in float32: weights around 0 become weights around 1 without rounding."""

    summand: float

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(np.float32) + np.float32(self.summand)


@dataclass(frozen=True)
class Squeeze:
    """Without an axis of size 1."""

    axis: int

    def shape(self, shape: Shape) -> Shape:
        if len(shape) <= self.axis or shape[self.axis] != 1:
            raise ValueError(f"{list(shape)} has no axis {self.axis} of size 1")
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.squeeze(self.axis)


type Transform = Transpose | Split | Element | Reorder | Scale | Offset | Squeeze


def _check_divisible(shape: Shape, axis: int, parts: int) -> None:
    """ValueError: the axis is not there, or not made of so many equal parts."""
    if len(shape) <= axis or shape[axis] % parts:
        raise ValueError(f"{list(shape)} has no {parts} equal parts along axis {axis}")


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _along(axis: int, part: slice | int) -> tuple[slice | int, ...]:
    return (*(slice(None),) * axis, part)


@dataclass(frozen=True)
class Rule:
    """The leaf is its sources, each put through `transforms` in their order, concatenated along
    `axis`.

    `{layer}` (or any other braced word) in `leaf` stands for a number, which replaces the same
    word in `sources`. Tensors of quantised modules cannot be transformed.
    """

    leaf: str
    sources: tuple[str, ...]
    axis: int = 0
    transforms: tuple[Transform, ...] = ()
    otherwise: Rule | None = None
    """What fills the leaf in a checkpoint that has none of the sources."""

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
    """Tensors with names like `pattern` (`*`, `?`) may stand in a checkpoint unused."""

    pattern: str
    only_zeros: bool = False
    """If all their numbers are 0."""


@dataclass(frozen=True)
class Repeat:
    """`tensor` may stand in a checkpoint as a repetition of `original`, with the same shape."""

    tensor: str
    original: str


type AnyRule = Rule | Ignore | Repeat

"""What a format of quantised checkpoints says about itself, and codes on their way to a weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve_checkpoints.reader import AnyArray
from jaxserve_kernels.weights import (
    Weight,
    pack_fp8,
    pack_int4,
    pack_int8,
    pack_mxfp4,
    pack_nvfp4,
)

KERNEL_GROUPS = (128, 64, 32)
"""Groups are cut into the first of these that divides them, which repeats their scales and changes
nothing else; one that none divides stays as it is, and no kernel knows it."""


class Inconsistent(Exception):
    """A module's tensors contradict the configuration or each other; says which and how."""


class TensorInfo(NamedTuple):
    """Of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Expected(NamedTuple):
    """What a format wants a tensor to be."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of these."""
    dtypes: tuple[str, ...]
    optional: bool = False


def expect(*shapes: tuple[int, ...], dtypes: str, optional: bool = False) -> Expected:
    """`dtypes`: names, separated by spaces."""
    return Expected(shapes, tuple(dtypes.split()), optional)


FLOATS = "float16 bfloat16 float32"


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """How a quantiser keeps the linear layers of a model. Tensors are named by what follows the
    module's name: ".qweight"."""

    main: ClassVar[str]
    """A module that has this tensor is quantised."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Tensors that a module may have and that this engine has no use for."""

    @abstractmethod
    def describe(self) -> str:
        """For the log: the format and its settings."""

    def holds(self, main: TensorInfo) -> bool:
        """Whether a module with this main tensor is quantised."""
        return True

    @abstractmethod
    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        """(out, in) of a module. Inconsistent: it cannot be told."""

    @abstractmethod
    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        """All tensors that a module [out, depth] has."""

    def check(self, read: Callable[[str], AnyArray | None]) -> None:
        """Inconsistent: values that contradict the configuration. `read` gives None for a tensor
        that is not there."""
        return

    def order(self, read: Callable[[str], AnyArray | None]) -> AnyArray | None:
        """int32 [in]: inputs in the order in which groups of them share a scale; None if groups
        are neighbours. Inconsistent: groups of different sizes."""
        return None

    @abstractmethod
    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Codes:
        """Codes of a module, inputs in `order` if one is given. Pure, for jit."""


class IntCodes(NamedTuple):
    """(codes - zero) * scale; a zero of None is 8."""

    codes: Array  # uint8 [out, in], 0..15
    scale: Array  # float32 [out, groups]
    zero: Array | None  # like scale, int32 or float32

    def pack(self) -> Weight:
        return pack_int4(self.codes, self.scale, self.zero)


class Int8Codes(NamedTuple):
    """codes * scale"""

    codes: Array  # int8 [out, in]
    scale: Array  # float32 [out, groups]

    def pack(self) -> Weight:
        return pack_int8(self.codes, self.scale)


class Fp8Codes(NamedTuple):
    """values * scale"""

    values: Array  # float8_e4m3fn [out, in]
    scale: Array  # float32 [out, groups]

    def pack(self) -> Weight:
        return pack_fp8(self.values, self.scale)


class Nvfp4Codes(NamedTuple):
    """e2m1(codes) * scale * row_scale"""

    codes: Array  # uint8 [out, in], 0..15
    scale: Array  # float8_e4m3fn [out, in / 16]
    row_scale: Array  # float32 [out]

    def pack(self) -> Weight:
        return pack_nvfp4(self.codes, self.scale, self.row_scale)


class Mxfp4Codes(NamedTuple):
    """e2m1(codes) * 2 ** (exponents - 127)"""

    codes: Array  # uint8 [..., out, in], 0..15
    exponents: Array  # uint8 [..., out, in / 32]

    def pack(self) -> Weight:
        return pack_mxfp4(self.codes, self.exponents)


type Codes = IntCodes | Int8Codes | Fp8Codes | Nvfp4Codes | Mxfp4Codes


def nibbles(words: Array) -> Array:
    """int32 [..., n] to uint8 [..., 8 n], each word's from its low bits up."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    each = (words.astype(jnp.uint32)[..., None] >> shifts) & 15
    return each.astype(jnp.uint8).reshape(*words.shape[:-1], -1)


def nibble_pairs(packed: Array) -> Array:
    """uint8 [..., n] to uint8 [..., 2 n], each byte's low half first."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def int_codes(codes: Array, scale: Array, zero: Array | None) -> IntCodes:
    """With groups that kernels know, where groups are larger: [out, groups] of scale and zero."""
    depth, groups = codes.shape[-1], scale.shape[-1]
    group = depth // groups
    repeats = next((group // size for size in KERNEL_GROUPS if group % size == 0), 1)

    def repeated(values: Array) -> Array:
        return jnp.repeat(values, repeats, axis=-1)

    return IntCodes(
        codes, repeated(scale.astype(jnp.float32)), None if zero is None else repeated(zero)
    )


def groups_of(depth: int, group_size: int) -> int:
    """Number of groups; -1 is one for all. Inconsistent: they do not divide the inputs."""
    if group_size == -1:
        return 1
    if depth % group_size:
        raise Inconsistent(f"{depth} inputs are not groups of {group_size}")
    return depth // group_size


def order_of(group_index: AnyArray, group_size: int) -> AnyArray | None:
    """The order of inputs in which groups of `group_size` are neighbours, None if they are.

    Args:
      group_index: int [in], the group of each input.
    """
    groups = groups_of(len(group_index), group_size)
    if group_index.min() < 0 or group_index.max() >= groups:
        raise Inconsistent(
            f"its inputs are in groups {group_index.min()} to {group_index.max()}, there are "
            f"groups 0 to {groups - 1}"
        )
    in_order = np.arange(len(group_index)) // (len(group_index) // groups)
    if np.array_equal(group_index, in_order):
        return None
    order = np.argsort(group_index, kind="stable").astype(np.int32)
    if not np.array_equal(group_index[order], in_order):
        sizes = np.bincount(group_index, minlength=groups)
        raise Inconsistent(
            f"its inputs are in groups of {sizes.min()} to {sizes.max()}, not {group_size}"
        )
    return order


def matrix_size(tensors: Mapping[str, TensorInfo], name: str) -> tuple[int, int]:
    """Shape of a tensor that must be a matrix. Inconsistent: it is not there, or is not one."""
    found = tensors.get(name)
    if found is None or len(found.shape) != 2:
        what = "it has no" if found is None else f"{list(found.shape)} is not a matrix:"
        raise Inconsistent(f"{what} {name[1:]}")
    return found.shape[0], found.shape[1]


def stored_size(
    tensors: Mapping[str, TensorInfo], name: str, read: Callable[[str], AnyArray]
) -> tuple[int, int]:
    """(out, in) that a tensor holds. Inconsistent: it is not there, or is not two sizes."""
    if name not in tensors:
        raise Inconsistent(f"it has no {name[1:]}")
    found = read(name).tolist()
    if tensors[name].shape != (2,) or not all(isinstance(n, int) and n > 0 for n in found):
        raise Inconsistent(f"{name[1:]} is {found!r:.60}, should be [out, in]")
    out, depth = found
    return out, depth


def row_scales(scale: Array, out: int) -> Array:
    """A scale per row or per tensor as float32 [out, 1]."""
    return jnp.broadcast_to(scale.astype(jnp.float32).reshape(-1, 1), (out, 1))

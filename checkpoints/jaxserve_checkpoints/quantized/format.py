"""The interface of a quantised checkpoint format, and decoded weights before they are packed."""

from __future__ import annotations

import re
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
"""Group sizes that kernels support. A larger group is split into groups of the first size that
divides it: its scale is repeated, and no value changes. Other groups stay as they are, without a
kernel."""


class Inconsistent(Exception):
    """A module's tensors contradict the configuration or each other. The message says how."""


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Expected(NamedTuple):
    """The shapes and dtypes that a format requires of a tensor."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of these."""
    dtypes: tuple[str, ...]
    optional: bool = False


def expect(*shapes: tuple[int, ...], dtypes: str, optional: bool = False) -> Expected:
    """Returns an Expected. `dtypes`: names, separated by spaces."""
    return Expected(shapes, tuple(dtypes.split()), optional)


FLOATS = "float16 bfloat16 float32"


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """How a quantiser stores linear layers.

    A module is one linear layer. Its tensors are named by their suffix after the module's name,
    for instance ".qweight". To add a format: subclass this in a file here, and recognise its
    configuration in `detect.py`.
    """

    main: ClassVar[str]
    """The suffix of the tensor that every quantised module has."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that a module may have and that the engine ignores."""
    pads: ClassVar[bool] = False
    """Whether decoding pads inputs to a multiple that kernels support."""

    @abstractmethod
    def describe(self) -> str:
        """Returns the format's name and settings for the log."""

    def of(self, module: str) -> Format | None:
        """Returns the format of a module; None if the configuration excludes the module."""
        return self

    def holds(self, main: TensorInfo) -> bool:
        """Returns whether a module with this main tensor is quantised."""
        return True

    @abstractmethod
    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        """Returns (out, in) of a module.

        Raises:
          Inconsistent: the tensors do not determine it.
        """

    @abstractmethod
    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        """Returns the tensors of a module [out, depth], by suffix."""

    def check(self, read: Callable[[str], AnyArray | None]) -> None:
        """Check values against the configuration.

        Args:
          read: returns a tensor by suffix; None if the module lacks it.

        Raises:
          Inconsistent: a value contradicts the configuration.
        """
        return

    def order(self, read: Callable[[str], AnyArray | None]) -> AnyArray | None:
        """Returns the order of inputs in which each group is contiguous: int32 [in].

        None if groups are contiguous as stored.

        Raises:
          Inconsistent: groups have different sizes.
        """
        return None

    def prepared(self, suffix: str, array: AnyArray) -> AnyArray:
        """Converts a stored tensor to the form that `decode` takes. Runs on the host in NumPy,
        which has float64."""
        return array

    @abstractmethod
    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Codes:
        """Returns the codes of a module [out, in], inputs in `order` if given. Jit-compatible."""


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Several formats in one checkpoint. Each has targets, as defined by compressed-tensors: names
    of modules, `re:` with a pattern for the beginning of names, or classes of modules."""

    groups: tuple[tuple[tuple[str, ...], Format], ...]

    def describe(self) -> str:
        """Returns the formats' names and settings for the log."""
        return " and ".join(format.describe() for _, format in self.groups)

    def of(self, module: str) -> Format | None:
        """Returns the format of a module; None if no group has it. Names take precedence over
        patterns, and patterns over classes."""
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"

        def pattern(target: str) -> bool:
            return target.startswith("re:") and re.match(target[3:], module) is not None

        for matches in (module.__eq__, pattern, kind.__eq__):
            for targets, format in self.groups:
                if any(matches(target) for target in targets):
                    return format
        return None


type AnyFormat = Format | Mixed


class IntCodes(NamedTuple):
    """Unsigned 4-bit codes: weight = (codes - zero) * scale. If zero is None it is 8."""

    codes: Array  # uint8 [out, in], 0..15
    scale: Array  # float32 [out, groups]
    zero: Array | None  # like scale, int32 or float32

    def pack(self) -> Weight:
        """Returns the weight in the layout that kernels read."""
        return pack_int4(self.codes, self.scale, self.zero)


class Int8Codes(NamedTuple):
    """Signed 8-bit codes: weight = codes * scale."""

    codes: Array  # int8 [out, in]
    scale: Array  # float32 [out, groups]

    def pack(self) -> Weight:
        """Returns the weight in the layout that kernels read."""
        return pack_int8(self.codes, self.scale)


class Fp8Codes(NamedTuple):
    """e4m3 values: weight = values * scale."""

    values: Array  # float8_e4m3fn [out, in]
    scale: Array  # float32 [out, groups]

    def pack(self) -> Weight:
        """Returns the weight in the layout that kernels read."""
        return pack_fp8(self.values, self.scale)


class Nvfp4Codes(NamedTuple):
    """NVFP4: weight = e2m1(codes) * scale * row_scale."""

    codes: Array  # uint8 [out, in], 0..15
    scale: Array  # float8_e4m3fn [out, in / 16]
    row_scale: Array  # float32 [out]

    def pack(self) -> Weight:
        """Returns the weight in the layout that kernels read."""
        return pack_nvfp4(self.codes, self.scale, self.row_scale)


class Mxfp4Codes(NamedTuple):
    """MXFP4 (OCP MX 1.0): weight = e2m1(codes) * 2 ** (exponents - 127)."""

    codes: Array  # uint8 [..., out, in], 0..15
    exponents: Array  # uint8 [..., out, in / 32]

    def pack(self) -> Weight:
        """Returns the weight in the layout that kernels read."""
        return pack_mxfp4(self.codes, self.exponents)


type Codes = IntCodes | Int8Codes | Fp8Codes | Nvfp4Codes | Mxfp4Codes


def nibbles(words: Array) -> Array:
    """Unpack int32 [..., n] to 4-bit codes, uint8 [..., 8 n], low bits first."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    each = (words.astype(jnp.uint32)[..., None] >> shifts) & 15
    return each.astype(jnp.uint8).reshape(*words.shape[:-1], -1)


def nibble_pairs(packed: Array) -> Array:
    """Unpack uint8 [..., n] to 4-bit codes, uint8 [..., 2 n], low half first."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def int_codes(codes: Array, scale: Array, zero: Array | None) -> IntCodes:
    """Returns IntCodes whose groups kernels can read, see KERNEL_GROUPS.

    Args:
      codes: uint8 [out, in].
      scale, zero: [out, groups].
    """
    depth, groups = codes.shape[-1], scale.shape[-1]
    group = depth // groups
    repeats = next((group // size for size in KERNEL_GROUPS if group % size == 0), 1)

    def repeated(values: Array) -> Array:
        return jnp.repeat(values, repeats, axis=-1)

    return IntCodes(
        codes, repeated(scale.astype(jnp.float32)), None if zero is None else repeated(zero)
    )


def groups_of(depth: int, group_size: int) -> int:
    """Returns the number of groups. A group size of -1 means one group for all inputs.

    Raises:
      Inconsistent: the group size does not divide the inputs.
    """
    if group_size == -1:
        return 1
    if depth % group_size:
        raise Inconsistent(f"{depth} inputs are not groups of {group_size}")
    return depth // group_size


def order_of(group_index: AnyArray, group_size: int) -> AnyArray | None:
    """Returns the order of inputs in which each group is contiguous; None if they are.

    Args:
      group_index: int [in], the group of each input.

    Raises:
      Inconsistent: groups that do not exist, or of unequal sizes.
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
    """Returns the shape of a tensor. Raises Inconsistent if it is missing or not a matrix."""
    found = tensors.get(name)
    if found is None or len(found.shape) != 2:
        what = "it has no" if found is None else f"{list(found.shape)} is not a matrix:"
        raise Inconsistent(f"{what} {name[1:]}")
    return found.shape[0], found.shape[1]


def stored_size(
    tensors: Mapping[str, TensorInfo], name: str, read: Callable[[str], AnyArray]
) -> tuple[int, int]:
    """Returns (out, in) as stored in a tensor. Inconsistent if it is missing or malformed."""
    if name not in tensors:
        raise Inconsistent(f"it has no {name[1:]}")
    found = read(name).tolist()
    if tensors[name].shape != (2,) or not all(isinstance(n, int) and n > 0 for n in found):
        raise Inconsistent(f"{name[1:]} is {found!r:.60}, should be [out, in]")
    out, depth = found
    return out, depth


def row_scales(scale: Array, out: int) -> Array:
    """Returns a scale per row or per tensor as float32 [out, 1]."""
    return jnp.broadcast_to(scale.astype(jnp.float32).reshape(-1, 1), (out, 1))

"""What a quantised weight is to products: a type in one file, with its layout and its meaning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal

from jax import Array

from jaxserve_kernels.weights.layout import TILE_IN

_TYPES: dict[str, Any] = {}


class Kind(IntEnum):
    """Which codes a kernel unpacks; an argument of kernels."""

    OTHER = -1
    """Two codes in each 16-bit word, inputs j and 64 + j of a tile, as `layout.pack_bytes` puts
    bytes; a float32 scale per row or per 128 inputs. The kernel is given the function that unpacks
    them."""
    INT8 = 0
    FP8 = 1
    INT4 = 2  # from here on: 4-bit codes
    NVFP4 = 3
    MXFP4 = 4


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A quantised weight [out, in] as kernels take it, and what decides which kernel does."""

    arrays: tuple[Array, Array, Array]
    """Codes, scales, and zero points or scales per row; where there are none, any array."""
    kind: Kind = Kind.OTHER
    bits: Literal[4, 8]
    """That a code takes."""
    group: int
    """Inputs that share a scale; all, where a row has one."""
    scale_bytes: int = 4
    zero: bool = False
    """It has zero points."""
    inputs_per_tile: int = TILE_IN
    tokens_in: Literal["int8", "e4m3"] | None = None
    """As what many tokens can be multiplied with it; None: in bfloat16 only."""
    sums: bool = False
    """Its codes stand for (code - zero) * scale, so that products of codes need the sum of the
    tokens' over each group of inputs."""
    unpack: Any = None
    """Of Kind.OTHER: a Triton function of words uint16 [rows, 64] of a tile that returns their
    codes' values, bfloat16 [rows, 64] of inputs 0 to 63 and of inputs 64 to 127."""

    @property
    def row_bytes(self) -> int:
        """Of a row in a tile of 128 inputs: codes, scales and zero points. A scale per row does not
        count."""
        scales = TILE_IN // self.group * (2 if self.zero else 1)
        return TILE_IN * self.bits // 8 + self.scale_bytes * scales

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of kernels: KIND; GROUP, inputs per scale; ZERO, whether there are zero points;
        and of Kind.OTHER, UNPACK."""
        unpack = {} if self.unpack is None else {"UNPACK": self.unpack}
        return {
            "KIND": self.kind.value, "GROUP": self.group, "ZERO": int(self.zero), **unpack,
        }  # fmt: skip


class Quantized(ABC):
    """A weight [..., out, in] in codes: a NamedTuple of arrays, and what this class lists.

    A new format is one file: a NamedTuple, a subclass of it and of this class, and a function that
    makes one. Products then multiply by its definition. With an `operand` few tokens are multiplied
    by the kernel in `quantized_matmul/triton.py`.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__name__.startswith("_"):
            _TYPES[cls.__name__] = cls

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""

    @abstractmethod
    def dequantize(self) -> Array:
        """float32 [..., out, in]: the definition of what the codes mean."""

    @property
    def operand(self) -> Operand | None:
        """What kernels take, of a weight [out, in]; None: no kernel knows its groups or its number
        of inputs."""
        return None

    @property
    def reordered(self) -> tuple[Array, Quantized] | None:
        """int32 [in] and the weight with its inputs in that order, with which products multiply;
        None: inputs are where the model has them."""
        return None

    # Rows of an embedding

    @property
    def has_rows(self) -> bool:
        """Whether `take_rows` can be called."""
        return False

    def take_rows(self, ids: Array) -> Array:
        """float32 [n, in]: rows `ids` [n] of a weight [out, in].

        Raises:
          TypeError: the format has no such rows.
        """
        raise TypeError(f"rows are taken from 8-bit weights with a scale per row, not {type(self)}")

    # Copies in e4m3

    @property
    def can_be_copied(self) -> bool:
        """Whether many tokens may read a copy in e4m3: see `CopiedWeight`."""
        return False

    def e4m3_scale(self) -> Array:
        """A scale per row, with which the weight fits e4m3: float32 [..., out / 64, 1, 64].

        Raises:
          TypeError: there are no copies of the format.
        """
        raise TypeError(f"no copies are made of {type(self).__name__}")

    def e4m3_factors(self, scale: Array) -> Array:
        """What the kernel that makes a copy with that scale needs of each row of a weight
        [out, in]: 4 bytes [out / 64, 1, 64]."""
        return scale


def types() -> Mapping[str, Any]:
    """The formats by their types' names: what checkpoints may hold. A copy in e4m3 is none; it is
    made where weights are loaded."""
    return MappingProxyType(_TYPES)

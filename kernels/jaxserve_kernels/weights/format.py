"""The interface of quantised weights. Each format is one file: its type, layout and definition."""

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
    """Kinds of codes that kernels unpack: the kernel constant KIND."""

    OTHER = -1
    """Any format with two codes per 16-bit word, for inputs j and 64 + j of a tile like
    `layout.pack_bytes`, and a float32 scale per row or per 128 inputs. Its operand supplies the
    function that unpacks the codes."""
    INT8 = 0
    FP8 = 1
    INT4 = 2  # from here on: 4-bit codes
    NVFP4 = 3
    MXFP4 = 4


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A quantised weight [out, in] in the form that kernels take, and properties that select the
    kernel."""

    arrays: tuple[Array, Array, Array]
    """Codes, scales, and zero points or scales per row; any array if there are none."""
    kind: Kind = Kind.OTHER
    bits: Literal[4, 8]
    """Bits per code."""
    group: int
    """Inputs that share a scale; all inputs if a row has one scale."""
    scale_bytes: int = 4
    zero: bool = False
    """Whether it has zero points."""
    inputs_per_tile: int = TILE_IN
    tokens_in: Literal["int8", "e4m3"] | None = None
    """The 8-bit dtype of tokens with which it can be multiplied; None: bfloat16 only."""
    sums: bool = False
    """Whether a code means (code - zero) * scale. Products of codes then also need the sums of the
    tokens over each group of inputs."""
    unpack: Any = None
    """For Kind.OTHER: a Triton function of a tile's words, uint16 [rows, 64]. It returns the values
    of their codes: bfloat16 [rows, 64] for inputs 0 to 63, and for inputs 64 to 127."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes, scales and zero points in a tile of 128 inputs. Scales per row
        are not counted."""
        scales = TILE_IN // self.group * (2 if self.zero else 1)
        return TILE_IN * self.bits // 8 + self.scale_bytes * scales

    @property
    def constants(self) -> dict[str, Any]:
        """Kernel constants: KIND; GROUP, inputs per scale; ZERO, whether there are zero points; and
        UNPACK for Kind.OTHER."""
        unpack = {} if self.unpack is None else {"UNPACK": self.unpack}
        return {
            "KIND": self.kind.value, "GROUP": self.group, "ZERO": int(self.zero), **unpack,
        }  # fmt: skip


class Quantized(ABC):
    """Base class of weights [..., out, in] that are stored as codes.

    A new format is one file: a NamedTuple of arrays, a subclass of it and of this class, and a
    function that makes one. Products then dequantise it. If it has an `operand`, the kernel in
    `quantized_matmul/triton.py` multiplies few tokens with it.
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
        """float32 [..., out, in]: the values of the codes, by definition."""

    @property
    def operand(self) -> Operand | None:
        """The operand of a weight [out, in]; None if no kernel supports its groups or its number of
        inputs."""
        return None

    @property
    def reordered(self) -> tuple[Array, Quantized] | None:
        """The stored order of inputs, int32 [in], and the weight with its inputs in that order,
        which products use. None: inputs are in the model's order."""
        return None

    # Rows of an embedding

    @property
    def has_rows(self) -> bool:
        """Whether `take_rows` can be called."""
        return False

    def take_rows(self, ids: Array) -> Array:
        """float32 [n, in]: rows `ids` [n] of a weight [out, in].

        Raises:
          TypeError: rows cannot be taken from the format.
        """
        raise TypeError(f"rows are taken from 8-bit weights with a scale per row, not {type(self)}")

    # Copies in e4m3

    @property
    def can_be_copied(self) -> bool:
        """Whether many tokens may read a copy in e4m3: see `CopiedWeight`."""
        return False

    def e4m3_scale(self) -> Array:
        """A scale per row with which the weight fits e4m3: float32 [..., out / 64, 1, 64].

        Raises:
          TypeError: the format has no copies.
        """
        raise TypeError(f"no copies are made of {type(self).__name__}")

    def e4m3_factors(self, scale: Array) -> Array:
        """Per-row values that the kernel that makes a copy with that scale needs, for a weight
        [out, in]: 4 bytes each, [out / 64, 1, 64]."""
        return scale


def types() -> Mapping[str, Any]:
    """The formats by the names of their types, as in checkpoints. `CopiedWeight` is not among them:
    copies are made when weights are loaded."""
    return MappingProxyType(_TYPES)

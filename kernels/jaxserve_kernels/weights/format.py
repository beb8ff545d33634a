"""What a quantised weight is to products: a type in one file, with its layout and its meaning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Any

from jax import Array


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


class Quantized(ABC):
    """A weight [..., out, in] in codes: a NamedTuple of arrays, and what this class lists.

    A new format is one file with such a type under `@Quantized.register`, and a function that makes
    one. Products then multiply by its definition. With `has_kernel` few tokens are multiplied by
    the kernel in `quantized_matmul/triton.py`, which unpacks codes as `kernel_constants` says.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""

    @abstractmethod
    def dequantize(self) -> Array:
        """float32 [..., out, in]: the definition of what the codes mean."""

    @property
    @abstractmethod
    def has_kernel(self) -> bool:
        """Whether kernels know groups and inputs of these numbers."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Of a row in a tile of 128 inputs: codes, scales and zero points."""

    @property
    @abstractmethod
    def kernel_arrays(self) -> tuple[Array, Array, Array]:
        """Codes, scales, and zero points or scales per row; where there are none, any array."""

    @property
    @abstractmethod
    def kernel_constants(self) -> dict[str, Any]:
        """KIND, of `Kind`; GROUP, inputs per scale; ZERO, whether there are zero points. With
        Kind.OTHER also UNPACK: a Triton function of words uint16 [rows, 64] of a tile that returns
        their codes' values, bfloat16 [rows, 64] of inputs 0 to 63 and of inputs 64 to 127."""

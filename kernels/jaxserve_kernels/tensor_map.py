"""Tensor maps: what TMA, Hopper's unit for copies, knows of an array whose blocks it copies.

A program's chains of kernels encode their maps themselves, when they know the arrays' addresses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from jaxserve_kernels import cuda_driver
from jaxserve_kernels.cuda_driver import check

_BYTES = 128
_ALIGNMENT = 64
_ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
"""By CUtensorMapDataType: uint8, uint16, uint32, int32, uint64, int64, float16, float32, float64,
bfloat16, float32 (ftz), tf32, tf32 (ftz)."""
_L2_PROMOTION_128B = 2
_LAST_WITH_FAULT, _SMALL, _FAULT = 13010, 1 << 17, 1 << 21
"""Up to this version, drivers set a bit in the second word of maps that must not be set for arrays
of fewer bytes. CUTLASS clears it, too (include/cute/atom/copy_traits_sm90_tma.hpp)."""


class TensorMap(NamedTuple):
    """An array in memory, and its blocks. Axes are in the order of JAX, the last one is dense."""

    dtype: int
    """A CUtensorMapDataType."""
    swizzle: int
    """A CUtensorMapSwizzle."""
    shape: Sequence[int]
    strides: Sequence[int]
    """Elements between neighbours along each axis."""
    block: Sequence[int]
    fill: int
    """A CUtensorMapFloatOOBfill: what blocks have beyond the array."""


class Encoded:
    """Memory for a tensor map as kernels take it. `encode` fills it in."""

    def __init__(self, tensor: TensorMap) -> None:
        rank, width = len(tensor.shape), _ELEMENT_BYTES[tensor.dtype]
        strides = [width * each for each in tensor.strides]
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        self._dtype, self._rank = tensor.dtype, rank
        self._rest = (
            (c_uint64 * rank)(*reversed(tensor.shape)),
            (c_uint64 * (rank - 1))(*reversed(strides[:-1])),
            (c_uint32 * rank)(*reversed(tensor.block)),
            (c_uint32 * rank)(*[1] * rank),
            0,
            tensor.swizzle,
            _L2_PROMOTION_128B,
            tensor.fill,
        )
        last = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
        self._small = last + 1 < _SMALL
        self._array = 0

    def encode(self, array: int) -> None:
        """Fills in the map of the array at that address.

        Raises:
          CudaError: the driver refuses the map.
        """
        if array == self._array:
            return
        driver = cuda_driver.locked_library()
        status = driver.cuTensorMapEncodeTiled(
            c_void_p(self.address), self._dtype, self._rank, c_void_p(array), *self._rest
        )
        check(status, "cuTensorMapEncodeTiled")
        if self._small and _driver_version() <= _LAST_WITH_FAULT:
            c_uint64.from_address(self.address + 8).value &= ~_FAULT
        self._array = array


@functools.cache
def _driver_version() -> int:
    """The newest CUDA that the driver supports, e.g. 13000."""
    version = c_int()
    check(cuda_driver.locked_library().cuDriverGetVersion(byref(version)), "cuDriverGetVersion")
    return version.value

"""CUDA's driver through ctypes: the library, its errors, and the context that XLA works in."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_void_p
from typing import Any

_LIBRARY = "libcuda.so.1"


class CudaError(RuntimeError):
    """A function of CUDA's driver has failed."""


def check(status: int, what: str) -> None:
    """Raises CudaError if a function of CUDA's driver has failed.

    Args:
      status: what the function returned, a CUresult.
      what: the function's name, or what it was to do.
    """
    if status:
        raise CudaError(f"CUDA error {status} from {what}")


def library() -> Any:
    """Returns the driver; other Python threads run during its calls.

    Raises:
      OSError: there is none.
    """
    return ctypes.CDLL(_LIBRARY)


@functools.cache
def locked_library() -> Any:
    """Returns the driver, whose calls keep the interpreter: given away 300 times in a row, it would
    have to be won back from busy threads as often.

    Raises:
      OSError: there is none.
    """
    return ctypes.PyDLL(_LIBRARY)


def retain_primary_context(driver: Any, ordinal: int) -> c_void_p:
    """Returns the primary context of a device, which is XLA's, with XLA's flags: none.

    Args:
      driver: the result of `library`.
      ordinal: of the device, among those that CUDA_VISIBLE_DEVICES leaves.

    Raises:
      CudaError: there is no such device, or it has no memory left for a context.
    """
    device, context = c_int(), c_void_p()
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDeviceGet(byref(device), ordinal), "cuDeviceGet")
    check(driver.cuDevicePrimaryCtxRetain(byref(context), device), "cuDevicePrimaryCtxRetain")
    return context

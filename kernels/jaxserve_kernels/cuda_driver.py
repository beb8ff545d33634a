"""The CUDA driver through ctypes: the library, its errors, and XLA's context."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_void_p
from typing import Any

_LIBRARY = "libcuda.so.1"


class CudaError(RuntimeError):
    """A function of the CUDA driver has failed."""


def check(status: int, what: str) -> None:
    """Raises CudaError if a function of the CUDA driver has failed.

    Args:
      status: the CUresult that the function returned.
      what: the function's name, or its purpose, for the message.
    """
    if status:
        raise CudaError(f"CUDA error {status} from {what}")


def library() -> Any:
    """Returns the driver. Its calls release the interpreter's lock (GIL).

    Raises:
      OSError: no CUDA driver is installed.
    """
    return ctypes.CDLL(_LIBRARY)


@functools.cache
def locked_library() -> Any:
    """Returns the driver. Its calls keep the interpreter's lock (GIL).

    A step makes 300 launches in a row. After each one the thread would have to win the lock back
    from busy threads.

    Raises:
      OSError: no CUDA driver is installed.
    """
    return ctypes.PyDLL(_LIBRARY)


def retain_primary_context(driver: Any, ordinal: int) -> c_void_p:
    """Returns the primary context of a device, the one that XLA uses, without flags, as XLA does.

    Args:
      driver: the result of `library`.
      ordinal: number of the device among those in CUDA_VISIBLE_DEVICES.

    Raises:
      CudaError: there is no such device, or it has no memory left for a context.
    """
    device, context = c_int(), c_void_p()
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDeviceGet(byref(device), ordinal), "cuDeviceGet")
    check(driver.cuDevicePrimaryCtxRetain(byref(context), device), "cuDevicePrimaryCtxRetain")
    return context

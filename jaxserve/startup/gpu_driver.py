"""What is asked of the GPU's driver itself: to open early, beside Python's imports, which hold the
interpreter and not the card; and how much memory the card has."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from jaxserve.startup.timeline import Timeline

_LIBRARY = "libcuda.so.1"


def open_early(timeline: Timeline, platforms: str | None) -> None:
    """Make the context of the first GPU on a thread of its own; XLA then finds it made.

    Nothing happens without a driver. What fails here fails again, and is reported, where the
    device is used.

    Args:
      platforms: those that jax may use, as in JAX_PLATFORMS; None: any.
    """
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return

    def run() -> None:
        try:
            driver = ctypes.CDLL(_LIBRARY)
        except OSError:
            return
        with timeline.span("driver"):
            open_first(driver)

    # Not a daemon: a process that ends inside the driver's initialisation would not end well.
    threading.Thread(target=run, name="open-gpu-driver").start()


def open_first(driver: Any) -> None:
    """The primary context of device 0, with the flags that XLA asks for: none. ctypes releases the
    interpreter during each call."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def total_memory() -> int:
    """Bytes of the first GPU; 0 if the driver does not say."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return size.value

"""Direct calls of the GPU driver. They open the device in parallel with Python's imports, and read
the size of its memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading

from jaxserve.startup.timeline import Timeline
from jaxserve_kernels import cuda_driver


def open_early(timeline: Timeline, platforms: str | None) -> None:
    """Creates the context of the first GPU on another thread. XLA later uses this context.

    Does nothing without a driver. Ignores errors, because they occur again when the device is used.

    Args:
      platforms: platforms that jax may use, as in JAX_PLATFORMS; None: any.
    """
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return

    def run() -> None:
        try:
            driver = cuda_driver.library()
        except OSError:
            return
        with timeline.span("driver"), contextlib.suppress(cuda_driver.CudaError):
            cuda_driver.retain_primary_context(driver, 0)

    # Not a daemon thread: a process must not end during the driver's initialisation.
    threading.Thread(target=run, name="open-gpu-driver").start()


def total_memory() -> int:
    """Returns the memory of the first GPU in bytes; 0 if the driver does not report it."""
    try:
        driver = cuda_driver.library()
    except OSError:
        return 0
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return size.value

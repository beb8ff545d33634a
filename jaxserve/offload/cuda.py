"""The CUDA context for copies, and the CPUs near the GPU."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int
from pathlib import Path
from typing import Any

from jaxserve_kernels import cuda_driver


class CudaContext:
    """The driver and the primary context of one GPU.

    Attributes:
      driver: the CUDA driver. Its calls release the interpreter lock.
      quick: the same driver, for calls that return at once. They keep the interpreter lock, because
        busy threads give it back only after a millisecond, the time to copy 50 MB.
      context: the primary context, which XLA uses too.
    """

    def __init__(self, ordinal: int = 0):
        """
        Args:
          ordinal: index of the GPU among those that CUDA_VISIBLE_DEVICES leaves; jax's
            `device.local_hardware_id`.

        Raises:
          CudaError: there is no driver or no such device.
        """
        try:
            self.driver: Any = cuda_driver.library()
            self.quick: Any = cuda_driver.locked_library()
        except OSError as error:
            raise cuda_driver.CudaError(f"no CUDA driver: {error}") from error
        self._ordinal = ordinal
        self.context = cuda_driver.retain_primary_context(self.driver, ordinal)

    def enter(self) -> None:
        """Makes the context current in this thread. Raises CudaError."""
        cuda_driver.check(self.driver.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")

    def near_cpus(self, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
        """Returns the CPUs close to the GPU (its NUMA node); empty if unknown.

        Args:
          devices: the system's folder of PCI devices.
        """
        device, name = c_int(), ctypes.create_string_buffer(32)
        driver = self.driver
        if driver.cuDeviceGet(ctypes.byref(device), self._ordinal):
            return set()
        if driver.cuDeviceGetPCIBusId(name, len(name), device):
            return set()
        try:
            text = (devices / os.fsdecode(name.value).lower() / "local_cpulist").read_text()
            return parse_cpus(text)
        except (OSError, ValueError):
            return set()


def parse_cpus(text: str) -> set[int]:
    """Returns the numbers in a CPU list of the Linux kernel, such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus

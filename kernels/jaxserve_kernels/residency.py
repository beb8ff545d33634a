"""How many programs of a kernel a GPU runs at once.

A program that waits for another one, through a flag in memory, ends only if the other one runs.
CUDA does not guarantee that any two programs of a grid run at the same time. But a GPU starts
programs while there is room, so a grid that fits as a whole runs as a whole. Earlier kernels end by
themselves. Later kernels start only when all its programs have started, even with programmatic
dependent launch.
"""

from __future__ import annotations

from jaxserve_kernels import ptxas
from jaxserve_kernels.device import Device

_RESERVED = 1024
"""Bytes of shared memory that CUDA reserves for each program, from compute capability 8.0 on."""

_REGISTERS = 65_536
"""Registers of a multiprocessor. A warp allocates multiples of 256. Each of the four partitions has
a quarter of them."""

_MOST_PROGRAMS = 16
"""The most programs on a multiprocessor. Some GPUs allow more."""

_MOST_REGISTERS = 255
"""The most registers of a thread."""


def programs_at_once(code: ptxas.Code, device: Device) -> int:
    """How many programs of a compiled kernel run at once, by shared memory, warps and registers.

    The rules and limits are those of the CUDA C++ Programming Guide, "Compute Capabilities".
    """
    registers = ptxas.registers(code.ptx, code.compute_capability) or _MOST_REGISTERS
    per_warp = -(-registers * 32 // 256) * 256
    warps = _REGISTERS // 4 // per_warp * 4
    fit = min(
        device.shared_memory // (code.shared_bytes + _RESERVED),
        device.threads // (32 * code.warps),
        warps // code.warps,
        _MOST_PROGRAMS,
    )
    return fit * device.multiprocessors


def check(code: ptxas.Code, grid: tuple[int, int, int], device: Device) -> None:
    """Checks that all programs of a grid run at once.

    Raises:
      ValueError: some would start only after others end.
    """
    x, y, z = grid
    most = programs_at_once(code, device)
    if x * y * z > most:
        raise ValueError(
            f"programs of the kernel {code.name} wait for each other, but of {x * y * z} only "
            f"{most} run at once on {device.multiprocessors} multiprocessors"
        )

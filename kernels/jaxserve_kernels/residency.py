"""How many programs of a kernel a GPU runs at once.

A program that waits for what another one leaves, by a flag in memory, ends only if the other one
runs. CUDA promises that of no two programs of a grid. But a GPU starts programs as long as there is
room, so a grid that fits as a whole does run as a whole: kernels before it end by themselves, and
those after it start, with programmatic dependent launch too, when all its programs have started.
"""

from __future__ import annotations

from jaxserve_kernels import ptxas
from jaxserve_kernels.device import Device

_RESERVED = 1024
"""Bytes of shared memory that the system takes for each program, from compute capability 8.0 on."""

_REGISTERS = 65_536
"""Of a multiprocessor; a warp takes multiples of 256, and each of four parts has a quarter."""

_MOST_PROGRAMS = 16
"""On a multiprocessor; some GPUs take more."""

_MOST_REGISTERS = 255
"""Of a thread."""


def programs_at_once(code: ptxas.Code, device: Device) -> int:
    """Of a compiled kernel, by its shared memory, warps and registers.

    Rules and numbers are those of the CUDA C++ Programming Guide, "Compute Capabilities".
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
    """Raises ValueError if programs of the grid would wait for others to end."""
    x, y, z = grid
    most = programs_at_once(code, device)
    if x * y * z > most:
        raise ValueError(
            f"programs of the kernel {code.name} wait for each other, but of {x * y * z} only "
            f"{most} run at once on {device.multiprocessors} multiprocessors"
        )

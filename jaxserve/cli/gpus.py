"""GPUs that a plan can be made for without having one."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU as its driver and its maker describe it."""

    name: str
    capability: str
    """Compute capability."""
    mebibytes: int
    """Memory, as the driver reports it."""
    gb_per_s: float
    """Peak rate of its memory, by the maker's data sheet."""


GPUS = {
    "a10": Gpu("NVIDIA A10", "8.6", 23_028, 600),
    "a100-80gb": Gpu("NVIDIA A100 80GB", "8.0", 81_920, 2_039),
    "b200": Gpu("NVIDIA B200", "10.0", 183_359, 8_000),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 81_559, 3_350),
    "h200": Gpu("NVIDIA H200", "9.0", 143_771, 4_800),
    "l4": Gpu("NVIDIA L4", "8.9", 23_034, 300),
    "l40s": Gpu("NVIDIA L40S", "8.9", 46_068, 864),
    "rtx3060": Gpu("NVIDIA GeForce RTX 3060", "8.6", 12_288, 360),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", "8.6", 24_576, 936),
    "rtx4080": Gpu("NVIDIA GeForce RTX 4080", "8.9", 16_376, 717),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 24_564, 1_008),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", "12.0", 32_607, 1_792),
}
"""By the names of `jaxserve plan --gpu`. The planner was run for all of them, on none but the H100
and the H200 was anything measured."""

"""GPUs that `jaxserve plan` knows without having one.

Sources of the figures; each figure was compared with its source in November 2026:

- Compute capability: https://developer.nvidia.com/cuda-gpus.
- Memory: the total that `nvidia-smi` prints for such a card in public logs. With ECC on, GDDR cards
  report less than their nominal size.
- Peak rate: the page named beside the card. The rate of a card with GDDR is its bus width x bits
  per pin / 8, which gives the same number: 384 x 21 / 8 = 1,008 GB/s for an RTX 4090.
- Multiprocessors: the page named beside the card, or the output of CUDA's `deviceQuery` on one. On
  Ada cards, each multiprocessor has 128 CUDA cores and one RT core.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU by the figures of its driver and its maker."""

    name: str
    capability: str
    """Compute capability."""
    mebibytes: int
    """Memory that the driver reports, in MiB."""
    gb_per_s: float
    """Peak rate of its memory, in 10^9 bytes per second."""
    multiprocessors: int


GPUS = {
    # 384 bit, 12.5 Gbit/s, 72 multiprocessors:
    # sysrqmts.com/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000
    "a10": Gpu("NVIDIA A10", "8.6", 23_028, 600, 72),
    # SXM: acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100; 108 multiprocessors:
    # notes.haroldbenoit.com/ML/Engineering/GPUs/Hardware
    "a100-80gb": Gpu("NVIDIA A100 80GB", "8.0", 81_920, 2_039, 108),
    # The first page: 64 TB/s of the 8 GPUs of a DGX B200. 148 multiprocessors: Chips and Cheese,
    # December 2025, "Nvidia's B200: Keeping the CUDA Juggernaut Rolling"
    "b200": Gpu("NVIDIA B200", "10.0", 183_359, 8_000, 148),
    # The first page, SXM; the PCIe card has 2,000. 132 multiprocessors, and the H200 the same GPU:
    # glennklockwood.com/garden/processors/h100
    "h100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 81_559, 3_350, 132),
    # The same pages.
    "h200": Gpu("NVIDIA H200", "9.0", 143_771, 4_800, 132),
    # 192 bit, 12.5 Gbit/s: pcpartdb.com/gpus/view/nvidia-l4; 58 multiprocessors, where that page
    # and others have 60: deviceQuery in github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139
    "l4": Gpu("NVIDIA L4", "8.9", 23_034, 300, 58),
    # 384 bit, 18 Gbit/s, 142 RT cores: grokipedia.com/page/NVIDIA_L4_vs_L40S, and
    # llmbook.apartsin.com/appendices/appendix-g-hardware-compute/section-g.1.html
    "l40s": Gpu("NVIDIA L40S", "8.9", 46_068, 864, 142),
    # 192 bit, 15 Gbit/s: pcpartdb.com/gpus/view/nvidia-geforce-rtx-3060-12-gb-ga104; 3,584 CUDA
    # cores, 128 a multiprocessor:
    # cpu-gpu.alldbin.com/.../GeForce-RTX-4090-and-GeForce-RTX-3060-12-GB-GA104-comparison.html
    "rtx3060": Gpu("NVIDIA GeForce RTX 3060", "8.6", 12_288, 360, 28),
    # 384 bit, 19.5 Gbit/s, 82 multiprocessors: KitGuru's review of the RTX 4090 Founders Edition
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", "8.6", 24_576, 936, 82),
    # 256 bit, 22.4 Gbit/s: 716.8; 76 multiprocessors:
    # holynerdvana.com/2022/10/nvidia-geforce-rtx-4080-specifications.html
    "rtx4080": Gpu("NVIDIA GeForce RTX 4080", "8.9", 16_376, 717, 76),
    # 384 bit, 21 Gbit/s, 128 multiprocessors: the same review
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 24_564, 1_008, 128),
    # 512 bit, 28 Gbit/s: Linux Format, May 2025, "Nvidia GeForce RTX 5090"; 170 multiprocessors:
    # deviceQuery in github.com/aikitoria/open-gpu-kernel-modules/issues/1
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", "12.0", 32_607, 1_792, 170),
}
"""GPUs by their name in `jaxserve plan --gpu`. The planner was run for all of them. Only the H100
and the H200 were measured."""

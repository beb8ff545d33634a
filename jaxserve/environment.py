"""Process settings that XLA reads once, when jax is imported; for `main`s, before that."""

from __future__ import annotations

import os

_XLA_FLAGS = (
    # cuBLASLt reads a layer's slice of a stacked weight in place and needs no tuning per layer.
    # XLA's own Triton products are as fast but are tuned for each slice on its own.
    "--xla_gpu_enable_triton_gemm=false",
    # It counts the KV cache once per in-place write, believes that memory is short, and spends
    # time on saving it.
    "--xla_disable_hlo_passes=rematerialization",
)

API_KEY = "JAXSERVE_API_KEY"


def api_key_of_environment() -> str | None:
    """None if it is not set; set and empty, as a missing secret would leave it, is no key."""
    return os.environ.get(API_KEY)


def prepare(gpu_memory_utilization: float) -> None:
    """Set what is not set already: the allocator's share of the GPU, and compiler flags."""
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(gpu_memory_utilization))
    # Launching a step takes 2 ms of a thread; on a thread of its own the engine's has 1.6 of them.
    os.environ.setdefault("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "1")
    given = os.environ.get("XLA_FLAGS", "")
    ours = [flag for flag in _XLA_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()

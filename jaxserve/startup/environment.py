"""Process settings that XLA reads once, when jax is imported. Call `prepare` before that."""

from __future__ import annotations

import os

from jaxserve.config import ConfigError
from jaxserve_kernels import ptxas

_XLA_FLAGS = (
    # cuBLASLt reads a layer's slice of a stacked weight in place and needs no tuning per layer.
    # XLA's own Triton products are as fast but are tuned for each slice on its own.
    "--xla_gpu_enable_triton_gemm=false",
    # What is found by trying algorithms out depends on what else the card does, so two starts would
    # run different programs. The first in cuBLASLt's own order is as fast: see "Outliers" in
    # lab/logs/decode.md.
    "--xla_gpu_autotune_level=0",
    # It counts the KV cache once per in-place write, believes that memory is short, and spends
    # time on saving it.
    "--xla_disable_hlo_passes=rematerialization",
)

# Level 3 takes half as long again to compile a step for a CPU, and its steps are no faster: see
# "On a CPU" in lab/logs/starting.md. Programs for GPUs were measured with what XLA does.
_CPU_OPTIONS = {"xla_backend_optimization_level": 2}

_NOT_IN_PROGRAMS = ("--xla_dump", "--xla_gpu_dump")

_MEMORY_SHARE, _FORMER_NAME = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"

API_KEY = "JAXSERVE_API_KEY"
ADMIN_API_KEY = "JAXSERVE_ADMIN_API_KEY"
REASONING_KEY = "JAXSERVE_REASONING_KEY"


VLLM_API_KEY = "VLLM_API_KEY"
"""Charts for vLLM set it, and expect that nobody gets in without it."""


def key_of_environment(variable: str) -> str | None:
    """Returns a key from the environment; None if the variable is unset. An empty value, as left by
    a missing secret, is no key."""
    return os.environ.get(variable)


def prepare(gpu_memory_utilization: float) -> None:
    """Set what is not set already: the allocator's share of the GPU, and compiler flags."""
    # jaxlib refuses both of its names together.
    former = os.environ.pop(_FORMER_NAME, "")
    if not os.environ.get(_MEMORY_SHARE):
        os.environ[_MEMORY_SHARE] = former or str(gpu_memory_utilization)
    # It gives a step's scratch the same addresses each time, so that its graph is launched as it
    # was recorded. With CUDA's pool (cuda_async) addresses wander, and changing a mixed step's
    # graph takes 7 ms. XLA's own (bfc) keeps 8 bytes of host memory for every 256 of the pool:
    # 4 GB, and 1.5 s of the start, for 126 GiB.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "vmm")
    # Launching a step takes 2 ms of a thread; on a thread of its own the engine's has 1.6 of them.
    os.environ.setdefault("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "1")
    # Kernels carry their source lines otherwise, which doubles their size in every program.
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    ptxas.put_on_path()
    given = os.environ.get("XLA_FLAGS", "")
    ours = [flag for flag in _XLA_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()


def memory_share() -> float:
    """Returns the allocator's share of the GPU, after `prepare`. ConfigError if the environment's
    value is invalid."""
    given = os.environ[_MEMORY_SHARE]
    try:
        return float(given)
    except ValueError:
        raise ConfigError(
            f"{_MEMORY_SHARE} in the environment is not a number: {given!r}"
        ) from None


def compiler_options(*, gpu: bool) -> dict[str, int]:
    """Returns XLA's compile options. XLA_FLAGS take precedence."""
    given = os.environ.get("XLA_FLAGS", "")
    return {} if gpu else {name: _CPU_OPTIONS[name] for name in _CPU_OPTIONS if name not in given}


def compiler_settings() -> dict[str, str]:
    """Returns environment settings that compilers and linked libraries compile into programs."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    tells = [flag for flag in flags if not flag.startswith(_NOT_IN_PROGRAMS)]
    names = ("NVIDIA_TF32_OVERRIDE", "TRITON_DISABLE_LINE_INFO")
    return {
        "XLA_FLAGS": " ".join(sorted(tells)),
        **{name: os.environ.get(name, "") for name in names},
    }

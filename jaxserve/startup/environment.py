"""Process settings that XLA reads once, when jax is imported. Call `prepare` before that."""

from __future__ import annotations

import os

from jaxserve.config import ConfigError
from jaxserve_kernels import ptxas

_XLA_FLAGS = (
    # cuBLASLt reads a layer's slice of a stacked weight in place and needs no tuning per layer.
    # XLA's own Triton products are as fast but are tuned for each slice separately.
    "--xla_gpu_enable_triton_gemm=false",
    # The result of autotuning depends on the load of the GPU, so two starts would run different
    # programs. cuBLASLt's first choice is as fast: see "Outliers" in lab/logs/decode.md.
    "--xla_gpu_autotune_level=0",
    # This pass counts the KV cache once per in-place write. It then believes that memory is short,
    # and spends time to save it.
    "--xla_disable_hlo_passes=rematerialization",
)

# At level 3 XLA compiles a step for a CPU half as long again, and the steps are no faster: see
# "On a CPU" in lab/logs/starting.md. On GPUs, only XLA's default was measured.
_CPU_OPTIONS = {"xla_backend_optimization_level": 2}

_NOT_IN_PROGRAMS = ("--xla_dump", "--xla_gpu_dump")

_MEMORY_SHARE, _FORMER_NAME = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"

API_KEY = "JAXSERVE_API_KEY"
ADMIN_API_KEY = "JAXSERVE_ADMIN_API_KEY"
REASONING_KEY = "JAXSERVE_REASONING_KEY"


VLLM_API_KEY = "VLLM_API_KEY"
"""vLLM's charts set this variable and expect that the server then requires a key."""


def key_of_environment(variable: str) -> str | None:
    """Returns a key from the environment; None if the variable is unset. An empty value, which a
    missing secret leaves, gives an empty key, not None."""
    return os.environ.get(variable)


def prepare(gpu_memory_utilization: float) -> None:
    """Sets the allocator's share of the GPU and compiler flags, unless they are set already."""
    # jaxlib accepts only one of the variable's two names.
    former = os.environ.pop(_FORMER_NAME, "")
    if not os.environ.get(_MEMORY_SHARE):
        os.environ[_MEMORY_SHARE] = former or str(gpu_memory_utilization)
    # This allocator gives a step's scratch the same addresses each time, so that its CUDA graph is
    # launched as recorded. CUDA's pool (cuda_async) changes the addresses, and updating a mixed
    # step's graph takes 7 ms. XLA's allocator (bfc) keeps 8 bytes of host memory for every 256
    # of the pool: 4 GB, and 1.5 s of the start, for 126 GiB.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "vmm")
    # Launching a step takes 2 ms. On XLA's own thread, that saves the engine thread 1.6 ms.
    os.environ.setdefault("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "1")
    # Without this, kernels carry their source lines, which double their size in every program.
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    ptxas.put_on_path()
    given = os.environ.get("XLA_FLAGS", "")
    ours = [flag for flag in _XLA_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()


def memory_share() -> float:
    """Returns the allocator's share of the GPU, after `prepare`. Raises ConfigError if the
    environment's value is invalid."""
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
    """Returns the environment settings that change the code of compiled programs."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    tells = [flag for flag in flags if not flag.startswith(_NOT_IN_PROGRAMS)]
    names = ("NVIDIA_TF32_OVERRIDE", "TRITON_DISABLE_LINE_INFO")
    return {
        "XLA_FLAGS": " ".join(sorted(tells)),
        **{name: os.environ.get(name, "") for name in names},
    }

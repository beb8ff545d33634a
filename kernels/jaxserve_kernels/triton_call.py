"""jax-triton, made to work with the Triton versions we support."""

from __future__ import annotations

from typing import Any

import jax
import triton.backends.nvidia.driver as nvidia_driver

from jaxserve_kernels import target

# jax-triton 0.4 asks for Triton 3.7; with 3.6 its import needs one constant and its tensor
# descriptors one key less. Both are no-ops on 3.7.
if not hasattr(nvidia_driver, "TMA_TF32"):
    nvidia_driver.TMA_TF32 = 11  # type: ignore[attr-defined]  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32

import jax_triton as jt  # after the constant
from jax_triton import triton_lib

_descriptor: Any = triton_lib.TensorDescMeta
_descriptor.__required_keys__ = frozenset(_descriptor.__required_keys__) - {"is_im2col"}


def triton_call(*args: jax.Array | jax.Ref | int, name: str, **kwargs: Any) -> Any:
    """`jax_triton.triton_call` for the current target. Ints are launch constants.

    Every kernel runs inside the step's CUDA graph, so configurations are fixed beforehand: Triton
    cannot tune while a graph is recorded.
    """
    capability = target.current().compute_capability
    return jt.triton_call(*args, name=name, compute_capability=capability, **kwargs)

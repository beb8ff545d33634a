"""Types of quantised weights: memory layout, meaning of the codes, and how to make them."""

from typing import TypeGuard

from jax import Array

from jaxserve_kernels.weights.copied import CopiedWeight as CopiedWeight
from jaxserve_kernels.weights.copied import e4m3_copy as e4m3_copy
from jaxserve_kernels.weights.eight_bit import E4M3_MAX as E4M3_MAX
from jaxserve_kernels.weights.eight_bit import Fp8Weight as Fp8Weight
from jaxserve_kernels.weights.eight_bit import Int8Weight as Int8Weight
from jaxserve_kernels.weights.eight_bit import pack_fp8 as pack_fp8
from jaxserve_kernels.weights.eight_bit import pack_int8 as pack_int8
from jaxserve_kernels.weights.eight_bit import quantize_fp8 as quantize_fp8
from jaxserve_kernels.weights.eight_bit import quantize_int8 as quantize_int8
from jaxserve_kernels.weights.format import Kind as Kind
from jaxserve_kernels.weights.format import Operand as Operand
from jaxserve_kernels.weights.format import Quantized as Quantized
from jaxserve_kernels.weights.format import types as types
from jaxserve_kernels.weights.fp4 import Mxfp4Weight as Mxfp4Weight
from jaxserve_kernels.weights.fp4 import Nvfp4Weight as Nvfp4Weight
from jaxserve_kernels.weights.fp4 import pack_mxfp4 as pack_mxfp4
from jaxserve_kernels.weights.fp4 import pack_nvfp4 as pack_nvfp4
from jaxserve_kernels.weights.fp4 import quantize_mxfp4 as quantize_mxfp4
from jaxserve_kernels.weights.fp4 import quantize_nvfp4 as quantize_nvfp4
from jaxserve_kernels.weights.int4 import Int4Weight as Int4Weight
from jaxserve_kernels.weights.int4 import pack_int4 as pack_int4
from jaxserve_kernels.weights.int4 import quantize_int4 as quantize_int4
from jaxserve_kernels.weights.ordered import OrderedInt4Weight as OrderedInt4Weight

type Weight = Array | Quantized | CopiedWeight


def is_quantized(weight: object) -> TypeGuard[Quantized]:
    """Whether a weight is stored as codes only: not an array, and not a `CopiedWeight`."""
    return isinstance(weight, Quantized)

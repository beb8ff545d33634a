"""Keys and values in one byte each: int8 with a scale per token and head, or fp8 e4m3."""

from jaxserve_kernels.kv_format.eight_bit.format import Fp8 as Fp8
from jaxserve_kernels.kv_format.eight_bit.format import Int8 as Int8
from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV as EightBitKV
from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV as Fp8KV
from jaxserve_kernels.kv_format.eight_bit.reference import Int8KV as Int8KV

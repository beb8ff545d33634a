"""Converts 8-bit numbers in registers. A word holds one byte of each half of a head."""

from __future__ import annotations

import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV
from jaxserve_kernels.target import Target


@triton.jit
def _int8_halves(words):
    """Both bytes minus 128, exact in bfloat16. The byte becomes the lowest bits of a float's
    mantissa, from which a constant is subtracted."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a,b,c,d; .reg .f32 e,f,g,h,k; mov.f32 k,0f4B000080;
        prmt.b32 a,$2,0x4B000000,0x7440; prmt.b32 b,$2,0x4B000000,0x7442;
        prmt.b32 c,$2,0x4B000000,0x7441; prmt.b32 d,$2,0x4B000000,0x7443;
        mov.b32 e,a; mov.b32 f,b; mov.b32 g,c; mov.b32 h,d;
        sub.f32 e,e,k; sub.f32 f,f,k; sub.f32 g,g,k; sub.f32 h,h,k;
        mov.b32 a,e; mov.b32 b,f; mov.b32 c,g; mov.b32 d,h;
        prmt.b32 $0,a,b,0x7632; prmt.b32 $1,c,d,0x7632; }""",
        "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fp8_halves(words):
    """The e4m3 numbers of both bytes, exact in float16."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 x,y; .reg .b32 a,b; mov.b32 {x,y},$2;
        cvt.rn.f16x2.e4m3x2 a,x; cvt.rn.f16x2.e4m3x2 b,y;
        prmt.b32 $0,a,b,0x5410; prmt.b32 $1,a,b,0x7632; }""",
        "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def float_of(byte, FP8: tl.constexpr):
    """The number that a byte encodes, float32."""
    if FP8:  # sign, exponent and mantissa moved to their places, then the bias corrected
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    else:
        number = (byte - 128).to(tl.float32)
    return number


@triton.jit
def halves(words, FP8: tl.constexpr, FAST: tl.constexpr):
    """The numbers of the low and of the high bytes, in float32; FAST: in a 16-bit float dtype that
    holds them exactly."""
    if FAST and FP8:
        first, second = _fp8_halves(words)
    elif FAST:
        first, second = _int8_halves(words)
    else:
        first = float_of(words.to(tl.int32) & 0xFF, FP8)
        second = float_of((words.to(tl.int32) >> 8) & 0xFF, FP8)
    return first, second


def numbers(dtype: DTypeLike, kv: EightBitKV, *, target: Target) -> dict[str, bool]:
    """The kernel constants FP8, whether the bytes are e4m3, and FAST, whether the GPU has
    instructions that convert them for activations of `dtype`."""
    fast = dtype == jnp.bfloat16 and target.gpu.compute_capability >= (89 if kv.fp8 else 80)
    return {"FP8": kv.fp8, "FAST": fast}

"""Which kernel multiplies with a quantised weight, by format, shape and number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxserve_kernels.op import NOT_HOPPER, NOT_PDL, Refusal
from jaxserve_kernels.quantized_matmul.config import (
    SMALL_M,
    Call,
    Config,
    e4m3_beforehand,
    e4m3_in_registers,
    hopper_bytes,
    hopper_codes,
    limits_of,
    small_m,
    stream_k,
    streaming,
    unpack,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Kind, Operand, Quantized

_MAX_PDL = 64
"""Tokens of a product by `triton_streaming`, with programmatic dependent launch."""


def choose(
    weight: Quantized,
    tokens: int,
    *,
    gated: bool,
    hopper: bool = False,
    e4m3: bool = True,
    target: Target,
) -> Config | None:
    """The configuration by the first rule that takes the product; None: dequantise, then the
    product with the plain weight.

    The rules and their limits are the fastest of those measured on an H200 with Qwen3-4B's shapes;
    see lab/logs/quantised_weights.md.
    """
    call = Call.of(weight, tokens, gated=gated, hopper=hopper, e4m3=e4m3, target=target)
    found = (configure(call, rule) for rule in RULES.values())
    return next((each for each in found if isinstance(each, Config)), None)


def configure(call: Call | None, rule: Callable[[Call], Config | Refusal]) -> Config | Refusal:
    """What a rule says to a product, if any kernel knows it."""
    if call is None:
        return Refusal("no kernel knows groups or inputs of this number")
    if call.operand.kind == Kind.OTHER and rule is not _unpacked:
        return Refusal("it does not know the format")
    config = rule(call)
    if isinstance(config, Refusal) or config.method == "large_n":  # whose last rows may be fewer
        return config
    if call.out % config.rows or (call.gated and call.out // 2 % (config.rows // 2)):
        return Refusal(f"not whole tiles of {config.rows} rows")
    return replace(config, splits=1) if call.gated else config


def _streaming_rule(call: Call) -> Config | Refusal:
    if not call.target.pdl:
        return NOT_PDL
    if call.tokens > _MAX_PDL:
        return Refusal(f"more than {_MAX_PDL} tokens")
    return streaming(call)


def _stream_k_rule(call: Call) -> Config | Refusal:
    """Warpgroups share many tokens where each multiprocessor gets about three of a weight's row
    tiles; that kernel knows 4-bit integers."""
    refused = _streaming_rule(call)
    if isinstance(refused, Refusal):
        return refused
    row_tiles, programs = call.out // 64, call.target.gpu.multiprocessors
    if not (call.gated and call.tokens > 32 and call.operand.kind == Kind.INT4):
        return Refusal("not gated, of 33 to 64 tokens and int4")
    if not 2 * programs < row_tiles <= 3 * programs:
        return Refusal("not three tiles of rows for each multiprocessor")
    return stream_k(call)


def _large_n(call: Call) -> Config | Refusal:
    """Of an output matrix of integers, and so many tokens that their copies count, but not their
    products."""
    if not call.hopper:
        return NOT_HOPPER
    rows = call.out >= call.limits.large_n_rows and call.out % 128 == 0
    knows = call.operand.kind == Kind.INT8 and call.scale_per_row and call.depth >= 256
    if call.gated or not (rows and knows and 16 < call.tokens <= 64):
        return Refusal("not an output matrix in int8, of 17 to 64 tokens")
    tokens = 32 if call.tokens <= 32 else 64
    return Config(method="large_n", rows=384, tokens=tokens, num_stages=3)


def _small_m_rule(call: Call) -> Config | Refusal:
    if call.tokens > SMALL_M or call.operand.kind != Kind.INT4:
        return Refusal(f"not int4, of up to {SMALL_M} tokens")
    return small_m(call.depth, gated=call.gated)


def _unpacked(call: Call) -> Config | Refusal:
    if _in_8_bits(call):
        return Refusal("so many tokens that they are read in 8 bits")
    most = call.limits.most_unpacked
    if call.tokens > most:
        return Refusal(f"more than {most} tokens")
    return unpack(call)


def _bytes(call: Call) -> Config | Refusal:
    """That kernel has tiles of 128 tokens."""
    if not call.hopper:
        return NOT_HOPPER
    knows = call.operand.kind == Kind.FP8 and call.scale_per_row and call.out % 128 == 0
    if not knows or call.tokens <= 128:
        return Refusal("not fp8 with a scale for each row, of more than 128 tokens")
    return hopper_bytes(call)


def _operand(call: Call) -> Config | Refusal:
    if not call.hopper:
        return NOT_HOPPER
    if refused := _plain_tokens(call):
        return refused
    if not _on_hopper(call):
        return Refusal("another kernel was faster for this format and number of tokens")
    return hopper_codes(call)


def _in_registers(call: Call) -> Config | Refusal:
    if refused := _plain_tokens(call):
        return refused
    most = _most_in_registers(call)
    if call.tokens > most:
        return Refusal(f"more than {most} tokens")
    return e4m3_in_registers(call)


def _beforehand(call: Call) -> Config | Refusal:
    if refused := _plain_tokens(call):
        return refused
    return e4m3_beforehand(call)


def _plain_tokens(call: Call) -> Refusal | None:
    return None if _in_8_bits(call) else Refusal("tokens are not read in 8 bits")


RULES: dict[str, Callable[[Call], Config | Refusal]] = {
    "triton_stream_k": _stream_k_rule,
    "triton_streaming": _streaming_rule,
    "triton_large_n": _large_n,
    "triton_small_m": _small_m_rule,
    "triton": _unpacked,
    "e4m3/hopper_bytes": _bytes,
    "e4m3/hopper": _operand,
    "e4m3/triton, codes to e4m3 in registers": _in_registers,
    "e4m3/triton": _beforehand,
}
"""By the implementation's name, in the order in which they are asked."""


def reads_copy(tokens: int, target: Target) -> bool:
    """Whether a product reads a 4-bit weight's copy in e4m3, if it has one, and not its codes."""
    return tokens > limits_of(target).most_from_codes


def reads_quantized(operand: Operand, tokens: int, config: Config, target: Target) -> bool:
    """Whether it pays that a norm before a product in e4m3 makes its tokens' 8 bits: it takes up to
    1 % off a step of 256 rows. With fewer rows it made no difference, nor with NVFP4 in Triton."""
    if config.method == "hopper" and operand.kind != Kind.INT4:
        return True
    in_8_bits = config.method in ("e4m3", "hopper") and operand.kind in (Kind.INT4, Kind.FP8)
    return in_8_bits and tokens > limits_of(target).most_quantized_apart


def _in_8_bits(call: Call) -> bool:
    """Where the tensor cores' rate counts, or the instructions that unpack."""
    tokens_in = call.operand.tokens_in
    if tokens_in is None or (tokens_in == "e4m3" and not call.e4m3):
        return False
    fp8 = call.operand.kind == Kind.FP8
    return call.tokens > (call.limits.most_in_bfloat16_fp8 if fp8 else call.limits.most_in_bfloat16)


def _most_in_registers(call: Call) -> int:
    """Tokens up to which 4 bits become e4m3 in registers: beyond it, or with very small groups,
    a pass over the weight costs less."""
    if call.operand.bits == 8:
        return 0
    if call.operand.kind == Kind.INT4:
        return 0 if call.operand.group == 32 else call.limits.most_in_registers_int4
    return call.limits.most_in_registers_fp4


def _on_hopper(call: Call) -> bool:
    """Where `e4m3.hopper` was the fastest of what was measured on an H200. Its tiles are of 256
    tokens, so that 384 are as slow as 512."""
    tokens, gated = call.tokens, call.gated
    if call.operand.bits == 8 or call.out % 128 or tokens > 512:
        return False
    if call.operand.kind != Kind.INT4:
        return not gated or not 256 < tokens <= 384
    if call.operand.group != 128 or tokens <= 128 or (gated and tokens <= 384):
        return False
    deep = call.tiles >= call.limits.deep_tiles
    return tokens > 384 or deep or (tokens > 256 and call.out > call.depth)

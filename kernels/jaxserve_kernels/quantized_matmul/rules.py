"""Rules that pick the kernel for a quantised weight, by format, shape and number of tokens."""

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
"""The most tokens of `triton_streaming`, with programmatic dependent launch."""


def choose(
    weight: Quantized,
    tokens: int,
    *,
    gated: bool,
    hopper: bool = False,
    e4m3: bool = True,
    target: Target,
) -> Config | None:
    """The configuration from the first rule that accepts the product. None if none does: the weight
    is then dequantised before the product.

    The rules and their limits were the fastest of those measured on an H200 with Qwen3-4B's shapes:
    see lab/logs/quantised_weights.md.
    """
    call = Call.of(weight, tokens, gated=gated, hopper=hopper, e4m3=e4m3, target=target)
    found = (configure(call, rule) for rule in RULES.values())
    return next((each for each in found if isinstance(each, Config)), None)


def configure(call: Call | None, rule: Callable[[Call], Config | Refusal]) -> Config | Refusal:
    """Applies a rule to a product. call is None if no kernel supports the weight."""
    if call is None:
        return Refusal("no kernel supports the group size or number of inputs")
    if call.operand.kind == Kind.OTHER and rule is not _unpacked:
        return Refusal("the format is not supported")
    config = rule(call)
    if isinstance(config, Refusal) or config.method == "large_n":  # accepts a partial last tile
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
    """For 4-bit integers, if there are more than two row tiles per multiprocessor: three warpgroups
    then share the copies of the tokens. With fewer tiles it was not tried."""
    refused = _streaming_rule(call)
    if isinstance(refused, Refusal):
        return refused
    if not (call.gated and call.tokens > 32 and call.operand.kind == Kind.INT4):
        return Refusal("not gated, of 33 to 64 tokens and int4")
    if call.out // 64 <= 2 * call.target.gpu.multiprocessors:
        return Refusal("at most two tiles of rows for each multiprocessor")
    return stream_k(call)


def _large_n(call: Call) -> Config | Refusal:
    """For an int8 output matrix, with enough tokens that copying them matters, but too few to be
    bound by the tensor cores."""
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
    """The kernel has tiles of 128 tokens, so it needs more than that."""
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
"""Rules by the implementation's name, in the order in which they are tried."""


def reads_copy(tokens: int, target: Target) -> bool:
    """Whether a product reads a 4-bit weight's e4m3 copy, if it has one, rather than its codes."""
    return tokens > limits_of(target).most_from_codes


def reads_quantized(operand: Operand, tokens: int, config: Config, target: Target) -> bool:
    """Whether the norm before a product should quantise its tokens. Before e4m3 products that saves
    up to 1 % of a step of 256 rows. It made no difference with fewer rows, or with NVFP4 in Triton.
    Int8 tokens of streaming products always come from norms, if there is one."""
    if config.int8_tokens or (config.method == "hopper" and operand.kind != Kind.INT4):
        return True
    in_8_bits = config.method in ("e4m3", "hopper") and operand.kind in (Kind.INT4, Kind.FP8)
    return in_8_bits and tokens > limits_of(target).most_quantized_apart


def _in_8_bits(call: Call) -> bool:
    """Whether the product takes 8-bit tokens: with many tokens it is bound by the tensor cores or
    by unpacking."""
    tokens_in = call.operand.tokens_in
    if tokens_in is None or (tokens_in == "e4m3" and not call.e4m3):
        return False
    fp8 = call.operand.kind == Kind.FP8
    return call.tokens > (call.limits.most_in_bfloat16_fp8 if fp8 else call.limits.most_in_bfloat16)


def _most_in_registers(call: Call) -> int:
    """The most tokens for which 4-bit codes are converted to e4m3 in registers. With more tokens,
    or with very small groups, a separate pass over the weight costs less."""
    if call.operand.bits == 8:
        return 0
    if call.operand.kind == Kind.INT4:
        return 0 if call.operand.group == 32 else call.limits.most_in_registers_int4
    return call.limits.most_in_registers_fp4


def _on_hopper(call: Call) -> bool:
    """Whether `e4m3.hopper` was the fastest kernel measured on an H200. Its tiles have 256 tokens,
    so 384 tokens take as long as 512."""
    tokens, gated = call.tokens, call.gated
    if call.operand.bits == 8 or call.out % 128 or tokens > 512:
        return False
    if call.operand.kind != Kind.INT4:
        return not gated or not 256 < tokens <= 384
    if call.operand.group != 128 or tokens <= 128 or (gated and tokens <= 384):
        return False
    deep = call.tiles >= call.limits.deep_tiles
    return tokens > 384 or deep or (tokens > 256 and call.out > call.depth)

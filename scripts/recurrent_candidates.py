"""Other ways to compute a recurrent layer's decode step, for `bench_recurrent.py --candidates`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import stream_k_candidate
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve.models import delta_net
from jaxserve_kernels.causal_conv import causal_conv
from jaxserve_kernels.causal_conv import triton as conv_kernels
from jaxserve_kernels.gated_delta_rule import RuleConfig, RuleTokens, RuleWeights
from jaxserve_kernels.gated_delta_rule import triton as rule_kernels
from jaxserve_kernels.matmul import linear, plain
from jaxserve_kernels.quantized_matmul import rules, triton_streaming
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int4Weight, Kind


class Tile(NamedTuple):
    """How a program of the rule is launched."""

    columns: int
    """Of a head's state."""
    warps: int
    norm: bool = False
    """The program has all columns, and takes the norm of its output."""
    rows_first: bool = False
    """Neighbours have other rows, not the columns and heads beside."""
    hint: bool = False
    """State is evicted first."""
    one_pass: bool = False
    """Both reads of the state are of that before the token."""


@triton.jit
def _rule(
    qkv_ptr, gates_ptr, a_log_ptr, bias_ptr, z_ptr, norm_ptr,
    length_ptr, slot_ptr, position_ptr, state_ptr, layer, out_ptr,
    slots, stride, z_stride, columns: tl.constexpr, parts: tl.constexpr, z_parts: tl.constexpr,
    key_heads: tl.constexpr, value_heads: tl.constexpr, scale: tl.constexpr, eps: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    ROWS_FIRST: tl.constexpr, HINT: tl.constexpr, ONE_PASS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Each row is a token."""
    blocks: tl.constexpr = VALUE // COLUMNS
    if ROWS_FIRST:
        row = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1)
    else:
        row = tl.program_id(1).to(tl.int64)
        place = tl.program_id(0)
    head = place // blocks
    key = tl.arange(0, KEY)
    column = place % blocks * COLUMNS + tl.arange(0, COLUMNS)
    real = tl.load(length_ptr + row) > 0
    slot = tl.load(slot_ptr + row).to(tl.int64)
    goes_on = real & (tl.load(position_ptr + row) > 0)
    tile = state_ptr + ((layer * slots + slot) * value_heads + head) * (KEY * VALUE)
    tile += key[:, None] * VALUE + column[None, :]
    inside = (key[:, None] >= 0) & (column[None, :] >= 0)
    # No kernel before this one in the step writes this layer's state.
    if HINT:
        state = tl.load(tile, mask=inside & goes_on, other=0.0, eviction_policy="evict_first")
    else:
        state = tl.load(tile, mask=inside & goes_on, other=0.0)
    decay = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + head)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    width: tl.constexpr = 2 * key_heads * KEY + value_heads * VALUE
    source = qkv_ptr + row * width
    of_key = (head // (value_heads // key_heads)) * KEY + key
    of_value = head * VALUE + column
    q = tl.load(source + of_key).to(tl.float32)
    k = tl.load(source + key_heads * KEY + of_key).to(tl.float32)
    v = tl.load(source + 2 * key_heads * KEY + of_value).to(tl.float32)
    a = tl.zeros([1], tl.float32)
    b = tl.zeros([1], tl.float32)
    for part in tl.static_range(parts):
        gates = gates_ptr + part * stride + row * (2 * value_heads) + head
        a += tl.load(gates).to(tl.float32)
        b += tl.load(gates + value_heads).to(tl.float32)
    if NORM:
        z = tl.zeros([COLUMNS], tl.float32)
        for part in tl.static_range(z_parts):
            at = part * z_stride + (row + 1) * columns - value_heads * VALUE + of_value
            z += tl.load(z_ptr + at).to(tl.float32)
        z = z.to(dtype).to(tl.float32)  # rounded where the reference rounds
    a = a.to(dtype).to(tl.float32) + bias
    b = b.to(dtype).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    # log(1 + exp(a)) without overflow
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    forget = tl.exp(decay * softplus)
    if ONE_PASS:
        found = tl.sum(state * k[:, None], axis=0) * forget
        read = tl.sum(state * q[:, None], axis=0) * forget
        write = (v - found) / (1.0 + tl.exp(-b))
        state = state * forget[:, None] + k[:, None] * write[None, :]
        out = (read + tl.sum(k * q, axis=0) * write).to(dtype)
    else:
        state *= forget[:, None]
        found = tl.sum(state * k[:, None], axis=0)
        write = (v - found) / (1.0 + tl.exp(-b))
        state += k[:, None] * write[None, :]
        out = tl.sum(state * q[:, None], axis=0).to(dtype)
    if HINT:
        tl.store(tile, state, mask=inside & real, eviction_policy="evict_first")
    else:
        tl.store(tile, state, mask=inside & real)
    if NORM:
        x = out.to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / VALUE + eps)
        x = x.to(dtype).to(tl.float32) * tl.load(norm_ptr + column).to(tl.float32)
        out = (x.to(dtype).to(tl.float32) * z / (1.0 + tl.exp(-z))).to(dtype)
    tl.store(out_ptr + row * (value_heads * VALUE) + of_value, out)


def rule_by(tile: Tile) -> Callable[..., Any]:
    """`gated_delta_rule` of decode rows with such programs."""

    def rule(
        tokens: RuleTokens, weights: RuleWeights, state: Array, layer: int, step: RecurrentStep,
        *, config: RuleConfig, target: Target,
    ) -> tuple[Array, Array]:  # fmt: skip
        heads, rows, place = config.heads, step.rows, jax.new_ref(state)
        parts, count, columns = tokens.projected.shape
        shape = (count, heads.values) if tile.norm else (count, heads.value_heads, heads.value_dim)
        width = min(tile.columns, heads.value_dim)
        grid = (heads.values // width, count)
        out = triton_call(
            tokens.qkv, tokens.gates, weights.a_log, weights.dt_bias, tokens.projected,
            weights.norm, rows.length, rows.slots, rows.positions, place, layer,
            kernel=_rule,
            name="gated_delta_rule",
            target=target,
            out_type=jax.ShapeDtypeStruct(shape, tokens.qkv.dtype),
            grid=grid[::-1] if tile.rows_first else grid,
            num_warps=tile.warps,
            slots=state.shape[1], stride=tokens.gates[0].size, z_stride=count * columns,
            columns=columns, parts=tokens.gates.shape[0], z_parts=parts,
            key_heads=heads.key_heads, value_heads=heads.value_heads, scale=heads.key_dim**-0.5,
            eps=config.eps, KEY=heads.key_dim, VALUE=heads.value_dim, COLUMNS=width,
            NORM=tile.norm, ROWS_FIRST=tile.rows_first, HINT=tile.hint, ONE_PASS=tile.one_pass,
        )  # fmt: skip
        if not tile.norm:
            out = rule_kernels._normed(out, tokens, weights, config=config, target=target)
        return out, jax.freeze(place)

    return rule


@triton.jit
def _prefetch(
    length_ptr, slot_ptr, state_ptr, layer, slots, size: tl.constexpr, EARLY: tl.constexpr = False
):  # fmt: skip
    """Asks for state of a row in L2: 2 KiB each of 32 threads."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(1)
    at = (layer * slots + tl.load(slot_ptr + row).to(tl.int64)) * size
    at += (tl.program_id(0) * 32 + tl.arange(0, 32)) * 512
    real = tl.load(length_ptr + row) > 0
    address = (state_ptr + tl.where(real, at, 0)).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.b32 $0, 0;",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    if EARLY:
        gdc_wait()


def prefetched(rows: int) -> Any:
    """`gates_first`, with the state of so many rows on its way while the large product runs."""

    def mix(
        weights: Any, normed: Any, state: Any, layer: int, step: RecurrentStep, spec: Any, *,
        target: Target,
    ) -> Any:  # fmt: skip
        place, delta = jax.new_ref(state.delta), state.delta
        triton_call(
            step.rows.length, step.rows.slots, place, layer,
            kernel=_prefetch,
            name="prefetch",
            target=target,
            out_type=(),
            grid=(math.prod(delta.shape[2:]) // (32 * 512), min(rows, step.rows.length.shape[0])),
            num_warps=1,
            slots=delta.shape[1], size=math.prod(delta.shape[2:]),
        )  # fmt: skip
        own = (weights, normed, state._replace(delta=jax.freeze(place)), layer, step, spec)
        return gates_first(*own, target=target)

    return patch.object(delta_net, "mix", mix)


def gates_first(
    weights: Any, normed: Any, state: Any, layer: int, step: RecurrentStep, spec: Any, *,
    target: Target,
) -> Any:  # fmt: skip
    """`delta_net.mix`, whose large product begins to read while the small one runs."""
    gates = linear(plain(normed), weights.in_gates, jax.numpy.float32, target=target)
    projected = linear(normed, weights.in_proj, target=target)
    mixed, conv = causal_conv(projected, weights.conv, state.conv, layer, step, target=target)
    out, delta = delta_net.gated_delta_rule(
        RuleTokens(mixed, gates, projected),
        RuleWeights(weights.a_log, weights.dt_bias, weights.norm),
        *(state.delta, layer, step),
        config=delta_net._rule_config(spec),
        target=target,
    )
    return out, RecurrentState(conv, delta)


def _products(change: Callable[[Any, Any], Any]) -> Any:
    """Products that stream by other configurations."""
    streaming = rules.streaming
    return patch.object(rules, "streaming", lambda call: change(call, streaming(call)))


def _parts(wanted: int, of: Callable[[Any], bool]) -> Any:
    """Some of them in other numbers of parts."""

    def change(call: Any, config: Any) -> Any:
        if call.gated or not of(call):
            return config
        each = -(-call.tiles // wanted)
        if call.tiles % each:
            each = -(-each // config.unroll) * config.unroll
        return replace(config, splits=-(-call.tiles // each))

    return _products(change)


def _stream_k(of: Callable[[Any, bool], bool], at_once: int = 3, **changes: Any) -> Any:
    """Some products by `stream_k_candidate`."""
    streaming = triton_streaming.launch

    def launch(x: Any, weight: Any, config: Any, out_type: Any, *, gated: bool, **rest: Any) -> Any:
        tokens = x.shape[0]
        own = isinstance(weight, Int4Weight) and tokens > 16 and config.splits == 1
        if not (own and of(weight, gated)):
            return streaming(x, weight, config, out_type, gated=gated, **rest)
        stages = (3 if tokens > 32 else 5) if at_once == 3 else (2 if tokens > 32 else 3)
        config = replace(config, num_stages=stages, unroll=1, **changes)
        return stream_k_candidate.launch(x, weight, config, out_type, gated=gated, **rest)

    return patch.object(triton_streaming, "launch", launch)


def _whole_sums(of: Callable[[Any], bool]) -> Any:
    """Some products in no parts, where `stream_k_candidate` takes them."""

    def change(call: Any, config: Any) -> Any:
        own = call.operand.kind == Kind.INT4 and call.tokens > 16 and of(call)
        return replace(config, splits=1) if own else config

    return _products(change)


def _four_at_once() -> Any:
    """Rings that leave room for four programs; 80 tiles of rows in 6 parts are 480."""

    def change(call: Any, config: Any) -> Any:
        if call.tokens <= 16 or call.gated:
            return config
        splits = 1 if call.out > call.depth else -(-call.tiles // -(-call.tiles // 6))
        stages = 2 if call.tokens > 32 else 3
        return replace(config, num_stages=stages, unroll=1, splits=splits)

    return _products(change)


def _is_tall(call: Any) -> bool:
    return call.out > 2 * call.depth


def _is_wide(call: Any) -> bool:
    return call.out <= call.depth


def _rule_patch(*tile: Any, **more: Any) -> Any:
    return patch.object(delta_net, "gated_delta_rule", rule_by(Tile(*tile, **more)))


def _gates_first() -> Any:
    return patch.object(delta_net, "mix", gates_first)


def _wide_conv() -> Any:
    return patch.object(conv_kernels, "_CHANNELS", 1024)


CANDIDATES: dict[str, Callable[[], list[Any]]] = {
    "base": list,
    "one token": lambda: [_rule_patch(32, 4, rows_first=True)],
    "columns first": lambda: [_rule_patch(32, 4)],
    "64 columns": lambda: [_rule_patch(64, 4)],
    "64 columns rows first": lambda: [_rule_patch(64, 4, rows_first=True)],
    "128 columns": lambda: [_rule_patch(128, 8)],
    "evict first": lambda: [_rule_patch(32, 4, hint=True)],
    "norm inside": lambda: [_rule_patch(128, 8, norm=True)],
    "norm inside 16 warps": lambda: [_rule_patch(128, 16, norm=True)],
    "gates first": lambda: [_gates_first()],
    "prefetch 4": lambda: [prefetched(4), _rule_patch(32, 4)],
    "prefetch 8": lambda: [prefetched(8), _rule_patch(32, 4)],
    "wide convolution": lambda: [_wide_conv()],
    "in_proj in 3": lambda: [_parts(3, _is_tall)],
    "out in 3": lambda: [_parts(3, _is_wide)],
    "out in 5": lambda: [_parts(5, _is_wide)],
    "out in 8": lambda: [_parts(8, _is_wide)],
    "next first": lambda: [_products(lambda _, config: replace(config, first=True))],
    "next last": lambda: [_products(lambda _, config: replace(config, first=False))],
    "stream-k gate and up": lambda: [_stream_k(lambda _, gated: gated)],
    "stream-k gate and up next first": lambda: [_stream_k(lambda _, gated: gated, first=True)],
    "stream-k in_proj": lambda: [_stream_k(lambda _, gated: not gated)],
    "stream-k both": lambda: [_stream_k(lambda _, gated: True)],
    "stream-k all": lambda: [_whole_sums(lambda call: True), _stream_k(lambda _, gated: True)],
    "stream-k all next last": lambda: [
        _whole_sums(lambda call: True),
        _stream_k(lambda _, gated: True, first=False),
    ],
    "stream-k all but out": lambda: [
        _whole_sums(lambda call: call.depth > 10_000),
        _stream_k(lambda _, gated: True),
    ],
    "A": lambda: [_rule_patch(64, 4), _stream_k(lambda _, gated: gated)],
    "B": lambda: [_rule_patch(64, 4), _stream_k(lambda _, gated: gated, 4)],
    "C": lambda: [_rule_patch(64, 4), _four_at_once(), _stream_k(lambda _, gated: True, 4)],
    "D": lambda: [
        _rule_patch(64, 4),
        _whole_sums(lambda call: True),
        _stream_k(lambda _, gated: True, 4),
    ],
    "R": lambda: [_rule_patch(64, 4, one_pass=True)],
    "R8": lambda: [_rule_patch(32, 4, one_pass=True)],
    "P": lambda: [prefetched(8), _rule_patch(64, 4)],
    "small things": lambda: [_gates_first(), _wide_conv(), _rule_patch(32, 4)],
}


@contextmanager
def computed_by(name: str) -> Iterator[None]:
    """What is traced inside is computed in another way."""
    with ExitStack() as stack:
        for each in CANDIDATES[name]():
            stack.enter_context(each)
        yield

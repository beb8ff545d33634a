"""Selects the kernel of an experts layer by the number of tokens, and its launch parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels import tables
from jaxserve_kernels.experts.types import ExpertWeights, Stacked, stacked
from jaxserve_kernels.op import Refusal
from jaxserve_kernels.quantized_matmul.config import int8_bytes, takes_int8
from jaxserve_kernels.quantized_matmul.e4m3 import tokens as token_formats
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, TokenFormat
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Kind, Operand, is_quantized


class Limits(NamedTuple):
    """See `tables/experts/`."""

    most_parts_tokens: int
    hopper_tokens: int
    hopper_tokens_e4m3: int
    hopper_tokens_mxfp4: int
    few_tokens: int
    scored_tokens: int
    ordered_tokens: int
    few_scores: int
    few_resident: int
    small_tiles_tokens: int


def limits_of(target: Target) -> Limits:
    """Returns the limits measured on the nearest card."""
    return tables.limits("experts", Limits, target)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch parameters of one product. A program multiplies `rows` rows of an expert's weight with
    up to `tokens` of its tokens, `depth` inputs per iteration."""

    rows: int = 64
    tokens: int = 16
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 4
    ahead: int = 0
    """Programs per multiprocessor that prefetch codes to the L2 cache while earlier kernels run
    (PDL). In the gate and up product they guess their experts; in the down product they know
    them."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters of both products."""

    gate_up: Launch
    down: Launch
    parts: bool
    """Whether the kernel that reads the output sums a token's experts, in float32. If not, they are
    rounded, and a separate pass sums them."""


def most_blocks(ids: Array, experts: int, tokens: int) -> int:
    """Returns the most tiles of `tokens` tokens that the pairs `ids` [tokens, k] can need."""
    pairs = ids.size
    alone = min(experts, pairs)  # tiles that may be partly empty
    return alone + (pairs - alone) // tokens


_EARLY = 64
"""Up to so many tokens, kernels of a chain that load weights before they wait are faster."""


def hopper_refuses(
    x: Array, ids: Array | jax.ShapeDtypeStruct, w: ExpertWeights, *, target: Target
) -> Refusal | None:
    """Returns why `hopper` cannot take x [tokens, embed] and ids [tokens, k]; None if it can."""
    if target.pdl and x.shape[0] <= _EARLY:
        return Refusal(f"up to {_EARLY} tokens in a chain")
    limits = limits_of(target)
    gate_up, least = stacked(w.gate_up), limits.hopper_tokens
    if gate_up is not None and tokens_in_bytes(gate_up):
        assert gate_up.operand is not None
        in_mxfp4 = gate_up.operand.kind is Kind.MXFP4
        least = limits.hopper_tokens_mxfp4 if in_mxfp4 else limits.hopper_tokens_e4m3
    if ids.size < least * w.gate_up.shape[0]:
        return Refusal(f"fewer than {least} tokens for each expert")
    if x.dtype != jnp.bfloat16:
        return Refusal("not in bfloat16")
    if x.shape[1] % 64 or w.width % 64:
        return Refusal("not whole tiles of 64 inputs")
    return _not_on_hopper(w.gate_up) or _not_on_hopper(w.down)


def token_format(x: Array, top_k: int, w: ExpertWeights, *, target: Target) -> TokenFormat | None:
    """Returns the 8-bit format in which the experts read x [tokens, embed], if they do. The kernel
    that computes the tokens may write them in both forms (`BothForms`)."""
    if not target.uses_triton() or not target.runs_hopper_kernels():
        return None
    tokens, inputs = x.shape[0], w.gate_up.shape[2]
    found, ids = stacked(w.gate_up), jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    if found is None or found.operand is None:
        return None
    if tokens_in_bytes(found) and hopper_refuses(x, ids, w, target=target) is None:
        return format_of(found, tokens, inputs)
    if not _reads_int8(x, ids, w, found.operand, target):
        return None
    return token_formats.int8_format(found.operand, tokens)._replace(inputs=inputs)


INT8_ABOVE = 2
"""With more tokens for each expert, if all had as many, `triton_streaming` reads int8 tokens. Up to
`Limits.scored_tokens` a kernel that writes plain tokens may score them, too."""


def _reads_int8(
    x: Array, ids: jax.ShapeDtypeStruct, w: ExpertWeights, operand: Operand, target: Target
) -> bool:
    """Whether `triton_streaming` reads x in int8, if the norm before it writes both forms."""
    if not (takes_int8(operand) or operand.kind is Kind.MXFP4):
        return False
    few = _each(ids, w.gate_up.shape[0]) <= INT8_ABOVE
    if few or x.shape[0] <= limits_of(target).scored_tokens:
        return False
    return isinstance(_streaming(x, ids, w, int8=True, target=target), Config)


def _each(ids: Array | jax.ShapeDtypeStruct, experts: int) -> int:
    """The mean number of tokens for each expert, rounded up."""
    return -(-ids.size // experts)


def format_of(weight: Stacked, tokens: int, inputs: int) -> TokenFormat:
    """The format of tokens in e4m3 that `hopper` reads beside a weight of `inputs` inputs."""
    assert weight.operand is not None
    orders = {Kind.FP8: token_formats.Order.BYTES, Kind.MXFP4: token_formats.Order.EIGHTHS}
    order = orders.get(weight.operand.kind, token_formats.Order.INPUTS)
    group = weight.operand.group if weight.operand.sums else 0
    return TokenFormat(jnp.float8_e4m3fn, order, group, tokens, inputs=inputs, beside=group > 0)


def tokens_in_bytes(weight: Stacked) -> bool:
    """Whether `hopper` multiplies a weight with tokens in e4m3, each with one scale."""
    return weight.operand is not None and weight.operand.kind in _IN_BYTES


_IN_BYTES = (Kind.FP8, Kind.INT4, Kind.MXFP4)


def has_small_tiles(ids: Array, w: ExpertWeights, *, target: Target) -> bool:
    """Whether `hopper` has small tiles for ids [tokens, k]: both weights are of 4-bit codes, and
    experts have few tokens."""
    found = [stacked(each) for each in (w.gate_up, w.down)]
    four_bits = [
        each is not None and each.operand is not None and each.operand.bits == 4 for each in found
    ]
    few = ids.size <= limits_of(target).small_tiles_tokens * w.gate_up.shape[0]
    return few and all(four_bits)


def _not_on_hopper(weight: Any) -> Refusal | None:
    if not is_quantized(weight):
        return None if weight.dtype == jnp.bfloat16 else Refusal("not in bfloat16")
    found = stacked(weight)
    if found is None or found.operand is None or found.operand.kind is Kind.NVFP4:
        return Refusal("written for codes with scales of 32 inputs or more")
    if found.operand.kind is not Kind.INT4:
        return None
    if found.operand.group < 128:
        return Refusal("integers in groups of fewer than 128")
    many = weight.shape[-1] > 128 * token_formats.SUMS
    return Refusal(f"integers in more than {token_formats.SUMS} groups") if many else None


def choose(x: Array, ids: Array, w: ExpertWeights, *, target: Target) -> Config | Refusal:
    """Returns the configuration for x [tokens, embed] and ids [tokens, k], or why none exists."""
    if x.dtype != jnp.bfloat16:
        return Refusal("not in bfloat16")
    found = {name: stacked(getattr(w, name)) for name in ("gate_up", "down")}
    launches = {}
    inputs = {"gate_up": x.shape[1], "down": w.width}
    for name, weight in found.items():
        if weight is None:
            return Refusal(f"no kernel supports the format of {name}")
        launch = _launch(name, getattr(w, name).shape, inputs[name], ids, weight, target)
        if isinstance(launch, Refusal):
            return launch
        launches[name] = launch
    parts = x.shape[0] <= limits_of(target).most_parts_tokens
    return Config(gate_up=launches["gate_up"], down=launches["down"], parts=parts)


def _launch(
    name: str, shape: tuple[int, ...], inputs: int, ids: Array, weight: Stacked, target: Target
) -> Launch | Refusal:
    kind = "plain" if weight.operand is None else weight.operand.kind.name.lower()
    tuned = tables.launch("experts", (name, kind, *shape), ids.shape[0], target=target)
    if tuned is not None:
        return Launch(**tuned)
    experts, rows, depth = shape
    refusal = unlike(rows, depth, inputs, weight)
    if refusal is not None:
        return refusal
    each = _each(ids, experts)
    tokens = 16 if each <= 8 else 32 if each <= 20 else 64 if each <= 48 else 128
    if weight.operand is not None:
        tokens = min(tokens, 64)
    tall = tokens <= 32 and _unpacks_slowly(weight, ids, target)
    launch = Launch(
        rows=128 if tall or each > 48 else 64,
        tokens=tokens,
        depth=_depth(depth, tokens, weight),
        num_warps=8 if each > 48 else 4,
        ahead=_ahead(name, experts, ids, weight),
    )
    most = 4 if ids.shape[0] > 1 else 6 if weight.operand is None else 8
    return replace(launch, num_stages=_stages(launch, most, weight, target))


def choose_streaming(
    x: Array | BothForms, ids: Array | jax.ShapeDtypeStruct, w: ExpertWeights, *, target: Target
) -> Config | Refusal:
    """Returns the configuration of `triton_streaming`, or why it cannot take x [tokens, embed] and
    ids [tokens, k]. Gate and up read the int8 form of x, if it has one."""
    return _streaming(x, ids, w, int8=token_formats.int8_form(x) is not None, target=target)


def _streaming(
    x: Array | BothForms,
    ids: Array | jax.ShapeDtypeStruct,
    w: ExpertWeights,
    *,
    int8: bool,
    target: Target,
) -> Config | Refusal:
    if x.dtype != jnp.bfloat16:
        return Refusal("not in bfloat16")
    if ids.shape[0] == 1:
        return Refusal("one token")
    if ids.shape[0] > limits_of(target).most_parts_tokens:
        return Refusal("so many tokens that their experts' parts are rounded")
    launches = {}
    for name, inputs in (("gate_up", x.shape[1]), ("down", w.width)):
        weight = getattr(w, name)
        found = stacked(weight)
        if found is None or found.operand is None or found.operand.kind not in STREAMED:
            return Refusal("not int4, MXFP4 or fp8")
        refusal = unlike(weight.shape[1], weight.shape[2], inputs, found)
        if refusal is not None:
            return refusal
        if name == "gate_up" and w.width % 64:
            return Refusal("not whole tiles of 64 rows of gate")
        most = STREAMED[found.operand.kind]
        if int8 and found.operand.kind is Kind.INT4:
            most = STREAMED_INT8
        if _each(ids, weight.shape[0]) > most:
            return Refusal(f"more than {most} tokens for each expert, if all had as many")
        in_int8 = int8 and name == "gate_up"
        launches[name] = _streaming_launch(name, weight.shape, ids, found, target, int8=in_int8)
    return Config(gate_up=launches["gate_up"], down=launches["down"], parts=True)


def _streaming_launch(
    name: str,
    shape: tuple[int, ...],
    ids: Array | jax.ShapeDtypeStruct,
    weight: Stacked,
    target: Target,
    *,
    int8: bool,
) -> Launch:
    """In the down product, a program has its first codes in flight before it waits, so that none is
    prefetched."""
    assert weight.operand is not None
    kind, experts = weight.operand.kind, shape[0]
    known = f"{STREAMING_INT8 if int8 else STREAMING}{name}", kind.name.lower(), *shape
    tuned = tables.launch("experts", known, ids.shape[0], target=target)
    if tuned is not None:
        return Launch(**tuned)
    each = _each(ids, experts)
    tokens = 8 if each <= 4 else 16 if each <= 8 else 32 if each <= 32 else 64
    ahead = _ahead(name, experts, ids, weight) if name == "gate_up" else 0
    short = kind is Kind.FP8 or tokens > 16 or shape[2] < 256 or (int8 and kind is Kind.MXFP4)
    depth = 128 if short or (kind is Kind.INT4 and tokens == 8) else 256
    launch = Launch(rows=128, tokens=tokens, depth=depth, ahead=ahead)
    programs = _resident(launch, weight, each=ids.size / experts)
    stages = _streaming_stages(launch, weight, programs, target, int8=int8)
    # Triton 3.6 compiles no ring with more slots than that.
    return replace(launch, num_stages=min(stages, shape[2] // depth + 1))


STREAMING = "streaming_"
"""Begins the names of products of `triton_streaming` in tables of launches."""

STREAMING_INT8 = "streaming_int8_"
"""The same with int8 tokens, for gate and up."""

STREAMED = {Kind.INT4: 8, Kind.MXFP4: 48, Kind.FP8: 8}
"""Formats of `triton_streaming`, and their most tokens for each expert. With more, the sums of
4-bit integers are scaled in as many instructions as in `triton`."""

STREAMED_INT8 = 16
"""The same for 4-bit integers, if gate and up read int8 tokens."""

_RESERVED = 1024
"""Bytes of shared memory that the system reserves for each program."""


def _resident(launch: Launch, weight: Stacked, *, each: float) -> int:
    """Returns how many programs a multiprocessor should have room for. each: mean tokens per
    expert."""
    if launch.tokens > 16:
        return 2  # it has registers for no more
    fp8 = weight.operand is not None and weight.operand.kind is Kind.FP8
    return 4 if fp8 and each <= 0.5 else 3  # with so few tokens four leave fewer turns


def _streaming_stages(
    launch: Launch, weight: Stacked, programs: int, target: Target, *, int8: bool
) -> int:
    assert weight.operand is not None
    row_bytes = weight.operand.row_bytes  # of 128 inputs, with scales
    token_bytes = int8_bytes(weight.operand) if int8 else 256
    stage = launch.depth // 128 * (launch.rows * row_bytes + token_bytes * launch.tokens)
    ring = target.gpu.shared_memory // programs - _RESERVED
    return max(2, min(4, ring // stage))


_LAUNCH_BOUND = 8
"""Up to this many tokens, launches dominate a layer's time."""
_AHEAD = 4


def _unpacks_slowly(weight: Stacked, ids: Array, target: Target) -> bool:
    """Whether a multiprocessor may unpack 4-bit codes more slowly than the memory delivers them.

    Tiles of 128 rows help: a thread then executes fewer instructions for each code. For an H100 and
    16 tokens ptxas makes (`triton_streaming`, which takes most of these, has its own tiles):

    | rows | int4 | MXFP4 |
    |---:|---:|---:|
    | 64 | 2.7 | 3.9 |
    | 128 | 2.1 | 3.3 |

    With more than 32 tokens one such program has nearly all registers of a multiprocessor.
    """
    four_bits = weight.operand is not None and weight.operand.bits == 4
    return four_bits and ids.shape[0] > _LAUNCH_BOUND and target.runs_hopper_kernels()


def _ahead(name: str, experts: int, ids: Array | jax.ShapeDtypeStruct, weight: Stacked) -> int:
    """Gate and up prefetch only if most experts have tokens: 86 % do with two pairs per expert."""
    if weight.operand is None or ids.shape[0] <= _LAUNCH_BOUND:
        return 0
    return _AHEAD if name == "down" or ids.size >= 2 * experts else 0


def _depth(depth: int, tokens: int, weight: Stacked) -> int:
    if weight.operand is not None:
        return weight.operand.inputs_per_tile
    return 64 if depth % 128 or tokens > 32 else 128


def _stages(launch: Launch, most: int, weight: Stacked, target: Target) -> int:
    """Returns the stages that fit in a program's shared memory, at most `most`. A single token gets
    more, because its few programs must keep the memory busy."""
    bits = 16 if weight.operand is None else weight.operand.bits
    stage = launch.depth * (launch.rows * bits // 8 + launch.tokens * 2)
    return max(2, min(most, target.gpu.shared_memory_per_block // stage))


def unlike(rows: int, depth: int, inputs: int, weight: Stacked) -> Refusal | None:
    """Returns why no kernel multiplies a weight [experts, rows, depth] with tokens of `inputs`
    inputs; None if one does."""
    if rows % 64:
        return Refusal("not whole tiles of 64 rows")
    if weight.operand is None:
        if depth != inputs:
            return Refusal("a plain weight with more inputs than tokens have")
        return Refusal("not whole tiles of 64 inputs") if depth % 64 else None
    if inputs > depth:
        return Refusal("fewer inputs than tokens have")
    if inputs % 16:
        return Refusal("tokens of no multiple of 16 inputs")
    narrow = weight.operand.scale_bytes == 4 and weight.operand.group < 128
    return Refusal("padded groups of fewer than 128") if narrow and inputs < depth else None


def describe(x: Array, _ids: Any, _weights: Any, w: ExpertWeights, *_: Any, **__: Any) -> str:
    """Describes the sizes of a call in words."""
    return f"{w.gate_up.shape[0]} experts of {x.shape[-1]} x {w.width}"

"""Token limits of each kernel, and launch parameters of the kernels for few tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxserve_kernels import tables
from jaxserve_kernels.op import Refusal
from jaxserve_kernels.target import Target


class Limits(NamedTuple):
    """See `tables/dense_matmul/`."""

    most_tokens: int
    most_tokens_pdl: int
    fused_gating_tokens: int
    adding_tokens: int
    programs_per_multiprocessor: int
    many_tokens: int
    most_splits: int


def limits_of(target: Target) -> Limits:
    """The limits measured on the nearest card."""
    return tables.limits("dense_matmul", Limits, target)


_NEARLY = 0.84
"""Share of the wanted number of programs that is enough: 256 of 264 for Llama-3.1-8B's down and
output products, 112 of 132 for Qwen2.5-7B's at 64 rows. The next larger possible numbers made a
step 3.5 and 1.2 % longer (lab/measurements/product_waves_h200.json)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters: `rows` of the weight per program, `depth` inputs per step, and `splits`
    programs that share the inputs.

    With PDL, warps and stages are those of `triton_streaming`. A gated product has no splits.
    """

    rows: int = 64
    depth: int = 128
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    tokens: int = 0
    """Of a program; 0: all."""


def choose(*, gated: bool, tokens: int, out: int, depth: int, target: Target) -> Config | Refusal:
    """The configuration of x [tokens, depth] times a weight [out, depth], for few tokens."""
    parameters = tables.launch(
        "dense_matmul", ("gated" if gated else "linear", out, depth), tokens, target=target
    )
    if parameters is not None:
        return Config(**parameters)
    limits = limits_of(target)
    most = limits.most_tokens_pdl if target.pdl else limits.most_tokens
    if tokens > most:
        return Refusal(f"more than {most} tokens")
    return _heuristic(tokens, out, depth, gated=gated, target=target)


def _heuristic(
    tokens: int, out: int, depth: int, *, gated: bool, target: Target
) -> Config | Refusal:
    limits = limits_of(target)
    many = tokens > limits.many_tokens
    config = Config(depth=64 if many or depth % 128 else 128)
    steps, rest = divmod(depth, config.depth)
    # A router need not be whole tiles: some of its rows are then read twice.
    router = not gated and (out < config.rows or (out < _ROUTER and out % _NARROW.rows))
    if rest or (out % config.rows and not router):
        return Refusal(f"not whole tiles of {config.rows} x {config.depth}")
    tiles = -(-out // config.rows)
    choices = [splits for splits in range(1, limits.most_splits + 1) if steps % splits == 0]
    wanted = target.gpu.multiprocessors * (1 if many else limits.programs_per_multiprocessor)
    enough = [splits for splits in choices if tiles * splits >= wanted * _NEARLY]
    splits = enough[0] if enough else choices[-1]
    stages = 4 if steps // splits > 16 and splits > 1 else 3
    return replace(config, splits=splits, num_stages=stages)


_ROUTER = 1024
"""A weight with fewer rows than this may have a partial tile, which costs little."""
_NARROW = Config(rows=16, num_warps=2)
_MOST_NARROW_SPLITS = 8
"""The most splits of a weight of few rows. Chosen by reasoning, not measured."""


def choose_narrow(*, tokens: int, out: int, depth: int, target: Target) -> Config | Refusal:
    """The configuration of the kernel without streaming, for a weight [out, depth] that `choose`
    cannot divide into whole tiles."""
    most = limits_of(target).most_tokens_pdl
    if tokens > most:
        return Refusal(f"more than {most} tokens")
    steps, rest = divmod(depth, _NARROW.depth)
    if rest or out % _NARROW.rows:
        return Refusal(f"not whole tiles of {_NARROW.rows} x {_NARROW.depth}")
    splits = max(each for each in range(1, _MOST_NARROW_SPLITS + 1) if steps % each == 0)
    return replace(_NARROW, splits=splits)


def choose_router(*, tokens: int, out: int, depth: int, target: Target) -> Config | Refusal:
    """The configuration of many tokens times a weight of so few rows that its product need not be
    as fast as the library's."""
    if not (target.pdl or target.joined):
        return Refusal("not in a chain of kernels")
    if out >= _ROUTER:
        return Refusal(f"{_ROUTER} rows or more")
    large = tokens >= _LARGE_FROM
    config, most = (_LARGE, _MOST_SPLITS_LARGE) if large else (_SQUARE, _MOST_NARROW_SPLITS)
    config = replace(config, rows=min(config.rows, -(-out // 64) * 64))
    config = replace(config, depth=64 if depth % 128 else config.depth)
    steps, rest = divmod(depth, config.depth)
    if rest:
        return Refusal(f"not whole steps of {config.depth} inputs")
    tiles = -(-out // config.rows) * -(-tokens // config.tokens)
    most = max(1, min(most, target.gpu.multiprocessors // tiles))
    splits = max(each for each in range(1, most + 1) if steps % each == 0)
    return replace(config, splits=splits)


_SQUARE = Config(rows=64, tokens=64)
_LARGE = Config(rows=128, tokens=128, depth=64, num_warps=8)
"""Their programs read as much from the L2 cache as they can take: with the smaller ones 2,048
tokens and 257 rows took 19 us."""
_LARGE_FROM = 1024
_MOST_SPLITS_LARGE = 4


def fused_gating(*, tokens: int, out: int, depth: int, target: Target) -> Refusal | None:
    """Why `hopper` does not accept a gated product of x [tokens, depth] and a weight [out, depth];
    None if it does."""
    least = limits_of(target).fused_gating_tokens
    if tokens < least:
        return Refusal(f"fewer than {least} tokens")
    return Refusal("not whole tiles of 256 x 64") if out % 256 or depth % 64 else None

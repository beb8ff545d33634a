"""For how many tokens each kernel is used, and how the one for few is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxserve_kernels import tuned
from jaxserve_kernels.target import Target

MAX_TOKENS = 16
"""Beyond it cuBLASLt is as fast. Measured on an H100; see lab/logs/decode.md."""

HOPPER_MIN_TOKENS = 384
"""From it on the product with the gating in it is faster on Hopper than cuBLASLt and a kernel that
gates. Measured on an H200; see lab/logs/prefill.md."""

ADDING_MIN_TOKENS = 2048
"""From it on a product of cuBLASLt's takes the residual stream in. Measured on an H200; see
lab/logs/prefill.md."""

_ENOUGH_PROGRAMS = 2
"""On each multiprocessor: they keep the memory busy."""

MAX_CHAINED_TOKENS = 64
"""In a chain of kernels, which can hold no product of XLA's."""

_MANY_TOKENS = 32
"""Beyond them partial sums are so large that one program for each multiprocessor is enough, and
tokens so many that half the depth of a tile leaves room for three programs."""

_MAX_SPLITS = 8
"""More partial sums than this cost their readers more than the product gains."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """`rows` of the weight per program, `depth` of the input per step, `splits` of the input.

    In a chain warps and stages are those of `triton_streaming`. Gated, there are no splits.
    """

    rows: int = 64
    depth: int = 128
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def choose(*, gated: bool, tokens: int, out: int, depth: int, target: Target) -> Config | None:
    """For x [tokens, depth] times a weight [out, depth]; None where XLA's product is used."""
    parameters = tuned.find(
        "dense_matmul", ("gated" if gated else "linear", out, depth), tokens, target=target
    )
    if parameters is not None:
        return Config(**parameters)
    most = MAX_CHAINED_TOKENS if target.pdl else MAX_TOKENS
    return _heuristic(tokens, out, depth, target=target) if tokens <= most else None


def _heuristic(tokens: int, out: int, depth: int, *, target: Target) -> Config | None:
    """None where the kernel does not apply."""
    many = tokens > _MANY_TOKENS
    config = Config(depth=64 if many else 128)
    steps, rest = divmod(depth, config.depth)
    if rest or out % config.rows:
        return None
    tiles = out // config.rows
    choices = [splits for splits in range(1, _MAX_SPLITS + 1) if steps % splits == 0]
    wanted = target.gpu.multiprocessors * (1 if many else _ENOUGH_PROGRAMS)
    enough = [splits for splits in choices if tiles * splits >= wanted]
    splits = enough[0] if enough else choices[-1]
    stages = 4 if steps // splits > 16 and splits > 1 else 3
    return replace(config, splits=splits, num_stages=stages)


def fuses_gating(*, tokens: int, out: int, depth: int) -> bool:
    """Whether the gated product of x [tokens, depth] and a weight [out, depth] takes `hopper`."""
    return tokens >= HOPPER_MIN_TOKENS and out % 256 == 0 and depth % 64 == 0

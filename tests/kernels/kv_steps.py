"""Steps of attention through a KV cache: made-up sequences, their projections and places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format import AttentionStep, CacheShape
from jaxserve_kernels.paged_attention import QueryTiles

EPS = 1e-6
LAYER = 1
"""The layer that steps are of, out of two."""
AS_WRITTEN = {"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
"""Options with which XLA compiles a definition for a CPU with every rounding that it has.

The first alone is not enough: of many tokens XLA gives a norm to YNNPACK, which leaves out the
rounding between the norm and its weight. Then 57 % of a key's elements are a neighbour in bfloat16,
and 1.2 % of the codes that KVarN makes of them.
"""


HEADS = {
    "norms": ("q_norm", "k_norm"),
    "nothing": (),
    "bias": ("bias",),
    "both": ("q_norm", "k_norm", "bias"),
    "sinks": ("bias", "sinks"),
}
"""Of `HeadWeights`, by models: Qwen3 has norms, Llama nothing, Qwen2 a bias, gpt-oss sinks, too."""


def head_weights(
    options: str, q_heads: int, kv_heads: int, dim: int, dtype: str = "float32", seed: int = 0
) -> HeadWeights:
    """Norms and biases of heads, of those that `options` names."""
    rng = np.random.default_rng(seed)
    norms = 1 + 0.1 * rng.standard_normal((2, dim))
    bias = rng.standard_normal((q_heads + 2 * kv_heads) * dim)
    sinks = 3 * rng.standard_normal(q_heads)
    given = zip(HeadWeights._fields, (*norms, bias, sinks), strict=True)
    chosen = {name: jnp.asarray(x, dtype) for name, x in given if name in HEADS[options]}
    return HeadWeights(**chosen)


class Projections(NamedTuple):
    """What comes into attention: arguments of `attend`."""

    qkv: Array  # [parts, tokens, (q_heads + 2 * kv_heads) * head_dim]
    tables: tuple[Array, Array]  # [tokens, head_dim/2] each


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequence i has slot i and pages of its own, in random order; the last slot is padding."""

    lengths: tuple[int, ...]
    """The longest that each gets."""
    page_size: int
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    seed: int = 0
    options: str = "norms"
    """A name in HEADS."""

    @property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def width(self) -> int:
        return max(-(-length // self.page_size) for length in self.lengths)

    @property
    def num_pages(self) -> int:
        return 2 + self.width * len(self.lengths)

    @property
    def shape(self) -> CacheShape:
        return CacheShape(
            layers=2,
            pages=self.num_pages,
            kv_heads=self.kv_heads,
            page_size=self.page_size,
            head_dim=self.head_dim,
            slots=len(self.lengths) + 1,
        )

    @property
    def page_table(self) -> NDArray[np.int32]:
        pages = self._rng.permutation(np.arange(1, self.num_pages - 1))
        own = pages.reshape(len(self.lengths), self.width)
        return np.concatenate([own, np.zeros((1, self.width), int)]).astype(np.int32)

    @property
    def heads(self) -> HeadWeights:
        return head_weights(
            self.options, self.q_heads, self.kv_heads, self.head_dim, self.dtype, self.seed
        )

    def step(
        self,
        starts: tuple[int, ...],
        counts: tuple[int, ...],
        tile_size: int,
        padding: int = 0,
        *,
        apart: bool = False,
    ) -> AttentionStep:
        """Sequence i computes counts[i] tokens from position starts[i] on.

        With `apart`, sequences of one token are `decode_rows`.
        """
        spare = len(self.lengths)
        slots = np.repeat(np.arange(spare), counts)
        positions = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        tiles: list[tuple[int, int, int, int]] = []
        decode_rows: list[tuple[int, int, int, int]] = []
        first = 0
        for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for offset in range(0, count, tile_size):
                length = min(tile_size, count - offset)
                kind = decode_rows if apart and count == 1 else tiles
                kind.append((first + offset, length, slot, start + offset))
            first += count
        for kind in (tiles, decode_rows):
            kind += [(0, 0, spare, 0)] * (1 + padding)
        slots = np.append(slots, [spare] * padding).astype(int)
        positions = np.append(positions, [0] * padding).astype(int)

        def ints(values: Any) -> Array:
            return jnp.asarray(np.asarray(values), jnp.int32)

        def columns(tiles: list[tuple[int, int, int, int]]) -> QueryTiles:
            return QueryTiles(*(ints(column) for column in zip(*tiles, strict=True)))

        return AttentionStep(
            slots=ints(slots),
            positions=ints(positions),
            pages=ints(self.page_table[slots, positions // self.page_size]),
            offsets=ints(positions % self.page_size),
            tiles=columns(tiles)._replace(decode_rows=columns(decode_rows) if apart else None),
            page_table=ints(self.page_table),
        )

    def projections(self, step: AttentionStep, parts: int = 1, scale: float = 1.0) -> Projections:
        """Normal numbers that depend on slot and position only, however tokens are chunked."""
        width = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        places = zip(np.asarray(step.slots), np.asarray(step.positions), strict=True)
        rows = [
            np.random.default_rng([self.seed, int(slot), int(position)]).standard_normal(
                (parts, width), np.float32
            )
            for slot, position in places
        ]
        qkv = scale * np.stack(rows, axis=1)
        half = self.head_dim // 2
        angles = np.asarray(step.positions)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        tables = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
        return Projections(jnp.asarray(qkv, "float32" if parts > 1 else self.dtype), tables)


def without_what_is_behind(
    kv: Any, step: AttentionStep, starts: tuple[int, ...], window: int, page_size: int
) -> tuple[Any, AttentionStep]:
    """The page tables name a page of NaN, or of other numbers, for pages wholly behind the window
    of the first token of each sequence."""
    pages = jax.tree.leaves(kv)[0].shape[1]

    def spoiled(leaf: Array) -> Array:
        if leaf.shape[1] != pages:
            return leaf
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.at[:, -1].set(jnp.nan if floats else 0x7F7F)

    table = np.asarray(step.page_table).copy()
    for slot, start in enumerate(starts):
        table[slot, : max(start - window + 1, 0) // page_size] = pages - 1
    return jax.tree.map(spoiled, kv), step._replace(page_table=jnp.asarray(table))

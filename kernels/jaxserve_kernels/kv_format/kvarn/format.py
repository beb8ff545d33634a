"""The KVarN formats: their arrays, and which implementation runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.fallback import why_not
from jaxserve_kernels.kv_format.base import AttentionStep, CacheShape
from jaxserve_kernels.kv_format.format import QuantizedKVFormat
from jaxserve_kernels.kv_format.kvarn import reference
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV, chunk_pages
from jaxserve_kernels.op import NO_KERNELS, Implementation, Op, Refusal, anything
from jaxserve_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class KVarN(QuantizedKVFormat):
    """4-bit keys and `value_bits`-bit values in tiles of `group` tokens, one tile per page.

    Every slot owns two tiles in full precision, so these never limit the number of sequences.

    When a step moves past a page, the page is encoded and its tail is overwritten. It cannot be
    encoded again with another token. A page whose last position is the step's last keeps its tail.
    """

    arrays = KVarNKV
    windows_on_gpus = False
    """The kernels that read contexts (two for single tokens, with their merges, and the one that
    expands pages of chunks) visit the first page, the encoded pages and the growing page. Each of
    them would need other bounds and a mask for a window."""
    computes_whole_tiles = True
    rewrites_pages = False

    value_bits: int
    group: int = 128

    @classmethod
    def of(cls, kv: KVarNKV) -> Self:
        return cls(value_bits=kv.value_bits, group=kv.group)

    @property
    def name(self) -> str:
        return f"kvarn_k4v{self.value_bits}_g{self.group}"

    @property
    def page_size(self) -> int:
        return self.group

    @property
    def own_tokens(self) -> int:
        return self.group  # the sink, which each slot stores for itself

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> KVarNKV:
        outer = (shape.layers, shape.pages, shape.kv_heads)
        quarter, value_rows = shape.head_dim // 4, self.group * self.value_bits // 4
        raw = (shape.layers, shape.slots, 2, shape.kv_heads, 2, self.group, shape.head_dim)

        def array(dims: tuple[int, ...], kind: DTypeLike) -> Any:
            return jax.ShapeDtypeStruct(dims, kind)

        return KVarNKV(
            key_words=array((*outer, self.group, quarter), jnp.int16),
            value_words=array((*outer, value_rows, quarter), jnp.int16),
            scales=array((*outer, 3 * (shape.head_dim + self.group)), jnp.float16),
            raw=array(raw, jnp.dtype(dtype)),
        )

    def tokens_per_page(self, kv: KVarNKV) -> int:
        return kv.group

    @property
    def attention(self) -> Op:
        return _OP

    def end_step(
        self, kv: KVarNKV, step: AttentionStep, *, tile_size: int, target: Target
    ) -> KVarNKV:
        if not target.uses_triton() or not _ends(kv, step, tile_size, target=target):
            return kv  # the reference has already encoded the pages in each layer
        from jaxserve_kernels.kv_format.kvarn import triton  # needs Triton: only for GPUs

        return triton.end_step(kv, step, tile_size=tile_size, target=target)

    def expanded_tokens(self, max_model_len: int, *, step_tokens: int, sequences: int) -> int:
        pages = chunk_pages(step_tokens, sequences, self.group)
        own = self.group * pages  # the chunks' own tokens, whose pages are encoded
        return (
            super().expanded_tokens(max_model_len, step_tokens=step_tokens, sequences=sequences)
            + own
        )


def _kernels(
    qkv: Array, kv: KVarNKV, heads: Any, tables: Any, step: AttentionStep, *,
    tile_size: int, target: Target, window: int | None = None, **_: Any,
) -> Refusal | None:  # fmt: skip
    if not target.uses_triton():
        return NO_KERNELS
    assert window is None, "the start refuses windows with KVarN on a GPU"
    if heads.sinks is not None:
        return Refusal("attention sinks are not supported")
    ends = _ends(kv, step, tile_size, target=target)
    return None if ends else Refusal("the kernels that encode do not compile")


def _streams(
    qkv: Array, kv: KVarNKV, heads: Any, tables: Any, step: AttentionStep, *,
    tile_size: int, dtype: Any, target: Target, **_: Any,
) -> Any:  # fmt: skip
    if refused := _kernels(qkv, kv, heads, tables, step, tile_size=tile_size, target=target):
        return refused
    if tile_size > 1:
        return Refusal("the step has prompt chunks")
    from jaxserve_kernels.kv_format.kvarn import triton_streaming  # needs Triton: only for GPUs

    if not triton_streaming.fits(qkv, kv, dtype):
        return Refusal("sizes of heads or pages are not supported")
    tiles = step.tiles.in_one_list().first.shape[0]
    return triton_streaming.heuristic(tiles=tiles, kv_heads=kv.key_words.shape[2], target=target)


def _stream(
    config: Any, qkv: Array, kv: KVarNKV, *rest: Any, layer: int, eps: float, target: Target,
    **_: Any,
) -> Any:  # fmt: skip
    from jaxserve_kernels.kv_format.kvarn import triton_streaming

    heads, tables, step = rest
    return triton_streaming.attend(
        qkv, kv, layer, heads, tables, step, config, eps=eps, target=target
    )


def _run(
    _: None, qkv: Array, kv: KVarNKV, *rest: Any, layer: int, window: None, **options: Any
) -> Any:
    from jaxserve_kernels.kv_format.kvarn import triton

    return triton.attend(qkv, kv, layer, *rest, **options)


def _definition(
    _: None, qkv: Array, kv: KVarNKV, *rest: Any, layer: int, target: Target, **options: Any
) -> Any:
    return reference.attend(qkv, kv, layer, *rest, **options)


_OP = Op(
    name="attention_kvarn",
    implementations=(
        Implementation(name="triton_streaming, with its inputs", configure=_streams, run=_stream),
        Implementation(name="triton", configure=_kernels, run=_run),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda qkv, *_, tile_size, **__: f"tokens of {qkv.shape[-1]}, tiles of {tile_size}",
    per_layer=True,
)


def _ends(kv: KVarNKV, step: AttentionStep, tile_size: int, *, target: Target) -> bool:
    """Whether the kernels of `end_step` compile. Without them the kernels of `attend` must not run,
    because they leave filled pages unencoded."""
    from jaxserve_kernels.kv_format.kvarn import triton  # needs Triton: only for GPUs

    own = target.replace(pdl=False)  # `end_step` is launched outside the PDL chain
    end = functools.partial(triton.end_step, tile_size=tile_size, target=own)
    if tile_size > 1:
        return True
    return why_not("encode_kvarn", end, kv, step, static=tile_size, target=own) is None

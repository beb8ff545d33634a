"""The definition of the KV write, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def kv_write(
    kv: Array, layer: int, keys: Array, values: Array, pages: Array, offsets: Array
) -> Array:
    """Store each token's key and value at its page and offset::

        kv[layer, pages[t], :, 0, offsets[t]] = keys[t]
        kv[layer, pages[t], :, 1, offsets[t]] = values[t]

    The update happens in place when kv is donated. Tokens of the padding go to page 0, in any
    order.

    Args:
      kv: [layers, pages, kv_heads, 2, page_size, head_dim].
      layer: index into the first axis of kv.
      keys, values: [tokens, kv_heads, head_dim].
      pages, offsets: int32 [tokens].
    """
    both = jnp.stack([keys, values], axis=2).astype(kv.dtype)
    return kv.at[layer, pages, :, :, offsets].set(both)

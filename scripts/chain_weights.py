"""Weights of a model's shape whose greedy output is known beforehand.

After each token comes its successor on one circle through the tokenizer's ids (`successors`): the
output matrix holds each token's embedding in its successor's row, and the layers, random otherwise,
add hardly anything. Steps take as long as with any other weights of the shape. So a prompt can hold
as much of the coming answer as a measurement of speculation wants.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from random_checkpoint import hf_config

from jaxserve.model_spec import ModelSpec
from jaxserve_checkpoints import resolve

if TYPE_CHECKING:
    from jaxserve.models.decoder import Params

TOKENIZER = Path(resolve.__file__).parent / "embedded"
_SHARE = 1e-4
"""Of their usual size, of the matrices that add to the residual stream. That is the size of the
embeddings times the square root of their width."""


def successors() -> list[int]:
    """Which token comes after each, of those that the tokenizer has: one circle in random order."""
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])}
    order = np.random.default_rng(1).permutation(max(ids) + 1)
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)
    return following.tolist()


def write_shape(spec: ModelSpec, folder: Path) -> None:
    """Write a folder of the shape, with an output matrix of its own, and of the embedded model's
    tokenizer. It holds no weights: serve it with `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(replace(spec, tie_embeddings=False))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


def chained(params: Params) -> Params:
    """Changes random weights to those of the module's first lines.

    Args:
      params: of a Qwen3 or Llama shape with an output matrix of its own; taken over. Matrices are
        [out, in], not quantised.
    """
    import jax
    import jax.numpy as jnp

    from jaxserve.models.layer_weights import Layer

    def quiet(matrix: Any) -> Any:
        return jax.jit(lambda each: each * _SHARE, donate_argnums=0)(matrix)

    def changed(layer: Layer) -> Layer:
        return layer._replace(out=quiet(layer.out), down=quiet(layer.down))

    def chain(head: jax.Array, embedding: jax.Array, following: jax.Array) -> jax.Array:
        return head.at[following].set(embedding[: len(following)])

    layers = params.layers
    head = jax.jit(chain, donate_argnums=0)
    return params._replace(
        layers=changed(layers) if isinstance(layers, Layer) else tuple(map(changed, layers)),
        final_norm=jnp.ones_like(params.final_norm),
        lm_head=head(params.lm_head, params.embedding, jnp.array(successors())),
    )

"""Makes weights of a model's shape whose greedy output is known beforehand.

Each token is followed by its successor on one cycle through the tokenizer's ids (`successors`). The
output matrix has each token's embedding in its successor's row. The layers are random, and scaled
down so that they add almost nothing. Steps take as long as with other weights of the shape. So a
measurement of speculation can put as much of the coming answer into a prompt as it needs.
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
"""Factor on the usual size of the matrices that add to the residual stream. The usual size is that
of the embeddings times the square root of their width."""


def successors() -> list[int]:
    """The successor of each of the tokenizer's tokens: one cycle in random order."""
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])}
    order = np.random.default_rng(1).permutation(max(ids) + 1)
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)
    return following.tolist()


def write_shape(spec: ModelSpec, folder: Path) -> None:
    """Writes a model folder without weights: the shape, with an untied output matrix, and the
    embedded model's tokenizer. Serve it with `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(replace(spec, tie_embeddings=False))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


def chained(params: Params) -> Params:
    """Turns random weights into weights with known output, as the module describes.

    Args:
      params: of a Qwen3 or Llama shape with an untied output matrix. Matrices are [out, in], not
        quantised. The arrays are consumed.
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

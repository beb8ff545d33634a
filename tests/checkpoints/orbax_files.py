"""Orbax checkpoints as trainers write them, made of Hugging Face's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve.models.tensor_names import rows_of
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.rules import Rule

type Tensors = Mapping[str, NDArray[Any]]
"""By Hugging Face's names."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Names with dots -> dictionaries in each other."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        place = tree
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return tree


def save(folder: Path, tree: Any, **settings: Any) -> Path:
    """Write one checkpoint with Orbax's Checkpointer; `settings`: of its PyTree handler."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)) as writer:
        writer.save(folder.absolute(), tree)
    return folder


def flax_tree(tensors: Tensors) -> dict[str, Any]:
    """The tree of `jaxserve.flax`."""
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        short = name.removeprefix("model.")
        module, _, kind = short.rpartition(".")
        if short == "embed_tokens.weight":
            tree["embed_tokens.embedding"] = array
        elif kind == "bias":
            tree[short] = array
        elif array.ndim == 1:
            tree[f"{module}.scale"] = array
        else:
            tree[f"{module}.kernel"] = array.T
    return nested(tree)


def tunix_tree(tensors: Tensors, spec: ModelSpec) -> dict[str, Any]:
    """Tunix's: google/tunix, tunix/models/qwen3/params.py."""
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        short = name.removeprefix("model.").replace("self_attn", "attn")
        module, _, kind = short.rpartition(".")
        head = (-1, spec.head_dim)
        if short == "embed_tokens.weight":
            tree["embedder.input_embedding"] = array
        elif short == "norm.weight":
            tree["final_norm.w"] = array
        elif kind == "bias":
            tree[module.replace("_proj", "_bias")] = array
        elif module.endswith("o_proj"):
            tree[f"{module}.w"] = array.T.reshape(*head, spec.embed)
        elif "attn" in module and array.ndim == 2:
            tree[f"{module}.w"] = array.T.reshape(spec.embed, *head)
        elif "mlp" in module:
            tree[f"{module}.kernel"] = array.T
        else:
            tree[f"{module}.w"] = array.T
    return nested(tree)


_MAXTEXT = {
    "input_layernorm.weight": "pre_self_attention_layer_norm.scale",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm.scale",
    "self_attn.q_norm.weight": "self_attention.query_norm.scale",
    "self_attn.k_norm.weight": "self_attention.key_norm.scale",
    "mlp.gate_proj.weight": "mlp.wi_0.kernel",
    "mlp.up_proj.weight": "mlp.wi_1.kernel",
    "mlp.down_proj.weight": "mlp.wo.kernel",
}
_HEADS = {"q": "query", "k": "key", "v": "value", "o": "out"}


def maxtext_tree(
    tensors: Tensors,
    spec: ModelSpec,
    *,
    scanned: bool,
    divided: bool = False,
    interleaved: bool = False,
    padded_vocab: int = 0,
) -> dict[str, Any]:
    """MaxText's: AI-Hypercomputer/maxtext,
    src/maxtext/checkpoint_conversion/utils/param_mapping.py.

    Args:
      divided: queries are divided by the root of the head size, as Llama's are.
      interleaved: the pairs of RoPE are neighbours, as Llama 3.1's are.
      padded_vocab: rows of zeros behind the vocabulary.
    """
    tree: dict[str, Any] = {}
    layers: dict[str, list[NDArray[Any]]] = {}
    for name, array in tensors.items():
        if name == "model.embed_tokens.weight":
            tree["token_embedder.embedding"] = np.pad(array, ((0, padded_vocab), (0, 0)))
        elif name == "model.norm.weight":
            tree["decoder.decoder_norm.scale"] = array
        elif name == "lm_head.weight":
            tree["decoder.logits_dense.kernel"] = np.pad(array, ((0, padded_vocab), (0, 0))).T
        else:
            short = name.split(".", 3)[3]
            path, value = _maxtext_part(short, array, spec, divided, interleaved)
            layers.setdefault(path, [value] * spec.num_layers)[int(name.split(".")[2])] = value
    for path, each in layers.items():
        if scanned:
            tree[f"decoder.layers.{path}"] = np.stack(each, axis=1)
        else:
            tree |= {f"decoder.layers_{index}.{path}": value for index, value in enumerate(each)}
    return {"params": {"params": nested(tree)}, "step": np.int32(7), "opt_state": {"count": 1}}


def _maxtext_part(
    short: str, array: NDArray[Any], spec: ModelSpec, divided: bool, interleaved: bool
) -> tuple[str, NDArray[Any]]:
    if short in _MAXTEXT:
        return _MAXTEXT[short], array.T
    letter = short.removeprefix("self_attn.")[0]
    path = f"self_attention.{_HEADS[letter]}"
    if short.endswith("bias"):
        return f"{path}.bias", array.reshape(-1, spec.head_dim)
    if letter == "o":
        return f"{path}.kernel", array.T.reshape(-1, spec.head_dim, spec.embed)
    kernel = array.T.reshape(spec.embed, -1, spec.head_dim)
    if interleaved and letter in "qk":
        halves = np.split(kernel, 2, axis=-1)
        kernel = np.stack(halves, axis=-1).reshape(kernel.shape)
    if divided and letter == "q":
        kernel = kernel / np.float32(np.sqrt(spec.head_dim))
    return f"{path}.kernel", kernel.astype(array.dtype)


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, NDArray[Any]]:
    """All tensors of a model in float32, by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    rules = {rule.leaf: rule for rule in registry.rules(spec) if isinstance(rule, Rule)}
    tensors: dict[str, NDArray[Any]] = {}
    for part in leaf_parts(decoder.abstract(spec, jnp.float32, stacked=True)):
        rule = rules[part.owner.replace("layers.", "layers.{layer}.")]
        rows = rows_of(spec, part.path) or part.leaf.shape[:1]
        for source, count in zip(rule.sources, rows, strict=True):
            shape = (count, *part.leaf.shape[1:])
            name = source.replace("{layer}", str(part.layer))
            tensors[name] = rng.normal(size=shape).astype(np.float32)
    return tensors

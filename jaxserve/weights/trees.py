"""Converts a trainer's arrays on the device to the engine's parameters, in the same process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve_checkpoints.naming import leaf_parts, leaf_paths, substitute, with_words
from jaxserve_checkpoints.rules import Rule


def named_tensors(tree: Mapping[Any, Any]) -> dict[str, jax.Array]:
    """Returns the arrays of a `jaxserve.flax` tree by Hugging Face's names, with matrices as [out,
    in]. Arrays that already have Hugging Face's names are unchanged."""
    found: dict[str, jax.Array] = {}
    for path, array in jax.tree_util.tree_leaves_with_path(dict(tree)):
        name = ".".join(str(key.key) for key in path)
        module, _, last = name.rpartition(".")
        if last in ("kernel", "embedding", "scale") or not name.startswith(("model.", "lm_head.")):
            module = module if module == "lm_head" else f"model.{module}"
            name = f"{module}.{'bias' if last == 'bias' else 'weight'}"
        found[name] = array.T if last == "kernel" else array
    return found


def engine_params(tree: Mapping[Any, Any], spec: ModelSpec, abstract: decoder.Params) -> Any:
    """Returns the engine's parameters, computed and cast from a trainer's. For `jax.jit`: no data
    passes through the host.

    Args:
      tree: a tree of `jaxserve.flax`, or arrays with Hugging Face's names and shapes.
      abstract: the engine's parameters as ShapeDtypeStructs, not quantised.

    Raises:
      KeyError: names the first tensor that the tree lacks.
      ValueError: a shape differs.
    """
    tensors = named_tensors(tree)
    rules = {rule.leaf: rule for rule in registry.rules(spec) if isinstance(rule, Rule)}
    parts: dict[str, list[jax.Array]] = {}
    for part in leaf_parts(abstract):
        rule = rules[with_words(part.path)]
        arrays = [tensors[substitute(source, part.numbers)] for source in rule.sources]
        whole = jnp.concatenate(arrays, rule.axis) if len(arrays) > 1 else arrays[0]
        if rule.transforms or whole.shape != part.leaf.shape:
            raise ValueError(f"{part.path} is {whole.shape}, needed is {part.leaf.shape}")
        parts.setdefault(part.owner, []).append(whole.astype(part.leaf.dtype))
    leaves = [
        jnp.stack(parts[path]).reshape(leaf.shape)
        if leaf.shape != parts[path][0].shape
        else parts[path][0]
        for path, leaf in leaf_paths(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

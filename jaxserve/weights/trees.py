"""Trees of arrays on the device as the engine's parameters: for trainers in the same process."""

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
    """Returns the arrays of a tree of `jaxserve.flax` by Hugging Face's names, matrices as [out,
    in]. Names that are Hugging Face's already stay, with their arrays as they are."""
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
    """Returns the engine's parameters made of a trainer's, cast; for `jax.jit`: nothing passes
    through the host.

    Args:
      tree: of `jaxserve.flax`, or of Hugging Face's names and forms.
      abstract: the engine's parameters as ShapeDtypeStructs, not quantised.

    Raises:
      KeyError: names the first tensor that the tree lacks.
      ValueError: shapes differ.
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

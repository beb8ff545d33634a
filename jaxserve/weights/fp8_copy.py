"""e4m3 copies of a model's 4-bit weights, made on the device; see `CopiedWeight`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.models.layer_weights import Experts
from jaxserve_checkpoints.naming import leaf_paths
from jaxserve_checkpoints.staging import StagingProgram
from jaxserve_kernels.weights import (
    CopiedWeight,
    Fp8Weight,
    Quantized,
    e4m3_copy,
    is_quantized,
    layout,
)


def abstract_copies[Tree](params: Tree) -> Tree:
    """Returns the tree as ShapeDtypeStructs, with a copy beside each 4-bit weight except
    experts."""
    return _beside(params, _abstract_copy)


def copying_programs(params: Any) -> list[StagingProgram]:
    """Returns the programs that `with_copies` executes.

    Args:
      params: abstract parameters without copies.
    """
    weights = (each for each in jax.tree.leaves(params, is_leaf=_is_whole) if _can_be_copied(each))
    programs = {
        _name(each): StagingProgram(_name(each), e4m3_copy, (each,), ()) for each in weights
    }
    return list(programs.values())


def with_copies[Tree](params: Tree, executables: Mapping[str, Callable[..., Any]]) -> Tree:
    """Returns the tree with a copy beside each 4-bit weight except experts.

    Args:
      executables: the compiled programs of `copying_programs`, by name.
    """
    return _beside(params, lambda weight: executables[_name(weight)](weight))


def _beside(params: Any, copy: Callable[[Quantized], Any]) -> Any:
    def copied(weight: Any) -> Any:
        return CopiedWeight(weight, copy(weight)) if _can_be_copied(weight) else weight

    return jax.tree.map(copied, params, is_leaf=_is_whole)


def _abstract_copy(weight: Quantized) -> Fp8Weight:
    """Returns the shapes of a copy without tracing, which would slow down the start."""
    *leading, out, depth = weight.shape
    tiles, rows = (*leading, out // layout.TILE_OUT), layout.TILE_OUT
    words = (depth // layout.TILE_IN, rows, layout.TILE_IN // 2)
    return Fp8Weight(
        packed=cast(Array, jax.ShapeDtypeStruct((*tiles, *words), jnp.uint16)),
        scale=cast(Array, jax.ShapeDtypeStruct((*tiles, 1, rows), jnp.float32)),
    )


def _is_whole(node: Any) -> bool:
    """Returns whether the node is treated as a whole and gets no copy: experts have none."""
    return _can_be_copied(node) or isinstance(node, Experts)


def _can_be_copied(node: Any) -> bool:
    return is_quantized(node) and node.can_be_copied


def _name(weight: Quantized) -> str:
    """Returns the name of a program. All weights that a program can copy share its name."""
    arrays = [f"{leaf.dtype}_{'x'.join(map(str, leaf.shape))}" for _, leaf in leaf_paths(weight)]
    return "_".join(["fp8_copy", type(weight).__name__, *arrays])

"""Parameters of the Flax models from and to files: every format that the engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.cli.options import parse_args
from jaxserve.flax.model import CausalLM, Kernel
from jaxserve.weights.exporting import Tensors, open_named
from jaxserve.weights.model_source import find_weights
from jaxserve.weights.opening import open_native_of
from jaxserve.weights.text_files import copy_text_files
from jaxserve_checkpoints.orbax.layouts import flax_path
from jaxserve_checkpoints.orbax.writer import save_step

type Tree = dict[Any, Any]
"""Dictionaries of arrays; layers have numbers for keys."""


def load(
    model: str | Path,
    *,
    from_step: int | None = None,
    hf_config: str | Path | None = None,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    kernel: Kernel = "xla",
) -> CausalLM:
    """Returns a model with a checkpoint's weights, cast to `param_dtype`.

    Args:
      model: whatever --model takes: a folder of safetensors, of the engine's own format or of
        Orbax, a short name, or a Hugging Face id.
      from_step, hf_config: as the flags of that name, for Orbax.
      dtype, kernel: see CausalLM.

    Raises:
      ConfigError, CheckpointError: one line; also if the weights are quantised, or layers are
        of a kind that nothing here trains.
    """
    flags = ["--model", str(model)]
    flags += [] if from_step is None else ["--from-step", str(from_step)]
    flags += [] if hf_config is None else ["--hf-config", str(hf_config)]
    options = parse_args(flags)
    source = find_weights(options)
    abstract = nnx.eval_shape(
        lambda: CausalLM(
            source.spec, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype, kernel=kernel
        )
    )
    tensors = Tensors(open_named(options, source, open_native_of(source)), source, None)
    tree: Tree = {}
    for name in tensors.names:
        path, transposed = flax_path(name)
        array = tensors.read(name)
        put(tree, path, jnp.array(array.T if transposed else array, param_dtype))
        tensors.release(name)
    graph, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, tree)
    return nnx.merge(graph, state)


def save(
    model: CausalLM | Mapping[Any, Any],
    folder: str | Path,
    *,
    step: int = 0,
    keep: int | None = None,
    like: str | Path | None = None,
) -> Path:
    """Write a step into a folder of Orbax checkpoints, which the engine serves. Returns its folder.

    Args:
      model: the model, or its `parameters`.
      keep: how many of the newest steps stay; None: all.
      like: a model's folder whose config.json and tokenizer go beside the steps; None: they are
        there, or a server will be told with --hf-config.

    Raises:
      CheckpointError, OSError: see `save_step`.
    """
    tree = parameters(model) if isinstance(model, CausalLM) else model
    folder = Path(folder)
    if like is not None:
        copy_text_files(Path(like), folder)
    return save_step(folder, step, lambda: _with_names(tree), keep=keep)


def parameters(model: CausalLM) -> Tree:
    """Returns the model's arrays, as they are: `embed_tokens.embedding`, `layers.0.…`, …"""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def put(tree: Tree, path: list[str], value: Any) -> None:
    """Put a value where `flax_path` says."""
    *outer, last = (int(key) if key.isdigit() else key for key in path)
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _with_names(tree: Any) -> Any:
    """Orbax wants names for keys."""
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _with_names(value) for key, value in tree.items()}

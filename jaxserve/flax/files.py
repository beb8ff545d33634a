"""Loads and saves parameters of the Flax models, in every format that the engine reads."""

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
"""Nested dictionaries of arrays. Layers have integer keys."""


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
      model: any value of --model: a folder of safetensors, of the engine's own format or of Orbax,
        a
        short name, or a Hugging Face id.
      from_step, hf_config: like the flags of these names, for Orbax.
      dtype, kernel: see CausalLM.

    Raises:
      ConfigError, CheckpointError: the message is one line. Also raised if the weights are
      quantised,
        or if a layer is of a kind that cannot be trained here.
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
    """Writes a step into a folder of Orbax checkpoints, which the engine can serve. Returns its
    folder.

    Args:
      model: the model, or its `parameters`.
      keep: number of newest steps to keep; None: all.
      like: folder of a model whose config.json and tokenizer are copied beside the steps; None:
        they
        are there already, or the server gets --hf-config.

    Raises:
      CheckpointError, OSError: see `save_step`.
    """
    tree = parameters(model) if isinstance(model, CausalLM) else model
    folder = Path(folder)
    if like is not None:
        copy_text_files(Path(like), folder)
    return save_step(folder, step, lambda: _with_names(tree), keep=keep)


def parameters(model: CausalLM) -> Tree:
    """Returns the model's arrays unchanged: `embed_tokens.embedding`, `layers.0.…`, …"""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def put(tree: Tree, path: list[str], value: Any) -> None:
    """Sets a value at a path of `flax_path`."""
    *outer, last = (int(key) if key.isdigit() else key for key in path)
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _with_names(tree: Any) -> Any:
    """Returns the tree with string keys, which Orbax needs."""
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _with_names(value) for key, value in tree.items()}

"""Maps the trees that trainers save to Hugging Face tensors: array, layer and transforms of each.

docs/jax-checkpoints.md describes the layouts and names their sources.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_checkpoints.rules import Shape

_OF_TRAINING = re.compile(r"(^|\.)(opt_state|optimizer|optimizer_state|step|rngs?|ema)(\.|$)")
"""Matches paths in a trainer's state that do not belong to the model."""


@dataclass(frozen=True)
class Matrix:
    """Turns [*inputs, *outputs] with `inputs` axes of inputs into [outputs, inputs]."""

    inputs: int = 1

    def shape(self, shape: Shape) -> Shape:
        """Returns (outputs, inputs) of an array of that shape.

        Raises:
          ValueError: it has too few axes.
        """
        if len(shape) <= self.inputs:
            raise ValueError(
                f"{list(shape)} has no {self.inputs} axes of inputs and one of outputs"
            )
        return (math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs]))

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        out, inputs = self.shape(array.shape)
        return array.reshape(inputs, out).T


@dataclass(frozen=True)
class Flat:
    """Flattens all axes to one."""

    def shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.reshape(-1)


@dataclass(frozen=True)
class Halves:
    """Moves pairs (2i, 2i + 1) of the last axis to (i, i + half)."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate((array[..., ::2], array[..., 1::2]), axis=-1)


@dataclass(frozen=True)
class TimesRoot:
    """Multiplies by the square root of the last axis' size, in float32, and rounds to the array's
    dtype."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return (array.astype(np.float32) * np.float32(math.sqrt(array.shape[-1]))).astype(
            array.dtype
        )


@dataclass(frozen=True)
class Rows:
    """Keeps the first `count` rows of a padded vocabulary."""

    count: int

    def shape(self, shape: Shape) -> Shape:
        return (min(shape[0], self.count), *shape[1:])

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        return array[: self.count]


type Form = Matrix | Flat | Halves | TimesRoot | Rows


class Place(NamedTuple):
    """The location of a tensor: an array, or one layer of it, transformed by `forms`."""

    path: str
    """The keys that lead to the array, joined with dots."""
    layer: int | None = None
    axis: int = 0
    """The axis of layers."""
    forms: tuple[Form, ...] = ()

    def shape(self, stored: Shape) -> Shape:
        """Returns the tensor's shape. Raises ValueError if the stored one does not allow it."""
        shape = stored
        if self.layer is not None:
            if len(stored) <= self.axis or stored[self.axis] <= self.layer:
                raise ValueError(f"{list(stored)} has no layer {self.layer} on axis {self.axis}")
            shape = (*stored[: self.axis], *stored[self.axis + 1 :])
        for form in self.forms:
            shape = form.shape(shape)
        return shape


class Layout(NamedTuple):
    """The kind of a tree, and the tensors in it by their Hugging Face names."""

    kind: str
    places: Mapping[str, Place]


type _Named = Callable[[str, Shape, Mapping[str, Any]], Mapping[str, Place]]
"""Maps a path below the model's root, the array's shape and config.json to the tensors in the
array. An unknown path keeps its name, so that it is reported as unused."""

_LAYER = "model.layers.{}.{}"
_NUMBERED = re.compile(r"layers\.([0-9]+)\.(.+)")

_PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")

type _Table = Mapping[str, tuple[str, tuple[Form, ...]]]
"""Maps a path to a tensor's name, and the transforms of the array."""

_FLAX: _Table = {
    "embed_tokens.embedding": ("model.embed_tokens.weight", ()),
    "norm.scale": ("model.norm.weight", ()),
    "lm_head.kernel": ("lm_head.weight", (Matrix(),)),
    **{f"{name}.scale": (f"{name}.weight", ()) for name in _NORMS},
    **{f"{name}.kernel": (f"{name}.weight", (Matrix(),)) for name in _PROJECTIONS},
    **{f"{name}.bias": (f"{name}.bias", ()) for name in _PROJECTIONS},
}

_TO_FLAX = {tensor: (path, bool(forms)) for path, (tensor, forms) in _FLAX.items()}
_OF_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")


def flax_path(tensor: str) -> tuple[list[str], bool]:
    """Returns the keys of a Hugging Face tensor in the tree of `jaxserve.flax`, and whether it is
    transposed there. KeyError: it has none."""
    match = _OF_LAYER.fullmatch(tensor)
    path, transposed = _TO_FLAX[match[2] if match else tensor]
    return [*(("layers", match[1]) if match else ()), *path.split(".")], transposed


_TUNIX: _Table = {
    "embedder.input_embedding": ("model.embed_tokens.weight", ()),
    "final_norm.w": ("model.norm.weight", ()),
    "lm_head.w": ("lm_head.weight", (Matrix(),)),
    **{f"{name}.w".replace("self_attn", "attn"): (f"{name}.weight", ()) for name in _NORMS},
    **{f"attn.{name}_proj.w": (f"self_attn.{name}_proj.weight", (Matrix(),)) for name in "qkv"},
    **{f"attn.{name}_bias": (f"self_attn.{name}_proj.bias", (Flat(),)) for name in "qkv"},
    "attn.o_proj.w": ("self_attn.o_proj.weight", (Matrix(2),)),
    **{f"{name}.kernel": (f"{name}.weight", (Matrix(),)) for name in _PROJECTIONS[4:]},
}

_SCANNED = re.compile(r"decoder\.layers(?:_([0-9]+))?\.(.+)")
_MAXTEXT_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}
_MAXTEXT: _Table = {
    "token_embedder.embedding": ("model.embed_tokens.weight", ()),
    "decoder.decoder_norm.scale": ("model.norm.weight", ()),
    "decoder.logits_dense.kernel": ("lm_head.weight", (Matrix(),)),
    "pre_self_attention_layer_norm.scale": ("input_layernorm.weight", ()),
    "post_self_attention_layer_norm.scale": ("post_attention_layernorm.weight", ()),
    "self_attention.query_norm.scale": ("self_attn.q_norm.weight", ()),
    "self_attention.key_norm.scale": ("self_attn.k_norm.weight", ()),
    **{
        f"self_attention.{theirs}.kernel": (
            f"self_attn.{name}_proj.weight",
            (Matrix(2 if name == "o" else 1),),
        )
        for theirs, name in _MAXTEXT_ATTENTION.items()
    },
    **{
        f"self_attention.{theirs}.bias": (f"self_attn.{name}_proj.bias", (Flat(),))
        for theirs, name in _MAXTEXT_ATTENTION.items()
    },
    "mlp.wi_0.kernel": ("mlp.gate_proj.weight", (Matrix(),)),
    "mlp.wi_1.kernel": ("mlp.up_proj.weight", (Matrix(),)),
    "mlp.wo.kernel": ("mlp.down_proj.weight", (Matrix(),)),
}
_DIVIDED = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures whose queries MaxText divides by the root of the head size in the weights."""


def _as_named(path: str, shape: Shape, config: Mapping[str, Any]) -> Mapping[str, Place]:
    return {path: Place(path)}


def _numbered(
    table: _Table, path: str, shape: Shape, config: Mapping[str, Any]
) -> dict[str, Place]:
    """A layout with a module for each layer."""
    match = _NUMBERED.fullmatch(path)
    known = table.get(match[2] if match else path)
    if known is None:
        return {path: Place(path)}
    tensor, forms = known
    return {_LAYER.format(match[1], tensor) if match else tensor: Place(path, forms=forms)}


def _maxtext(path: str, shape: Shape, config: Mapping[str, Any]) -> dict[str, Place]:
    """MaxText's layers: a module each, or all in one array with an axis of layers."""
    match = _SCANNED.fullmatch(path)
    known = _MAXTEXT.get(match[2] if match else path)
    if known is None:
        return {path: Place(path)}
    tensor, forms = known
    if tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        forms = (*forms, Rows(int(config["vocab_size"])))
    forms = (*_maxtext_rotation(tensor, config), *forms)
    if match is None or match[1] is not None:
        name = tensor if match is None else _LAYER.format(match[1], tensor)
        return {name: Place(path, forms=forms)}
    axis = _scanned_axis(shape, int(config["num_hidden_layers"]))
    return {
        _LAYER.format(layer, tensor): Place(path, layer, axis, forms)
        for layer in range(shape[axis] if len(shape) > axis else 1)
    }


def _maxtext_rotation(tensor: str, config: Mapping[str, Any]) -> tuple[Form, ...]:
    """Transforms that undo MaxText's changes to queries and keys [..., heads, head_dim]."""
    forms: tuple[Form, ...] = ()
    architectures: list[str] = config.get("architectures") or []
    scaling: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if tensor == "self_attn.q_proj.weight" and set(architectures) & set(_DIVIDED):
        forms = (TimesRoot(),)
    rotated = tensor in ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
    if rotated and scaling.get("rope_type", scaling.get("type")) == "llama3":
        forms = (*forms, Halves())
    return forms


def _scanned_axis(shape: Shape, layers: int) -> int:
    """MaxText's `param_scan_axis`: 1, unless only the first axis has the size."""
    return 0 if shape[:1] == (layers,) and shape[1:2] != (layers,) else 1


_LAYOUTS: tuple[tuple[str, str, _Named], ...] = (
    ("Hugging Face", "model.embed_tokens.weight", _as_named),
    ("jaxserve.flax", "embed_tokens.embedding", functools.partial(_numbered, _FLAX)),
    ("MaxText", "token_embedder.embedding", _maxtext),
    ("Tunix", "embedder.input_embedding", functools.partial(_numbered, _TUNIX)),
)
"""Kind of layout, path of its embedding, and function that names its tensors."""


def layout_of(shapes: Mapping[str, Shape], config: Mapping[str, Any], folder: object) -> Layout:
    """Recognises the layout from the arrays' paths.

    Args:
      shapes: path of each array, keys joined with dots -> stored shape.
      config: the model's config.json.
      folder: for messages.

    Raises:
      CheckpointError: the paths match no layout, or match at several roots.
    """
    plain = {path.removesuffix(".value"): path for path in shapes}  # flax's variables add a key
    for kind, mark, named in _LAYOUTS:
        roots = _roots(plain, mark)
        if not roots:
            continue
        if len(roots) > 1:
            raise CheckpointError(f"{folder}: which is the model? {', '.join(map(repr, roots))}")
        places: dict[str, Place] = {}
        for short, path in plain.items():
            name = short.removeprefix(roots[0])
            if short.startswith(roots[0]) and not _OF_TRAINING.search(name):
                found = named(name, shapes[path], config)
                places |= {tensor: place._replace(path=path) for tensor, place in found.items()}
        return Layout(kind, places)
    first = ", ".join(sorted(shapes)[:5])
    raise CheckpointError(
        f"{folder}: a tree of no known layout ({', '.join(kind for kind, _, _ in _LAYOUTS)}); its "
        f"first arrays are {first}"
    )


def _roots(plain: Mapping[str, str], mark: str) -> list[str]:
    """Returns the shortest prefixes of paths that end with `mark`, outside of the optimiser."""
    found = [path.removesuffix(mark) for path in plain if path.endswith(mark)]
    found = [root for root in found if not root or root.endswith(".")]
    found = [root for root in found if not _OF_TRAINING.search(root)]
    least = min((root.count(".") for root in found), default=0)
    return [root for root in found if root.count(".") == least]

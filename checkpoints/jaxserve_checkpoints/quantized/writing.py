"""Writes the engine's quantised weights in layouts that other servers can read.

Integers, e4m3, NVFP4 and MXFP4 are written as compressed-tensors. Codes with fractional zero
points, which only HQQ makes, are written in HQQ's layout. Reading them again gives the same arrays,
bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_checkpoints.quantized.format import (
    Codes,
    Fp8Codes,
    Int8Codes,
    IntCodes,
    Mxfp4Codes,
    Nvfp4Codes,
)
from jaxserve_checkpoints.quantized.fp8 import BLOCK
from jaxserve_checkpoints.reader import AnyArray
from jaxserve_kernels.weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    OrderedInt4Weight,
    Quantized,
    layout,
)

_Writable = Int4Weight | Int8Weight | Fp8Weight | Nvfp4Weight | Mxfp4Weight | OrderedInt4Weight
"""The formats for which compressed-tensors or HQQ has a layout."""

HQQ = "hqq"
_EMBEDDING = "embed_tokens"
_BYTES_OF_WORD = 4


class Unwritable(Exception):
    """No layout can store the weights. The message names their format and an alternative."""


class Scheme(NamedTuple):
    """How weights of one kind are stored."""

    format: str
    """compressed-tensors' name of the layout, or HQQ."""
    settings: Mapping[str, Any]
    """The configuration of the weights."""


def scheme_of(weight: Quantized) -> Scheme:
    """Returns the scheme for a weight, whose arrays may be abstract.

    Raises:
      Unwritable: no layout can store it.
    """
    if not isinstance(weight, _Writable):
        raise Unwritable(f"{type(weight).__name__}, which no layout of other engines holds")
    depth, arrays = weight.shape[-1], weight.scale.shape
    if isinstance(weight, (Int4Weight, OrderedInt4Weight)):
        return _scheme_of_int4(weight)
    if isinstance(weight, Nvfp4Weight):
        return _compressed("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16)
    if isinstance(weight, Mxfp4Weight):
        settings: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8"}
        return _compressed("mxfp4-pack-quantized", "float", 4, "group", **settings)
    floating, groups = isinstance(weight, Fp8Weight), arrays[-2]
    name, kind = ("float-quantized", "float") if floating else ("int-quantized", "int")
    if groups == 1:
        return _compressed(name, kind, 8, "channel")
    if floating and depth == groups * BLOCK:
        return _compressed(name, kind, 8, "block", block_structure=[BLOCK, BLOCK])
    raise Unwritable(
        f"8 bits with a scale for each {depth // groups} inputs have no layout in safetensors: "
        "take --to native or --to orbax, or the checkpoint that they were made of"
    )


def _scheme_of_int4(weight: Int4Weight | OrderedInt4Weight) -> Scheme:
    group = weight.shape[-1] // weight.scale.shape[-2]
    ordered = isinstance(weight, OrderedInt4Weight)
    if weight.zero is not None and weight.zero.dtype == np.float32:
        if ordered:
            raise Unwritable(
                "4 bits with fractional zero points and inputs in another order have no layout in "
                "safetensors: take --to native or --to orbax"
            )
        return Scheme(HQQ, {"nbits": 4, "group_size": group, "axis": 1})
    return _compressed(
        "pack-quantized",
        "int",
        4,
        "group",
        symmetric=weight.zero is None,
        group_size=group,
        actorder="group" if ordered else None,
    )


def _compressed(
    format: str, kind: str, bits: int, strategy: str, *, symmetric: bool = True, **settings: Any
) -> Scheme:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric}
    return Scheme(format, weights | {"dynamic": False} | settings)


def configuration(modules: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint.

    Args:
      modules: the scheme of every linear layer and embedding; None: not quantised.

    Raises:
      Unwritable: one checkpoint cannot combine the schemes.
    """
    kinds: dict[str, Scheme | None] = {}
    for name, scheme in modules.items():
        if kinds.setdefault(name.rpartition(".")[2], scheme) != scheme:
            raise Unwritable(f"{name} is not quantised as in other layers")
    kinds.setdefault("lm_head", None)  # tied to the embedding
    counts = Counter(str(scheme) for scheme in modules.values() if scheme)
    by_text = {str(scheme): scheme for scheme in kinds.values() if scheme}
    ordered = [by_text[text] for text, _ in counts.most_common()]
    if any(scheme.format == HQQ for scheme in ordered):
        return _hqq_configuration(kinds, ordered)
    groups: dict[str, Any] = {}
    for index, scheme in enumerate(ordered):
        named = [kind for kind, each in kinds.items() if each == scheme]
        embeds = [kind for kind in named if kind == _EMBEDDING]
        most = index == 0 and named != embeds
        groups[f"group_{index}"] = {
            "targets": ["Linear", *map(_target, embeds)] if most else list(map(_target, named)),
            "weights": dict(scheme.settings),
            "input_activations": None,
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {scheme.format for scheme in ordered}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [_target(kind) for kind, scheme in kinds.items() if scheme is None],
        "kv_cache_scheme": None,
    }


def _target(kind: str) -> str:
    return f"re:.*{kind}$"


def _hqq_configuration(
    kinds: Mapping[str, Scheme | None], schemes: Sequence[Scheme]
) -> dict[str, Any]:
    if len(schemes) > 1:
        others = [kind for kind, each in kinds.items() if each and each.format != HQQ]
        raise Unwritable(
            f"HQQ's layout has no place for {', '.join(others)} in another format: convert the "
            "original with --lm-head-dtype unquantized, or take --to native or --to orbax"
        )
    settings = {"weight_quant_params": dict(schemes[0].settings)}
    skipped = [kind for kind, scheme in kinds.items() if scheme is None]
    return {"quant_method": HQQ, "quant_config": settings, "skip_modules": skipped}


def tensors_of(weight: Quantized, rows: Sequence[int]) -> list[dict[str, AnyArray]]:
    """Returns the tensors of each module of a weight, by their suffix after the module's name.

    Args:
      weight: one layer's weight, [out, in], which may stack several modules.
      rows: number of outputs of each stacked module.

    Raises:
      Unwritable: see `scheme_of`; or no layout can store the values.
    """
    scheme, order = scheme_of(weight), None
    assert isinstance(weight, _Writable)
    if isinstance(weight, OrderedInt4Weight):
        order, weight = np.asarray(weight.order), weight.stored
    codes = jax.tree.map(np.asarray, _codes(weight))
    found: list[dict[str, AnyArray]] = []
    start = 0
    for count in rows:
        stop = start + count
        part = jax.tree.map(lambda array, start=start, stop=stop: array[start:stop], codes)
        found.append(_hqq(part) if scheme.format == HQQ else _stored(part, order))
        start = stop
    return found


@jax.jit
def _codes(weight: _Writable) -> Codes:
    """The inverse of `Codes.pack`."""
    scale = layout.untile_rows(weight.scale)
    match weight:
        case Int4Weight():
            zero = None if weight.zero is None else layout.untile_rows(weight.zero)
            return IntCodes(layout.unpack_nibbles(weight.packed), scale, zero)
        case Int8Weight():
            codes = layout.unpack_bytes(weight.packed)
            return Int8Codes(jax.lax.bitcast_convert_type(codes, jnp.int8), scale)
        case Fp8Weight():
            codes = layout.unpack_bytes(weight.packed)
            return Fp8Codes(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale)
        case Nvfp4Weight():
            scales = jax.lax.bitcast_convert_type(_bytes_of(scale), jnp.float8_e4m3fn)
            rows = layout.untile_rows(weight.row_scale)[:, 0]
            return Nvfp4Codes(layout.unpack_nibbles(weight.packed), scales, rows)
        case Mxfp4Weight():
            return Mxfp4Codes(layout.unpack_blocks(weight.packed), _bytes_of(scale))
        case OrderedInt4Weight():
            return _codes(weight.stored)


def _bytes_of(words: jax.Array) -> jax.Array:
    """Unpacks uint32 [..., n] to uint8 [..., 4 n], the low byte first."""
    bytes_ = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return bytes_.reshape(*words.shape[:-1], _BYTES_OF_WORD * words.shape[-1])


def _stored(codes: Codes, order: AnyArray | None) -> dict[str, AnyArray]:
    """Returns a module's tensors in compressed-tensors. Codes must be on the host."""
    match codes:
        case IntCodes():
            return _packed_integers(codes, order)
        case Int8Codes():
            return {".weight": np.asarray(codes.codes), ".weight_scale": np.asarray(codes.scale)}
        case Fp8Codes():
            scale = _block_scales(np.asarray(codes.scale))
            return {".weight": np.asarray(codes.values), ".weight_scale": scale}
        case Nvfp4Codes():
            scale = np.unique(np.asarray(codes.row_scale))
            if len(scale) > 1:
                raise Unwritable(f"NVFP4 with {len(scale)} scales in one matrix has no layout")
            return {
                ".weight_packed": _nibble_bytes(np.asarray(codes.codes)),
                ".weight_scale": np.asarray(codes.scale),
                # In float64: not every float32 is the rounded inverse of a float32.
                ".weight_global_scale": 1.0 / scale.astype(np.float64),
            }
        case Mxfp4Codes():
            packed = _nibble_bytes(np.asarray(codes.codes))
            return {".weight_packed": packed, ".weight_scale": np.asarray(codes.exponents)}


def _packed_integers(codes: IntCodes, order: AnyArray | None) -> dict[str, AnyArray]:
    values, scale = np.asarray(codes.codes), np.asarray(codes.scale)
    out, depth = values.shape
    found: dict[str, AnyArray] = {}
    if order is not None:
        place = np.argsort(order)
        values = values[:, place]
        group = depth // scale.shape[1]
        found[".weight_g_idx"] = (place // group).astype(np.int32)
    found[".weight_packed"] = _words(values)
    found[".weight_scale"] = scale
    found[".weight_shape"] = np.array([out, depth], np.int64)
    if codes.zero is not None:
        zero = np.asarray(codes.zero).astype(np.uint8).T
        padded = np.pad(zero, ((0, 0), (0, -out % 8)))
        found[".weight_zero_point"] = _words(padded).T
    return found


def _block_scales(scale: AnyArray) -> AnyArray:
    """Converts scales [out, groups] to [out, 1], or to one per 128 rows, which must have equal
    ones.

    Raises:
      Unwritable: rows of a block differ.
    """
    if scale.shape[1] == 1:
        return scale
    blocks = scale[::BLOCK]
    if not np.array_equal(np.repeat(blocks, BLOCK, axis=0)[: len(scale)], scale):
        raise Unwritable(
            "e4m3 with a scale per row and 128 inputs has no layout in safetensors: take "
            "--to native or --to orbax"
        )
    return blocks


def _nibble_bytes(codes: AnyArray) -> AnyArray:
    """Packs codes 0..15 [..., 2 n] into uint8 [..., n], the first in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _words(codes: AnyArray) -> AnyArray:
    """Packs codes 0..15 [..., 8 n] into int32 [..., n], the first in the low bits."""
    return np.ascontiguousarray(_nibble_bytes(codes)).view("<i4")


_HQQ_FLAGS = {
    **dict.fromkeys(("view_as_float", "quant_scale", "quant_zero", "offload_meta"), 0),
    **dict.fromkeys(("encoded_state_dict", "stores_quant_config", "channel_wise"), 1),
    "optimize": 1,
    "round_zero": 0,
}
_HQQ_TEXTS = {
    "packing": "4bit_u8",
    "unpack_view_dtype": "torch.uint8",
    "compute_dtype": "torch.bfloat16",
}


def _hqq(codes: Codes) -> dict[str, AnyArray]:
    """Returns a module's tensors in HQQ's layout, including its settings."""
    assert isinstance(codes, IntCodes) and codes.zero is not None
    values, scale = np.asarray(codes.codes), np.asarray(codes.scale)
    group = values.shape[1] // scale.shape[1]
    rows = values.reshape(-1, group)
    half = len(rows) // 2
    numbers = {"nbits": 4, "group_size": group, "axis": 1}
    return {
        ".W_q": rows[:half] << 4 | rows[half:],
        ".scale": scale.reshape(-1, 1),
        ".zero": np.asarray(codes.zero).reshape(-1, 1),
        ".shape": np.array(values.shape, np.int64),
        **{f".{name}": np.array(value, np.int32) for name, value in numbers.items()},
        **{f".{name}": np.array(value, np.uint8) for name, value in _HQQ_FLAGS.items()},
        **{f".{name}": np.frombuffer(text.encode(), np.uint8) for name, text in _HQQ_TEXTS.items()},
    }

"""Detects the quantisation format from a model's configuration, and rejects unsupported
settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from jaxserve_checkpoints.quantized import compressed_tensors as compressed
from jaxserve_checkpoints.quantized.awq import Awq
from jaxserve_checkpoints.quantized.format import AnyFormat, Format, Mixed
from jaxserve_checkpoints.quantized.fp8 import BLOCK, Fp8
from jaxserve_checkpoints.quantized.gptq import Gptq
from jaxserve_checkpoints.quantized.hqq import Hqq
from jaxserve_checkpoints.quantized.modelopt import ModeloptNvfp4
from jaxserve_checkpoints.quantized.mxfp4 import Mxfp4
from jaxserve_checkpoints.reader import CheckpointError

type Config = Mapping[str, Any]

SUPPORTED = (
    "awq (version gemm), gptq, compressed-tensors (pack-quantized, int-quantized, float-quantized, "
    "nvfp4-pack-quantized, mxfp4-pack-quantized), modelopt (NVFP4, FP8), hqq, mxfp4, fp8, "
    "fbgemm_fp8"
)


_METHOD_OF_KEY = {"quantization": "modelopt", "compression_config": "compressed-tensors"}
"""Configuration keys that identify the quantisation method by themselves."""


class _Unsupported(Exception):
    """A setting that this engine does not support. The message names it and the supported
    values."""


def detect(folder: Path) -> AnyFormat | None:
    """The format that `config.json` or `hf_quant_config.json` names; None if no weight is
    quantised, even if the KV cache is.

    Raises:
      CheckpointError: the format is unknown, or has unsupported settings. The message names them,
        and what is supported.
    """
    source, key = "config.json", "quantization_config"
    content = _read(folder / source) if _is(folder, source) else {}
    if not content.get(key) and content.get("compression_config"):
        key = "compression_config"  # as compressed-tensors wrote it at first
    if not content.get(key) and _is(folder, "hf_quant_config.json"):
        source, key = "hf_quant_config.json", "quantization"
        content = _read(folder / source)
    if not content.get(key):
        return None
    try:
        config = _object(content, key)
        if method := _METHOD_OF_KEY.get(key):
            config = {"quant_method": method, **config}
        method = config.get("quant_method")
        if not isinstance(method, str) or method not in _METHODS:
            raise _Unsupported(f"quant_method is {method!r}, supported: {SUPPORTED}")
        if _is_of_cache_only(config):
            return None
        return _METHODS[method](config)
    except _Unsupported as error:
        raise CheckpointError(f"{folder}: quantised, as {source} says: {error}") from None


def _is_of_cache_only(config: Config) -> bool:
    """Whether compressed-tensors or ModelOpt quantised no weights, and the checkpoint only has
    scales for a KV cache."""
    weights = _weight_groups(config) or config.get("quant_algo")
    return not weights and bool(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))


def _weight_groups(config: Config) -> list[Config]:
    """The groups of compressed-tensors that quantise weights. Others quantise attention's
    inputs."""
    named = _object(config, "config_groups")
    return [group for name in named if (group := _object(named, name)).get("weights")]


def _awq(config: Config) -> Format:
    _demand(config, "bits", 4)
    _demand(config, "version", "gemm", default="gemm", plain=lambda value: str(value).lower())
    _demand(config, "zero_point", True, default=True)
    return Awq(group_size=_group_size(config.get("group_size", config.get("q_group_size"))))


def _gptq(config: Config) -> Format:
    _demand(config, "bits", 4)
    overrides = [name for name in _object(config, "dynamic") if not name.startswith("-:")]
    if overrides:
        raise _Unsupported(f"settings per module ({', '.join(overrides)}), supported: one for all")
    written = config.get("checkpoint_format", config.get("format", "gptq"))
    return Gptq(
        group_size=_group_size(config.get("group_size")),
        symmetric=_flag(config, "sym", default=True),
        version=_choice("checkpoint_format", written, {"gptq": 1, "gptq_v2": 2}),
        ordered=_flag(config, "desc_act", default=False),
    )


def _compressed_tensors(config: Config) -> AnyFormat:
    if config.get("transform_config"):
        found = config["transform_config"]
        raise _Unsupported(f"transform_config is {found!r:.200}, supported: none")
    sparsity = _object(config, "sparsity_config")
    if sparsity and sparsity.get("format") != "dense":  # which stores zeros like other weights
        raise _Unsupported(f"sparsity_config is {sparsity!r:.200}, supported: none, format 'dense'")
    groups = _weight_groups(config)
    found = [_format_of(group, config) for group in groups]
    if not found:
        raise _Unsupported("config_groups has none with weights, supported: at least one")
    if all(format == found[0] for format in found):
        return found[0]
    targets = [tuple(map(str, group.get("targets") or ())) for group in groups]
    return Mixed(groups=tuple(zip(targets, found, strict=True)))


def _format_of(group: Config, config: Config) -> Format:
    """Returns the format of a group of compressed-tensors."""
    readers: dict[str, Callable[[Config], Format]] = {
        "pack-quantized": _pack_quantized,
        "int-quantized": _int_quantized,
        "float-quantized": _float_quantized,
        "naive-quantized": _naive_quantized,
        "nvfp4-pack-quantized": _nvfp4_packed,
        "mxfp4-pack-quantized": _mxfp4_packed,
    }
    format = group.get("format") or config.get("format")
    return _choice("format", format, readers)(_object(group, "weights"))


def _pack_quantized(scheme: Config) -> Format:
    _demand(scheme, "num_bits", 4)
    _demand(scheme, "type", "int")
    strategy = scheme.get("strategy")
    if strategy not in ("group", "channel"):
        raise _Unsupported(f"strategy is {strategy!r}, supported: group, channel")
    size = scheme.get("group_size") if strategy == "group" else -1
    return compressed.PackQuantized(
        group_size=_group_size(size),
        symmetric=_flag(scheme, "symmetric", default=True),
        # "weight" (or "static") quantises in that order and stores groups of neighbours.
        ordered=scheme.get("actorder") in (True, "group", "dynamic"),
    )


def _nvfp4_packed(scheme: Config) -> Format:
    _demand_fp4(scheme, 16)
    return compressed.Nvfp4Packed()


def _mxfp4_packed(scheme: Config) -> Format:
    _demand_fp4(scheme, 32)
    return compressed.Mxfp4Packed()


def _demand_fp4(scheme: Config, group: int) -> None:
    _demand(scheme, "num_bits", 4)
    _demand(scheme, "type", "float")
    _demand(scheme, "group_size", group, default=group)


def _int_quantized(scheme: Config) -> Format:
    _demand(scheme, "num_bits", 8)
    _demand(scheme, "symmetric", True)
    _demand_strategy(scheme, ("channel", "tensor"))
    return compressed.IntQuantized()


def _float_quantized(scheme: Config) -> Format:
    _demand(scheme, "num_bits", 8)
    _demand(scheme, "type", "float")
    _demand_strategy(scheme, ("channel", "tensor", "block"))
    blocks = scheme.get("strategy") == "block"
    if blocks:
        _demand(scheme, "block_structure", [BLOCK, BLOCK])
    return Fp8(name="compressed-tensors", blocks=blocks)


def _naive_quantized(scheme: Config) -> Format:
    return _float_quantized(scheme) if scheme.get("type") == "float" else _int_quantized(scheme)


def _modelopt(config: Config) -> Format:
    algorithm = config.get("quant_algo")
    if algorithm == "NVFP4":
        _demand(config, "group_size", 16, default=16)
        return ModeloptNvfp4()
    if algorithm == "FP8":
        return Fp8(name="modelopt", blocks=False)
    raise _Unsupported(f"quant_algo is {algorithm!r}, supported: NVFP4, FP8")


def _fp8(config: Config) -> Format:
    _demand(config, "fmt", "e4m3", default="e4m3")
    block = config.get("weight_block_size")
    if block is None:
        return Fp8(name="fp8", blocks=False)
    _demand(config, "weight_block_size", [BLOCK, BLOCK])
    return Fp8(name="fp8", blocks=True, scale=".weight_scale_inv")


def _hqq(config: Config) -> Format:
    settings = _object(_object(config, "quant_config"), "weight_quant_params")
    _demand(settings, "nbits", 4)
    axis = settings.get("axis", 1)
    if axis not in (0, 1):
        raise _Unsupported(f"axis is {axis!r}, supported: 0, 1")
    size = _group_size(settings.get("group_size"))
    if size == -1:
        raise _Unsupported("group_size is -1, supported with hqq: a positive number")
    return Hqq(group_size=size, axis=axis)


_METHODS: dict[Any, Callable[[Config], AnyFormat]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: Fp8(name="fbgemm_fp8", blocks=False),
    "hqq": _hqq,
    "mxfp4": lambda config: Mxfp4(),
}


def _demand(
    config: Config,
    key: str,
    wanted: Any,
    *,
    default: Any = None,
    plain: Callable[[Any], Any] = lambda value: value,
) -> None:
    found = config.get(key, default)
    if found is None or plain(found) != wanted:
        raise _Unsupported(f"{key} is {found!r}, supported: {wanted!r}")


def _object(config: Config, key: str) -> Config:
    """The object under a key; empty if the key is missing."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise _Unsupported(f"{key} is {found!r:.200}, supported: an object")
    return cast(dict[str, Any], found)


def _flag(config: Config, key: str, *, default: bool) -> bool:
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise _Unsupported(f"{key} is {found!r}, supported: true, false")
    return found


def _choice[T](name: str, found: Any, known: Mapping[str, T]) -> T:
    if not isinstance(found, str) or found not in known:
        raise _Unsupported(f"{name} is {found!r}, supported: {', '.join(known)}")
    return known[found]


def _demand_strategy(scheme: Config, known: tuple[str, ...]) -> None:
    if scheme.get("strategy") not in known:
        raise _Unsupported(f"strategy is {scheme.get('strategy')!r}, supported: {', '.join(known)}")


def _group_size(value: Any) -> int:
    if not isinstance(value, int) or (value != -1 and (value < 16 or value % 16)):
        raise _Unsupported(f"group_size is {value!r}, supported: multiples of 16, and -1 for a row")
    return value


def _is(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _read(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return cast(dict[str, Any], content)

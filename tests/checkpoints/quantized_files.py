"""Quantised checkpoints written for tests, in NumPy and from each format's definition alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.reader import open_checkpoint

type Tensors = dict[str, NDArray[Any]]
type Rng = np.random.Generator

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight columns each nibble of a word is, from the low bits up."""


class Written(NamedTuple):
    """A module's tensors, by what follows its name, and the weight that they mean."""

    tensors: Tensors
    weight: NDArray[np.float32]


class Kind(NamedTuple):
    """A format with its configuration; `write` makes a module [out, in]."""

    config: dict[str, Any]
    write: Callable[[Rng, int, int], Written]
    error: float = 0.0
    """Largest difference of the weight that is read, as a part of its group's largest value."""


def words(nibbles: NDArray[Any]) -> NDArray[np.int32]:
    """[..., 8 n] values 0..15 to int32 [..., n], the first in the low bits."""
    eight = nibbles.astype(np.uint64).reshape(*nibbles.shape[:-1], -1, 8)
    return sum(eight[..., i] << np.uint64(4 * i) for i in range(8)).astype(np.uint32).view(np.int32)


def integers(rng: Rng, out: int, depth: int, group: int) -> tuple[Any, Any, Any]:
    """Codes [out, in], float16 scales and zero points 0..15 [out, groups]."""
    groups = 1 if group == -1 else depth // group
    u = rng.integers(0, 16, (out, depth), np.uint8)
    scale = rng.uniform(1e-3, 2e-2, (out, groups)).astype(np.float16)
    return u, scale, rng.integers(0, 16, (out, groups))


def affine(u: Any, zero: Any, scale: Any, group_index: Any = None) -> NDArray[np.float32]:
    """(u - zero) * scale, with zero and scale of each input's group."""
    if group_index is None:
        group_index = np.arange(u.shape[1]) // (u.shape[1] // scale.shape[1])
    zero = np.broadcast_to(np.float32(zero), scale.shape)[:, group_index]
    return (u.astype(np.float32) - zero) * scale.astype(np.float32)[:, group_index]


def awq(rng: Rng, out: int, depth: int, group: int = 128) -> Written:
    u, scale, zero = integers(rng, out, depth, group)

    def columns(values: Any) -> Any:
        eights = values.reshape(values.shape[0], -1, 8)
        return words(eights[..., AWQ_COLUMNS].reshape(values.shape))

    tensors = {".qweight": columns(u.T), ".qzeros": columns(zero.T), ".scales": scale.T}
    return Written(tensors, affine(u, zero, scale))


def gptq(
    rng: Rng,
    out: int,
    depth: int,
    *,
    group: int = 128,
    version: int = 1,
    symmetric: bool = False,
    permute: int | None = None,
) -> Written:
    u, scale, zero = integers(rng, out, depth, group)
    zero = np.full_like(zero, 8) if symmetric else zero
    less = np.uint32(0x11111111 if version == 1 else 0)  # of the word: a 0 borrows from the next
    group_index = np.arange(depth) // (depth if group == -1 else group)
    if permute is not None:
        group_index = np.random.default_rng(permute).permutation(group_index)
    tensors = {
        ".qweight": words(u).T,
        ".qzeros": (words(zero.T).view(np.uint32) - less).view(np.int32),
        ".scales": scale.T,
        ".g_idx": group_index.astype(np.int32),
    }
    return Written(tensors, affine(u, zero, scale, group_index))


def packed(
    rng: Rng, out: int, depth: int, *, group: int = 128, symmetric: bool = True, permute: int = -1
) -> Written:
    u, scale, zero = integers(rng, out, depth, group)
    scale = scale.astype(ml_dtypes.bfloat16)
    tensors = {
        ".weight_packed": words(u),
        ".weight_scale": scale,
        ".weight_shape": np.array([out, depth], np.int64),
    }
    group_index = np.arange(depth) // (depth if group == -1 else group)
    if permute >= 0:
        group_index = np.random.default_rng(permute).permutation(group_index)
        tensors[".weight_g_idx"] = group_index.astype(np.int32)
    if symmetric:
        return Written(tensors, affine(u, 8, scale, group_index))
    tensors[".weight_zero_point"] = words(zero.T).T
    return Written(tensors, affine(u, zero, scale, group_index))


def int8(rng: Rng, out: int, depth: int) -> Written:
    q = rng.integers(-128, 128, (out, depth), np.int8)
    scale = rng.uniform(1e-3, 2e-2, (out, 1)).astype(ml_dtypes.bfloat16)
    return Written({".weight": q, ".weight_scale": scale}, q * scale.astype(np.float32))


def e4m3(rng: Rng, *shape: int) -> Any:
    """Finite values; their float32 is theirs by ml_dtypes, which tests of weights check."""
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[(codes & 127) == 127] = 0
    return codes.view(ml_dtypes.float8_e4m3fn)


def nibble_bytes(codes: Any) -> Any:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def nvfp4(rng: Rng, out: int, depth: int, *, modelopt: bool) -> Written:
    codes = rng.integers(0, 16, (out, depth), np.uint8)
    scale = np.abs(e4m3(rng, out, depth // 16))
    tensor = np.float32(rng.uniform(1e-4, 1e-3))
    exact = E2M1[codes] * np.repeat(scale.astype(np.float32), 16, axis=1)
    data = nibble_bytes(codes)
    if modelopt:
        tensors = {".weight": data, ".weight_scale": scale, ".weight_scale_2": np.array(tensor)}
        tensors[".input_scale"] = np.float32([1.0]).reshape(())
        return Written(tensors, exact * tensor)
    inverse = np.float32(1) / tensor
    tensors = {".weight_packed": data, ".weight_scale": scale}
    tensors |= {".weight_global_scale": np.array([inverse]), ".input_global_scale": np.ones(1)}
    return Written(tensors, exact * (np.float32(1) / inverse))


def mxfp4(rng: Rng, out: int, depth: int, *, blocks: bool) -> Written:
    codes = rng.integers(0, 16, (out, depth), np.uint8)
    exponents = rng.integers(100, 140, (out, depth // 32), np.uint8)
    powers = np.ldexp(np.float32(1), exponents.astype(int) - 127)
    data = nibble_bytes(codes)
    if blocks:
        data = data.reshape(out, depth // 32, 16)
        tensors = {".weight_blocks": data, ".weight_scales": exponents}
    else:
        tensors = {".weight_packed": data, ".weight_scale": exponents}
    return Written(tensors, E2M1[codes] * np.repeat(powers, 32, axis=1))


def fp8(rng: Rng, out: int, depth: int, *, scales: str, name: str = ".weight_scale") -> Written:
    values = e4m3(rng, out, depth)
    shape = {"block": (-(-out // 128), -(-depth // 128)), "row": (out, 1), "tensor": ()}[scales]
    scale = np.asarray(rng.uniform(1e-4, 1e-3, shape), np.float32)
    each = np.kron(scale, np.ones((128, 128), np.float32)) if scales == "block" else scale
    if scales == "block":
        each = each[:out, :depth]
    return Written({".weight": values, name: scale}, values.astype(np.float32) * each)


def hqq(rng: Rng, out: int, depth: int, *, axis: int = 1, group: int = 64) -> Written:
    rows, columns = (-1, group) if axis == 1 else (group, -1)
    u = rng.integers(0, 16, (out, depth), np.uint8).reshape(rows, columns)
    shape = (u.shape[0], 1) if axis == 1 else (1, u.shape[1])
    scale = rng.uniform(1e-3, 2e-2, shape).astype(np.float16)
    zero = rng.uniform(0, 15, shape).astype(np.float16)
    half = len(u) // 2
    tensors = {".W_q": u[:half] << 4 | u[half:], ".scale": scale, ".zero": zero}
    numbers = {"nbits": 4, "group_size": group, "axis": axis}
    flags = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero")
    true = ("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize")
    texts = {"packing": "4bit_u8", "unpack_view_dtype": "torch.uint8"}
    texts |= {"compute_dtype": "torch.bfloat16"}
    tensors |= {f".{name}": np.array(value, np.int32) for name, value in numbers.items()}
    tensors |= {f".{name}": np.array(name in true, np.uint8) for name in (*flags, *true)}
    tensors |= {f".{n}": np.frombuffer(text.encode(), np.uint8) for n, text in texts.items()}
    tensors[".shape"] = np.array([out, depth])
    weight = (u.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    return Written(tensors, weight.reshape(out, depth))


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
    }


def with_[**P](write: Callable[..., Written], **settings: Any) -> Callable[..., Written]:
    return lambda rng, out, depth: write(rng, out, depth, **settings)


def gptq_config(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, **settings}


def hqq_config(**settings: Any) -> dict[str, Any]:
    parameters = {"nbits": 4, "group_size": 64, "axis": 1, **settings}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": parameters}}


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}

KINDS: Mapping[str, Kind] = {
    "awq": Kind(AWQ, awq),
    "awq-g64": Kind(AWQ | {"group_size": 64}, with_(awq, group=64)),
    "gptq": Kind(gptq_config(), gptq),
    "gptq-sym": Kind(gptq_config(sym=True), with_(gptq, symmetric=True)),
    "gptq-sym-v2": Kind(
        gptq_config(sym=True, checkpoint_format="gptq_v2", group_size=64),
        with_(gptq, symmetric=True, version=2, group=64),
    ),
    "gptq-v2": Kind(gptq_config(checkpoint_format="gptq_v2"), with_(gptq, version=2)),
    "gptq-act-order": Kind(gptq_config(desc_act=True), with_(gptq, permute=5)),
    "gptq-channel": Kind(gptq_config(group_size=-1), with_(gptq, group=-1)),
    "packed": Kind(compressed("pack-quantized", strategy="group", group_size=128), packed),
    "packed-g64": Kind(
        compressed("pack-quantized", strategy="group", group_size=64), with_(packed, group=64)
    ),
    "packed-asym": Kind(
        compressed("pack-quantized", strategy="group", group_size=32, symmetric=False),
        with_(packed, group=32, symmetric=False),
    ),
    "packed-channel": Kind(
        compressed("pack-quantized", strategy="channel"), with_(packed, group=-1)
    ),
    "packed-act-order": Kind(
        compressed("pack-quantized", strategy="group", group_size=128, actorder="group"),
        with_(packed, permute=7),
    ),
    "int8": Kind(compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    "nvfp4-packed": Kind(
        compressed("nvfp4-pack-quantized", type="float"), with_(nvfp4, modelopt=False)
    ),
    "nvfp4-modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        with_(nvfp4, modelopt=True),
    ),
    "mxfp4-packed": Kind(
        compressed("mxfp4-pack-quantized", type="float"), with_(mxfp4, blocks=False)
    ),
    "mxfp4-blocks": Kind({"quant_method": "mxfp4"}, with_(mxfp4, blocks=True)),
    "hqq": Kind(hqq_config(), hqq),
    "hqq-axis-0": Kind(hqq_config(axis=0), with_(hqq, axis=0), error=0.5 / 127),
    "fp8-blocks": Kind(FP8_BLOCKS, with_(fp8, scales="block", name=".weight_scale_inv")),
    "fp8-rows": Kind(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        with_(fp8, scales="row"),
    ),
    "fp8-blocks-compressed": Kind(
        compressed(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
        ),
        with_(fp8, scales="block"),
    ),
    "fp8-modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, with_(fp8, scales="tensor")
    ),
    "fp8-fbgemm": Kind({"quant_method": "fbgemm_fp8"}, with_(fp8, scales="row")),
    "fp8-tensor": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"}, with_(fp8, scales="tensor")
    ),
}


def save(
    folder: Path, kind: Kind, modules: Mapping[str, tuple[int, int]], seed: int, **plain: Any
) -> dict[str, NDArray[np.float32]]:
    """Write a folder with these modules, and plain tensors; returns the modules' weights."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = dict(plain)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, (out, depth) in modules.items():
        written = kind.write(rng, out, depth)
        tensors |= {  # ascontiguousarray would give a number an axis
            f"{name}{suffix}": np.require(array, requirements="C") if array.ndim else array
            for suffix, array in written.tensors.items()
        }
        weights[name] = written.weight
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": kind.config}))
    return weights


SIZES = {"q": (64, 256), "k": (32, 256), "v": (32, 256)}
NAMES = ("q.weight", "k.weight", "v.weight")


def view(folder: Path) -> QuantizedCheckpoint:
    format = detect(folder)
    assert format is not None
    return QuantizedCheckpoint(open_checkpoint(folder), format)
